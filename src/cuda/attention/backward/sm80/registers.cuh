// What the sm80 backward kernel holds in registers between products, how it passes it through shared memory, and the
// first product of a team that has code of its own (BackwardShape::kOwnCode). Used by main.cuh.
#pragma once

#include <cstdint>

#include "cuda/ptx/matrix.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace flashkernel::cuda::sm80 {

/// Values in a warp's registers that are operands or results of matrix instructions: rows are keys.
template <int kSlices, int kTiles>
using Fragments = float[kSlices][kTiles][4];

__device__ inline std::uint32_t& shared_word(std::uint32_t address) {
  return *static_cast<std::uint32_t*>(__cvta_shared_to_generic(address));
}
__device__ inline uint4& shared_vector(std::uint32_t address) {
  return *static_cast<uint4*>(__cvta_shared_to_generic(address));
}

/// Computes S^T, or dP^T - D with sums that start from -D of the lane's queries, for the keys that the warp holds and
/// the queries that start at `rows`. It works through 32 queries at a time, so that the code that follows may start on
/// the first ones before the rest is there.
template <class T, int kDim, bool kFromDelta, int kSlices, int kTiles>
__device__ inline void first_product_by_halves(Fragments<kSlices, kTiles>& result,
                                               const std::uint32_t (&held)[kSlices][kDim / 16][4], std::uint32_t rows,
                                               const float* delta) {
  using Rows = SharedTile<kDim>;
  static_assert(kTiles % 4 == 0, "whole groups of 32 queries");
#pragma unroll
  for (int group = 0; group < kTiles; group += 4) {
    float2 start[4] = {};
    if (kFromDelta) {
#pragma unroll
      for (int n = 0; n < 4; ++n) start[n] = *reinterpret_cast<const float2*>(delta + 8 * (group + n));
    }
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d)
#pragma unroll
      for (int n = 0; n < 4; n += 2) {
        std::uint32_t queries[4];
        ptx::ldmatrix_x4(queries, Rows::at_slice(rows, d) + (group + n) * 8 * Rows::kPitch);
#pragma unroll
        for (int s = 0; s < kSlices; ++s)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float(&sums)[4] = result[s][group + n + half];
            const float2 from = start[n + half];
            if (d == 0)
              ptx::mma_m16n8k16_from<T>(sums, held[s][d], queries[2 * half], queries[2 * half + 1], from.x, from.y);
            else
              ptx::mma_m16n8k16<T>(sums, held[s][d], queries[2 * half], queries[2 * half + 1]);
          }
      }
  }
}

/// Stores a warp's kRows rows of a tile in shared memory, `left` of which the sequence has, to global memory.
template <class T, class Rows, int kRows>
__device__ inline void store_rows(std::uint32_t rows, T* to, std::int64_t stride_token, int left, int dim,
                                  bool vectors) {
#pragma unroll 4
  for (int at = threadIdx.x % 32; at < kRows * Rows::kChunks; at += 32) {
    const int row = at / Rows::kChunks, column = at % Rows::kChunks * 8;
    if (row >= left || column >= dim) continue;
    const uint4 packed =
        *reinterpret_cast<const uint4*>(__cvta_shared_to_generic(rows + Rows::offset(row, column / 8)));
    T* const target = to + row * stride_token + column;
    if (vectors && column + 8 <= dim) {
      *reinterpret_cast<uint4*>(target) = packed;
    } else {
      const T* values = reinterpret_cast<const T*>(&packed);
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (column + e < dim) target[e] = values[e];
    }
  }
}

}  // namespace flashkernel::cuda::sm80
