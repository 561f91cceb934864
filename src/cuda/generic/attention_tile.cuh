// Shared by the tiled attention kernels in plain FFMA: 16 x 16 threads over tiles of rows held in shared memory as
// fp32. Thread (ty, tx) owns rows ty + 16 r of the M side, columns tx + 16 c of the N side, and columns 64 c + 4 tx + e
// of a head.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/tile/attention_score.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda {

inline constexpr int kTileThreads = 256;
/// Stands in a tile of probabilities for "this query does not see this key": a probability is never negative.
inline constexpr float kMasked = -1.0f;

template <int kBlockM_, int kBlockN_, int kHeadDim_>
struct Tile {
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kHeadDim = kHeadDim_;
  static constexpr int kRowsM = kBlockM / 16, kRowsN = kBlockN / 16, kColumns = kHeadDim / 64;
  static constexpr int kLd =
      kHeadDim + 4;  // rows 4 banks apart: 8 threads that read float4s of 8 rows touch all 32 banks
  static constexpr int kLdP = kBlockN + 1;
};

/// The numbers of a row are its elements.
struct NoScale {};

/// Copies kRows rows into shared memory as fp32; columns from `dim` on, and rows that `row_of` calls null, become 0.
/// `scale_of(row)`: what the elements of a row that is there are multiplied by.
template <class Tile, int kRows, class T, class RowOf, class ScaleOf = NoScale>
__device__ inline void load_rows(float* tile, std::int64_t dim, bool vectors, RowOf row_of, ScaleOf scale_of = {}) {
  constexpr int N = kVectorElements<T>;
  constexpr int kVectorsPerRow = Tile::kHeadDim / N;
  for (int at = threadIdx.x; at < kRows * kVectorsPerRow; at += kTileThreads) {
    const int row = at / kVectorsPerRow, column = at % kVectorsPerRow * N;
    const T* from = row_of(row);
    float values[N];
    if (from && vectors && column + N <= dim) {
      load_floats(values, from + column);
    } else {
#pragma unroll
      for (int e = 0; e < N; ++e) values[e] = from && column + e < dim ? to_float(from[column + e]) : 0.0f;
    }
    if constexpr (!std::is_same_v<ScaleOf, NoScale>) {
      const float scale = from ? scale_of(row) : 0.0f;
#pragma unroll
      for (int e = 0; e < N; ++e) values[e] *= scale;
    }
#pragma unroll
    for (int e = 0; e < N; e += 4)
      *reinterpret_cast<float4*>(tile + row * Tile::kLd + column + e) =
          make_float4(values[e], values[e + 1], values[e + 2], values[e + 3]);
  }
}

/// sums[r][c] += <row ty + 16 r of a, row tx + 16 c of b> over the whole head.
template <class Tile, int kRowsA, int kRowsB>
__device__ inline void row_products(float (&sums)[kRowsA][kRowsB], const float* a, const float* b) {
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll 4
  for (int d = 0; d < Tile::kHeadDim; d += 4) {
    float4 x[kRowsA], y[kRowsB];
#pragma unroll
    for (int r = 0; r < kRowsA; ++r) x[r] = *reinterpret_cast<const float4*>(a + (ty + 16 * r) * Tile::kLd + d);
#pragma unroll
    for (int c = 0; c < kRowsB; ++c) y[c] = *reinterpret_cast<const float4*>(b + (tx + 16 * c) * Tile::kLd + d);
#pragma unroll
    for (int r = 0; r < kRowsA; ++r)
#pragma unroll
      for (int c = 0; c < kRowsB; ++c) {
        sums[r][c] = fmaf(x[r].x, y[c].x, sums[r][c]);
        sums[r][c] = fmaf(x[r].y, y[c].y, sums[r][c]);
        sums[r][c] = fmaf(x[r].z, y[c].z, sums[r][c]);
        sums[r][c] = fmaf(x[r].w, y[c].w, sums[r][c]);
      }
  }
}

/// out[r] += sum over n of weight(r, n) * row n of b, skipping those for which `masked(r, n)`: a masked row may hold
/// NaN, and 0 * NaN is NaN.
template <class Tile, int kInner, int kRows, class Weight, class Masked>
__device__ inline void accumulate_rows(float (&out)[kRows][Tile::kColumns][4], const float* b, Weight weight,
                                       Masked masked) {
  const int tx = threadIdx.x % 16;
#pragma unroll 4
  for (int n = 0; n < kInner; ++n) {
    float w[kRows];
    bool skip[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      skip[r] = masked(r, n);
      w[r] = weight(r, n);
    }
#pragma unroll
    for (int c = 0; c < Tile::kColumns; ++c) {
      const float4 value = *reinterpret_cast<const float4*>(b + n * Tile::kLd + 64 * c + 4 * tx);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (skip[r]) continue;
        out[r][c][0] = fmaf(w[r], value.x, out[r][c][0]);
        out[r][c][1] = fmaf(w[r], value.y, out[r][c][1]);
        out[r][c][2] = fmaf(w[r], value.z, out[r][c][2]);
        out[r][c][3] = fmaf(w[r], value.w, out[r][c][3]);
      }
    }
  }
}

/// This thread's columns of one row, times `factor`, to memory.
template <class Tile, class T>
__device__ inline void store_row(T* to, std::int64_t dim, const float (&values)[Tile::kColumns][4], float factor) {
  const int tx = threadIdx.x % 16;
#pragma unroll
  for (int c = 0; c < Tile::kColumns; ++c)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int d = 64 * c + 4 * tx + e;
      if (d < dim) to[d] = from_float<T>(factor == 0.0f ? 0.0f : values[c][e] * factor);
    }
}

/// Over the 16 threads of a row.
template <class Op>
__device__ inline float reduce_16(float value, Op op) {
#pragma unroll
  for (int lane = 8; lane > 0; lane /= 2) value = op(value, __shfl_xor_sync(kFullMask, value, lane));
  return value;
}

}  // namespace flashkernel::cuda
