// The order of the Hopper forward kernel's tiles (cuda/attention/forward/sm90a/order.hpp): host code, tested without a
// GPU. Conformance shows that every tile is taken once, and by one block.
#include "cuda/attention/forward/sm90a/order.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

namespace flashkernel::cuda::sm90a {
namespace {

/// A causal call of 132 blocks whose tiles of `consumers` x 64 queries meet blocks of 64 keys.
OrderedCall causal_call(std::int64_t heads, int seq, int consumers, double l2_share = 0.0) {
  OrderedCall call;
  call.heads = heads;
  call.num_sms = 132;
  call.l2_share = l2_share;
  call.may_mix = call.may_pair = true;
  for (int last = (seq + 63) / 64; last > 0; last -= consumers) call.work.push_back(last + kTileChange);
  return call;
}

/// The mean of a block's work.
double mean(const OrderedCall& call) {
  return static_cast<double>(call.heads) * std::accumulate(call.work.begin(), call.work.end(), 0) / call.num_sms;
}

TEST(TileOrder, ImbalanceOfWhatCanBeCountedByHand) {
  OrderedCall call;
  call.heads = 4, call.num_sms = 2, call.work = {3, 1};
  TileOrder all;  // 3 3 3 3 1 1 1 1: blocks 0, 1, 1, 0, 0, ...
  all.heads_at_once = 4;
  EXPECT_DOUBLE_EQ(imbalance(call, all), 1.0);
  TileOrder each;  // 3 1, 3 1, ...: every head's first tile to block 0, its second to block 1, and backwards
  each.groups = 4;
  EXPECT_DOUBLE_EQ(imbalance(call, each), 1.0);
  each.in_turn = 1;
  EXPECT_DOUBLE_EQ(imbalance(call, each), 1.5);  // 12 of 16
  TileOrder rest;                                // a head alone, then three: 3 1, 3 3 3 1 1 1
  rest.groups = 2;
  EXPECT_DOUBLE_EQ(imbalance(call, rest), 1.25);
  call.heads = 1;
  EXPECT_DOUBLE_EQ(imbalance(call, TileOrder{}), 1.5);  // 3 of 4
}

TEST(TileOrder, BlocksGetNearlyTheSameWork) {
  for (const int consumers : {2, 3, 4})
    for (const std::int64_t heads : {1, 16, 48, 64, 96, 128, 256, 336, 672})
      for (const int seq : {64, 192, 512, 768, 1024, 1536, 2048, 4096}) {
        const OrderedCall call = causal_call(heads, seq, consumers);
        if (call.tiles() > 64 * call.num_sms) continue;
        const TileOrder order = order_tiles(call);
        // Off by a tile at most, as where whoever is free takes the heaviest one that is left.
        EXPECT_LE(imbalance(call, order) * mean(call), 1.02 * mean(call) + call.work.front())
            << consumers << " x 64 queries, " << heads << " heads, seq " << seq;
      }
}

TEST(TileOrder, GroupsCoverAllHeads) {
  for (const std::int64_t heads : {1, 7, 64, 100, 256, 336, 4096})
    for (const int seq : {512, 1024, 4096}) {
      OrderedCall call = causal_call(heads, seq, 3, seq * 512.0 / 5e7);
      call.may_pair = false;
      const TileOrder order = order_tiles(call);
      ASSERT_GE(order.heads_at_once, 1);
      ASSERT_EQ(order.pairs, 0);
      const std::int64_t before_last = std::int64_t{order.groups - 1} * order.heads_at_once;
      EXPECT_LT(before_last, heads);                            // the last group has heads
      EXPECT_LT(heads - before_last, 2 * order.heads_at_once);  // less than two groups' worth
      EXPECT_TRUE(order.heads_at_once == heads || order.heads_at_once * call.l2_share <= 1.0);
    }
}

// What was measured to be the fastest, or within 1 % of it, on an H200 (lab/notebooks/attention_hopper_log.md).
TEST(TileOrder, TakesWhatMeasuredFastest) {
  const double head = 512.0 / 62914560;  // a token's keys and values at d128, of an H200's L2 cache
  TileOrder order = order_tiles(causal_call(512, 512, 3, 512 * head));
  EXPECT_TRUE(order.in_turn && order.heads_at_once == 12);
  order = order_tiles(causal_call(256, 1024, 3, 1024 * head));
  EXPECT_TRUE(!order.in_turn && order.heads_at_once == 33 && order.groups == 8);
  order = order_tiles(causal_call(128, 2048, 3, 2048 * head));
  EXPECT_TRUE(!order.in_turn && order.heads_at_once == 36 && order.groups == 3);  // the last one of 56
  order = order_tiles(causal_call(64, 1024, 3, 1024 * head));                     // 2.9 rounds
  EXPECT_EQ(order.heads_at_once, 64);
  order = order_tiles(causal_call(256, 512, 2, 512 * 2 * head));  // d256
  EXPECT_TRUE(order.in_turn && order.heads_at_once == 4);
}

TEST(TileOrder, InTurnOnlyWhereABlockComesByAllOfATilesWeights) {
  for (const int sms : {78, 108, 114, 132, 144})
    for (int tiles = 1; tiles <= 12; ++tiles) {
      OrderedCall call = causal_call(512, 192 * tiles, 3);
      call.num_sms = sms;
      const TileOrder order = order_tiles(call);
      if (!order.in_turn) continue;
      ASSERT_EQ(sms % order.heads_at_once, 0) << sms << " blocks, " << tiles << " tiles";
      EXPECT_EQ(std::gcd(sms / order.heads_at_once, tiles), 1) << sms << " blocks, " << tiles << " tiles";
    }
}

TEST(TileOrder, PairsWhereNoGroupsKeysFit) {
  const double head = 1024.0 / 62914560;  // d256
  OrderedCall call = causal_call(64, 2048, 2, 2048 * head);
  const TileOrder order = order_tiles(call);
  ASSERT_EQ(order.pairs, 8);
  // 3 rounds of pairs are left for the end at most; what is paired are whole heads.
  EXPECT_EQ(order.paired_heads * order.pairs, order.pair_rounds * call.num_sms + order.pair_rest);
  EXPECT_LT(order.paired_heads, call.heads);
  EXPECT_EQ(order.paired_heads + order.heads_at_once, call.heads);
  call.may_pair = false;
  EXPECT_EQ(order_tiles(call).pairs, 0);
  EXPECT_EQ(order_tiles(call).heads_at_once, 64);
}

TEST(TileOrder, TheLastAnswerIsKeptForItsCallAlone) {
  for (const std::int64_t heads : {256, 256, 64, 256, 336})
    for (const int seq : {1024, 512, 32768}) {  // the last one has too many tiles to be kept
      const OrderedCall call = causal_call(heads, seq, 3, 0.001);
      const TileOrder fresh = order_tiles(call);
      for (int i = 0; i < 2; ++i) {
        const TileOrder kept = remembered_order(call);
        EXPECT_TRUE(kept.heads_at_once == fresh.heads_at_once && kept.groups == fresh.groups &&
                    kept.in_turn == fresh.in_turn && kept.pairs == fresh.pairs);
      }
    }
}

}  // namespace
}  // namespace flashkernel::cuda::sm90a
