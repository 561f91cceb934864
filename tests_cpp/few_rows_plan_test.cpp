// Which kernel of sm90a for few rows serves, and how a product is cut (cuda/linear/few_rows/sm90a/plan.hpp): host
// code, tested without a GPU.
#include "cuda/linear/few_rows/sm90a/plan.hpp"

#include <gtest/gtest.h>

#include <string>

#include "conformance/linear_sizes.hpp"
#include "hopper_devices.hpp"

namespace flashkernel::cuda::sm90a {
namespace {

struct Text {
  std::string operator()(const FewRowsDirectPlan& plan) const { return "direct " + std::to_string(plan.tiles); }
  std::string operator()(const FewRowsStreamPlan&) const { return "stream"; }
  std::string operator()(const FewRowsBlocksPlan& plan) const {
    const std::string features = std::to_string(plan.block_features);
    const std::string parts = std::to_string(plan.splits) + " parts" + (features == "64" ? "" : " of " + features);
    const std::string what = plan.splits > 1 ? parts : "blocks of " + features;
    return what + ", " + std::to_string(plan.blocks_per_sm) + (plan.line_pairs ? ", pairs" : "");
  }
};

std::string plan(std::int64_t rows, std::int64_t k, std::int64_t features, const GemmDevice& device = kH200,
                 bool k_major = true) {
  return std::visit(Text(), plan_few_rows({rows, features, k, k_major}, device));
}

TEST(FewRowsPlan, EachCaseTakesTheKernelThatItIsThereFor) {
  for (const conformance::FewRowsSize& size : conformance::kFewRowsSizes) {
    SCOPED_TRACE(std::to_string(size.rows) + " x " + std::to_string(size.in) + " -> " + std::to_string(size.out));
    EXPECT_EQ(plan(size.rows, size.in, size.out, kH200, !size.along_out), size.plan);
    EXPECT_EQ(plan(size.rows, size.in, size.out_emulated, kEmulatedDevice, !size.along_out),
              size.plan_emulated ? size.plan_emulated : size.plan);
  }
}

TEST(FewRowsPlan, WeightsThatMemoryReadsInTwoMicrosecondsGoToRegisters) {
  EXPECT_EQ(plan(1, 768, 3072), "direct 3");
  EXPECT_EQ(plan(8, 3072, 768), "direct 1");
  EXPECT_EQ(plan(4, 2048, 2048), "direct 2");
  EXPECT_EQ(plan(1, 4096, 1024), "direct 1");
  EXPECT_EQ(plan(9, 768, 3072), "2 parts, 2");
  EXPECT_EQ(plan(1, 1024, 4096), "blocks of 32, 2");  // two blocks a multiprocessor
}

TEST(FewRowsPlan, LongStreamsGoByRows) {
  EXPECT_EQ(plan(1, 4096, 16384), "stream");
  EXPECT_EQ(plan(8, 4096, 16384), "stream");
  EXPECT_EQ(plan(1, 4096, 6144), "stream");
  EXPECT_EQ(plan(1, 2048, 8192), "blocks of 64, 1, pairs");
  EXPECT_EQ(plan(8, 2048, 8192), "blocks of 64, 1, pairs");
  EXPECT_EQ(plan(4, 8192, 2048), "stream");
  EXPECT_EQ(plan(8, 8192, 2048), "2 parts, 1");
  EXPECT_EQ(plan(1, 16384, 4096), "stream");
  EXPECT_EQ(plan(1, 16416, 4096), "2 parts, 1");  // more k than the registers hold
  EXPECT_EQ(plan(8, 3584, 18944), "blocks of 72, 2");
  EXPECT_EQ(plan(2, 8960, 1536), "4 parts, 2");
}

TEST(FewRowsPlan, EveryMultiprocessorHasAsMuch) {
  EXPECT_EQ(plan(64, 2048, 8192), "blocks of 64, 1, pairs");
  EXPECT_EQ(plan(16, 4096, 16384), "blocks of 64, 2");
  EXPECT_EQ(plan(32, 5120, 5120), "blocks of 40, 1");    // 128 blocks for 80
  EXPECT_EQ(plan(32, 1536, 8960), "blocks of 72, 1");    // 125 of equal length for 140 on 132 multiprocessors
  EXPECT_EQ(plan(64, 3584, 18944), "blocks of 72, 2");   // 264 for 296
  EXPECT_EQ(plan(16, 4096, 28672), "blocks of 112, 2");  // one round
  EXPECT_EQ(plan(64, 4096, 28672), "blocks of 56, 2");   // two
  EXPECT_EQ(plan(64, 2048, 4096), "blocks of 32, 1");    // rather than parts of a short k
}

TEST(FewRowsPlan, AsManyPartsAsClustersFindRoomFor) {
  EXPECT_EQ(plan(64, 768, 3072), "2 parts, 2");
  EXPECT_EQ(plan(16, 4096, 4096), "2 parts, 2");
  EXPECT_EQ(plan(16, 14336, 4096), "2 parts, 1");
  EXPECT_EQ(plan(16, 10240, 2560), "2 parts of 48, 1");
  EXPECT_EQ(plan(64, 3072, 3072), "2 parts of 48, 1");
  EXPECT_EQ(plan(16, 8192, 2048), "2 parts, 1");  // 32 clusters of 4 don't run at once
  EXPECT_EQ(plan(16, 8960, 1536), "4 parts, 2");
  EXPECT_EQ(plan(64, 8960, 1536), "4 parts, 1");
  EXPECT_EQ(plan(16, 4096, 1024), "4 parts, 2");
  EXPECT_EQ(plan(16, 3072, 768), "8 parts, 2");
}

TEST(FewRowsPlan, EachKernelTakesWhatItsRegistersHold) {
  using few_rows_plan::takes_direct;
  using few_rows_plan::takes_stream;
  EXPECT_TRUE(takes_direct({8, 151936, 4096}));  // however many weights
  EXPECT_FALSE(takes_direct({9, 1024, 4096}));
  EXPECT_FALSE(takes_direct({8, 1024, 4128}));
  EXPECT_FALSE(takes_direct({8, 1024, 1000}));
  EXPECT_FALSE(takes_direct({8, 1024, 1024, false}));
  EXPECT_TRUE(takes_stream({1, 8, 1280}));  // however few
  EXPECT_FALSE(takes_stream({1, 8, 1248}));
  EXPECT_TRUE(takes_stream({4, 8, 16384}));
  EXPECT_FALSE(takes_stream({4, 8, 16416}));
  EXPECT_TRUE(takes_stream({8, 8, 8192}));
  EXPECT_FALSE(takes_stream({5, 8, 9216}));
  EXPECT_FALSE(takes_stream({5, 8, 1536}));
  EXPECT_FALSE(takes_stream({4, 8, 2048, false}));
}

TEST(FewRowsPlan, ThresholdsAreWhereTheyAreNamed) {
  using namespace few_rows_plan;
  const auto on = [](auto is, std::int64_t rows, std::int64_t features, std::int64_t k) {
    return is(FewRowsExtent{rows, features, k}, 132);
  };
  EXPECT_TRUE(on(is_direct, 1, kMostDirectWeights / 4096, 4096));
  EXPECT_FALSE(on(is_direct, 1, kMostDirectWeights / 4096 + 1, 4096));
  const auto stream = [&](std::int64_t rows, std::int64_t features, std::int64_t k, int splits) {
    return is_stream({rows, features, k}, 132, {splits});
  };
  EXPECT_TRUE(stream(4, 132 * kStreamFrom / 2048, 2048, 1));
  EXPECT_FALSE(stream(4, 132 * kStreamFrom / 2048 - 1, 2048, 1));
  EXPECT_TRUE(stream(8, 132 * kStreamFromOfEight / 2048, 2048, 1));
  EXPECT_FALSE(stream(8, 132 * kStreamFromOfEight / 2048 - 1, 2048, 1));
  // Halves of k that leave half of the multiprocessors without a block.
  EXPECT_TRUE(stream(4, 132 * kStreamFromAlone / 8192, 8192, 2));
  EXPECT_FALSE(stream(4, 132 * kStreamFromAlone / 8192 - 1, 8192, 2));
  EXPECT_FALSE(stream(4, 132 * kStreamFrom / 2048, 2048, 4));
}

TEST(FewRowsPlan, TheOrderOfTheTilesHasABlockAMultiprocessor) {
  const auto blocks = [](std::int64_t features) {
    return plan_few_rows_by<FewRowsInOrderPlan>({1, features, 4096}, kH200).blocks;
  };
  EXPECT_EQ(blocks(128256), 132);
  EXPECT_EQ(blocks(4096), 132);
  EXPECT_EQ(blocks(1024), 128);  // of 8 features
  EXPECT_EQ(blocks(1), 1);
  EXPECT_TRUE(few_rows_plan::takes_in_order({64, 8, 64}));
  EXPECT_FALSE(few_rows_plan::takes_in_order({1, 8, 72}));
  EXPECT_FALSE(few_rows_plan::takes_in_order({1, 8, 64, false}));
}

TEST(FewRowsPlan, TheOrderOfTheTilesIsTheBlocksWhereManyRowsHaveManyFeatures) {
  const auto plan = [](std::int64_t rows, std::int64_t k, std::int64_t features) -> std::string {
    const FewRowsPlanInOrder chosen = plan_few_rows_in_order({rows, features, k}, kH200.num_sms);
    if (std::holds_alternative<FewRowsInOrderPlan>(chosen)) return "in order";
    return Text()(std::get<FewRowsBlocksInOrderPlan>(chosen).blocks);
  };
  for (const std::int64_t rows : {1, 32}) {
    EXPECT_EQ(plan(rows, 2048, 128256), "in order");
    EXPECT_EQ(plan(rows, 4096, 4096), "in order");
    EXPECT_EQ(plan(rows, 14336, 1024), "in order");
  }
  EXPECT_EQ(plan(64, 14336, 1024), "in order");
  EXPECT_EQ(plan(64, 2048, 2048), "in order");
  EXPECT_EQ(plan(64, 768, 132 * few_rows_plan::kMostFeaturesInOrder), "in order");
  EXPECT_EQ(plan(33, 768, 132 * few_rows_plan::kMostFeaturesInOrder + 8), "blocks of 32, 1");
  EXPECT_EQ(plan(64, 4096, 4096), "blocks of 32, 1");
  EXPECT_EQ(plan(64, 2048, 8192), "blocks of 64, 1, pairs");
  EXPECT_EQ(plan(1, 4104, 4096), "blocks of 32, 1");  // k ends within a line
}

TEST(FewRowsPlan, AForcedKernelHasAPlanWhereAnotherIsBetter) {
  for (const std::int64_t features : {8, 1000, 4096, 151936})
    for (const std::int64_t k : {32, 1024, 1280, 2048, 4096}) {
      const FewRowsExtent p{4, features, k};
      const auto direct = plan_few_rows_by<FewRowsDirectPlan>(p, kH200);
      EXPECT_TRUE(direct.tiles >= 1 && direct.tiles <= 3);
      EXPECT_LE(direct.chunks, few_rows_plan::kMostDirectChunks[direct.tiles - 1]);
      EXPECT_GE(256 * direct.chunks, k);
      EXPECT_EQ(plan_few_rows_by<FewRowsStreamPlan>(p, kH200).blocks, 132);
      EXPECT_GE(plan_few_rows_by<FewRowsBlocksPlan>(p, kH200).block_features, 24);
      EXPECT_EQ(plan_few_rows_by<FewRowsBlocksInOrderPlan>(p, kH200).blocks.splits, 1);
    }
}

TEST(FewRowsPlan, WhatIsPlannedIsThere) {
  for (const GemmDevice& device : {kH200, kSmallDevice, kWithoutClusters, kEmulatedDevice})
    for (const std::int64_t rows : {1, 4, 5, 8, 9, 16, 17, 33, 64})
      for (const std::int64_t features : {1, 8, 100, 768, 4096, 9000, 28672, 151936, 1 << 20})
        for (const std::int64_t k : {1, 8, 64, 256, 1000, 1280, 2048, 4096, 4104, 8960, 16384, 53248})
          for (const bool k_major : {true, false}) {
            const FewRowsPlan chosen = plan_few_rows({rows, features, k, k_major}, device);
            SCOPED_TRACE(std::visit(Text(), chosen) + " for " + std::to_string(rows) + " x " + std::to_string(k) +
                         " -> " + std::to_string(features));
            if (const auto* direct = std::get_if<FewRowsDirectPlan>(&chosen)) {
              EXPECT_TRUE(k_major && rows <= 8 && k % 32 == 0);
              EXPECT_LE(direct->chunks, direct->tiles == 1 ? 16 : direct->tiles == 2 ? 8 : 4);
              EXPECT_GE(256 * direct->chunks, k);
            } else if (std::holds_alternative<FewRowsStreamPlan>(chosen)) {
              EXPECT_TRUE(k_major && rows <= 8 && k % 32 == 0 && k >= 1280);
              EXPECT_TRUE(rows <= 4 ? k <= 16384 : k <= 8192 && k % 1024 == 0);
            } else {
              const auto& blocks = std::get<FewRowsBlocksPlan>(chosen);
              EXPECT_TRUE(blocks.block_features % 8 == 0 && blocks.block_features <= kMostBlockFeatures);
              EXPECT_GE(blocks.block_features, 24);
              if (!k_major) {
                EXPECT_EQ(blocks.block_features, 64);
              }
              if (blocks.splits > 1) {
                EXPECT_EQ(blocks.block_features % (8 * blocks.splits), 0);
                EXPECT_LE(blocks.block_features, 64);
                EXPECT_LE((features + blocks.block_features - 1) / blocks.block_features,
                          device.clusters[static_cast<std::size_t>(blocks.splits)]);
                EXPECT_GE(k, 128 * blocks.splits);
              }
              if (blocks.line_pairs) {
                EXPECT_TRUE(k_major && blocks.splits == 1 && blocks.blocks_per_sm == 1);
                EXPECT_TRUE(k % 64 == 0 && blocks.block_features == 64);
              }
            }
          }
}

}  // namespace
}  // namespace flashkernel::cuda::sm90a
