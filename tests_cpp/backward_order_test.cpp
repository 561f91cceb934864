// The order of the Hopper backward kernel's items (cuda/attention/backward/sm90a/order.hpp): host code, tested without
// a GPU.
#include "cuda/attention/backward/sm90a/order.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
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

/// 16384 tokens of 2048 / dim heads in sequences of `seq`, on an H200.
BackwardCall causal_call(int dim, int seq, bool ordered) {
  BackwardCall call;
  call.joined = dim == 128;
  call.heads = 16384 / seq * (2048 / dim);
  call.k_tiles = seq / 128, call.q_tiles = seq / (dim == 128 ? 64 : 128);
  call.ordered = ordered, call.uneven = true;
  call.head_bytes = std::int64_t{seq} * dim * (2 + 2 + 4);
  call.num_sms = 132, call.l2_bytes = 50 << 20;
  return call;
}

TEST(BackwardHeadsAtOnce, AreTheFastestOfThoseMeasured) {
  EXPECT_EQ(choose_heads_at_once(causal_call(128, 16384, false)), 2);
  EXPECT_EQ(choose_heads_at_once(causal_call(128, 8192, false)), 4);
  EXPECT_EQ(choose_heads_at_once(causal_call(128, 4096, false)), 8);
  EXPECT_EQ(choose_heads_at_once(causal_call(64, 4096, false)), 8);
  EXPECT_EQ(choose_heads_at_once(causal_call(64, 16384, false)), 1);
  // In order blocks wait in every step at d128: twice as far apart.
  EXPECT_EQ(choose_heads_at_once(causal_call(128, 2048, true)), 32);
  EXPECT_EQ(choose_heads_at_once(causal_call(64, 16384, true)), 16);
}

TEST(BackwardHeadsAtOnce, InOrderWithoutAMaskFillTheDeviceOnceOrTheCache) {
  const auto full = [](int seq_q, int seq_k, int heads, int group) {
    BackwardCall call = causal_call(128, seq_q, true);
    call.uneven = false;
    call.heads = heads, call.group = group, call.k_tiles = seq_k / 128, call.head_bytes *= group;
    return choose_heads_at_once(call);
  };
  EXPECT_EQ(full(1024, 1024, 256, 1), 16);
  EXPECT_EQ(full(2048, 2048, 128, 1), 8);
  EXPECT_EQ(full(4096, 4096, 64, 1), 4);
  EXPECT_EQ(full(8192, 8192, 32, 1), 4);
  EXPECT_EQ(full(16384, 16384, 8, 4), 4);
  EXPECT_EQ(full(32768, 32768, 16, 1), 1);
  EXPECT_EQ(full(32768, 65536, 8, 4), 1);
  EXPECT_EQ(full(4096, 65536, 8, 4), 3);
}

TEST(BackwardHeadsAtOnce, OfABandAreAsManyAsOfShortSequences) {
  BackwardCall band = causal_call(128, 16384, true);
  band.uneven = false, band.band_tiles = 8;
  BackwardCall full = causal_call(128, 16384, true);
  full.uneven = full.joined = false, full.q_tiles = 8;
  EXPECT_EQ(choose_heads_at_once(band), choose_heads_at_once(full));
  EXPECT_FALSE(first_tiles_lead(band));
}

TEST(BackwardHeadsAtOnce, WithABlockMaskInOrderAreFour) {
  BackwardCall sparse = causal_call(128, 16384, true);
  sparse.uneven = sparse.joined = false, sparse.sparse = true;
  EXPECT_EQ(choose_heads_at_once(sparse), 4);
  sparse.ordered = false;
  EXPECT_EQ(choose_heads_at_once(sparse), 1);  // nobody waits: what fits the L2 cache
  EXPECT_FALSE(first_tiles_lead(sparse));
}

TEST(BackwardHeadsAtOnce, AGroupHasAtMostWhatIsWantedAndTheLastOneIsNoneTooMany) {
  for (int heads = 1; heads <= 40; ++heads)
    for (int wanted = 0; wanted <= 50; ++wanted) {
      SCOPED_TRACE(testing::Message() << heads << " heads, " << wanted << " wanted");
      const int at_once = alike_in_size(heads, wanted), most = std::clamp(wanted, 1, heads);
      const auto groups_of = [&](int size) { return (heads + size - 1) / size; };
      ASSERT_LE(at_once, most);
      ASSERT_EQ(groups_of(at_once), groups_of(most));
      if (at_once > 1) {
        ASSERT_GT(groups_of(at_once - 1), groups_of(most));
      }
    }
  EXPECT_EQ(choose_heads_at_once(BackwardCall{}), 1);
}

}  // namespace
}  // namespace flashkernel::cuda::sm90a
