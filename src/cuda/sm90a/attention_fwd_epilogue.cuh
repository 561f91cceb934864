// The end of a row block in the Hopper forward kernel: divide by the row sums, write LSE, repair rows that met NaN
// behind a mask, and send the output through the place of the warpgroup's Q to global memory.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/sm90a/attention_fwd_softmax.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace flashkernel::cuda::sm90a {

/// Byte offset of a 16-byte chunk of one of a warpgroup's 64 rows: blocks of 64 columns, lines of 128 bytes, swizzled.
__device__ inline std::uint32_t row_chunk(int row, int chunk) {
  return chunk / 8 * (64 * 128) + row * 128 + ((chunk ^ row) & 7) * 16;
}

/// Rows of the warpgroup's place in shared memory -> out, rows past the sequence left alone.
template <class Shape, class T>
__device__ inline void store_some_rows(const AttentionParams& p, const TileRecord& tile, std::uint32_t from) {
  const int thread = threadIdx.x % 128, rows = min(64, tile.range.q_len - tile.first_query);
  T* const to = static_cast<T*>(p.out) + p.out_offset(tile.b, tile.h, tile.first_query);
#pragma unroll 1
  for (int at = thread; at < rows * (Shape::kDim / 8); at += 128) {
    const int row = at / (Shape::kDim / 8), chunk = at % (Shape::kDim / 8);
    const uint4 packed = *static_cast<const uint4*>(__cvta_shared_to_generic(from + row_chunk(row, chunk)));
    T* const row_to = to + row * p.stride_out_token + chunk * 8;
    const T* const values = reinterpret_cast<const T*>(&packed);
    const int count = static_cast<int>(p.head_dim_v) - chunk * 8;
    if (count >= 8) {
      *reinterpret_cast<uint4*>(row_to) = packed;
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (e < count) row_to[e] = values[e];
    }
  }
}

/// The warpgroup's output, rounded, into the place of its Q.
template <class Shape, class T>
__device__ inline void stage_rows(const float (&out)[Shape::kDim / 2], std::uint32_t place) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
  for (int c = 0; c < Shape::kDim / 16; ++c)
    ptx::stmatrix_x4(place + row_chunk(row, 2 * c + lane / 16), pack<T>(out[8 * c], out[8 * c + 1]),
                     pack<T>(out[8 * c + 2], out[8 * c + 3]), pack<T>(out[8 * c + 4], out[8 * c + 5]),
                     pack<T>(out[8 * c + 6], out[8 * c + 7]));
}

/// From there to global memory; thread 0 of the warpgroup must wait for its group of stores before the place is filled
/// again.
template <class Shape, class T>
__device__ inline void send_rows(const AttentionParams& p, const TileRecord& tile, const CUtensorMap* map_out,
                                 std::uint32_t place, int barrier) {
  // The copy engine cuts rows at the tensor's end; where sequences lie side by side, that is not the sequence's.
  const bool whole = !p.is_varlen_q() || tile.first_query + 64 <= tile.range.q_len;
  ptx::fence_proxy_async_shared();
  ptx::barrier_sync(barrier, 128);
  if (!whole) {
    store_some_rows<Shape, T>(p, tile, place);
    ptx::barrier_sync(barrier, 128);
  } else if (threadIdx.x % 128 == 0) {
    const int begin = tile.first_query + (p.is_varlen_q() ? static_cast<int>(p.q_begin(tile.b)) : 0);
#pragma unroll
    for (int c = 0; c < Shape::kColumnBlocks; ++c)
      ptx::tma_store(map_out, place + c * Shape::kQBlockBytes, c * 64, begin, tile.h, p.is_varlen_q() ? 0 : tile.b);
    ptx::bulk_commit();
  }
}

/// The output from registers to global memory. The four lanes of a row hold two of each eight columns; they exchange,
/// so that each has eight and stores 16 bytes.
template <class Shape, class T>
__device__ inline void store_rows(const AttentionParams& p, const TileRecord& tile,
                                  const float (&out)[Shape::kDim / 2]) {
  const int lane = threadIdx.x % 32, quarter = lane % 4;
  const bool odd = quarter & 1, upper = quarter & 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = tile.first_query + threadIdx.x % 128 / 32 * 16 + lane / 4 + 8 * half;
    T* const to = static_cast<T*>(p.out) + p.out_offset(tile.b, tile.h, min(i, tile.range.q_len - 1));
#pragma unroll
    for (int m = 0; m < Shape::kDim / 32; ++m) {
      std::uint32_t w[4];  // of columns 32 m + 8 e: this lane's two, at first
#pragma unroll
      for (int e = 0; e < 4; ++e) w[e] = pack<T>(out[16 * m + 4 * e + 2 * half], out[16 * m + 4 * e + 2 * half + 1]);
      const auto exchange = [](bool second, std::uint32_t& a, std::uint32_t& b, int lanes) {
        const std::uint32_t other = __shfl_xor_sync(kFullMask, second ? a : b, lanes);
        (second ? a : b) = other;
      };
      exchange(odd, w[0], w[1], 1);
      exchange(odd, w[2], w[3], 1);
      exchange(upper, w[0], w[2], 2);
      exchange(upper, w[1], w[3], 2);
      const int column = 32 * m + 8 * quarter, count = static_cast<int>(p.head_dim_v) - column;
      if (i >= tile.range.q_len) continue;
      if (count >= 8) {
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

/// Divides by the row sums, writes LSE and starts the output's way to global memory.
template <class Shape, class T>
__device__ inline void finish_rows(const AttentionParams& p, const TileRecord& tile, const CUtensorMap* map_out,
                                   float (&out)[Shape::kDim / 2], RunningRows& rows, bool scores_are_final,
                                   bool partly_masked, int* met_nan, std::uint32_t place, int barrier) {
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x % 128 / 32 * 16;
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float total = rows.sum[half];
    total += __shfl_xor_sync(kFullMask, total, 1);
    total += __shfl_xor_sync(kFullMask, total, 2);
    SoftmaxState state;
    state.maximum =
        scores_are_final || rows.maximum[half] == -INFINITY ? rows.maximum[half] : rows.maximum[half] * p.scale;
    state.sum = total;
    float lse;
    factor[half] = state.finish(p.sinks, tile.h, &lse);
    const int i = tile.first_query + warp_row + lane / 4 + 8 * half;
    if (p.lse && lane % 4 == 0 && i < tile.range.q_len) p.lse[p.lse_offset(tile.b, tile.h, i)] = lse;
    if (partly_masked) {
      float zero = 0.0f;  // NaN once any result is not finite
#pragma unroll
      for (int c = 0; c < Shape::kDim / 8; ++c)
        zero = fmaf(out[4 * c + 2 * half], 0.0f, fmaf(out[4 * c + 2 * half + 1], 0.0f, zero));
      if (__any_sync(kFullMask, zero != zero && i < tile.range.q_len)) *met_nan = 1;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int c = 0; c < Shape::kDim / 8; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = out[4 * c + 2 * half + e];
        x *= factor[half];  // 0 * NaN where nothing is seen: noted above
      }
  if constexpr (Shape::kQSlots > 1) {
    stage_rows<Shape, T>(out, place);
    send_rows<Shape, T>(p, tile, map_out, place, barrier);
  } else {
    store_rows<Shape, T>(p, tile, out);
  }
}

/// The output of 64 rows that see no key.
template <class Shape, class T>
__device__ inline void store_empty_rows(const AttentionParams& p, const TileRecord& tile) {
  const int thread = threadIdx.x % 128, rows = min(64, tile.range.q_len - tile.first_query);
  for (int row = thread / 32; row < rows; row += 4) {
    const int i = tile.first_query + row;
    T* const to = static_cast<T*>(p.out) + p.out_offset(tile.b, tile.h, i);
    for (int column = thread % 32; column < p.head_dim_v; column += 32) to[column] = T(0.0f);
    SoftmaxState state;
    float lse;
    state.finish(p.sinks, tile.h, &lse);
    if (p.lse && thread % 32 == 0) p.lse[p.lse_offset(tile.b, tile.h, i)] = lse;
  }
}

}  // namespace flashkernel::cuda::sm90a
