// Walks over the blocks that a block mask shows, for kernels that leave the hidden ones out. A warp looks at 32 tiles
// at a time.
#pragma once

#include "cuda/tile/reduce.cuh"
#include "ops/attention_params.hpp"

namespace flashkernel::cuda {

/// The last tile of kTile keys before `tile`, and not before `least`, of which a block mask shows something; least - 1
/// if there is none. `row`: the mask's row of the queries (AttentionBlocks::row). A tile lies in one block. All lanes
/// of a warp call this together.
template <int kTile>
__device__ inline int shown_tile_before(const AttentionBlocks& blocks, const std::uint8_t* row, int tile, int least) {
  static_assert(kTile == 64 || kTile == 32 || kTile == 16, "a tile lies in one block");
  for (int from = tile - 1; from >= least; from -= 32) {
    const int at = from - static_cast<int>(threadIdx.x % 32);
    const bool shown =
        at >= least && row[(static_cast<std::int64_t>(at) * kTile >> blocks.shift_k) * blocks.stride_k] != kBlockHidden;
    const unsigned found = __ballot_sync(kFullMask, shown);
    if (found != 0) return from - (__ffs(static_cast<int>(found)) - 1);
  }
  return least - 1;
}

/// Whether a block mask shows something of kKeys keys from first_key on to the queries of `row`.
template <int kKeys>
__device__ inline bool is_shown(const AttentionBlocks& blocks, const std::uint8_t* row, int first_key, int k_len) {
  unsigned any = 0;
#pragma unroll
  for (int n = 0; n < kKeys; n += 64)
    if (n == 0 || first_key + n < k_len) any |= row[((first_key + n) >> blocks.shift_k) * blocks.stride_k];
  return any != 0;
}

}  // namespace flashkernel::cuda
