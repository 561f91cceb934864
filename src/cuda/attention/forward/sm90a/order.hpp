// In which order the thread blocks of the Hopper forward kernel take tiles of queries: decided by the host for each
// launch, walked by locate_tile (shape.cuh). Under a causal mask tiles have unequal work. A good order
// gives all blocks as much, has the keys of few heads in use at a time, so that they stay in the L2 cache, and heavy
// and light tiles side by side, so that memory is asked for evenly. How well the costs here foretell what is measured:
// lab/notebooks/attention_hopper_log.md, "Orders by a model".
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <numeric>
#include <vector>

namespace flashkernel::cuda::sm90a {

/// Groups of heads one after the other; of a group the heavy tiles of all its heads first. With `pairs`, heads whose
/// tiles blocks take two at a time, a heavy and a light one, come before the groups.
struct TileOrder {
  int heads_at_once = 1;               // of a group
  int groups = 1;                      // the last one has what is left
  int in_turn = 0;                     // every round of blocks in the same order; else every other one backwards
  int pairs = 0;                       // of tiles of a head
  int paired_heads = 0;                // the first ones
  int pair_rounds = 0, pair_rest = 0;  // pairs of every block, and how many blocks have one more
};

/// What a tile costs beside its blocks of keys, in such blocks: its beginning and end (5000 clocks, of 1700 to 2000).
inline constexpr int kTileChange = 3;

/// The first row of a head's tile with `lighter` tiles behind it, of `row_groups` groups of 64 rows; may be below 0.
/// Tiles end where the sequence's last group does. What fills no tile stands before the first one, where a causal mask
/// leaves few keys: at the end, a tile of one group would walk all of them.
template <class Int>
constexpr Int first_row_of_tile(Int row_groups, Int consumers, Int lighter) {
  return 64 * (row_groups - (lighter + 1) * consumers);
}

/// What an order depends on.
struct OrderedCall {
  std::int64_t heads = 0;
  std::vector<int> work;  // of a head's tiles, the last one first: blocks of keys, and kTileChange
  double l2_share = 0;    // of the L2 cache, what one head's keys and values take
  int num_sms = 0;        // blocks
  bool may_mix = false;   // heavy and light tiles side by side: not where exponentials are the limit (d64)
  bool may_pair = false;

  std::int64_t tiles() const { return heads * static_cast<std::int64_t>(work.size()); }
};

/// The work of the block that has the most, over the mean of all.
inline double imbalance(const OrderedCall& call, const TileOrder& order) {
  std::vector<int> loads(static_cast<std::size_t>(call.num_sms));
  std::int64_t place = 0;
  bool backwards = false;
  for (int group = 0; group < order.groups; ++group) {
    const std::int64_t first = std::int64_t{group} * order.heads_at_once;
    const std::int64_t heads = group + 1 < order.groups ? order.heads_at_once : call.heads - first;
    for (const int work : call.work)
      for (std::int64_t left = heads; left > 0;) {
        const std::int64_t count = std::min(left, call.num_sms - place);  // of this round
        int* const load = loads.data() + (backwards ? call.num_sms - place - count : place);
        for (std::int64_t i = 0; i < count; ++i) load[i] += work;
        left -= count, place += count;
        if (place == call.num_sms) place = 0, backwards = !backwards && !order.in_turn;
      }
  }
  const std::int64_t all = call.heads * std::accumulate(call.work.begin(), call.work.end(), std::int64_t{0});
  return static_cast<double>(*std::max_element(loads.begin(), loads.end())) * call.num_sms / static_cast<double>(all);
}

/// Heads in pairs of tiles: as many whole ones as leave a round of pairs, and what fills no round, to be taken tile by
/// tile. In pairs to the end, the last round would keep some blocks waiting (3 % of eight rounds).
inline TileOrder order_in_pairs(const OrderedCall& call) {
  TileOrder order;
  order.pairs = static_cast<int>(call.work.size() / 2);
  const int rounds = static_cast<int>(call.heads) * order.pairs / call.num_sms - 1;
  order.paired_heads = rounds * call.num_sms / order.pairs;
  order.pair_rounds = order.paired_heads * order.pairs / call.num_sms;
  order.pair_rest = order.paired_heads * order.pairs % call.num_sms;
  order.heads_at_once = static_cast<int>(call.heads) - order.paired_heads;
  return order;
}

/// The order for tiles of unequal work. Backwards in every other round: heads that fill one and a half rounds of
/// blocks, two, three or four, so that heavy and light tiles meet in each block (8 heads of few tiles: keys are asked
/// for less in bursts). In turn, where there are up to eight tiles: heads of which a round holds eleven (33) tiles
/// each. A block's next tile is then eleven lighter, the heaviest following the lightest; without a factor in common
/// with their number it comes by all of them. Of these, what costs least; where no group's keys fit the L2 cache, pairs
/// (the few heads whose pairs are under way do), or all heads at once: then blocks in step read the same keys.
inline TileOrder order_tiles(const OrderedCall& call) {
  const auto q_tiles = static_cast<std::int64_t>(call.work.size());
  const std::int64_t kMostRounds = 64;  // longer calls level themselves out, and a model of them would take long
  const auto cost = [&](const TileOrder& order, std::int64_t largest) {
    const double cache = 0.01 * std::min(1.5, static_cast<double>(largest) * call.l2_share);
    if (call.tiles() > kMostRounds * call.num_sms) return cache;
    return imbalance(call, order) + cache - (order.in_turn ? 0.02 : 0.0);
  };
  TileOrder best;
  best.heads_at_once = static_cast<int>(call.heads);
  double least = cost(best, call.heads);
  const auto consider = [&](std::int64_t heads, bool in_turn) {
    if (heads < 1 || heads >= call.heads || static_cast<double>(heads) * call.l2_share > 1) return;
    for (const bool takes_rest : {false, true}) {
      const std::int64_t whole = call.heads / heads, rest = call.heads % heads;
      if (takes_rest && rest == 0) continue;
      TileOrder order;
      order.heads_at_once = static_cast<int>(heads);
      order.groups = static_cast<int>(takes_rest || rest == 0 ? whole : whole + 1);
      order.in_turn = in_turn;
      const double costs = cost(order, takes_rest ? heads + rest : heads);
      if (costs < least) least = costs, best = order;
    }
  };
  for (const std::int64_t half_rounds : {3, 4, 6, 8}) {
    const std::int64_t tiles = half_rounds * call.num_sms / 2;
    consider(tiles / std::gcd(tiles, q_tiles), false);
  }
  if (q_tiles <= 4) consider(8, false);
  // Nearly eleven would not do: a tile that is half a one lighter each time is as heavy for half of the call.
  for (const std::int64_t tiles : {11, 33})
    if (call.may_mix && q_tiles <= (tiles == 11 ? 8 : 4) && call.num_sms % tiles == 0 && std::gcd(tiles, q_tiles) == 1)
      consider(call.num_sms / tiles, true);
  const bool all_heads = best.heads_at_once == call.heads && static_cast<double>(call.heads) * call.l2_share > 1;
  // Up to 32 tiles (more have not been measured), and a few rounds of pairs.
  if (all_heads && call.may_pair && q_tiles % 2 == 0 && q_tiles <= 32 && call.tiles() >= 6 * call.num_sms)
    return order_in_pairs(call);
  return best;
}

/// The same, with the answer of this thread's last call kept: a model's layers ask the same again and again.
inline TileOrder remembered_order(const OrderedCall& call) {
  struct Answer {  // plain data, so that a thread may end at any time
    std::int64_t heads = 0;
    double l2_share = 0;
    int num_sms = 0, tiles = 0;
    int work[96] = {};
    bool may_mix = false, may_pair = false;
    TileOrder order;
  };
  static thread_local Answer last;
  const auto tiles = static_cast<int>(call.work.size());
  if (tiles > static_cast<int>(std::size(last.work))) return order_tiles(call);
  if (last.heads != call.heads || last.l2_share != call.l2_share || last.num_sms != call.num_sms ||
      last.tiles != tiles || last.may_mix != call.may_mix || last.may_pair != call.may_pair ||
      !std::equal(call.work.begin(), call.work.end(), last.work)) {
    last.order = order_tiles(call);
    last.heads = call.heads, last.l2_share = call.l2_share, last.num_sms = call.num_sms, last.tiles = tiles;
    last.may_mix = call.may_mix, last.may_pair = call.may_pair;
    std::copy(call.work.begin(), call.work.end(), last.work);
  }
  return last.order;
}

}  // namespace flashkernel::cuda::sm90a
