// The order of the CUDA families by their modelled costs (cuda/costs.hpp), which is all that decides where no range
// does. Host code, tested without a GPU.
#include "cuda/costs.hpp"

#include <gtest/gtest.h>

#include <initializer_list>

namespace flashkernel::cuda {
namespace {

void rises(std::initializer_list<int> rates) {
  for (const int* rate = rates.begin() + 1; rate < rates.end(); ++rate) EXPECT_LT(rate[-1], rate[0]);
}

TEST(CudaCosts, NewerFamiliesAreFasterAndSplitsBeatThemAllForFewQueries) {
  using namespace rates;
  rises({kNaive.few, kTiled.few, kForwardSm75.few, kForwardSm80.few, kForwardScoredSm90a.few, kForwardSm90a.few,
         kForwardShort.few, kDecode.few, kDecodeSm80.few, kDecodeSm90a.few});
  rises({kNaive.many, kTiled.many, kForwardSm75.many, kForwardSm80.many, kForwardScoredSm90a.many, kForwardSm90a.many,
         kForwardShort.many});
  rises({kLinearTiles.few, kLinearSm75.few, kLinearSm80.few, kLinearFewRows.few, kLinearSm90a.few,
         kLinearFewRowsSm80.few, kLinearFewRowsSm90a.few});
  rises({kLinearTiles.few, kQuantizedFewRowsSm80.few});
  rises({kLinearTiles.many, kQuantizedFewRowsSm80.many});
  rises({kLinearTiles.many, kLinearSm75.many, kLinearSm80.many, kLinearSm90a.many});
  rises({kGradientGeneric, kGradientSm75, kGradientSm80, kGradientSm90a});
  rises({kBackwardGeneric, kBackwardSm75, kBackwardSm80, kBackwardSm90a});
  rises({kRowsByElement, kRowsTwice, kRowsGeneric, kRowsInClusters});
}

TEST(CudaCosts, SmallTilesAreForShortSequences) {
  AttentionParams p;
  p.batch = 256, p.heads_q = 32, p.heads_kv = 8, p.seq_q = p.seq_k = 60, p.head_dim = p.head_dim_v = 64;
  EXPECT_LT(attention_short_cost_us(p, DeviceFacts()), attention_us(p, rates::kForwardSm90a));
  p.seq_q = p.seq_k = kMostShortQueries, p.bias.data = &p;
  EXPECT_LT(attention_short_cost_us(p, DeviceFacts()), attention_us(p, rates::kForwardScoredSm90a));
  p.seq_q = kMostShortQueries + 1;
  EXPECT_GT(attention_short_cost_us(p, DeviceFacts()), attention_us(p, rates::kForwardScoredSm90a));
  p.seq_q = 1, p.seq_k = kMostShortKeys + 1;
  EXPECT_GT(attention_short_cost_us(p, DeviceFacts()), attention_us(p, rates::kForwardSm90a));
}

TEST(CudaCosts, OutsideItsRangeAVariantIsBehindTheNextFamily) {
  for (const double work : {0.0, 1.0, 1e6, 1e12})
    EXPECT_GT(kOutsideItsRange * launch_and(work, rates::kLinearFewRowsSm90a.few),
              launch_and(work, rates::kLinearFewRowsSm80.few));
}

TEST(CudaCosts, AnInstanceForLargerHeadDimsIsOutsideItsRange) {
  const auto ratio = [](auto cost, auto plain, std::int64_t head_dim, std::int64_t head_dim_v) {
    AttentionBackwardParams p;
    AttentionParams& f = p.forward;
    f.batch = 2, f.heads_q = f.heads_kv = 8, f.seq_q = f.seq_k = 100, f.head_dim = head_dim, f.head_dim_v = head_dim_v;
    return cost(p, DeviceFacts()) / plain(p, DeviceFacts());
  };
  constexpr auto kPlain = cost_us<AttentionBackwardParams, rates::kBackwardSm80>;
  const auto of_96 = cost_us_of_head_dims<AttentionBackwardParams, kPlain, kTiledHeadDims, 96, 96>;
  EXPECT_EQ(ratio(of_96, kPlain, 96, 96), 1);
  EXPECT_EQ(ratio(of_96, kPlain, 65, 8), 1);
  EXPECT_EQ(ratio(of_96, kPlain, 8, 65), 1);
  EXPECT_FLOAT_EQ(ratio(of_96, kPlain, 64, 64), kOutsideItsRange);
  EXPECT_FLOAT_EQ(ratio(of_96, kPlain, 8, 8), kOutsideItsRange);
  // A family without an instance of 32: that of 64 serves all below.
  const auto of_64 = cost_us_of_head_dims<AttentionBackwardParams, kPlain, kHopperBackwardHeadDims, 64, 64>;
  EXPECT_EQ(ratio(of_64, kPlain, 8, 8), 1);
}

TEST(CudaCosts, CallsOfFewQueriesAndRowsAreMeasuredByWhatTheyRead) {
  AttentionParams p;
  p.batch = 2, p.heads_q = 32, p.heads_kv = 8, p.seq_q = 8, p.seq_k = 1000, p.head_dim = p.head_dim_v = 64;
  EXPECT_TRUE(has_few_queries(p));  // 32 rows
  EXPECT_DOUBLE_EQ(attention_us(p, {1000, 1}), kLaunchUs + 2048.0);
  p.seq_q = 9;
  EXPECT_FALSE(has_few_queries(p));
  EXPECT_DOUBLE_EQ(attention_us(p, {1, 1000000}), kLaunchUs + 73.728);
  LinearParams few;
  few.rows = kFewRowsOfLinear, few.in_features = 100, few.out_features = 30;
  EXPECT_DOUBLE_EQ(linear_us(few, {1000, 1}), kLaunchUs + 3);
  few.rows = kFewRowsOfLinear + 1;
  EXPECT_DOUBLE_EQ(linear_us(few, {1, 1000}), kLaunchUs + 195);
}

}  // namespace
}  // namespace flashkernel::cuda
