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

/// The parts of a tile in the workspace: first the numerators of all tiles, then their maxima (base 2) and sums.
template <class Shape>
struct PartsOfTile {
  float* numerators;
  float2* states;

  /// `item`: the tile's number, of `items`.
  __device__ PartsOfTile(float* workspace, std::int64_t item, std::int64_t items, int splits)
      : numerators(workspace + item * splits * Shape::kBlockM * Shape::kVDim),
        states(reinterpret_cast<float2*>(workspace + items * splits * Shape::kBlockM * Shape::kVDim) +
               item * splits * Shape::kBlockM) {}
  __device__ float* values(int part, int row) const {
    return numerators + (static_cast<std::int64_t>(part) * Shape::kBlockM + row) * Shape::kVDim;
  }
  __device__ float2* state(int part, int row) const { return states + part * Shape::kBlockM + row; }

  /// Merges a tile's parts, a row for each warp of the consumers at a time. Returns whether the thread has stored a
  /// value that is not finite.
  template <class T>
  __device__ bool merge(const AttentionParams& p, const RowTile& tile, int parts) const {
    constexpr int kColumns = Shape::kVDim / kWarp;  // of a lane
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    bool all_finite = true;
#pragma unroll 1
    for (int row = static_cast<int>(threadIdx.x / kWarp); row < tile.rows; row += Shape::kConsumerThreads / kWarp) {
      const float2 own = lane < parts ? *state(lane, row) : float2{-INFINITY, 0.0f};
      float maximum = own.x;
#pragma unroll
      for (int step = 1; step < kWarp; step *= 2) maximum = fmaxf(maximum, __shfl_xor_sync(kFullMask, maximum, step));
      const float factor = ptx::exp2_approx(own.x - SoftmaxState::shift(maximum));
      float sum = 0.0f, merged[kColumns] = {};
      const float* from = values(0, row) + lane * kColumns;
#pragma unroll 8
      for (int i = 0; i < parts; ++i, from += Shape::kBlockM * Shape::kVDim) {
        const Packed<float, kColumns> part = load_vector<kColumns>(from);
        const float weight = __shfl_sync(kFullMask, factor, i);
        sum = fmaf(__shfl_sync(kFullMask, own.y, i), weight, sum);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) merged[c] = fmaf(part.values[c], weight, merged[c]);
      }
      const RowPlace at = tile.place(row);
      const float scale = finish_few_queries_row(p, tile.b, at, maximum, sum, lane == 0);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        merged[c] = scale == 0.0f ? 0.0f : merged[c] * scale;
        all_finite = all_finite && fabsf(merged[c]) <= 65504.0f;  // beyond that, fp16 has infinities
      }
      if (lane * kColumns < p.head_dim_v)
        store_floats(static_cast<T*>(p.out) + at.out_offset(p, tile.b) + lane * kColumns, merged);
    }
    return !all_finite;
  }
};

}  // namespace flashkernel::cuda::sm90a
