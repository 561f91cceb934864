// In which order the thread blocks of the Hopper backward kernel take items, tiles of keys of all heads: decided by the
// host for each launch, walked by take_item (attention_bwd_producer.cuh).
#pragma once

namespace flashkernel::cuda::sm90a {

/// Groups of heads one after another; in a group tile after tile, which is the heavy ones first under a causal mask and
/// the order in which blocks add to dQ. With `leads` a head's first tile, which stores where others add, comes a group
/// early: the first tiles of the next group before the other tiles of this one. The others then never wait for it.
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

}  // namespace flashkernel::cuda::sm90a
