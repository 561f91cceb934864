// Tiles, shared memory, the item record and the plan of the Hopper backward kernel (kernel.cuh), which its
// producer, its two kinds of consumers and the kernels before and after it share.
#pragma once

#include <type_traits>

#include "cuda/attention/backward/sm90a/variant.hpp"
#include "cuda/attention/backward/sm90a/order.hpp"
#include "cuda/attention/key_range.cuh"
#include "cuda/pipeline/register_pool.hpp"
#include "cuda/pipeline/ring.cuh"

namespace flashkernel::cuda::sm90a {

/// A thread block works on kBlockN keys and, in each step, on kBlockM queries. Each of two key warpgroups has 64 of the
/// keys, a third warpgroup makes dQ, and the fourth one loads. kWide: both key warpgroups have the same 64 keys.
/// kJoined: the key warpgroups make dQ themselves (joined.cuh).
template <int kQkDim_, int kVDim_>
struct BackwardShape {
  static constexpr bool kJoined = false, kMayCut = false;  // BackwardCut
  static constexpr bool kSparse = false;                   // see SparseBackwardShape (sparse.cuh)
  static constexpr int kQkDim = kQkDim_, kVDim = kVDim_, kWidest = HeadDims{kQkDim, kVDim}.widest();
  static constexpr bool kWide = backward_is_wide(kWidest);
  static constexpr int kBlockM = backward_block_m(kWidest), kBlockN = backward_block_n(kWidest);
  static constexpr int kKeyGroups = 2;
  static constexpr int kThreads = 128 * (kKeyGroups + 2);
  static constexpr int kKeyWarps = 4 * kKeyGroups, kQueryWarps = 4;  // of dK and dV; of dQ
  static constexpr int kConsumerWarps = kKeyWarps + kQueryWarps;
  // Slots of Q and of dO, and slots of dS. By measurement, d64 needs more room for dS, and d128 for Q and dO.
  static constexpr int kStages = kWidest <= 64 || kWide ? 2 : 3, kScoreSlots = kWidest <= 64 ? 3 : 2;
  // Slots of K, which the dQ warpgroup needs to the end. V has one slot, which is free early.
  static constexpr int kKeySlots = kWidest > 192 ? 1 : 2;
  static constexpr int kWeightSlots = kWide ? 2 : 0;  // of P
  // A key thread holds (kQkDim + kVDim) / 2 of dK and dV (kWide: half of it), kBlockM / 2 of scores, kBlockM / 4 of P
  // or dS rounded; a thread of the dQ warpgroup 32 sums.
  static constexpr int kKeyRegisters = 208, kQueryRegisters = 64, kProducerRegisters = 32;
  static_assert(kKeyGroups * kKeyRegisters + kQueryRegisters + kProducerRegisters <= registers_a_row(kThreads));
  // Tiles lie as blocks of 64 columns: lines of 128 bytes, swizzled. dS^T has a line a key and 64 queries a block.
  static constexpr int kQkBlocks = (kQkDim + 63) / 64, kVBlocks = (kVDim + 63) / 64;
  static constexpr int kQBlockBytes = kBlockM * 128, kKvBlockBytes = kBlockN * 128;
  static constexpr int kQBytes = kQkBlocks * kQBlockBytes, kGradOutBytes = kVBlocks * kQBlockBytes;
  static constexpr int kKBytes = kQkBlocks * kKvBlockBytes, kVBytes = kVBlocks * kKvBlockBytes;
  static constexpr int kRowsBytes = 2 * kBlockM * 4;  // -LSE in base 2 and -D of a tile of queries
  static constexpr int kScoreBlocks = kBlockM / 64, kScoreBlockBytes = kBlockN * 128;
  static constexpr int kScoreBytes = kScoreBlocks * kScoreBlockBytes;
  // The place of an element of a tile's sum of dQ. Sums lie in the order of the fragments: a warp writes 512
  // neighbouring bytes.
  __host__ __device__ static constexpr int sum_index(int slice, int column_tile, int thread) {
    return ((slice * (kQkDim / 8) + column_tile) * 128 + thread) * 4;
  }
};

/// The same tiles and places, for a producer and two key warpgroups that also make dQ.
struct JoinedBackwardShape : BackwardShape<128, 128> {
  static constexpr bool kJoined = true, kMayCut = true;
  static constexpr int kThreads = 128 * (kKeyGroups + 1);
  static constexpr int kQueryWarps = kKeyWarps, kConsumerWarps = kKeyWarps;
  // A key thread holds 128 of dK and dV, 64 of scores, 32 rounded.
  static constexpr int kKeyRegisters = 240, kProducerRegisters = 24;
  static_assert(kKeyGroups * kKeyRegisters + kProducerRegisters <= registers_a_row(kThreads));
  // A tile's sum lies as fragments of dQ^T: 16 columns a warp, queries by eights.
  __host__ __device__ static constexpr int joined_sum_index(int warp, int query_tile, int lane) {
    return ((warp * (kBlockM / 8) + query_tile) * 32 + lane) * 4;
  }
};

/// kBlockN keys of one kv head, and the queries that see any of them.
struct BackwardItem {
  int b, g;                     // sequence, head of k and v
  int n_tile;                   // of keys
  int key_slot;                 // of K
  int first_tile, tiles;        // of queries; walked from the last one to the first, each with all heads of the group
  int steps;                    // tiles of all heads of the group; -1: no more items
  int q_row, k_row;             // of the sequence, the first ones in q and k
  int first_whole, last_whole;  // tiles of queries [first, last) see all of the keys
  KeyWindow range;
  std::int64_t first_step;  // with a block mask: where the item's steps begin in plan.steps
  /// Whether the block has all of the item's tiles of queries. If it has some, another block has the others, and this
  /// one gives its sums to that block or takes them from it.
  enum Share : int { kAll, kGives, kTakes };
  Share share;
  int cut_range;  // of cut items that this is of

  /// Key tiles that add to the dQ of a tile of queries, in this order: [first_adder, last_adder].
  template <class Shape>
  __device__ int first_adder(int tile) const {
    return range.first(tile * Shape::kBlockM) / Shape::kBlockN;
  }
  template <class Shape>
  __device__ int last_adder(int tile) const {
    return (range.last(min(range.q_len, (tile + 1) * Shape::kBlockM) - 1) - 1) / Shape::kBlockN;
  }
};

/// What a block has left of a range of cut items.
struct BackwardRange {
  int number, left;  // tiles of queries
};

/// What JoinedConsumer does with a step's dQ.
struct BackwardTurn {
  enum How : int { kAdd, kStore, kDrop };
  int tile;  // of queries, of all heads
  How how;
};

/// The head and tile of queries of a step. All heads of a tile come before the next tile. Otherwise, under a causal
/// mask, items with few tiles would wait at each head for the item with the most tiles.
struct BackwardPlace {
  int h, tile;
  __device__ BackwardPlace(const BackwardItem& item, int group)
      : h(item.g * group), tile(item.first_tile + item.tiles - 1) {}
  __device__ void advance(const BackwardItem& item, int group) {
    const int wraps = ++h == (item.g + 1) * group;
    h = wraps ? item.g * group : h;
    tile -= wraps;
  }
  __device__ int head(const BackwardItem&, int) const { return h; }
  __device__ int q_tile() const { return tile; }
  /// How many tiles of keys add to the dQ of this tile of queries before the item's, and whether none does after it.
  template <class Shape>
  __device__ int before(const BackwardItem& item) const {
    return item.n_tile - item.first_adder<Shape>(tile);
  }
  template <class Shape>
  __device__ bool is_last(const BackwardItem& item) const {
    return item.n_tile == item.last_adder<Shape>(tile);
  }
};

/// A step of a call with a block mask: a tile of queries of one head to which the mask shows something of an item's
/// keys (sparse.cuh makes the lists). Two words.
struct SparseStep {
  // Of 64 keys of warpgroup w and 64 queries n of the tile, two bits from bit 4 w + 2 n of `states` on say what
  // AttentionBlocks say. The tile of queries has the other bits.
  std::uint32_t tile_and_states;
  // How many tiles of keys add to the tile's dQ before; whether none does after; the head, counted in its group.
  std::uint32_t order;
  static constexpr std::uint32_t kMostHeads = 512, kMostBefore = 1u << 22;

  SparseStep() = default;
  __device__ SparseStep(int tile, unsigned states, int before, bool last, int head)
      : tile_and_states(static_cast<std::uint32_t>(tile) << 8 | states),
        order(static_cast<std::uint32_t>(before) << 10 | static_cast<std::uint32_t>(last) << 9 |
              static_cast<std::uint32_t>(head)) {}
  __device__ int tile() const { return static_cast<int>(tile_and_states >> 8); }
  __device__ unsigned states(int warpgroup) const { return tile_and_states >> 4 * warpgroup & 15; }
  __device__ int before() const { return static_cast<int>(order >> 10); }
  __device__ bool is_last() const { return (order >> 9 & 1) != 0; }
  __device__ int head() const { return static_cast<int>(order & (kMostHeads - 1)); }
};

/// BackwardPlace of such a call: it walks the list. (What can be had from the record again is not kept.)
struct SparsePlace {
  int index = 0;
  SparseStep now;
  __device__ SparsePlace(const BackwardItem& item, const SparseStep* steps) : now(steps[item.first_step]) {}
  __device__ void advance(const BackwardItem& item, const SparseStep* steps) {
    index = min(index + 1, item.steps - 1);  // behind the list there is nothing to read
    now = steps[item.first_step + index];
  }
  __device__ int head(const BackwardItem& item, int group) const { return item.g * group + now.head(); }
  __device__ int q_tile() const { return now.tile(); }
  template <class Shape>
  __device__ int before(const BackwardItem&) const {
    return now.before();
  }
  template <class Shape>
  __device__ bool is_last(const BackwardItem&) const {
    return now.is_last();
  }
};

/// What the host works out once per launch.
struct BackwardPlan : BackwardOrder {
  int tickets;                 // items that are dealt out whole, and ranges of the cut ones
  int whole_items;             // of all: tiles of keys of all kv heads
  int range_tiles, cut_tiles;  // of queries, of cut items: of a range, and of all
  int q_tiles;                 // of the longest sequence
  int group;                   // heads_q / heads_kv
  int ordered;                 // blocks add to a tile of dQ in the order of their keys
  int last_writes;             // the last one to add writes grad_q, from its registers
  float scale_log2;            // from what goes into the exponentials to powers of two
  float* delta;                // -D, [batch, heads_q, seq_q]
  float* rows;                 // per tile of queries: kBlockM of -LSE in base 2, kBlockM of -D
  float* sums;
  int* counters;
  int* ticket;
  int* not_finite;  // becomes 1 when some gradient is not finite
  int* given;       // lanes that have given, of each range
  float* parts;     // what they gave: a block's sums of dK and dV as fragments
  // With a block mask, else null, and the same for heads or sequences that share a mask: for each tile of queries of
  // all heads how many tiles of keys add to its dQ; of each pair of tiles the order, or kNoOrder; for each tile of keys
  // of all kv heads how many steps it has, and those.
  int list_batches, list_heads_q, list_heads_kv;  // SparseLists
  int zeroed;  // sums of dQ start as zeros, and nobody waits: the first one to add to a tile may be a long item's
  int* adders;
  std::uint16_t* orders;
  int* num_steps;
  SparseStep* steps;
  static constexpr std::uint16_t kNoOrder = 0xffff;

  __device__ int tile_index(int heads_q, int b, int h, int tile) const { return (b * heads_q + h) * q_tiles + tile; }
  /// The place of a tile of queries in `adders`, and of one of keys in `num_steps`.
  __device__ int query_list(int b, int h, int tile) const {
    return ((list_batches == 1 ? 0 : b) * list_heads_q + (list_heads_q == 1 ? 0 : h)) * q_tiles + tile;
  }
  __device__ int key_list(int b, int g, int n_tile) const {
    return ((list_batches == 1 ? 0 : b) * list_heads_kv + (list_heads_kv == 1 ? 0 : g)) * k_tiles + n_tile;
  }

  /// What the counter of a tile must be before a block adds, where `before` blocks precede it in the order of keys: all
  /// of them must have added, or, where the order does not matter, the first one.
  __device__ int awaited(int before) const { return ordered ? before : min(before, 1); }
  /// Whether that block counts itself afterwards.
  __device__ bool passes(int before, bool last) const { return !last && (ordered || before == 0); }
  template <class Shape>
  __device__ bool adds_freely() const {
    return Shape::kSparse && zeroed;
  }
};

template <class Shape>
using PlaceOf = std::conditional_t<Shape::kSparse, SparsePlace, BackwardPlace>;

/// The first step of an item.
template <class Shape>
__device__ inline PlaceOf<Shape> first_place(const BackwardPlan& plan, const BackwardItem& item) {
  if constexpr (Shape::kSparse)
    return SparsePlace(item, plan.steps);
  else
    return BackwardPlace(item, plan.group);
}
template <class Shape>
__device__ inline void advance(PlaceOf<Shape>& place, const BackwardPlan& plan, const BackwardItem& item) {
  if constexpr (Shape::kSparse)
    place.advance(item, plan.steps);
  else
    place.advance(item, plan.group);
}

/// The tile of queries that a block of the kernels before and after the pass works on. Heads vary fastest: in most
/// calls the heads of a token are neighbours in memory, so that blocks that run side by side read and write whole
/// pages. Sequences are walked backwards: after the pass the L2 cache still holds the sums of the last sequences, and
/// when the pass starts it holds the inputs of the first ones.
struct TileOfBlock {
  int b, h, tile, index;  // index: of all tiles of all heads, as plan.tile_index says
  __device__ TileOfBlock(const AttentionParams& f, const BackwardPlan& plan) {
    const unsigned heads = static_cast<unsigned>(f.heads_q), tiles = plan.q_tiles, token_tile = blockIdx.x / heads;
    h = static_cast<int>(blockIdx.x % heads);
    b = static_cast<int>(f.batch) - 1 - static_cast<int>(token_tile / tiles);
    tile = static_cast<int>(token_tile % tiles);
    index = plan.tile_index(static_cast<int>(heads), b, h, tile);
  }
};

/// Where things lie in dynamic shared memory, as 32-bit addresses.
template <class Shape>
struct BackwardLayout {
  static constexpr int kStages = Shape::kStages, kScoreSlots = Shape::kScoreSlots;
  static constexpr int kKeySlots = Shape::kKeySlots;
  static constexpr int kK = 0, kV = kK + kKeySlots * Shape::kKBytes, kQ = kV + Shape::kVBytes;
  static constexpr int kGradOut = kQ + kStages * Shape::kQBytes, kGradS = kGradOut + kStages * Shape::kGradOutBytes;
  static constexpr int kWeights = kGradS + kScoreSlots * Shape::kScoreBytes;
  static constexpr int kRows = kWeights + Shape::kWeightSlots * Shape::kScoreBytes;
  static constexpr int kBarrier = kRows + kStages * Shape::kRowsBytes;
  static constexpr int kItems = 2, kTurns = 2, kPasses = 2;
  static constexpr int kBarriers = 2 + 2 * kKeySlots + 4 * kStages + 2 * kScoreSlots + 2 * (kItems + kPasses + kTurns);
  static constexpr int kRecord = kBarrier + kBarriers * 8;
  static constexpr int kRecordBytes = (sizeof(BackwardItem) + 15) / 16 * 16;
  static constexpr int kTurnRecord = kRecord + kItems * kRecordBytes;
  static constexpr int kRange = kTurnRecord + kTurns * static_cast<int>(sizeof(BackwardTurn));
  static constexpr int kStepRecord = kRange + static_cast<int>(sizeof(BackwardRange));
  static constexpr int kBytes = kStepRecord + (Shape::kSparse ? kStages * static_cast<int>(sizeof(SparseStep)) : 0);
  static_assert(kBytes <= 227 * 1024, "a block of sm_90 has 227 KB");

  std::uint32_t base;

  __device__ std::uint32_t k(int slot) const { return base + kK + slot * Shape::kKBytes; }
  __device__ std::uint32_t v() const { return base + kV; }
  __device__ std::uint32_t q(int stage) const { return base + kQ + stage * Shape::kQBytes; }
  __device__ std::uint32_t grad_out(int stage) const { return base + kGradOut + stage * Shape::kGradOutBytes; }
  __device__ std::uint32_t grad_s(int slot) const { return base + kGradS + slot * Shape::kScoreBytes; }
  __device__ std::uint32_t weights(int slot) const { return base + kWeights + slot * Shape::kScoreBytes; }
  __device__ std::uint32_t rows(int stage) const { return base + kRows + stage * Shape::kRowsBytes; }
  __device__ std::uint32_t barrier(int i) const { return base + kBarrier + 8 * i; }
  __device__ std::uint32_t v_full() const { return barrier(0); }
  __device__ std::uint32_t v_empty() const { return barrier(1); }
  __device__ std::uint32_t k_full(int slot) const { return barrier(2 + slot); }
  __device__ std::uint32_t k_empty(int slot) const { return barrier(2 + kKeySlots + slot); }
  __device__ std::uint32_t q_full(int stage) const { return barrier(2 + 2 * kKeySlots + stage); }
  __device__ std::uint32_t q_empty(int stage) const { return q_full(kStages + stage); }
  __device__ std::uint32_t grad_out_full(int stage) const { return q_full(2 * kStages + stage); }
  __device__ std::uint32_t grad_out_empty(int stage) const { return q_full(3 * kStages + stage); }
  __device__ std::uint32_t grad_s_full(int slot) const { return q_full(4 * kStages + slot); }
  __device__ std::uint32_t grad_s_empty(int slot) const { return grad_s_full(kScoreSlots + slot); }
  __device__ std::uint32_t item_full(int slot) const { return grad_s_full(2 * kScoreSlots + slot); }
  __device__ std::uint32_t item_empty(int slot) const { return item_full(kItems + slot); }
  __device__ std::uint32_t pass_full(int slot) const { return item_full(2 * kItems + slot); }
  __device__ std::uint32_t pass_empty(int slot) const { return pass_full(kPasses + slot); }
  __device__ std::uint32_t turn_full(int slot) const { return pass_full(2 * kPasses + slot); }
  __device__ std::uint32_t turn_empty(int slot) const { return turn_full(kTurns + slot); }
  __device__ BackwardTurn* turn(int slot) const {
    return static_cast<BackwardTurn*>(__cvta_shared_to_generic(base + kTurnRecord + slot * sizeof(BackwardTurn)));
  }
  __device__ BackwardRange* range() const {
    return static_cast<BackwardRange*>(__cvta_shared_to_generic(base + kRange));
  }
  /// With a block mask: the step whose Q a stage holds.
  __device__ SparseStep* step(int stage) const {
    return static_cast<SparseStep*>(__cvta_shared_to_generic(base + kStepRecord + stage * sizeof(SparseStep)));
  }
  __device__ BackwardItem* item(int slot) const {
    return static_cast<BackwardItem*>(__cvta_shared_to_generic(base + kRecord + slot * kRecordBytes));
  }
};

/// Remembers whether all values that it was shown are finite. Its sums take turns: an addition waits for the last one.
template <int kSums = 4>
struct FiniteCheck {
  float zero[kSums] = {};  // NaN once one is not
  __device__ void see(float x, int turn) { zero[turn % kSums] = fmaf(x, 0.0f, zero[turn % kSums]); }
  __device__ void report(int* not_finite) const {
    float all = zero[0];
#pragma unroll
    for (int i = 1; i < kSums; ++i) all += zero[i];
    if (all != all) *not_finite = 1;
  }
};

}  // namespace flashkernel::cuda::sm90a
