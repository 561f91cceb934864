// The order of the Hopper backward kernel's items (cuda/sm90a/attention_bwd_order.hpp): host code, tested without a
// GPU.
#include "cuda/sm90a/attention_bwd_order.hpp"

#include <gtest/gtest.h>

#include <map>
#include <utility>

namespace flashkernel::cuda::sm90a {
namespace {

using Items = std::map<std::pair<unsigned, unsigned>, unsigned>;  // head, tile of keys: when

/// Every order of up to 12 heads with up to six tiles of keys, and when each item is taken.
template <class F>
void for_orders(bool leads, const F& f) {
  for (int heads = 1; heads <= 12; ++heads)
    for (int at_once = 1; at_once <= heads; ++at_once)
      for (int tiles = 1; tiles <= 6; ++tiles) {
        SCOPED_TRACE(testing::Message() << heads << " heads, " << at_once << " at once, " << tiles << " tiles");
        BackwardOrder order;
        order.heads = heads, order.k_tiles = tiles;
        order.set_groups(at_once, leads);
        Items items;
        for (int i = 0; i < heads * tiles; ++i) {
          const BackwardOrder::Place place = order.place(static_cast<unsigned>(i));
          items.insert({{place.head, place.tile}, static_cast<unsigned>(i)});
        }
        f(order, items);
      }
}

unsigned when(const Items& items, int head, int tile) {
  return items.at({static_cast<unsigned>(head), static_cast<unsigned>(tile)});
}

TEST(BackwardOrder, EveryItemIsTakenOnceAndAHeadsTilesInTheirOrder) {
  for (const bool leads : {false, true})
    for_orders(leads, [](const BackwardOrder& order, const Items& items) {
      ASSERT_EQ(items.size(), static_cast<std::size_t>(order.heads * order.k_tiles));
      for (int head = 0; head < order.heads; ++head)
        for (int tile = 0; tile < order.k_tiles; ++tile) {
          ASSERT_TRUE(items.count({static_cast<unsigned>(head), static_cast<unsigned>(tile)}));
          if (tile > 0) {
            ASSERT_GT(when(items, head, tile), when(items, head, tile - 1));
          }
        }
    });
}

TEST(BackwardOrder, GroupsFollowEachOther) {
  for_orders(false, [](const BackwardOrder& order, const Items& items) {
    for (int head = order.heads_at_once; head < order.heads; ++head)
      for (int before = 0; before < head / order.heads_at_once * order.heads_at_once; ++before)
        ASSERT_GT(when(items, head, 0), when(items, before, order.k_tiles - 1));
  });
}

TEST(BackwardOrder, FirstTilesLeadByAGroup) {
  for_orders(true, [](const BackwardOrder& order, const Items& items) {
    const auto group = [&](int head) { return head / order.heads_at_once; };
    for (int head = 0; head < order.heads; ++head)
      for (int other = 0; other < order.heads; ++other)
        for (int tile = 1; tile < order.k_tiles; ++tile) {
          // Before the others of the group before its own and of all later ones, behind those before that.
          ASSERT_EQ(when(items, head, 0) < when(items, other, tile), group(head) <= group(other) + 1);
          if (tile > 1 && group(head) > group(other)) {
            ASSERT_GT(when(items, head, 1), when(items, other, tile));
          }
        }
  });
}

TEST(BackwardOrder, TheLastItemsAreTheLastGroups) {
  for (const bool leads : {false, true})
    for_orders(leads, [](const BackwardOrder& order, const Items&) {
      const int rest = (order.heads - 1) % order.heads_at_once + 1;
      for (int i = order.heads * order.k_tiles - rest * (order.k_tiles - 1); i < order.heads * order.k_tiles; ++i) {
        const BackwardOrder::Place place = order.place(static_cast<unsigned>(i));
        ASSERT_GE(static_cast<int>(place.head), order.heads - rest);
        ASSERT_GE(place.tile, 1u);
      }
    });
}

}  // namespace
}  // namespace flashkernel::cuda::sm90a
