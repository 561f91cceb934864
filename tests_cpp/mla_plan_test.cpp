// How MLA decoding on 8.0 and 9.0 groups heads, and what 8.0 takes (cuda/attention/mla/sm80/variant.hpp, and plan.hpp
// of sm90a): host code, tested without a GPU.
#include "cuda/attention/mla/sm80/variant.hpp"

#include <gtest/gtest.h>

#include "cuda/attention/mla/sm90a/plan.hpp"

namespace flashkernel::cuda::sm80 {
namespace {

MlaDecodeParams call(std::int64_t batch, std::int64_t heads, std::int64_t seq_q, std::int64_t keys) {
  MlaDecodeParams params;
  AttentionParams& p = params.attention;
  p.dtype = p.dtype_q = DType::kFloat16;
  p.batch = batch, p.heads_q = heads, p.heads_kv = 1;
  p.seq_q = seq_q, p.seq_k = keys, p.head_dim = kMlaDim, p.head_dim_v = kMlaValueDim;
  p.stride_k_token = kMlaDim, p.stride_k_batch = 64 * kMlaDim;
  return params;
}

DeviceFacts device(int num_sms, int shared_kilobytes) {
  DeviceFacts facts;
  facts.compute_capability = 80;
  facts.num_sms = num_sms;
  facts.max_shared_bytes_per_block = shared_kilobytes * 1024;
  return facts;
}

TEST(MlaPlan, FewRowsAreForTheKernelOf80) {
  const auto has_rows = [](std::int64_t batch, std::int64_t heads, std::int64_t seq_q, bool narrow = false) {
    return sm90a::has_mla_rows(call(batch, heads, seq_q, 4096).attention, narrow);
  };
  EXPECT_FALSE(has_rows(1, 128, 1));
  EXPECT_FALSE(has_rows(8, 16, 1));
  EXPECT_TRUE(has_rows(8, 64, 1));
  EXPECT_TRUE(has_rows(32, 16, 1));
  EXPECT_TRUE(has_rows(1, 128, 4));
  EXPECT_TRUE(has_rows(8, 64, 1, true));
  EXPECT_TRUE(has_rows(32, 16, 2, true));
  EXPECT_FALSE(has_rows(32, 16, 1, true));  // a tile of 16 rows
  EXPECT_FALSE(has_rows(1, 128, 1, true));
}

TEST(MlaPlan, GroupsDivideTheHeadsAndFillTiles) {
  const auto group = [](std::int64_t heads, std::int64_t seq_q) {
    return mla_group(call(1, heads, seq_q, 64).attention);
  };
  EXPECT_EQ(group(16, 1), 16);
  EXPECT_EQ(group(64, 1), 64);
  EXPECT_EQ(group(128, 1), 64);
  EXPECT_EQ(group(128, 2), 32);
  EXPECT_EQ(group(96, 1), 48);
  EXPECT_EQ(group(17, 4), 1);  // 17 x 4 rows are too many for a tile, and nothing else divides 17
  EXPECT_EQ(group(17, 3), 17);
  EXPECT_EQ(group(8, 64), 1);
  for (std::int64_t heads = 1; heads <= 256; ++heads)
    for (std::int64_t seq_q = 1; seq_q <= kMlaMostRows; ++seq_q) {
      EXPECT_EQ(heads % group(heads, seq_q), 0);
      EXPECT_LE(group(heads, seq_q) * seq_q, kMlaMostRows);
    }
}

TEST(MlaPlan, SharedMemoryHoldsTheTiles) {
  struct {
    std::int64_t heads;
    int kilobytes, stages;
  } const cases[] = {{16, 99, 2}, {16, 163, 3}, {16, 227, 4}, {32, 163, 3}, {32, 227, 4}, {64, 163, 2}, {64, 227, 4}};
  for (const auto& one : cases) {
    const DeviceFacts facts = device(108, one.kilobytes);
    const MlaPlan plan = plan_mla_decode<false>(call(4, one.heads, 1, 4096).attention, facts);
    EXPECT_EQ(plan.stages, one.stages) << one.heads << " heads, " << one.kilobytes << " KB";
    EXPECT_LE(plan.decode.shared_bytes + kMlaStaticBytes, facts.max_shared_bytes_per_block);
  }
}

TEST(MlaPlan, TilesAreCutToTheSharedMemory) {
  const auto plan = [](std::int64_t heads, std::int64_t seq_q, int kilobytes) {
    return plan_mla_decode<false>(call(4, heads, seq_q, 4096).attention, device(108, kilobytes));
  };
  EXPECT_EQ(plan(128, 1, 163).decode.rows, 64);
  const MlaPlan small = plan(128, 1, 99);  // of 8.6 and 8.9: 16 rows fit
  EXPECT_EQ(small.decode.rows, 16);
  EXPECT_EQ(small.decode.head_groups, 8);
  EXPECT_EQ(small.stages, 2);
  EXPECT_EQ(plan(128, 17, 99).stages, 0);  // 17 queries of a head are too many
  const auto narrow = [](std::int64_t heads, int kilobytes) {
    return plan_mla_decode<true>(call(4, heads, 1, 4096).attention, device(108, kilobytes));
  };
  EXPECT_EQ(narrow(128, 227).decode.rows, 64);
  EXPECT_EQ(narrow(128, 163).decode.rows, 32);
  EXPECT_EQ(narrow(128, 99).stages, 0);
  for (const int kilobytes : {163, 227})
    for (const int heads : {1, 16, 32, 64, 128}) {
      const MlaPlan found = narrow(heads, kilobytes);
      EXPECT_GE(found.stages, 2) << heads << " heads, " << kilobytes << " KB";
      EXPECT_LE(found.decode.shared_bytes + kMlaStaticBytes, kilobytes * 1024);
    }
}

TEST(MlaPlan, TakesLatentRowsOfDeepSeek) {
  const auto takes = [](const MlaDecodeParams& p) { return bool(mla_decode_supports<DType::kFloat16, false>(p)); };
  EXPECT_TRUE(takes(call(4, 128, 1, 4096)));
  EXPECT_FALSE(takes(call(4, 128, kMlaMostRows + 1, 4096)));
  MlaDecodeParams p = call(4, 128, 1, 4096);
  p.attention.stride_k_token = kMlaDim + 4;
  EXPECT_FALSE(takes(p));
  p = call(4, 128, 1, 4096);
  p.attention.head_dim = 512;
  EXPECT_FALSE(takes(p));
  p = call(4, 128, 1, 4096);
  p.attention.dtype = DType::kBFloat16;
  EXPECT_FALSE(takes(p));
}

TEST(MlaPlan, HoppersCopiesLieInOnePage) {
  const auto plan = [](std::int64_t heads, std::int64_t seq_q, std::int64_t page_size) {
    MlaDecodeParams params = call(4, heads, seq_q, 4096);
    params.attention.page_size = page_size;
    return sm90a::plan_mla_decode(params.attention, device(132, 227));
  };
  for (const auto& [page_size, rows] : {std::pair{64, 64}, {128, 64}, {32, 32}, {24, 8}, {8, 8}})
    EXPECT_EQ(plan(128, 1, page_size).box_rows, rows) << page_size;
  EXPECT_EQ(plan(128, 1, 64).head_groups, 2);
  EXPECT_EQ(plan(16, 4, 64).head_groups, 1);
  EXPECT_EQ(plan(16, 4, 64).rows, 64);
  EXPECT_EQ(plan(17, 4, 64).head_groups, 17);
}

}  // namespace
}  // namespace flashkernel::cuda::sm80
