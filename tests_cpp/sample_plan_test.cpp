// How many blocks of a cluster take a row of sample (cuda/sampling/plan.hpp): host code, tested without a GPU.
#include "cuda/sampling/plan.hpp"

#include <gtest/gtest.h>

namespace flashkernel::cuda {
namespace {

constexpr int kSms = 132;

TEST(SamplePlan, AFewRowsTakeLargeClusters) {
  for (const std::int64_t rows : {1, 8, 32}) EXPECT_EQ(sample_plan(rows, 128256, kSms).blocks, 8);
  EXPECT_EQ(sample_plan(32, 50257, kSms).blocks, 8);
}

TEST(SamplePlan, ShortRowsNeedNoOtherBlock) {
  EXPECT_EQ(sample_plan(1, kSampleEnoughTokens, kSms).blocks, 1);
  EXPECT_EQ(sample_plan(1, kSampleEnoughTokens + 1, kSms).blocks, 2);
}

TEST(SamplePlan, ManyRowsTakeTheBlocksThatHoldThem) {
  EXPECT_EQ(sample_plan(512, 32000, kSms).blocks, 1);
  EXPECT_EQ(sample_plan(512, kSampleMostHeld + 1, kSms).blocks, 2);
  EXPECT_EQ(sample_plan(512, kSampleMostBlocks * kSampleMostHeld, kSms).blocks, 8);
}

TEST(SamplePlan, SharesAreWholeWarpsAndHoldTheRow) {
  for (const std::int64_t rows : {1, 7, 64, 1000})
    for (const std::int64_t vocab : {1, 33, 4097, 50257, 128256, 393216}) {
      const SamplePlan plan = sample_plan(rows, vocab, kSms);
      EXPECT_EQ(plan.share % 32, 0);
      EXPECT_GE(std::int64_t{plan.share} * plan.blocks, vocab);
      EXPECT_LE(plan.share, kSampleMostHeld);
    }
}

}  // namespace
}  // namespace flashkernel::cuda
