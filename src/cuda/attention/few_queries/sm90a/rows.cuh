// The rows of a tile of the kernel for few queries: which query and head a row is, how a row ends, and where the parts
// of a row lie that blocks leave each other.
// Invariant: parts are merged in their order. Therefore results are the same bit for bit.
#pragma once

#include "cuda/attention/few_queries/sm90a/shape.cuh"
#include "cuda/attention/key_range.cuh"
#include "cuda/attention/score.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda::sm90a {

/// Query and head of a row.
struct RowPlace {
  int query;
  std::int64_t head;
  __device__ std::int64_t q_offset(const AttentionParams& p, int b) const { return p.q_offset(b, head, query); }
  __device__ std::int64_t out_offset(const AttentionParams& p, int b) const { return p.out_offset(b, head, query); }
};

/// The rows of a block.
struct RowTile {
  int b, g;         // sequence, kv head
  int first, rows;  // of all rows of the kv head; rows of this tile, 0 or less if the sequence has no such tile
  int group;
  KeyRange range;

  /// Rows past the last one see what the last one sees.
  __device__ RowPlace place(int row) const {
    const unsigned at = static_cast<unsigned>(first + min(row, rows - 1)), query = at / static_cast<unsigned>(group);
    return {static_cast<int>(query),
            static_cast<std::int64_t>(g) * group + static_cast<int>(at - query * static_cast<unsigned>(group))};
  }
};

/// The factor that turns a row's numerators into the output; 0 where the row has seen no key. One of its threads stores
/// the LSE.
__device__ inline float finish_few_queries_row(const AttentionParams& p, int b, const RowPlace& at, float maximum_log2,
                                               float sum, bool stores_lse) {
  constexpr float kLn2 = 0.69314718055994531f;
  float factor = sum == 0.0f ? 0.0f : ptx::reciprocal_approx(sum);
  if (p.sinks || p.lse) {
    SoftmaxState state;
    state.maximum = maximum_log2 * kLn2;  // -inf stays
    state.sum = sum;
    float lse;
    const float joined = state.finish(p.sinks, at.head, &lse);
    if (p.sinks) factor = joined;  // the output is the same bit for bit whether an LSE is asked for or not
    if (p.lse && stores_lse) p.lse[p.lse_offset(b, at.head, at.query)] = lse;
  }
  return factor;
}

/// What a warp merges of a row: numerators in columns of its lanes, the maximum (base 2) and the sum.
template <int kColumns>
struct MergedRow {
  float values[kColumns] = {};
  float maximum = -INFINITY, sum = 0.0f;
};

/// Merges `parts` parts of rows, at most 32, in their order. load(r, i) gives a lane's columns of part i's numerators
/// of row r; `own` has the row's maximum and sum in the part with the lane's number. Several rows at once, because a
/// load takes long.
template <int kColumns, int kRows, class Load>
__device__ inline void merge_rows(int parts, const float2 (&own)[kRows], MergedRow<kColumns> (&rows)[kRows],
                                  Load load) {
  float factor[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    rows[r].maximum = own[r].x;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2)
      rows[r].maximum = fmaxf(rows[r].maximum, __shfl_xor_sync(kFullMask, rows[r].maximum, step));
    factor[r] = ptx::exp2_approx(own[r].x - SoftmaxState::shift(rows[r].maximum));
  }
#pragma unroll 4
  for (int i = 0; i < parts; ++i)
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Packed<float, kColumns> part = load(r, i);
      const float weight = __shfl_sync(kFullMask, factor[r], i);
      rows[r].sum = fmaf(__shfl_sync(kFullMask, own[r].y, i), weight, rows[r].sum);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) rows[r].values[c] = fmaf(part.values[c], weight, rows[r].values[c]);
    }
}

/// Finishes a row and stores it. Returns whether the lane has stored a value that is not finite.
template <class T, int kColumns>
__device__ inline bool store_merged_row(const AttentionParams& p, int b, const RowPlace& at, MergedRow<kColumns>& row) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const float scale = finish_few_queries_row(p, b, at, row.maximum, row.sum, lane == 0);
  bool all_finite = true;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    row.values[c] = scale == 0.0f ? 0.0f : row.values[c] * scale;
    all_finite = all_finite && fabsf(row.values[c]) <= 65504.0f;  // beyond that, fp16 has infinities
  }
  if (lane * kColumns < p.head_dim_v)
    store_floats(static_cast<T*>(p.out) + at.out_offset(p, b) + lane * kColumns, row.values);
  return !all_finite;
}

/// Parts of a tile, each of which a cluster has merged, in the workspace: first the numerators of all tiles, then their
/// maxima and sums.
template <class Shape>
struct PartsOfTile {
  float* numerators;
  float2* states;

  /// `item`: the tile's number, of `items`, each of which has `clusters` parts.
  __device__ PartsOfTile(float* workspace, std::int64_t item, std::int64_t items, int clusters)
      : numerators(workspace + item * clusters * Shape::kBlockM * Shape::kVDim),
        states(reinterpret_cast<float2*>(workspace + items * clusters * Shape::kBlockM * Shape::kVDim) +
               item * clusters * Shape::kBlockM) {}
  __device__ float* values(int cluster, int row) const {
    return numerators + (static_cast<std::int64_t>(cluster) * Shape::kBlockM + row) * Shape::kVDim;
  }
  __device__ float2* state(int cluster, int row) const { return states + cluster * Shape::kBlockM + row; }
};

}  // namespace flashkernel::cuda::sm90a
