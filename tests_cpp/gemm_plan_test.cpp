// Which row and which variant of the Hopper product serve, and in how many parts (cuda/linear/tiles/sm90a/plan.hpp):
// host code, tested without a GPU.
#include "cuda/linear/tiles/sm90a/plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "conformance/linear_sizes.hpp"
#include "hopper_devices.hpp"

namespace flashkernel::cuda::sm90a {
namespace {

std::string text(const GemmPlan& plan) {
  const char* const names[] = {"ping-pong 192",
                               "ping-pong 176",
                               "ping-pong 168",
                               "ping-pong 160",
                               "ping-pong 144",
                               "ping-pong 128",
                               "ping-pong 112",
                               "ping-pong 80",
                               "ping-pong 64",
                               "128",
                               "96",
                               "cluster 128",
                               "cluster 96"};
  return std::string(names[static_cast<int>(plan.variant)]) + " x " + std::to_string(plan.parts);
}

std::string plan(std::int64_t m, std::int64_t k, std::int64_t n) { return text(plan_gemm({m, n, k}, kH200)); }

TEST(GemmPlan, FewTilesAndALongKGoToClusters) {
  EXPECT_EQ(plan(512, 3072, 768), "cluster 96 x 3");
  EXPECT_EQ(plan(256, 3072, 768), "cluster 96 x 6");
  EXPECT_EQ(plan(1024, 3072, 768), "cluster 96 x 2");
  EXPECT_EQ(plan(512, 2048, 512), "cluster 96 x 4");
  EXPECT_EQ(plan(128, 8192, 2048), "cluster 96 x 5");
  EXPECT_EQ(plan(512, 8192, 2048), "cluster 128 x 2");
  EXPECT_EQ(plan(512, 4096, 1024), "cluster 128 x 3");
  EXPECT_EQ(plan(128, 16384, 4096), "cluster 128 x 3");
  EXPECT_EQ(plan(128, 4040, 96), "cluster 96 x 8");
  EXPECT_EQ(plan(512, 768, 768), "cluster 96 x 3");
}

TEST(GemmPlan, FullWavesStayWhole) {
  EXPECT_EQ(plan(512, 768, 3072), "96 x 1");
  EXPECT_EQ(plan(512, 4096, 4096), "128 x 1");
  EXPECT_EQ(plan(512, 2048, 8192), "ping-pong 128 x 1");
}

TEST(GemmPlan, WavesOfPingPongTilesByTheirClocks) {
  EXPECT_EQ(plan(2048, 768, 3072), "ping-pong 128 x 1");    // as many columns, and a shorter end
  EXPECT_EQ(plan(4096, 768, 3072), "ping-pong 192 x 1");    // as many columns, fewer changes of tiles
  EXPECT_EQ(plan(8192, 768, 3072), "ping-pong 192 x 1");    // 8 rounds for 12: as many columns
  EXPECT_EQ(plan(16384, 768, 3072), "ping-pong 192 x 1");   // 16 rounds for 24
  EXPECT_EQ(plan(16384, 2048, 8192), "ping-pong 192 x 1");  // 42 rounds for 63
  EXPECT_EQ(plan(4096, 4096, 16384), "ping-pong 192 x 1");  // 25 rounds of 160 for 21: 0.8 % fewer clocks
  EXPECT_EQ(plan(2048, 5120, 1280), "ping-pong 160 x 1");   // one round
  EXPECT_EQ(plan(8192, 6400, 1600), "ping-pong 160 x 1");   // 5 rounds for 7
  EXPECT_EQ(text(plan_gemm({2048, 1280, 5120, true, false}, kH200)), "ping-pong 192 x 1");        // weights along out
  EXPECT_EQ(text(plan_gemm({512, 11008, 4096, true, true, false}, kH200)), "ping-pong 192 x 1");  // an fp32 bias
  EXPECT_EQ(plan(1536, 320, 3072), "ping-pong 128 x 1");  // too short for the ring of those that store neighbours
}

TEST(GemmPlan, WidthsThatFillTheLastRound) {
  EXPECT_EQ(plan(512, 4096, 16384), "ping-pong 168 x 1");   // 3 rounds for 4 of 128: 504 columns for 512
  EXPECT_EQ(plan(4096, 2048, 8192), "ping-pong 168 x 1");   // 12 for 11 of 192
  EXPECT_EQ(plan(512, 4096, 11008), "ping-pong 168 x 1");   // 2 for 3 of 128
  EXPECT_EQ(plan(2048, 5120, 1288), "ping-pong 168 x 1");   // one round
  EXPECT_EQ(plan(1536, 768, 3072), "ping-pong 144 x 1");    // 2 for 2 of 160 and 3 of 128
  EXPECT_EQ(plan(512, 5120, 13824), "ping-pong 144 x 1");   // 3 for 3 of 160 and 4 of 128
  EXPECT_EQ(plan(1024, 2048, 5632), "ping-pong 176 x 1");   // 2 for 2 of 192 and 3 of 128
  EXPECT_EQ(plan(512, 4096, 14336), "ping-pong 112 x 1");   // 4 for 3 of 160 and 4 of 128
  EXPECT_EQ(plan(2048, 6400, 1600), "ping-pong 112 x 1");   // 2 for 2 of 128
  EXPECT_EQ(plan(4096, 16384, 4096), "ping-pong 128 x 1");  // 8 of 128 and of 112, 6 of 176
}

TEST(GemmPlan, ConformanceCasesTakeEveryWidth) {
  const GemmDevice emulated{4, {0, 4, 2, 2, 2, 2, 2, 0, 2}};
  const auto both = [&](std::int64_t k, std::int64_t n) {  // of "waves": as many tiles a multiprocessor on either
    EXPECT_EQ(text(plan_gemm({422, n, k}, emulated)), plan(16806, k, n));
    return plan(16806, k, n);
  };
  EXPECT_EQ(both(392, 216), "ping-pong 112 x 1");
  EXPECT_EQ(both(456, 224), "ping-pong 112 x 1");
  EXPECT_EQ(both(440, 376), "ping-pong 128 x 1");
  EXPECT_EQ(both(392, 280), "ping-pong 144 x 1");
  EXPECT_EQ(both(392, 432), "ping-pong 144 x 1");
  EXPECT_EQ(both(392, 320), "ping-pong 160 x 1");
  EXPECT_EQ(both(392, 168), "ping-pong 168 x 1");
  EXPECT_EQ(both(840, 504), "ping-pong 168 x 1");
  EXPECT_EQ(both(392, 352), "ping-pong 176 x 1");
  EXPECT_EQ(both(264, 544), "ping-pong 192 x 1");
  EXPECT_EQ(both(1544, 544), "ping-pong 192 x 1");
  EXPECT_EQ(plan(100, 392, 76032), "ping-pong 192 x 1");  // short rows
  EXPECT_EQ(text(plan_gemm({100, 2304, 392}, emulated)), "ping-pong 192 x 1");
  using namespace conformance;
  for (const LinearEdge& edge : kLinearEdges) {
    const std::string wanted = "ping-pong " + std::to_string(edge.columns) + " x 1";
    EXPECT_EQ(plan(kEdgeRows, kEdgeIn, edge.out), wanted);
    EXPECT_EQ(text(plan_gemm({kEdgeRowsEmulated, edge.out_emulated, kEdgeIn}, emulated)), wanted);
  }
  EXPECT_EQ(plan(782, 392, 3584), "ping-pong 112 x 1");  // groups of rows
  EXPECT_EQ(plan(782, 392, 2560), "ping-pong 144 x 1");
  EXPECT_EQ(plan(782, 392, 3456), "ping-pong 192 x 1");
}

TEST(GemmPlan, ConformanceCasesTakeEveryNumberOfParts) {
  EXPECT_EQ(plan(500, 1480, 1000), "cluster 96 x 2");
  EXPECT_EQ(plan(70, 720, 88), "cluster 96 x 3");
  EXPECT_EQ(plan(100, 1000, 96), "cluster 96 x 4");
  EXPECT_EQ(plan(190, 2424, 792), "cluster 96 x 5");
  EXPECT_EQ(plan(129, 1480, 72), "cluster 96 x 6");
  EXPECT_EQ(plan(128, 4040, 88), "cluster 96 x 8");
  EXPECT_EQ(plan(190, 3960, 1352), "cluster 128 x 5");
  EXPECT_EQ(plan(190, 3960, 872), "cluster 128 x 8");
}

TEST(GemmPlan, OneWaveByTheBytesThatBlocksAskFor) {
  EXPECT_EQ(plan(768, 4096, 1024), "cluster 128 x 2");     // 96 blocks for 132
  EXPECT_EQ(plan(1536, 4096, 1024), "ping-pong 112 x 1");  // 120 blocks for 132 of 96 columns
  EXPECT_EQ(plan(768, 8192, 2048), "ping-pong 112 x 1");
  EXPECT_EQ(plan(128, 8192, 10240), "ping-pong 80 x 1");  // weights from memory: 128 blocks for 107
  EXPECT_EQ(plan(256, 768, 3072), "ping-pong 64 x 1");
}

TEST(GemmPlan, MorePartsThanAClusterHasMeetInTheWorkspace) {
  // The gradient of 192 x 768 weights over 32768 tokens: 12 tiles, of which each finds 11 multiprocessors.
  EXPECT_EQ(text(plan_gemm({768, 192, 32768, false, false}, kH200)), "128 x 11");
  EXPECT_EQ(text(plan_gemm({768, 192, 1024, false, false}, kH200)), "cluster 128 x 4");
}

TEST(GemmPlan, ThresholdsAreWhereTheyAreNamed) {
  using namespace gemm_plan;
  EXPECT_TRUE(is_one_wave({128, 132 * 128, 4096}, 132));
  EXPECT_FALSE(is_one_wave({128, 132 * 128 + 8, 4096}, 132));
  const auto offers = [](const GemmExtent& p, GemmWork work) { return offer_gemm(p, kH200).of(work).us < kNever; };
  const std::int64_t cluster_k = 2 * kLeastClusterTiles * kGemmTileK;
  EXPECT_TRUE(offers({128, 96, cluster_k}, GemmWork::kCluster));
  EXPECT_FALSE(offers({128, 96, cluster_k - kGemmTileK}, GemmWork::kCluster));
  EXPECT_TRUE(offers({128, 96, 2 * kLeastPart}, GemmWork::kSplitK));
  EXPECT_FALSE(offers({128, 96, 2 * kLeastPart - 8}, GemmWork::kSplitK));
  EXPECT_TRUE(offers({128, 96, kLeastSplitK, true, false}, GemmWork::kSplitK));
  EXPECT_FALSE(offers({128, 96, kLeastSplitK - 8, true, false}, GemmWork::kSplitK));
  EXPECT_EQ(offer_gemm({768, 192, 32768, false, false}, kH200).of(GemmWork::kSplitK).plan.parts, 132 / 12);
  EXPECT_EQ(offer_gemm({128, 96, 5 * kLeastOtherPart, true, false}, kH200).of(GemmWork::kSplitK).plan.parts, 5);
  EXPECT_TRUE(takes_neighbours({128, 112, kMostSlots * kGemmTileK}, 112));
  EXPECT_FALSE(takes_neighbours({128, 112, (kMostSlots - 1) * kGemmTileK}, 112));
  EXPECT_FALSE(takes_neighbours({128, 104, kMostSlots * kGemmTileK}, 112));
}

TEST(GemmPlan, InSeveralWavesPingPongAloneIsInItsRange) {
  const GemmOffers offers = offer_gemm({4096, 3072, 768}, kH200);
  EXPECT_EQ(offers.best, GemmWork::kPingPong);
  for (const GemmWork work : {GemmWork::kCooperative, GemmWork::kCluster, GemmWork::kSplitK})
    EXPECT_EQ(offers.of(work).us, gemm_plan::kNever);
  // Forced, they run all the same.
  EXPECT_EQ(text(offers.of(GemmWork::kCooperative).plan), "128 x 1");
  EXPECT_EQ(text(offers.of(GemmWork::kCluster).plan), "cluster 128 x 2");
  EXPECT_EQ(text(offers.of(GemmWork::kSplitK).plan), "128 x 2");
}

TEST(GemmPlan, TheBestOfferIsThePlan) {
  for (const std::int64_t m : {128, 512, 1024, 4096})
    for (const std::int64_t n : {96, 768, 2048})
      for (const std::int64_t k : {64, 768, 3072}) {
        const GemmOffers offers = offer_gemm({m, n, k}, kH200);
        EXPECT_EQ(text(offers.plan()), plan(m, k, n));
        for (const GemmOffer& offer : offers.by) EXPECT_GE(offer.us, offers.of(offers.best).us);
        const bool whole = offers.best == GemmWork::kCooperative || offers.best == GemmWork::kPingPong;
        EXPECT_EQ(offers.plan().parts == 1, whole);
        EXPECT_EQ(in_clusters(offers.plan().variant), offers.best == GemmWork::kCluster);
      }
}

TEST(GemmPlan, AWholeKIsOnePartOfOneBlock) {
  for (const GemmDevice& device : {kH200, kSmallDevice, kWithoutClusters})
    for (const std::int64_t m : {1, 64, 128, 1024, 8192})
      for (const std::int64_t n : {8, 96, 4096})
        for (const std::int64_t k : {64, 4096, 16384}) {
          const GemmPlan plan = plan_gemm_of_whole_k({m, n, k}, device);
          EXPECT_EQ(plan.parts, 1) << m << " " << k << " " << n;
          EXPECT_FALSE(in_clusters(plan.variant)) << m << " " << k << " " << n;
        }
}

TEST(GemmPlan, WhatIsPlannedFitsTheDevice) {
  for (const GemmDevice& device : {kH200, kSmallDevice, kWithoutClusters})
    for (const std::int64_t m : {1, 128, 200, 512, 1024, 4096})
      for (const std::int64_t n : {8, 96, 128, 768, 2048, 8192})
        for (const std::int64_t k : {8, 64, 256, 512, 768, 2048, 3072, 16384})
          for (const int layout : {0, 1, 2}) {
            const GemmExtent extent{m, n, k, layout < 2, layout == 0};
            const GemmPlan plan = plan_gemm(extent, device);
            SCOPED_TRACE(text(plan) + " for " + std::to_string(m) + " " + std::to_string(k) + " " + std::to_string(n));
            const bool narrow = plan.variant == GemmVariant::kCooperative96 || plan.variant == GemmVariant::kCluster96;
            EXPECT_TRUE(!narrow || layout == 0);
            const std::int64_t tiles = gemm_plan::tiles(extent, narrow ? 96 : 128);
            if (in_clusters(plan.variant)) {
              EXPECT_EQ(std::count(std::begin(kClusterParts), std::end(kClusterParts), plan.parts), 1);
              EXPECT_LE(tiles, device.clusters[static_cast<std::size_t>(plan.parts)]);
              EXPECT_GE((k + 63) / 64, 4 * plan.parts);
            } else if (plan.parts > 1) {
              EXPECT_LE(tiles * plan.parts, device.num_sms);
              EXPECT_GE(k, 256 * plan.parts);
            }
          }
}

}  // namespace
}  // namespace flashkernel::cuda::sm90a
