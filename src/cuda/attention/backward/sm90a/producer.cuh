// The producer warpgroup of the Hopper backward kernel. One thread takes items by ticket, tells the consumers, and
// fills the slots of K, V, Q and dO by TMA, as far ahead as the slots allow. One thread in each of two other warps
// keeps the order in which blocks add to dQ. These two wait for the L2 cache and for other blocks, which delays nobody
// else.
#pragma once

#include "cuda/ptx/atomic.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/attention/backward/sm90a/shape.cuh"

namespace flashkernel::cuda::sm90a {

/// Cuts an item to the tiles of queries that belong to a range, and leaves the rest of the range for later. A range is
/// walked from its end. Therefore a block starts with the sums that it gives away, and ends with those that it takes,
/// which another block has given long before.
__device__ inline void cut_item(const BackwardPlan& plan, BackwardRange* range, BackwardItem* item) {
  const int range_first = range->number * plan.range_tiles, end = range_first + range->left;
  const int item_first = (end - 1) / plan.q_tiles * plan.q_tiles, first = max(range_first, item_first);
  item->share = end < item_first + plan.q_tiles ? BackwardItem::kGives
                : first > item_first            ? BackwardItem::kTakes
                                                : BackwardItem::kAll;
  item->cut_range = range->number;
  item->first_tile = first - item_first;
  item->tiles = end - first;
  range->left = first - range_first;
}

/// A ticket past the whole items starts a range. Within a range, `index` becomes that of the next item, which is the
/// last one that is left of the range.
__device__ inline void begin_range(const BackwardPlan& plan, BackwardRange* range, unsigned* index) {
  const int number = static_cast<int>(*index) - plan.whole_items;
  if (range->left == 0 && number >= 0) {
    range->number = number;
    range->left = min(plan.range_tiles, plan.cut_tiles - number * plan.range_tiles);
  }
  if (range->left > 0) *index = plan.whole_items + (range->number * plan.range_tiles + range->left - 1) / plan.q_tiles;
}

/// Takes the next item: the next ticket of all thread blocks, or the next item of the range that this block has
/// started. The last tickets are ranges of cut items. A block waits for lower tickets only, and blocks that run have
/// taken all of those. Therefore no block waits forever.
template <class Shape>
__device__ inline void take_item(const AttentionBackwardParams& p, const BackwardPlan& plan, BackwardRange* range,
                                 BackwardItem* item) {
  const AttentionParams& f = p.forward;
  for (;;) {
    unsigned index = 0;
    if (!Shape::kMayCut || range->left == 0) {
      index = static_cast<unsigned>(atomicAdd(plan.ticket, 1));
      if (index >= static_cast<unsigned>(plan.tickets)) {
        item->steps = -1;
        return;
      }
    }
    if constexpr (Shape::kMayCut) begin_range(plan, range, &index);
    const auto [head, tile] = plan.place(index);
    item->b = static_cast<int>(head / static_cast<unsigned>(f.heads_kv));
    item->g = static_cast<int>(head % static_cast<unsigned>(f.heads_kv));
    item->n_tile = Shape::kSparse ? plan.k_tiles - 1 - static_cast<int>(tile) : static_cast<int>(tile);
    const KeyWindow keys(f, item->b);
    const int first_key = item->n_tile * Shape::kBlockN;
    if (first_key >= keys.k_len) continue;  // a shorter sequence has no such tile
    const int first_query = keys.first_query(first_key);
    const int last_query = keys.last_query(min(keys.k_len, first_key + Shape::kBlockN) - 1);
    item->range = keys;
    item->q_row = f.is_varlen_q() ? f.q_begin(item->b) : 0;
    item->k_row = f.is_varlen_k() ? f.k_begin(item->b) : 0;
    item->first_tile = first_query / Shape::kBlockM;
    item->tiles = last_query > first_query ? (last_query + Shape::kBlockM - 1) / Shape::kBlockM - item->first_tile : 0;
    if constexpr (Shape::kMayCut) {
      item->share = BackwardItem::kAll;
      if (range->left > 0) cut_item(plan, range, item);
    }
    item->steps = item->tiles * plan.group;
    if constexpr (Shape::kSparse) {
      const int keys_index = plan.key_list(item->b, item->g, item->n_tile);
      item->steps = plan.num_steps[keys_index];
      item->first_step = static_cast<std::int64_t>(keys_index) * (plan.q_tiles * plan.group);
    }
    // The first query of a tile sees the last key, the last query the first key; no key is past the end.
    const int whole = first_key + Shape::kBlockN <= keys.k_len;
    item->first_whole =
        whole ? (max(0, first_key + Shape::kBlockN - keys.right) + Shape::kBlockM - 1) / Shape::kBlockM : 0;
    item->last_whole = !whole                                    ? 0
                       : keys.q_len - 1 + keys.left <= first_key ? 0x7fffffff
                                                                 : max(0, first_key + 1 - keys.left) / Shape::kBlockM;
    return;
  }
}

/// Column blocks of a tile that begins at row `row` of head `head`.
template <int kColumnBlocks>
__device__ inline void load_tile(std::uint32_t to, int block_bytes, const CUtensorMap* map, std::uint32_t barrier,
                                 std::uint64_t policy, int row, int head, int b) {
#pragma unroll
  for (int c = 0; c < kColumnBlocks; ++c)
    ptx::tma_load(to + c * block_bytes, map, barrier, policy, c * 64, row, head, b);
}

/// One thread runs this. It reads the item's record each time, because it has few registers.
template <class Shape>
__device__ inline void produce_gradients(const AttentionBackwardParams& p, const BackwardPlan& plan,
                                         const BackwardLayout<Shape>& shared, const CUtensorMap* map_q,
                                         const CUtensorMap* map_k, const CUtensorMap* map_v,
                                         const CUtensorMap* map_grad_out, const CUtensorMap* map_rows) {
  const AttentionParams& f = p.forward;
  constexpr std::uint64_t kKeep = ptx::kL2EvictLast, kPass = ptx::kL2EvictFirst;
  Ring<Shape::kStages> at;
  Ring<BackwardLayout<Shape>::kItems> items;
  Ring<Shape::kKeySlots> keys;
  for (;; ++items.count) {
    ptx::mbarrier_wait(shared.item_empty(items.slot()), items.parity() ^ 1);
    BackwardItem* const item = shared.item(items.slot());
    take_item<Shape>(p, plan, shared.range(), item);
    item->key_slot = static_cast<int>(keys.slot());
    ptx::mbarrier_arrive(shared.item_full(items.slot()));
    const int steps = item->steps;
    if (steps < 0) return;
    if (steps == 0) continue;
    auto place = first_place<Shape>(plan, *item);
#pragma unroll 1
    for (int left = steps; left > 0; --left, ++at.count, advance<Shape>(place, plan, *item)) {
      const std::uint32_t stage = at.slot();
      ptx::mbarrier_wait(shared.q_empty(stage), at.parity() ^ 1);
      if constexpr (Shape::kSparse) *shared.step(stage) = place.now;
      ptx::mbarrier_arrive_expect(shared.q_full(stage), Shape::kQBytes + Shape::kRowsBytes);
      load_tile<Shape::kQkBlocks>(shared.q(stage), Shape::kQBlockBytes, map_q, shared.q_full(stage), kKeep,
                                  item->q_row + place.q_tile() * Shape::kBlockM, place.head(*item, plan.group),
                                  f.is_varlen_q() ? 0 : item->b);
      // With a tensor map: compute-sanitizer takes a copy without one for a write by this thread, and reports races.
      ptx::tma_load(shared.rows(stage), map_rows, shared.q_full(stage), kKeep, 0,
                    plan.tile_index(f.heads_q, item->b, place.head(*item, plan.group), place.q_tile()));
      if (left == item->steps) {  // K and V after the first Q, whose slot is free before theirs
        const std::uint32_t slot = keys.slot();
        const int row = item->k_row + item->n_tile * Shape::kBlockN, b = f.is_varlen_k() ? 0 : item->b;
        ptx::mbarrier_wait(shared.k_empty(slot), keys.parity() ^ 1);
        ptx::mbarrier_arrive_expect(shared.k_full(slot), Shape::kKBytes);
        load_tile<Shape::kQkBlocks>(shared.k(slot), Shape::kKvBlockBytes, map_k, shared.k_full(slot), kPass, row,
                                    item->g, b);
        ptx::mbarrier_wait(shared.v_empty(), Ring<1>{keys.count}.parity() ^ 1);
        ptx::mbarrier_arrive_expect(shared.v_full(), Shape::kVBytes);
        load_tile<Shape::kVBlocks>(shared.v(), Shape::kKvBlockBytes, map_v, shared.v_full(), kPass, row, item->g, b);
        ++keys.count;
      }
      ptx::mbarrier_wait(shared.grad_out_empty(stage), at.parity() ^ 1);
      ptx::mbarrier_arrive_expect(shared.grad_out_full(stage), Shape::kGradOutBytes);
      load_tile<Shape::kVBlocks>(shared.grad_out(stage), Shape::kQBlockBytes, map_grad_out, shared.grad_out_full(stage),
                                 kKeep, item->q_row + place.q_tile() * Shape::kBlockM, place.head(*item, plan.group),
                                 f.is_varlen_q() ? 0 : item->b);
    }
  }
}

/// One thread runs this: calls `step(item, place)` for all steps of the block's items, if they are `wanted`.
template <class Shape, class Step>
__device__ inline void walk_steps(const BackwardPlan& plan, const BackwardLayout<Shape>& shared, bool wanted,
                                  const Step& step) {
  Ring<BackwardLayout<Shape>::kItems> items;
  for (;; ++items.count) {
    ptx::mbarrier_wait(shared.item_full(items.slot()), items.parity());
    const BackwardItem& item = *shared.item(items.slot());
    const int steps = item.steps;
    if (steps < 0) return;
    if (wanted) {
      auto place = first_place<Shape>(plan, item);
#pragma unroll 1
      for (int i = 0; i < steps; ++i, advance<Shape>(place, plan, item)) step(item, place);
    }
    ptx::mbarrier_arrive(shared.item_empty(items.slot()));
  }
}

/// One thread runs this. It finds out when the block may add the dQ of a step, up to two turns ahead of the dQ
/// warpgroup, which then finds the answer in shared memory.
template <class Shape>
__device__ inline void await_turns(const AttentionBackwardParams& p, const BackwardPlan& plan,
                                   const BackwardLayout<Shape>& shared) {
  Ring<BackwardLayout<Shape>::kTurns> turns;
  walk_steps<Shape>(plan, shared, p.grad_q, [&](const BackwardItem& item, const PlaceOf<Shape>& place) {
    const int turn = place.template before<Shape>(item);
    if (turn == 0 || plan.adds_freely<Shape>()) return;
    const int* const counter =
        plan.counters + plan.tile_index(p.forward.heads_q, item.b, place.head(item, plan.group), place.q_tile());
    ptx::mbarrier_wait(shared.turn_empty(turns.slot()), turns.parity() ^ 1);
    while (ptx::load_acquire(counter) < plan.awaited(turn)) {
    }
    ptx::mbarrier_arrive(shared.turn_full(turns.slot()));
    ++turns.count;
  });
}

/// One thread runs this. Once the dQ warpgroup has added a tile, this thread lets the next block add. The release waits
/// until the additions are done, and no other thread should have to wait for that.
template <class Shape>
__device__ inline void pass_turns(const AttentionBackwardParams& p, const BackwardPlan& plan,
                                  const BackwardLayout<Shape>& shared) {
  Ring<BackwardLayout<Shape>::kPasses> passes;
  walk_steps<Shape>(plan, shared, p.grad_q, [&](const BackwardItem& item, const PlaceOf<Shape>& place) {
    const int turn = place.template before<Shape>(item);
    if (plan.adds_freely<Shape>() || !plan.passes(turn, place.template is_last<Shape>(item))) return;
    ptx::mbarrier_wait(shared.pass_full(passes.slot()), passes.parity());
    ptx::store_release(
        plan.counters + plan.tile_index(p.forward.heads_q, item.b, place.head(item, plan.group), place.q_tile()),
        turn + 1);
    ptx::mbarrier_arrive(shared.pass_empty(passes.slot()));
    ++passes.count;
  });
}

/// One thread runs this, for JoinedConsumer. For every step it says what becomes of the step's dQ, once it is the
/// step's turn, up to kTurns steps ahead.
template <class Shape>
__device__ inline void publish_turns(const AttentionBackwardParams& p, const BackwardPlan& plan,
                                     const BackwardLayout<Shape>& shared) {
  Ring<BackwardLayout<Shape>::kTurns> turns;
  walk_steps<Shape>(plan, shared, true, [&](const BackwardItem& item, const PlaceOf<Shape>& place) {
    BackwardTurn turn;
    turn.tile = plan.tile_index(p.forward.heads_q, item.b, place.head(item, plan.group), place.q_tile());
    turn.how = p.grad_q ? BackwardTurn::kAdd : BackwardTurn::kDrop;
    ptx::mbarrier_wait(shared.pass_empty(turns.slot()), turns.parity() ^ 1);
    if (p.grad_q) {
      const int before = place.template before<Shape>(item);
      if (before == 0) turn.how = BackwardTurn::kStore;
      while (before > 0 && ptx::load_acquire(plan.counters + turn.tile) < plan.awaited(before)) {
      }
    }
    *shared.turn(turns.slot()) = turn;
    ptx::mbarrier_arrive(shared.turn_full(turns.slot()));
    ++turns.count;
  });
}

/// One thread runs this, for JoinedConsumer. Once the dQ of a step has been added, it lets the next block add.
template <class Shape>
__device__ inline void pass_published_turns(const AttentionBackwardParams& p, const BackwardPlan& plan,
                                            const BackwardLayout<Shape>& shared) {
  Ring<BackwardLayout<Shape>::kTurns> turns;
  walk_steps<Shape>(plan, shared, true, [&](const BackwardItem& item, const PlaceOf<Shape>& place) {
    ptx::mbarrier_wait(shared.pass_full(turns.slot()), turns.parity());
    const int before = place.template before<Shape>(item);
    if (p.grad_q && plan.passes(before, place.template is_last<Shape>(item)))
      ptx::store_release(
          plan.counters + plan.tile_index(p.forward.heads_q, item.b, place.head(item, plan.group), place.q_tile()),
          before + 1);
    ptx::mbarrier_arrive(shared.pass_empty(turns.slot()));
    ++turns.count;
  });
}

}  // namespace flashkernel::cuda::sm90a
