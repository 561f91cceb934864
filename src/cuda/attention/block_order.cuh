// Which head and which tile a block of an attention kernel serves. Heads form groups, and what a group streams fits
// half of the L2 cache. The blocks of a group take one tile of each of its heads, then the next tile of each.
#pragma once

#include <algorithm>

#include "cuda/host/launch.hpp"

namespace flashkernel::cuda {

struct BlockOrder {
  unsigned heads, heads_at_once, tiles;  // tiles of the longest sequence

  BlockOrder() = default;
  BlockOrder(std::int64_t heads, std::int64_t tiles, std::int64_t bytes_per_head, int device)
      : heads(static_cast<unsigned>(heads)),
        heads_at_once(static_cast<unsigned>(std::max<std::int64_t>(
            1,
            std::min(heads, cuda_device_properties(device).l2_bytes / 2 / std::max<std::int64_t>(1, bytes_per_head))))),
        tiles(static_cast<unsigned>(tiles)) {}

  unsigned blocks() const { return heads * tiles; }

  /// The head of a block, and the number of its tile in the order in which tiles start.
  __device__ void find(unsigned block, unsigned* head, int* tile) const {
    const unsigned group = block / (heads_at_once * tiles), in_group = block % (heads_at_once * tiles);
    const unsigned group_heads = min(heads_at_once, heads - group * heads_at_once);
    *head = group * heads_at_once + in_group % group_heads;
    *tile = static_cast<int>(in_group / group_heads);
  }
};

}  // namespace flashkernel::cuda
