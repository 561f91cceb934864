// How linear_fp8 is cut on 9.0 (cuda/linear/fp8/sm90a/plan.hpp): host code, tested without a GPU.
#include "cuda/linear/fp8/sm90a/plan.hpp"

#include <gtest/gtest.h>

namespace flashkernel::cuda::sm90a::fp8_plan {
namespace {

constexpr int kSms = 132;

TEST(LinearFp8Plan, EveryCallOfFewRowsHasACut) {
  for (const int sms : {1, 78, kSms})
    for (const std::int64_t rows : {1, 8, 9, 64, 65, 128, 129, 1024})
      for (const std::int64_t in : {16, 128, 4096, 7168, 65536})
        for (const std::int64_t out : {1, 128, 576, 4096, 129280}) {
          const Plan plan = plan_few_rows({rows, in, out}, sms);
          const std::int64_t k_tiles = ceil_div(in, kTileK);
          ASSERT_LT(plan.us, kNever);
          EXPECT_TRUE(plan.width >= rows || plan.width == 128);
          EXPECT_TRUE(plan.parts >= 1 && plan.parts <= kMostParts && plan.parts <= k_tiles);
          EXPECT_LE(ceil_div(k_tiles, plan.parts), kMostKTiles);
        }
}

TEST(LinearFp8Plan, FewRowsHaveTheNarrowestTileThatHoldsThem) {
  for (const auto& [rows, width] : {std::pair{1, 8}, {8, 8}, {9, 16}, {17, 32}, {64, 64}, {65, 128}, {200, 128}})
    EXPECT_EQ(plan_few_rows({rows, 4096, 4096}, kSms).width, width) << rows;
}

TEST(LinearFp8Plan, BlocksShareKWhereOutputsAreFew) {
  EXPECT_EQ(plan_few_rows({1, 7168, 576}, kSms).parts, 4);
  EXPECT_EQ(plan_few_rows({1, 7168, 2112}, kSms).parts, 4);
  EXPECT_EQ(plan_few_rows({1, 4096, 4096}, kSms).parts, 2);
  EXPECT_EQ(plan_few_rows({1, 2048, 7168}, kSms).parts, 1);
  EXPECT_EQ(plan_few_rows({1, 4096, 129280}, kSms).parts, 1);
}

TEST(LinearFp8Plan, TheModelLeavesFewRowsAndManyToTheirKernels) {
  const auto few_is_best = [](std::int64_t rows, std::int64_t in, std::int64_t out) {
    const Extent e{rows, in, out};
    return plan_few_rows(e, kSms).us < plan_tiles(e, kSms).us;
  };
  for (const auto& [in, out] : {std::pair{4096, 4096}, {7168, 2112}, {2048, 7168}, {7168, 4096}}) {
    for (const std::int64_t rows : {1, 16, 64, 128}) EXPECT_TRUE(few_is_best(rows, in, out)) << rows << ' ' << in;
    EXPECT_FALSE(few_is_best(1024, in, out)) << in;
  }
}

TEST(LinearFp8Plan, LargeTilesFillWholeRounds) {
  EXPECT_EQ(plan_tiles({4096, 4096, 16384}, kSms).width, 192);
  EXPECT_EQ(plan_tiles({4096, 4096, 128}, kSms).width, 128);
  // 32 x 22 tiles of 192 are six rounds, 32 x 32 of 128 eight shorter ones.
  EXPECT_EQ(plan_tiles({4096, 4096, 4096}, kSms).width, 128);
}

}  // namespace
}  // namespace flashkernel::cuda::sm90a::fp8_plan
