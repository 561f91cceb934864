// Which calls of decode for sm90a are for a cluster a sequence and kv head, and how large the clusters are
// (cuda/attention/decode/sm90a/group_plan.hpp): host code, tested without a GPU. The sizes are those of
// lab/notebooks/attention_decode.md's tables, where one of several plans was measured to be the best.
#include "cuda/attention/decode/sm90a/group_plan.hpp"

#include <gtest/gtest.h>

#include <array>
#include <initializer_list>
#include <string>

#include "hopper_devices.hpp"

namespace flashkernel::cuda::sm90a {
namespace {

struct Heads {
  std::int64_t q, kv, dim = 128;
};

AttentionParams call(std::int64_t batch, std::int64_t keys, const Heads& heads, std::int64_t page_size = 16) {
  AttentionParams p;
  p.batch = batch, p.seq_q = 1, p.seq_k = keys;
  p.heads_q = heads.q, p.heads_kv = heads.kv, p.head_dim = p.head_dim_v = heads.dim;
  static constexpr std::int32_t kTable = 0;
  if (page_size > 0) p.block_table = &kTable, p.page_size = page_size, p.max_pages = keys / page_size;
  return p;
}

GroupPlan plan(const AttentionParams& p, const GemmDevice& device) {
  return plan_group(p, device.num_sms, [&](int blocks) { return device.clusters[static_cast<std::size_t>(blocks)]; });
}

/// Blocks of a cluster; 0: another kernel's.
int blocks(std::int64_t batch, std::int64_t keys, const Heads& heads, const GemmDevice& device = kH200) {
  const AttentionParams p = call(batch, keys, heads);
  return is_for_groups(p, device.num_sms) ? plan(p, device).blocks : 0;
}

struct Size {
  std::int64_t batch, keys;
  int blocks;
};

void expect(const Heads& heads, std::initializer_list<Size> sizes) {
  for (const Size& size : sizes) {
    SCOPED_TRACE(std::to_string(size.batch) + " x " + std::to_string(size.keys) + " of " + std::to_string(heads.q) +
                 "/" + std::to_string(heads.kv) + " heads of " + std::to_string(heads.dim));
    EXPECT_EQ(blocks(size.batch, size.keys, heads), size.blocks);
  }
}

TEST(DecodeGroupPlan, ManyHeads) {
  expect({32, 1}, {{7, 4096, 0},   // a third of the multiprocessors
                   {8, 4096, 6},   // the largest clusters
                   {10, 4096, 5},  // the next call's clusters have room beside this one's
                   {12, 4096, 4},
                   {16, 4096, 6},  // where that would cost more than a third of the blocks, they have not
                   {24, 4096, 4},
                   {32, 4096, 2},
                   {32, 8192, 3},  // long sequences take as many as there is room for
                   {8, 32768, 6},
                   {8, 32784, 0},  // a sequence that is long alone would be its cluster's alone
                   {64, 2048, 2},
                   {64, 128, 1},  // a tile for each warpgroup
                   {132, 1024, 1},
                   {264, 512, 1},  // a second round
                   {265, 512, 0}});
  expect({33, 1}, {{32, 4096, 0}});
  expect({32, 3}, {{32, 1024, 0}});  // no whole groups
}

TEST(DecodeGroupPlan, FewHeads) {
  expect({32, 8}, {{1, 256, 2},  // one sequence, as long as it is short
                   {1, 1024, 0},
                   {1, 65536, 0},
                   {2, 4096, 6},
                   {4, 4096, 2},
                   {8, 1024, 2},
                   {8, 4096, 2},
                   {8, 4112, 0},
                   {9, 1024, 1},  // a half of the multiprocessors idle
                   {9, 2048, 0},  // long, and blocks that share all keys keep all of them busy
                   {12, 1024, 1},
                   {12, 2048, 0},
                   {16, 2048, 1},
                   {32, 1024, 1},
                   {34, 128, 0}});
  expect({8, 8}, {{8, 4096, 2}});
  expect({64, 8}, {{1, 1024, 0}, {9, 2048, 0}});  // 8 are few, 9 are not
  expect({72, 8}, {{1, 1024, 6}, {9, 2048, 1}});
  expect({32, 32}, {{1, 2048, 2}, {2, 4096, 2}, {3, 512, 1}, {3, 2048, 0}, {4, 1024, 1}, {8, 1024, 1}});
  expect({28, 4}, {{8, 4096, 2}, {14, 2048, 2}, {20, 1024, 1}, {64, 512, 1}});
  expect({8, 1}, {{1, 128, 0}, {64, 2048, 2}, {250, 512, 1}});
}

TEST(DecodeGroupPlan, HeadsOf64) {
  expect({32, 8, 64}, {{1, 1024, 6}, {1, 2048, 0}, {4, 1024, 2}, {4, 4096, 3}, {8, 8192, 2}, {8, 8208, 0}});
  expect({12, 12, 64}, {{1, 1024, 4}, {1, 2048, 0}, {11, 1024, 1}});
  expect({32, 1, 64}, {{32, 1024, 2}, {32, 2048, 3}});
  expect({32, 1, 96}, {{32, 1024, 0}});
}

TEST(DecodeGroupPlan, ClustersHaveRoom) {
  for (const GemmDevice& device : {kH200, kSmallDevice, kEmulatedDevice})
    for (std::int64_t batch = 1; batch <= 2 * device.num_sms; ++batch) {
      SCOPED_TRACE(std::to_string(batch) + " sequences on " + std::to_string(device.num_sms) + " multiprocessors");
      const int n = blocks(batch, 512, {16, 1}, device);
      if (n > 1) {
        EXPECT_GE(device.clusters[static_cast<std::size_t>(n)], batch);
      }
      EXPECT_EQ(n > 0, 18 * batch >= device.num_sms);
    }
}

TEST(DecodeGroupPlan, BoxesAreOfOnePageAndOneTile) {
  for (const auto& [page_size, log2_page, log2_box] :
       {std::array{16, 4, 4}, std::array{32, 5, 5}, std::array{64, 6, 6}, std::array{256, 8, 6}, std::array{0, 0, 6}}) {
    const GroupPlan chosen = plan(call(8, 1024, {24, 1}, page_size), kH200);
    EXPECT_EQ(chosen.log2_page, log2_page);
    EXPECT_EQ(chosen.log2_box, log2_box);
    EXPECT_EQ(chosen.rows, 24);
  }
}

}  // namespace
}  // namespace flashkernel::cuda::sm90a
