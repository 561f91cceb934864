// How few queries over many keys are spread over an H200, and which calls are for that kernel
// (cuda/attention/few_queries/sm90a/plan.hpp): host code, tested without a GPU.
#include "cuda/attention/few_queries/sm90a/plan.hpp"

#include <gtest/gtest.h>

#include "hopper_devices.hpp"

namespace flashkernel::cuda::sm90a {
namespace {

AttentionParams call(std::int64_t batch, std::int64_t keys, std::int64_t queries, std::int64_t heads = 32,
                     std::int64_t heads_kv = 8, std::int64_t dim = 128) {
  AttentionParams p;
  p.batch = batch, p.seq_q = queries, p.seq_k = keys;
  p.heads_q = heads, p.heads_kv = heads_kv, p.head_dim = p.head_dim_v = dim;
  return p;
}

TEST(FewQueriesPlan, BlocksFillTheDeviceAtMostOnce) {
  for (const std::int64_t batch : {1, 4, 16, 64})
    for (const std::int64_t keys : {1024, 8192, 131072})
      for (const std::int64_t queries : {1, 2, 16, 64, 128})
        for (const std::int64_t heads_kv : {1, 8}) {
          const AttentionParams p = call(batch, keys, queries, 48 * heads_kv, heads_kv);
          const FewQueriesPlan plan = plan_few_queries(p, kH200.num_sms);
          const std::int64_t rows = 48 * queries, tile = 64 * plan.consumers;
          EXPECT_EQ(plan.tiles, (rows + tile - 1) / tile);
          EXPECT_LE(plan.splits, kMostKeyParts);
          EXPECT_GE(plan.splits, 1);
          if (plan.splits > 1) {
            EXPECT_EQ(plan.splits % plan.cluster, 0);
            const std::int64_t clusters = plan.splits / plan.cluster * plan.tiles * heads_kv * batch;
            EXPECT_LE(clusters, clusters_at_once(kH200.num_sms, plan.cluster) * few_queries_residents(plan.consumers));
          }
        }
}

TEST(FewQueriesPlan, FewSequencesAreCut) {
  EXPECT_GE(plan_few_queries(call(1, 8192, 16), kH200.num_sms).splits, 8);
  EXPECT_GE(plan_few_queries(call(1, 4096, 1, 48, 1), kH200.num_sms).splits, 8);
  EXPECT_EQ(plan_few_queries(call(64, 1024, 5), kH200.num_sms).splits, 1);
}

// What a sweep of plans on an H200 found the fastest, or within 3 % of it.
TEST(FewQueriesPlan, IsThatOfTheSweep) {
  const auto is = [](AttentionParams p, int consumers, int splits, int cluster, std::int64_t page_size = 0) {
    const std::int32_t table = 0;
    if (page_size > 0) p.block_table = &table, p.page_size = page_size;
    const FewQueriesPlan plan = plan_few_queries(p, kH200.num_sms);
    EXPECT_EQ(plan.consumers, consumers);
    EXPECT_EQ(plan.splits, splits);
    EXPECT_EQ(plan.cluster, cluster);
  };
  is(call(8, 4096, 4), 1, 2, 2);
  is(call(1, 8192, 128), 2, 4, 2);
  is(call(2, 8192, 16), 1, 6, 6);
  is(call(1, 4096, 1, 48, 1), 1, 32, 8);
  is(call(1, 4096, 1, 71, 1, 64), 1, 32, 8);  // 71 rows in two tiles of 64: more blocks
  is(call(64, 2048, 1, 48, 1), 1, 2, 2);
  is(call(8, 4096, 16), 1, 2, 2, 16);
  is(call(8, 4096, 16), 1, 3, 3, 1);
  is(call(1, 8192, 16), 1, 24, 8, 1);  // gathered, two blocks wait for less
}

TEST(FewQueriesPlan, ServesWhatTheForwardKernelCannotSpread) {
  const auto is_for = [](const AttentionParams& p) { return is_for_few_queries(p, kH200.num_sms); };
  for (const std::int64_t queries : {2, 4, 8}) EXPECT_TRUE(is_for(call(1, 4096, queries)));
  for (const std::int64_t queries : {16, 32, 64, 128}) EXPECT_TRUE(is_for(call(1, 8192, queries)));
  EXPECT_TRUE(is_for(call(64, 1024, 5)));
  EXPECT_TRUE(is_for(call(16, 2048, 16)));
  EXPECT_TRUE(is_for(call(4, 8192, 64)));
  EXPECT_TRUE(is_for(call(8, 4096, 64, 16, 16)));
  for (const std::int64_t batch : {1, 16, 64}) EXPECT_TRUE(is_for(call(batch, 4096, 1, 48, 1)));
  EXPECT_FALSE(is_for(call(1, 8192, 1)));             // decode
  EXPECT_FALSE(is_for(call(1, 256, 1, 16, 4, 112)));  // few keys
  EXPECT_TRUE(is_for(call(1, 4096, 1, 16, 4, 112)));  // a head dim that decode on wgmma is not built for
  EXPECT_TRUE(is_for(call(1024, 256, 1)));            // more sequences than it takes
  EXPECT_TRUE(is_for(call(1, 2048, 1, 32, 32, 80)));
  EXPECT_FALSE(is_for(call(16, 2048, 1, 32, 32, 80)));  // 32 heads with keys of their own, on a full device
  EXPECT_FALSE(is_for(call(1, 8192, 512)));             // tiles enough
  EXPECT_FALSE(is_for(call(64, 128, 64, 12, 12)));      // few keys
  EXPECT_FALSE(is_for(call(32, 1024, 128)));            // as many tiles as the device takes for long
  EXPECT_FALSE(is_for(call(32, 1024, 128, 32, 32)));    // nor has a group more rows than a head
}

TEST(FewQueriesPlan, TheModelHasTheBytesAndTheProducts) {
  // 33.5 MB of keys take 8.4 us at least; beyond 64 rows a kv head, products count.
  EXPECT_GT(plan_few_queries(call(1, 8192, 16), kH200.num_sms).modelled_us, 8.4);
  EXPECT_LT(plan_few_queries(call(1, 8192, 16), kH200.num_sms).modelled_us, 23);   // FlashAttention-3
  EXPECT_LT(plan_few_queries(call(1, 8192, 128), kH200.num_sms).modelled_us, 48);  // 46.1 in the sweep
  EXPECT_LT(plan_few_queries(call(1, 8192, 16), kH200.num_sms).modelled_us,
            plan_few_queries(call(1, 8192, 128), kH200.num_sms).modelled_us);
}

}  // namespace
}  // namespace flashkernel::cuda::sm90a
