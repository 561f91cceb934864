// The order in which the thread blocks of the Hopper backward kernel take items, which are the tiles of keys of all
// heads. The host decides it for each launch, and take_item (producer.cuh) walks it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/host/ceil_div.hpp"

namespace flashkernel::cuda::sm90a {

/// Groups of heads follow one another, and a group is walked tile after tile. That is the order in which blocks add to
/// dQ, and under a causal mask heavy tiles come first. The first tile of a head stores where the others add. With
/// `leads` it comes one group early: the first tiles of the next group come before the other tiles of this one, so that
/// the others never wait for it.
struct BackwardOrder {
  int k_tiles = 0;        // of the longest sequence
  int heads = 0;          // batch x heads_kv
  int heads_at_once = 1;  // of a group; the last one has what is left
  int leads = 0;
  int last_group = 0;  // with leads, from this item on all are the last group's

  struct Place {
    unsigned head, tile;
  };

  /// How many heads the last of groups of `at_once` has.
  constexpr int last_heads(int at_once) const { return heads > 0 ? (heads - 1) % at_once + 1 : 0; }

  constexpr void set_groups(int at_once, bool with_leads) {
    const int rest = last_heads(at_once);
    heads_at_once = at_once;
    leads = with_leads;
    last_group = (heads - rest) * k_tiles + rest;
  }

  /// Where item `index` of heads x k_tiles is.
  constexpr Place place(unsigned index) const {
    const unsigned at_once = heads_at_once, per_group = at_once * k_tiles, all = heads, last = last_group;
    unsigned first = 0, count = at_once;  // of the group's heads
    if (!leads) {
      first = index / per_group * at_once;
      index %= per_group;
      count = at_once < all - first ? at_once : all - first;
    } else if (index >= last) {
      first = (all - 1) / at_once * at_once;
      count = all - first;
      index += count - last;
    } else if (index >= at_once) {
      index -= at_once;
      first = index / per_group * at_once;
      index %= per_group;
      const unsigned others = all - first - at_once, next = at_once < others ? at_once : others;
      if (index < next)
        first += at_once;
      else
        index += at_once - next;
    }
    return {first + index % count, index / count};
  }
};

/// What the order of a call follows from.
struct BackwardCall {
  int heads = 0, k_tiles = 0, q_tiles = 0;  // batch x heads_kv, and tiles of the longest sequence
  int group = 1;                            // heads_q / heads_kv
  bool ordered = false;                     // blocks add to a tile of dQ in the order of their keys
  bool joined = false;                      // the key warpgroups make dQ themselves, and wait in every step
  bool sparse = false;                      // a block mask says which steps an item has; no block waits but in order
  bool uneven = false;                      // items have more steps the lower their keys are, as under a causal mask
  std::int64_t band_tiles = 0;  // under a window with two sides: tiles of queries that see a tile of keys; 0 elsewhere
  std::int64_t head_bytes = 0;  // of a kv head, what is read and added to again and again: Q, dO and the sums of dQ
  int num_sms = 0;
  std::int64_t l2_bytes = 0;
};

/// Whether blocks add in order though the call allows any order. With few tiles of keys and under a mask, order saves
/// the kernel that converts dQ, and waiting costs less than that. TFLOP/s in order and in any order, measured at d64:
/// causal 1024 330 and 317, 2048 388 and 396. It does not pay where the key warpgroups make dQ: causal 1024 338 and
/// 358, full 512 380 and 386.
inline bool order_is_cheap(bool joined, int k_tiles) { return !joined && k_tiles <= 8; }

/// Whether the first tile of keys of a head comes one group early, in calls that add in any order. The first block to
/// add to a tile of dQ stores, and the others wait for that block only. Where few heads run for a long time, all blocks
/// would stay behind it. Measured against sums that start as zeros, TFLOP/s without and with early tiles: d64 causal
/// 8192 494 and 515, 16384 506 and 517, full 8192 513 and 531; d128 16384 the same. In shorter calls blocks wait once
/// for a short time, and early tiles cost up to 2 % in steady runs. Under a window with two sides each tile of keys is
/// the first one for some queries.
inline bool first_tiles_lead(const BackwardCall& call) {
  return !call.ordered && !call.sparse && call.band_tiles == 0 && call.k_tiles > (call.joined ? 64 : 32);
}

/// The size of a group of heads, such that all groups are about alike: a small group at the end would not fill the
/// device.
inline int alike_in_size(int heads, std::int64_t wanted) {
  wanted = std::clamp<std::int64_t>(wanted, 1, heads);
  return static_cast<int>(ceil_div(heads, ceil_div(heads, wanted)));
}

/// The heads of a group, so that the tiles of keys of one head start `distance` steps apart. A block adds to dQ after
/// the block with the previous tile of keys, and both walk the same queries. Therefore the later one should have
/// started a few steps later. A larger distance takes more heads, whose data must then share the L2 cache.
///
/// Measured: two steps are best. In order under a mask it is k_tiles / 8, up to eight, since the steps of neighbours
/// differ more the longer the sequence is. Where key warpgroups make dQ themselves and wait in every step, it is twice
/// as many and more: at d128, causal calls of 1024 to 16384 gain 2 to 7 %. With grouped heads a block has more steps,
/// but the blocks of a chain of k_tiles start at the same time. Such calls take as many heads as without groups, and
/// half as many under a mask.
inline int heads_apart(const BackwardCall& call) {
  std::int64_t steps = call.q_tiles, distance = 2;
  if (call.uneven) {
    steps = (steps + 1) / 2;
    distance = call.joined && call.ordered ? std::clamp(call.k_tiles / 4, 3, 16) : std::clamp(call.k_tiles / 8, 2, 8);
  } else if (call.band_tiles > 0) {
    steps = std::min(steps, call.band_tiles);
  }
  if (call.uneven || call.band_tiles > 0) steps *= std::max(1, call.group / 2);
  return alike_in_size(call.heads, ceil_div(distance * call.num_sms, std::max<std::int64_t>(1, steps)));
}

/// The heads of a group in order, without a mask, where key warpgroups make dQ. The tiles of keys of a group are enough
/// for all multiprocessors once. Where one head has that many, the blocks of a head start at different times as it is,
/// and a group has as many heads as fit the L2 cache.
///
/// Measured on an H200 with bf16 at d128 in steady runs, TFLOP/s by the heads of a group:
///
///   tiles of keys, of queries     1    2    4    8 heads
///              64         128        568  572  563
///             128         256        604  602  574
///             256         512   610  601  570  544
///             512         512   587  555  537  508   with four query heads for one of keys
///             512          64        598  586  558   the same; 3 heads: 592
///            1024         128   612  583  562  535   the same
inline int heads_of_a_round(const BackwardCall& call) {
  const std::int64_t wanted = call.k_tiles < call.num_sms ? std::max(4, call.num_sms / std::max(1, call.k_tiles))
                                                          : call.l2_bytes / std::max<std::int64_t>(1, call.head_bytes);
  return alike_in_size(call.heads, wanted);
}

/// The heads of a group where blocks add in any order and items are uneven or first tiles come early: two items for
/// each multiprocessor. Then a block that ends a long item finds another one of the same head. More heads would not fit
/// the L2 cache, and traffic to memory takes power.
///
/// Measured at d128, causal. At 16384, with 2 heads instead of 8, 0.6 GB go to and from memory instead of 1.9; the call
/// is 1 to 5 % faster at the clock that its own power allows, and 1 % slower at one clock for all libraries. At 8192 (4
/// heads instead of 8) it is 4 % faster and 1 % slower, at 4096 (8 instead of 11) 3 % faster and the same; d64 at 4096
/// (8 instead of 32) is 6 % and 3 % faster.
inline int heads_of_two_items(const BackwardCall& call) {
  return alike_in_size(call.heads, (2 * call.num_sms + call.k_tiles / 2) / std::max(1, call.k_tiles));
}

/// The heads of a group where first tiles come early and a third warpgroup makes dQ: so few that what they read and add
/// to again and again fits three tenths of the L2 cache. Measured at d64, causal, TFLOP/s by heads_apart and by this:
/// 4096 453 and 479, 8192 473 and 493, 16384 497 and 532.
inline int heads_in_cache(const BackwardCall& call) {
  return alike_in_size(call.heads, call.l2_bytes * 3 / 10 / std::max<std::int64_t>(1, call.head_bytes));
}

/// The same in order with a block mask: items of a head may have to wait for one that has many steps, or steps that
/// look up the packed mask. Those of other heads run meanwhile. Not measured yet.
inline int heads_of_chains(const BackwardCall& call) { return alike_in_size(call.heads, 4); }

/// BackwardOrder::heads_at_once for a call.
inline int choose_heads_at_once(const BackwardCall& call) {
  if (call.heads == 0) return 1;
  if (call.sparse) return std::max(heads_in_cache(call), call.ordered ? heads_of_chains(call) : 1);
  if (call.ordered && call.joined && !call.uneven && call.band_tiles == 0) return heads_of_a_round(call);
  if (call.ordered) return heads_apart(call);
  const bool lead = first_tiles_lead(call);
  if (lead && !call.joined) return heads_in_cache(call);
  return lead || call.uneven ? heads_of_two_items(call) : heads_apart(call);
}

}  // namespace flashkernel::cuda::sm90a
