// Tiles, shared memory and the tile record of the Hopper forward kernel (attention_fwd.cuh), which its producer,
// consumers and epilogue share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/tile/key_range.cuh"

namespace flashkernel::cuda::sm90a {

/// kConsumers warpgroups own 64 queries each; keys come kBlockN at a time through kStages slots for K and as many for
/// V. kQSlots 2: a tile's output leaves through the place of its Q while the next tile's Q is there already. kQSlots 1:
/// Q's place is free for the next Q once the last scores are done, and the output leaves from registers.
template <int kDim_, int kConsumers_, int kBlockN_, int kQSlots_, int kStages_ = 2>
struct ForwardShape {
  static constexpr int kDim = kDim_, kConsumers = kConsumers_, kBlockN = kBlockN_;
  static constexpr int kQSlots = kQSlots_, kStages = kStages_;
  static constexpr int kBlockM = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // 65536 registers / 128 = 512 a row of threads: 2 x 232 + 40 or 3 x 152 + 56.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 56;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 152;
  // A tile lies as blocks of 64 columns: lines of 128 bytes, swizzled.
  static constexpr int kColumnBlocks = (kDim + 63) / 64;
  static constexpr int kQBlockBytes = 64 * 128, kKvBlockBytes = kBlockN * 128;
  static constexpr int kQBytes = kColumnBlocks * kQBlockBytes;  // of one warpgroup
  static constexpr int kKvBytes = kColumnBlocks * kKvBlockBytes;
  static constexpr int kTileBytes = kQSlots * kConsumers * kQBytes + 2 * kStages * kKvBytes;
  // The first tile of a causal row block is masked in half for every other warpgroup; those take half of it.
  static constexpr bool kHasHalf = kBlockN % 32 == 0;
};

/// One tile of queries of one head, for one warpgroup.
struct TileRecord {
  int b, h, g;      // sequence, head of q, head of k and v
  int first_query;  // of the warpgroup
  int num_blocks;   // of keys, for the whole thread block; 0: these rows see none; -1: no more tiles
  int end_block;    // blocks are walked from end_block - 1 down
  KeyRange range;
};

/// Where things lie in dynamic shared memory, as 32-bit addresses.
template <class Shape>
struct SharedLayout {
  static constexpr int kBarriers = 2 * Shape::kQSlots * Shape::kConsumers + 4 * Shape::kStages;
  static constexpr int kRecords = 4;
  static constexpr int kRecordBytes = (sizeof(TileRecord) + 15) / 16 * 16;
  static constexpr int kBytes = Shape::kTileBytes + kBarriers * 8 + kRecords * Shape::kConsumers * kRecordBytes;
  static_assert(kBytes <= 227 * 1024, "a block of sm_90 has 227 KB");

  std::uint32_t base;

  __device__ std::uint32_t q(int slot, int warpgroup) const {
    return base + (slot * Shape::kConsumers + warpgroup) * Shape::kQBytes;
  }
  __device__ std::uint32_t k(int stage) const {
    return base + Shape::kQSlots * Shape::kConsumers * Shape::kQBytes + stage * Shape::kKvBytes;
  }
  __device__ std::uint32_t v(int stage) const { return k(Shape::kStages + stage); }
  __device__ std::uint32_t barrier(int i) const { return base + Shape::kTileBytes + 8 * i; }
  __device__ std::uint32_t q_full(int slot, int warpgroup) const {
    return barrier(slot * Shape::kConsumers + warpgroup);
  }
  __device__ std::uint32_t q_empty(int slot, int warpgroup) const {
    return barrier((Shape::kQSlots + slot) * Shape::kConsumers + warpgroup);
  }
  __device__ std::uint32_t k_full(int stage) const { return barrier(2 * Shape::kQSlots * Shape::kConsumers + stage); }
  __device__ std::uint32_t k_empty(int stage) const { return k_full(Shape::kStages + stage); }
  __device__ std::uint32_t v_full(int stage) const { return k_full(2 * Shape::kStages + stage); }
  __device__ std::uint32_t v_empty(int stage) const { return k_full(3 * Shape::kStages + stage); }
  /// Of the tile'th tile. The one before stays while consumers look back at it: the producer is two ahead of them at
  /// most.
  __device__ TileRecord* record(std::uint32_t tile, int warpgroup) const {
    return static_cast<TileRecord*>(__cvta_shared_to_generic(
        barrier(kBarriers) + (tile % kRecords * Shape::kConsumers + warpgroup) * kRecordBytes));
  }
};

/// A count of what went through a ring of slots: the place of the next one and the parity of its barriers' phase.
template <int kSlots>
struct Ring {
  std::uint32_t count = 0;
  __device__ std::uint32_t slot() const { return count % kSlots; }
  __device__ std::uint32_t parity() const { return count / kSlots & 1; }
  __device__ Ring before() const { return {count - 1}; }
};

/// What the host works out once per launch.
struct ForwardPlan {
  int items;                  // tiles of queries of all heads
  int q_tiles;                // of the longest sequence
  int heads_at_once;          // heads whose tiles alternate: as many as keep K and V in the L2 cache
  int kv_box_rows;            // keys that one copy brings: a block, or what pages and blocks share
  int heads, heads_q, group;  // batch x heads_q, and heads_q / heads_kv
  float scale_log2;           // from what goes into the exponentials to powers of two
};

}  // namespace flashkernel::cuda::sm90a
