// The order in which the thread blocks of the Hopper forward kernel take tiles of queries. The host decides it for each
// launch; locate_tile (shape.cuh) walks it. Under a causal mask, tiles differ in work: a tile near the end of the
// sequence sees more keys. A good order does three things. It gives every block the same amount of work. It keeps the
// keys of only a few heads in use at a time, so that they stay in the L2 cache. It runs heavy and light tiles at the
// same time, so that the load on memory is even. lab/notebooks/attention_hopper_log.md ("Orders by a model") compares
// the costs here with measurements.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <numeric>
#include <vector>

namespace flashkernel::cuda::sm90a {

/// Heads are split into groups, which follow one another. Within a group, the heaviest tiles of all its heads come
/// first. With `pairs`, the first heads are taken differently, before all groups: a block takes two tiles of a head at
/// a time, a heavy one and a light one.
struct TileOrder {
  int heads_at_once = 1;               // heads of a group
  int groups = 1;                      // number of groups; the last one holds the remaining heads
  int in_turn = 0;                     // 1: every round walks the blocks forwards; 0: every second round backwards
  int pairs = 0;                       // pairs of tiles of a head
  int paired_heads = 0;                // heads, from the first on, that are taken in pairs
  int pair_rounds = 0, pair_rest = 0;  // pairs that every block takes, and the number of blocks that take one more
};

/// The fixed cost of a tile (its start and its end, 5000 clocks), in blocks of keys (1700 to 2000 clocks each).
inline constexpr int kTileChange = 3;

/// The first row of the tile of a head that has `lighter` lighter tiles after it; the head has `row_groups` groups of
/// 64 rows. The last tile ends with the sequence. Rows that fill no tile belong to the first tile, whose first row may
/// then be negative: under a causal mask that tile sees few keys, whereas a partly filled tile at the end would see all
/// of them.
template <class Int>
constexpr Int first_row_of_tile(Int row_groups, Int consumers, Int lighter) {
  return 64 * (row_groups - (lighter + 1) * consumers);
}

/// The properties of a call that decide its order.
struct OrderedCall {
  std::int64_t heads = 0;
  std::vector<int> work;  // cost of each tile of a head, the last tile first: its blocks of keys plus kTileChange
  double l2_share = 0;    // the share of the L2 cache that the keys and values of one head take
  int num_sms = 0;        // thread blocks, one a multiprocessor
  bool may_mix = false;   // heavy and light tiles may run together: no gain where exponentials are the limit (d64)
  bool may_pair = false;  // tiles may be taken in pairs

  std::int64_t tiles() const { return heads * static_cast<std::int64_t>(work.size()); }
};

/// The work of the busiest block, divided by the mean over all blocks.
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

/// Takes as many whole heads in pairs as possible while at least one round of pairs is left over; those heads are taken
/// tile by tile. If all heads were taken in pairs, some blocks would wait in the last round (3 % of eight rounds).
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

/// The order for tiles of unequal work: the cheapest of these candidates.
/// - All heads in one group.
/// - Groups whose tiles fill 1.5, 2, 3 or 4 rounds of blocks, every second round backwards: each block gets heavy and
///   light tiles. With up to 4 tiles a head also groups of 8 heads, which ask for keys in smaller bursts.
/// - With up to 8 tiles a head: groups of which a round holds 11 (or 33) tiles of each head, every round forwards. The
///   next tile of a block is then 11 places lighter, and the heaviest tile follows the lightest. Since 11 and the
///   number of tiles have no common factor, each block meets tiles of every weight.
/// If the keys of no group fit into the L2 cache, tiles are taken in pairs where that is allowed (the few heads in
/// progress fit), else all heads form one group, whose blocks read the same keys at the same time.
inline TileOrder order_tiles(const OrderedCall& call) {
  const auto q_tiles = static_cast<std::int64_t>(call.work.size());
  const std::int64_t kMostRounds = 64;  // longer calls balance themselves, and to model them would take long
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
  // It must be 11 exactly. If the step were off by half a tile, a block would keep tiles of one weight for half a call.
  for (const std::int64_t tiles : {11, 33})
    if (call.may_mix && q_tiles <= (tiles == 11 ? 8 : 4) && call.num_sms % tiles == 0 && std::gcd(tiles, q_tiles) == 1)
      consider(call.num_sms / tiles, true);
  const bool all_heads = best.heads_at_once == call.heads && static_cast<double>(call.heads) * call.l2_share > 1;
  // Pairs are for up to 32 tiles a head (more were not measured) and calls of several rounds.
  if (all_heads && call.may_pair && q_tiles % 2 == 0 && q_tiles <= 32 && call.tiles() >= 6 * call.num_sms)
    return order_in_pairs(call);
  return best;
}

/// The same as order_tiles, but keeps the answer of this thread's last call: the layers of a model ask for the same
/// order.
inline TileOrder remembered_order(const OrderedCall& call) {
  struct Answer {  // plain data: needs no destructor when a thread ends
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
