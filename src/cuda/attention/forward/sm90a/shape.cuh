// Tiles, shared memory and the tile record of the Hopper forward kernel (kernel.cuh), which its producer,
// consumers and epilogue share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/attention/forward/sm90a/order.hpp"
#include "cuda/pipeline/register_pool.hpp"
#include "cuda/pipeline/ring.cuh"
#include "cuda/attention/key_range.cuh"

namespace flashkernel::cuda::sm90a {

/// The defaults of a tile, which must add kConsumers, kBlockN and kQSlots. Each of kConsumers warpgroups owns 64
/// queries. Keys come kBlockN at a time, through kStages slots for K and as many for V.
template <int kQkDim_, int kVDim_ = kQkDim_>
struct ForwardTile {
  static constexpr int kQkDim = kQkDim_, kVDim = kVDim_;  // head dims of Q and K, and of V and the output
  static constexpr int kStages = 2;
  /// With a kQSlots of 2, the output of a tile leaves through the place of its Q, while the Q of the next tile is there
  /// already. With 1, the place of Q is free for the next Q once the last scores are done. The output then leaves
  /// through kOutSlots places of its own, 64 columns in each; other columns leave through the slot of the tile's last
  /// values.
  static constexpr int kOutSlots = 0;
  /// In how many of the kQkDim / 16 steps of Q K^T the part of Q is held in registers. These steps read shared memory
  /// less, which a product of 64 x 64 uses to its limit.
  static constexpr int kHeld = 0;
  /// Warpgroups issue their products in turn. If not, each goes on as far as the slots allow. Every second tile then
  /// gives its rows to the warpgroups in reverse, so that under a causal mask no warpgroup always has the longer rows.
  static constexpr bool kTurns = true;
  /// In the invariant mode a chunk of keys is kChunkBlocks blocks (chunks.cuh); 0: keys are not cut.
  static constexpr int kChunkBlocks = 0;
  /// The total of a tile's chunks lies in shared memory, not in registers.
  static constexpr bool kTotalShared = false;
  /// The state of each chunk leaves for the workspace (parts.cuh), not the output.
  static constexpr bool kParts = false;
  static constexpr int kResident = 1;  // thread blocks of a multiprocessor
  /// Q, K and V are e4m3, and V lies transposed (float8.cuh).
  static constexpr bool kEightBits = false;
};

struct ForwardPlan;

/// What follows from a tile.
template <class Tile>
struct ForwardShape : Tile {
  using Tile::kConsumers, Tile::kBlockN, Tile::kQSlots, Tile::kQkDim, Tile::kVDim, Tile::kStages, Tile::kOutSlots;
  using Tile::kParts, Tile::kEightBits;
  using Plan = ForwardPlan;
  static constexpr bool kSums = false;                   // see SummedShape
  static constexpr bool kScored = false;                 // see ScoredShape (scored.cuh)
  static constexpr bool kSparse = false;                 // see SparseShape (sparse.cuh)
  static constexpr bool kTakesBits = false;              // whether redo_row reads a packed mask though not kScored
  static constexpr int kBiasStages = 0, kBiasBytes = 0;  // slots of a consumer, and bytes of one
  static_assert(kParts || (kOutSlots == 0) == (kQSlots > 1),
                "the output leaves through one of two places of Q, or its own");
  static constexpr bool kFolds = Tile::kChunkBlocks > 0 && !kParts;
  static constexpr int kTotalBytes =
      kFolds ? 128 * 16 * (1 + (Tile::kTotalShared ? kVDim / 8 : 0)) : 0;  // a consumer's
  static constexpr int kBlockM = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kProducerRegisters = kConsumers <= 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 1 ? 216 : kConsumers == 2 ? 232 : kConsumers == 3 ? 160 : 112;
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= registers_a_row(kThreads) / Tile::kResident);
  // A tile lies as blocks of 64 columns: lines of 128 bytes, swizzled. Of 8 bits, a line has 128 columns.
  static constexpr int kLineColumns = kEightBits ? 128 : 64, kStepColumns = kEightBits ? 32 : 16;  // of a line, a step
  static constexpr int kQkBlocks = (kQkDim + kLineColumns - 1) / kLineColumns, kVBlocks = (kVDim + 63) / 64;
  static constexpr int kQBlockBytes = 64 * 128, kKvBlockBytes = kBlockN * 128;
  static constexpr int kQLoadBytes = kQkBlocks * kQBlockBytes;  // of one warpgroup
  // Of 8 bits, the place of Q has to hold an output that is wider.
  static constexpr int kQBytes = (kEightBits && kQSlots > 1 ? kVBlocks : kQkBlocks) * kQBlockBytes;
  static constexpr int kKBytes = kQkBlocks * kKvBlockBytes;
  // Transposed values lie in lines of as many keys as divide a block.
  static constexpr int kVLine = kBlockN % 128 == 0 ? 128 : kBlockN % 64 == 0 ? 64 : 32;
  static_assert(!kEightBits || kBlockN % kVLine == 0);
  static constexpr int kVBytes = kEightBits ? kVDim * kBlockN : kVBlocks * kKvBlockBytes;
  static constexpr int kOutInValues = kQSlots > 1 || kParts ? 0 : kVBlocks - kOutSlots;  // of its column blocks
  static_assert(kConsumers * kOutInValues * kQBlockBytes <= kVBytes, "the slot of values has no room");
  static_assert(kQSlots == 1 || kVBlocks * kQBlockBytes <= kQBytes, "the place of Q has no room for the output");
  static constexpr int kTileBytes =
      kQSlots * kConsumers * kQBytes + kStages * (kKBytes + kVBytes) + kConsumers * kOutSlots * kQBlockBytes;
};

/// The same, but the tensor cores also compute the row sums. Behind the columns of V lie eight columns of ones, which
/// are the first columns of a block of 64 behind each slot. The sums are those of rounded weights. The output divides
/// by them, but they are too coarse for an LSE.
template <class Shape>
struct SummedShape : Shape {
  static constexpr bool kSums = true;
};

/// One tile of queries of one head.
struct TileRecord {
  int b, h, g;      // sequence, head of q, head of k and v
  int first_query;  // of the warpgroup that gets the record; or of the thread block, where it may be below 0
  int num_blocks;   // of keys, for the whole thread block; 0: these rows see no key; -1: there are no more tiles
  int end_block;    // blocks are walked from end_block - 1 down
  unsigned round;   // the turn of the thread block that found the tile
  // No row of the warpgroup sees a key from last_key on. Blocks outside of [first_full, end_full) are not seen by all
  // rows.
  int last_key, first_full, end_full;
  KeyRange range;
};

/// Which output of a warpgroup the warp of V sends.
struct OutputRecord {
  int b, h, first_query;
  int rows;  // that the sequence has, of 64
};

/// Of a call with a block mask: which block of keys a slot holds, and what the mask says of it. A block of keys is one
/// or two halves of 64 keys, which lie in one block of the mask each.
struct ShownBlock {
  int block = -1;       // below 0: there is none
  unsigned states = 0;  // two bits for half n of consumer w, from bit 4 w + 2 n on, as AttentionBlocks has them
  static constexpr unsigned kLast = 1u << 31;  // among the states: the tile has no more blocks

  __device__ bool is_last() const { return (states & kLast) != 0; }
  __device__ unsigned of(int warpgroup) const { return states >> 4 * warpgroup & 15; }
};

/// Where things lie in dynamic shared memory, as 32-bit addresses.
template <class Shape>
struct SharedLayout {
  static constexpr int kOnesBytes = Shape::kSums ? Shape::kKvBlockBytes : 0, kValueBytes = Shape::kVBytes + kOnesBytes;
  static constexpr int kBiasBase = Shape::kTileBytes + Shape::kStages * kOnesBytes;
  static constexpr int kTotalBase = kBiasBase + Shape::kConsumers * Shape::kBiasStages * Shape::kBiasBytes;
  static constexpr int kTileBytes = kTotalBase + Shape::kConsumers * Shape::kTotalBytes;
  static constexpr int kRecords = 4;
  static constexpr int kBarriers = 2 * Shape::kQSlots * Shape::kConsumers + 4 * Shape::kStages + 2 * kRecords +
                                   2 * Shape::kConsumers + 2 * Shape::kBiasStages * Shape::kConsumers;
  static constexpr int kRecordBytes = (sizeof(TileRecord) + 15) / 16 * 16;
  static constexpr int kBytes = kTileBytes + kBarriers * 8 + kRecords * (Shape::kConsumers + 1) * kRecordBytes +
                                Shape::kConsumers * static_cast<int>(sizeof(OutputRecord) + sizeof(int)) +
                                (Shape::kSparse ? Shape::kStages * static_cast<int>(sizeof(ShownBlock)) + 8 : 0);
  static_assert(kBytes <= 228 * 1024 / Shape::kResident - 1024, "a multiprocessor of 9.0 has 228 KB, a block's 1 KB");

  std::uint32_t base;

  __device__ std::uint32_t q(int slot, int warpgroup) const {
    return base + (slot * Shape::kConsumers + warpgroup) * Shape::kQBytes;
  }
  __device__ std::uint32_t k(int stage) const {
    return base + Shape::kQSlots * Shape::kConsumers * Shape::kQBytes + stage * Shape::kKBytes;
  }
  __device__ std::uint32_t v(int stage) const { return k(Shape::kStages) + stage * kValueBytes; }
  __device__ std::uint32_t ones(int stage) const { return v(stage) + Shape::kVBytes; }
  __device__ std::uint32_t out(int warpgroup) const {
    return v(Shape::kStages) + warpgroup * Shape::kOutSlots * Shape::kQBlockBytes;
  }
  /// The place of a warpgroup's columns from 64 `block` on. `slot` is that of the tile's last values.
  __device__ std::uint32_t out(int warpgroup, int block, int slot) const {
    if (block < Shape::kOutSlots) return out(warpgroup) + block * Shape::kQBlockBytes;
    return v(slot) + (warpgroup * Shape::kOutInValues + block - Shape::kOutSlots) * Shape::kQBlockBytes;
  }
  __device__ std::uint32_t barrier(int i) const { return base + kTileBytes + 8 * i; }
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
  __device__ std::uint32_t found_full(int slot) const { return k_full(4 * Shape::kStages + slot); }
  __device__ std::uint32_t found_empty(int slot) const { return found_full(kRecords + slot); }
  __device__ std::uint32_t out_full(int warpgroup) const { return found_full(2 * kRecords + warpgroup); }
  __device__ std::uint32_t out_empty(int warpgroup) const { return out_full(Shape::kConsumers + warpgroup); }
  __device__ std::uint32_t bias(int slot, int warpgroup) const {
    return base + kBiasBase + (warpgroup * Shape::kBiasStages + slot) * Shape::kBiasBytes;
  }
  __device__ std::uint32_t total(int warpgroup) const { return base + kTotalBase + warpgroup * Shape::kTotalBytes; }
  __device__ std::uint32_t bias_full(int slot, int warpgroup) const {
    return out_empty(Shape::kConsumers) + 8 * (slot * Shape::kConsumers + warpgroup);
  }
  __device__ std::uint32_t bias_empty(int slot, int warpgroup) const {
    return bias_full(Shape::kBiasStages + slot, warpgroup);
  }
  /// The record of the tile'th tile for a warpgroup. The record of the previous tile stays while consumers look back at
  /// it, since the producer is at most two tiles ahead of them.
  __device__ TileRecord* record(std::uint32_t tile, int warpgroup) const {
    return static_cast<TileRecord*>(__cvta_shared_to_generic(
        barrier(kBarriers) + (tile % kRecords * (Shape::kConsumers + 1) + warpgroup) * kRecordBytes));
  }
  /// The record for the warps of the producer, which has a ring of its own.
  __device__ TileRecord* found(std::uint32_t tile) const { return record(tile, Shape::kConsumers); }
  __device__ OutputRecord* output(int warpgroup) const {
    return static_cast<OutputRecord*>(
               __cvta_shared_to_generic(barrier(kBarriers) + kRecords * (Shape::kConsumers + 1) * kRecordBytes)) +
           warpgroup;
  }
  /// 1 once the warpgroup has met a row whose result is not finite, perhaps because of a masked pair.
  __device__ int* met_nan(int warpgroup) const { return reinterpret_cast<int*>(output(Shape::kConsumers)) + warpgroup; }
  /// What a slot of keys holds, where blocks are left out.
  __device__ ShownBlock* shown(int stage) const {
    return reinterpret_cast<ShownBlock*>(met_nan(Shape::kConsumers)) + stage;
  }
  /// The tile that the thread block has taken last, where it takes them by ticket; -1: none.
  __device__ int* taken() const { return reinterpret_cast<int*>(shown(Shape::kStages)); }
};

/// What the host works out once per launch.
struct ForwardPlan {
  int items;    // tiles of queries of all heads
  int q_tiles;  // of the longest sequence
  TileOrder order;
  int kv_box_rows;                 // keys that one copy brings: a block, or what pages and blocks share
  int block_pieces, batch_blocks;  // of pages: copies of a block, and blocks whose pages are looked up at once
  int heads, heads_q, group;       // batch x heads_q, and heads_q / heads_kv
  int group_tiles;                 // of order.heads_at_once heads
  int window_left, window_right;   // at most kMostTokens, which is all
  int most_keys, max_pages;        // of a sequence in pages
  float scale_log2;                // from what goes into the exponentials to powers of two
  std::uint64_t out_policy;        // of the L2 cache
};

/// The first row of a warpgroup in a tile of the thread block. A warpgroup whose rows would lie before the first row of
/// the sequence, or behind its end, gets a row past its end, and so has nothing to do.
template <class Shape>
__device__ inline int first_row(const TileRecord& tile, int warpgroup) {
  const bool reversed = !Shape::kTurns && tile.round % 2;
  const int row = tile.first_query + 64 * (reversed ? Shape::kConsumers - 1 - warpgroup : warpgroup);
  return row < 0 ? tile.range.q_len : min(row, tile.range.q_len);
}

/// What a block mask says of a block of keys for the rows of a tile: ShownBlock::states. 0: all is hidden.
template <class Shape>
__device__ inline unsigned block_states(const AttentionParams& p, const TileRecord& tile, int block) {
  static_assert(Shape::kBlockN % 64 == 0 && Shape::kBlockN <= 128 && Shape::kConsumers <= 4, "four bits a consumer");
  const AttentionBlocks& blocks = p.mask.blocks;
  unsigned states = 0;
#pragma unroll
  for (int w = 0; w < Shape::kConsumers; ++w) {
    const int row = first_row<Shape>(tile, w);
    if (row >= tile.range.q_len) continue;
    const std::uint8_t* const entries = blocks.row(tile.b, tile.h, row);
#pragma unroll
    for (int n = 0; n < Shape::kBlockN / 64; ++n) {
      const int j = block * Shape::kBlockN + 64 * n;
      if (j >= tile.range.k_len) continue;
      const unsigned entry = entries[(j >> blocks.shift_k) * blocks.stride_k];
      const unsigned state = entry == kBlockShown && p.mask.data ? kBlockShown : kBlockWhole;
      states |= (entry == kBlockHidden ? 0u : state) << (4 * w + 2 * n);
    }
  }
  return states;
}

/// Fills in what the record of a tile says of its rows and keys. The head has `lighter` tiles after this one.
template <class Shape>
__device__ inline void fill_tile(const AttentionParams& p, const ForwardPlan& plan, unsigned head, unsigned lighter,
                                 TileRecord* tile) {
  tile->b = static_cast<int>(head / static_cast<unsigned>(plan.heads_q));
  tile->h = static_cast<int>(head % static_cast<unsigned>(plan.heads_q));
  tile->g = tile->h / plan.group;
  tile->range.q_len = static_cast<int>(p.q_length(tile->b));
  tile->range.k_len = p.is_paged() ? max(0, min(plan.most_keys, static_cast<int>(p.seq_lens[tile->b])))
                                   : static_cast<int>(p.k_length(tile->b));
  const int shift = tile->range.k_len - tile->range.q_len;
  tile->range.left = shift - plan.window_left;
  tile->range.right = shift + plan.window_right + 1;
  tile->range.start = static_cast<int>(p.k_start(tile->b, tile->range.k_len));
  // With a block mask whole tiles begin with the sequence, as the mask's blocks of queries do.
  const int row_groups = (tile->range.q_len + 63) / 64;
  const int filled = (row_groups + Shape::kConsumers - 1) / Shape::kConsumers * Shape::kConsumers;
  tile->first_query =
      first_row_of_tile(Shape::kSparse ? filled : row_groups, Shape::kConsumers, static_cast<int>(lighter));
  const int last_query = min(tile->range.q_len, tile->first_query + Shape::kBlockM) - 1;
  const int first_key = tile->range.first(max(0, tile->first_query)), last_key = tile->range.last(last_query);
  tile->end_block = (last_key + Shape::kBlockN - 1) / Shape::kBlockN;
  tile->num_blocks = last_key > first_key ? tile->end_block - first_key / Shape::kBlockN : 0;
}

/// The head of the index'th tile of those that are not taken in pairs, and how many lighter tiles of it come after.
__device__ inline void place_of_index(const ForwardPlan& plan, unsigned index, unsigned* head, unsigned* lighter) {
  const TileOrder& order = plan.order;
  const unsigned groups = order.groups, group_tiles = plan.group_tiles;
  const unsigned group = min(index / group_tiles, groups - 1), in_group = index - group * group_tiles;
  const unsigned first_head = order.paired_heads + group * order.heads_at_once;
  const unsigned group_heads = group + 1 < groups ? order.heads_at_once : plan.heads - first_head;
  *head = first_head + in_group % group_heads;
  *lighter = in_group / group_heads;
}

/// Finds the tile of the block's `round`-th turn in the order of the plan; returns false when none is left. Pairs come
/// first: the heaviest and the lightest tile of a head that are left. All pairs are the same work, and blocks side by
/// side read the same keys. The tiles of the last heads follow one by one, so that all blocks end together. Blocks that
/// have had one pair less start with them.
template <class Shape>
__device__ inline bool locate_tile(const AttentionParams& p, const ForwardPlan& plan, unsigned round,
                                   TileRecord* tile) {
  const TileOrder& order = plan.order;
  const unsigned blocks = gridDim.x, block = blockIdx.x, rest = order.pair_rest;
  const unsigned paired = 2 * (order.pair_rounds + (block < rest));  // rounds
  unsigned head, lighter;
  if (round < paired) {
    const unsigned pair = round / 2 * blocks + block;
    head = pair / order.pairs;
    lighter = pair % order.pairs;
    if (round % 2) lighter = plan.q_tiles - 1 - lighter;
  } else {
    const unsigned begins = rest > 0 && block >= rest, turn = round - paired - begins;
    const bool backwards = turn % 2 && !order.in_turn;
    unsigned index = (rest > 0 ? blocks - rest : 0) + turn * blocks + (backwards ? blocks - 1 - block : block);
    if (begins && round == paired) index = block - rest;
    index += order.paired_heads * plan.q_tiles;
    if (index >= static_cast<unsigned>(plan.items)) return false;
    place_of_index(plan, index - order.paired_heads * plan.q_tiles, &head, &lighter);
  }
  tile->round = round;
  fill_tile<Shape>(p, plan, head, lighter, tile);
  return true;
}

/// The end of the keys that the 64 rows from `first` on see; 0 where they are no rows of the sequence.
__device__ inline int last_key_of_rows(const KeyRange& range, int first) {
  return first < range.q_len ? range.last(min(range.q_len - 1, first + 63)) : 0;
}

}  // namespace flashkernel::cuda::sm90a
