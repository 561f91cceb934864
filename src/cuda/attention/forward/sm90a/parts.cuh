// Thread blocks that share the chunks of a tile of queries (chunks.hpp): which chunks a block takes, and where the
// state of a chunk goes. merge_parts.cuh folds the states.
#pragma once

#include "cuda/attention/forward/sm90a/chunks.cuh"
#include "cuda/attention/forward/sm90a/shape.cuh"

namespace flashkernel::cuda::sm90a {

struct PartsPlan : ForwardPlan {
  int splits;       // thread blocks that share a tile
  int most_chunks;  // of a sequence
  int rows;         // of a head
  float* out;       // [batch, heads, rows, chunks, kVDim]
  float2* states;   // [batch, heads, rows, chunks]: maximum, before scale_log2, and sum
};

template <class Tile>
struct PartsShape : ForwardShape<Tile> {
  using Plan = PartsPlan;
};

/// Finds the part of the block's `round`-th turn; returns false when none is left. A tile's chunks are cut into
/// `splits` runs of about the same length.
template <class Shape>
__device__ inline bool locate_part(const AttentionParams& p, const PartsPlan& plan, unsigned round, TileRecord* tile) {
  const unsigned item = round * gridDim.x + blockIdx.x, splits = plan.splits, of_tile = item / splits;
  if (of_tile >= static_cast<unsigned>(plan.items)) return false;
  const unsigned q_tiles = plan.q_tiles, head = of_tile / q_tiles;
  tile->round = round;
  fill_tile<Shape>(p, plan, head, of_tile - head * q_tiles, tile);
  if (tile->num_blocks == 0) return true;
  constexpr int kBlocks = Shape::kChunkBlocks;
  const int split = static_cast<int>(item - of_tile * splits), first_block = tile->end_block - tile->num_blocks;
  const int first = first_block / kBlocks, chunks = (tile->end_block - 1) / kBlocks + 1 - first;
  const auto begin_of = [&](int share) { return first + static_cast<int>(std::int64_t{share} * chunks / plan.splits); };
  const int begin = begin_of(split), end = begin_of(split + 1);
  tile->end_block = min(tile->end_block, end * kBlocks);
  tile->num_blocks = begin < end ? tile->end_block - max(first_block, begin * kBlocks) : 0;
  return true;
}

/// Stores the state of a chunk, of rows that there are.
template <class Shape, int kOut>
__device__ inline void store_part(const AttentionParams& p, const PartsPlan& plan, const TileRecord& tile, int chunk,
                                  const float (&out)[kOut], const RunningRows& rows) {
  const int first = tile.first_query + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, lane = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = row_sum(rows.sum[half]);
    const int i = first + 8 * half;
    if (i >= min(tile.range.q_len, plan.rows)) continue;
    const std::int64_t at =
        (static_cast<std::int64_t>(tile.b * plan.heads_q + tile.h) * plan.rows + i) * plan.most_chunks + chunk;
    if (lane == 0) plan.states[at] = float2{rows.maximum[half], sum};
    float* const to = plan.out + at * Shape::kVDim + 2 * lane;
#pragma unroll
    for (int c = 0; c < kOut / 4; ++c)
      *reinterpret_cast<float2*>(to + 8 * c) = float2{out[4 * c + 2 * half], out[4 * c + 2 * half + 1]};
  }
}

}  // namespace flashkernel::cuda::sm90a
