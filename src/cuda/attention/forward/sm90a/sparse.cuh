// Calls of the Hopper forward kernel with a block mask. The warps of the producer walk over the blocks of keys that the
// mask shows to some row of a tile, and load those alone. The warp of K says beside each slot which block it holds,
// what the mask says of it, and whether it is the tile's last; the consumers learn it when the keys have arrived. So no
// list of blocks is kept, and none has to fit anywhere.
#pragma once

#include "cuda/attention/forward/sm90a/shape.cuh"
#include "cuda/attention/forward/sm90a/sparse.hpp"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda::sm90a {

/// Tiles have unequal work that the host does not know: thread blocks take them by ticket.
struct SparsePlan : ForwardPlan {
  int* counters;  // the next ticket, and thread blocks that have found no tile; 0 before and after
  int* before;    // of each tile: which one its thread block had taken before it; -1: none
};

template <class Tile>
struct SparseShape : ForwardShape<Tile> {
  using Plan = SparsePlan;
  static constexpr bool kSparse = true, kTakesBits = true;
  static_assert(Tile::kTurns && Tile::kQSlots > 1,
                "a consumer's rows are the same in every tile, and Q need not leave");
};

template <class Shape>
__device__ inline void fill_ticket(const AttentionParams& p, const ForwardPlan& plan, int index, TileRecord* tile) {
  unsigned head, lighter;
  place_of_index(plan, static_cast<unsigned>(index), &head, &lighter);
  tile->round = 0;
  fill_tile<Shape>(p, plan, head, lighter, tile);
}

/// Takes the next tile; returns false when none is left. The last thread block to find none leaves the counters at 0.
template <class Shape>
__device__ inline bool take_tile(const AttentionParams& p, const SparsePlan& plan, const SharedLayout<Shape>& shared,
                                 TileRecord* tile) {
  const int index = atomicAdd(plan.counters, 1);
  if (index >= plan.items) {
    if (atomicAdd(plan.counters + 1, 1) == static_cast<int>(gridDim.x) - 1) plan.counters[0] = plan.counters[1] = 0;
    return false;
  }
  plan.before[index] = *shared.taken();
  *shared.taken() = index;
  fill_ticket<Shape>(p, plan, index, tile);
  return true;
}

/// The blocks of a tile that the mask shows, the last one first. A warp looks at 32 blocks at a time, one in each lane.
/// Of a tile that sees nothing it is the last block, all of which is hidden: so the consumers need not be told before.
template <class Shape>
struct ShownWalk {
  int before;          // blocks before this one have not been looked at
  unsigned found = 0;  // bit n: block before + 31 - n is shown and not taken yet
  unsigned states = 0;

  __device__ ShownBlock next(const AttentionParams& p, const TileRecord& tile) {
    const int first = tile.end_block - tile.num_blocks;
    while (found == 0) {
      if (before <= first) return {};
      const int at = before - 1 - static_cast<int>(threadIdx.x % kWarp);
      states = at >= first ? block_states<Shape>(p, tile, at) : 0;
      found = __ballot_sync(kFullMask, states != 0);
      before -= kWarp;
    }
    const int from = __ffs(static_cast<int>(found)) - 1;
    found &= found - 1;
    return {before + kWarp - 1 - from, __shfl_sync(kFullMask, states, from)};
  }
  __device__ ShownBlock first(const AttentionParams& p, const TileRecord& tile) {
    const ShownBlock found = next(p, tile);
    return found.block < 0 ? ShownBlock{tile.end_block - 1, 0} : found;
  }
};

/// Sets scores to -inf where the masks hide the key from query i, or i + 8. `states`: of this consumer. `first_key` is
/// the first one of the block.
template <int kBlockN, int kCount>
__device__ inline void hide_blocks(float (&score)[kCount], const AttentionParams& p, const TileRecord& tile,
                                   unsigned states, int i, int first_key) {
#pragma unroll
  for (int n = 0; n < kBlockN / 64; ++n) {
    const unsigned state = states >> 2 * n & 3;
    if (state == kBlockWhole) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(i + 8 * half, tile.range.q_len - 1), first = first_key + 64 * n;
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        std::uint32_t shown = 0;
        if (state == kBlockShown && first + 32 * w < p.seq_k)
          shown = p.mask.row(tile.b, tile.h, row)[first / 32 + w] >> (2 * (threadIdx.x % 4));
#pragma unroll
        for (int c = 8 * n + 4 * w; c < 8 * n + 4 * w + 4; ++c)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if ((shown >> (c % 4 * 8 + e) & 1) == 0) score[4 * c + 2 * half + e] = -INFINITY;
      }
    }
  }
}

}  // namespace flashkernel::cuda::sm90a
