// How gradients leave the registers of a warpgroup in the Hopper backward kernel: fragments to rows in global memory.
#pragma once

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/attention/backward/sm90a/shape.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace flashkernel::cuda::sm90a {

/// Each of the four lanes of a row holds two of every eight columns. They exchange them, so that each lane has eight.
__device__ inline void exchange_columns(std::uint32_t (&w)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  const auto exchange = [](bool second, std::uint32_t& a, std::uint32_t& b, int lanes) {
    const std::uint32_t other = __shfl_xor_sync(kFullMask, second ? a : b, lanes);
    (second ? a : b) = other;
  };
  exchange(odd, w[0], w[1], 1);
  exchange(odd, w[2], w[3], 1);
  exchange(upper, w[0], w[2], 2);
  exchange(upper, w[1], w[3], 2);
}

/// Stores the warpgroup's 64 rows x kDim, multiplied by `factor`, at row0: the first `rows` rows and `dim` columns. A
/// lane stores 16 bytes of a row at a time. kWhole: all rows and columns, without branches, so that the exchanges do
/// not wait for each other.
template <int kDim, bool kWhole, class T, int kSums>
__device__ inline void store_fragment(const float (&x)[kDim / 2], float factor, T* row0, std::int64_t stride_token,
                                      int rows, int dim, FiniteCheck<kSums>& finite) {
  const int lane = threadIdx.x % 32, quarter = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = threadIdx.x % 128 / 32 * 16 + lane / 4 + 8 * half;
    T* const to = row0 + row * stride_token;
#pragma unroll
    for (int m = 0; m < kDim / 32; ++m) {
      std::uint32_t w[4];  // of columns 32 m + 8 e: this lane's two, at first
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float a = x[16 * m + 4 * e + 2 * half], b = x[16 * m + 4 * e + 2 * half + 1];
        if (kWhole || row < rows) finite.see(a, 2 * e), finite.see(b, 2 * e + 1);
        w[e] = pack<T>(a * factor, b * factor);
      }
      exchange_columns(w);
      const int column = 32 * m + 8 * quarter, count = dim - column;
      if (!kWhole && row >= rows) continue;
      if (kWhole || count >= 8) {
        *reinterpret_cast<uint4*>(to + column) = uint4{w[0], w[1], w[2], w[3]};
      } else {
        const T* const values = reinterpret_cast<const T*>(w);
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if (e < count) to[column + e] = values[e];
      }
    }
  }
}

/// Stores a warp's 16 rows x kDim of a fragment, times `factor`, at row0: the first `rows` rows and `dim` columns. They
/// pass through `place`, 2 KB of shared memory that no other warp uses: 64 columns at a time in lines of 128 bytes, so
/// that eight lanes write a line. store_fragment takes four times the instructions: 2500 cycles at the end of an item.
template <int kDim, class T, int kSums>
__device__ inline void store_by_lines(const float (&x)[kDim / 2], float factor, std::uint32_t place, T* row0,
                                      std::int64_t stride_token, int rows, int dim, int lane,
                                      FiniteCheck<kSums>& finite) {
#pragma unroll
  for (int block = 0; block < (kDim + 63) / 64; ++block) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int at = 8 * (4 * block + c);  // of the lane's elements: 8 of 16 columns
      if (at >= kDim / 2) break;
      std::uint32_t w[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float a = x[at + 2 * e], b = x[at + 2 * e + 1];
        if (lane / 4 + e % 2 * 8 < rows) finite.see(a, 2 * e), finite.see(b, 2 * e + 1);
        w[e] = pack<T>(a * factor, b * factor);
      }
      ptx::stmatrix_x4(place + lane % 16 * 128 + ((2 * c + lane / 16) ^ (lane % 8)) * 16, w[0], w[1], w[2], w[3]);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 4 * i + lane / 8, chunk = lane % 8, column = 64 * block + 8 * chunk, count = dim - column;
      const uint4 packed =
          *static_cast<const uint4*>(__cvta_shared_to_generic(place + row * 128 + (chunk ^ (row & 7)) * 16));
      T* const to = row0 + row * stride_token + column;
      if (row >= rows) continue;
      if (count >= 8) {
        ptx::store_16(to, packed, true);
      } else {
        const T* const values = reinterpret_cast<const T*>(&packed);
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if (e < count) to[e] = values[e];
      }
    }
    __syncwarp();
  }
}

/// `rows` rows of zeros, by `threads` threads of which this one is `thread`.
template <class T>
__device__ inline void store_zero_rows(T* row0, std::int64_t stride_token, int rows, int dim, int thread, int threads) {
  for (int row = thread / 32; row < rows; row += threads / 32)
    for (int column = thread % 32; column < dim; column += 32) row0[row * stride_token + column] = T(0.0f);
}

/// Where a tile of queries begins in grad_q.
template <class T>
__device__ inline T* grad_q_row(const AttentionBackwardParams& p, int b, int h, int i) {
  const AttentionParams& f = p.forward;
  return static_cast<T*>(p.grad_q) + row_offset(f.is_varlen_q(), f.is_varlen_q() ? f.q_begin(b) : 0, b, h, i,
                                                p.stride_grad_q_batch, p.stride_grad_q_head, p.stride_grad_q_token);
}

}  // namespace flashkernel::cuda::sm90a
