// Which of the two rows of decode on 8.0 serves a call, and how a call is spread over the device
// (cuda/attention/decode/sm80/variant.hpp): host code, tested without a GPU.
#include "cuda/attention/decode/sm80/variant.hpp"

#include <gtest/gtest.h>

namespace flashkernel::cuda::sm80 {
namespace {

AttentionParams call(std::int64_t batch, std::int64_t keys, std::int64_t heads_q, std::int64_t heads_kv) {
  AttentionParams p;
  p.dtype = p.dtype_q = DType::kFloat16;
  p.batch = batch, p.heads_q = heads_q, p.heads_kv = heads_kv;
  p.seq_q = 1, p.seq_k = keys, p.head_dim = p.head_dim_v = 128;
  return p;
}

DeviceFacts device(int num_sms, int shared_kilobytes = 163) {
  DeviceFacts facts;
  facts.compute_capability = 80;
  facts.num_sms = num_sms;
  facts.max_shared_bytes_per_block = shared_kilobytes * 1024;
  return facts;
}

TEST(DecodePlan, ThresholdsAreWhereTheyAreNamed) {
  EXPECT_TRUE(is_for_apart(call(1, kMostKeysApart, 8, 8), 104));
  EXPECT_FALSE(is_for_apart(call(1, kMostKeysApart + 1, 8, 8), 104));
  EXPECT_TRUE(is_for_apart(call(4, kMostKeysApart / 4, 8, 8), 104));  // of all sequences
  EXPECT_FALSE(is_for_apart(call(4, kMostKeysApart / 4 + 1, 8, 8), 104));
  EXPECT_FALSE(is_for_apart(call(8, 65536, kMostRowsWithin, 1), 30));
  EXPECT_TRUE(is_for_apart(call(8, 65536, kMostRowsWithin + 1, 1), 30));
  // 4 rows of each of (blocks / 2 + 2) parts.
  EXPECT_FALSE(is_for_apart(call(8, 65536, 8, 2), 2 * (kMostPartsWithin / 4 - 2)));
  EXPECT_TRUE(is_for_apart(call(8, 65536, 8, 2), 2 * (kMostPartsWithin / 4 - 2) + 2));
}

TEST(DecodePlan, PagesHoldGranulesOrGranulesHoldPages) {
  const std::int32_t table = 0;
  AttentionParams p = call(1, 1024, 8, 8), quantized = p;
  p.block_table = quantized.block_table = &table;
  const auto takes = [&](std::int64_t page_size) {
    p.page_size = page_size;
    return bool(attention_decode_supports<DType::kFloat16, 128, 128, DecodeMerge::kApart>(p));
  };
  for (const std::int64_t page_size : {1, 2, 4, 8, 16, 32, 48}) EXPECT_TRUE(takes(page_size)) << page_size;
  for (const std::int64_t page_size : {3, 7, 12, 20, 24}) EXPECT_FALSE(takes(page_size)) << page_size;
  quantized.page_size = 8;  // scales of 16 keys are one copy
  EXPECT_FALSE(bool(decode_supports<128, 128, DecodeMerge::kApart>(quantized, 16)));
}

TEST(DecodePlan, OneOfTheTwoRowsIsInItsRange) {
  const DeviceFacts facts = device(108);
  for (const std::int64_t keys : {128, 65536}) {
    const AttentionParams p = call(4, keys, 32, 8);
    const float apart = attention_decode_cost_us<DecodeMerge::kApart>(p, facts);
    const float within = attention_decode_cost_us<DecodeMerge::kWithin>(p, facts);
    EXPECT_EQ(apart < within, keys == 128);
    EXPECT_FLOAT_EQ(std::max(apart, within), static_cast<float>(kOutsideItsRange) * std::min(apart, within));
  }
}

TEST(DecodePlan, BothRowsCanBeForcedWhereTheyAreLegal) {
  const auto takes = [](const AttentionParams& p) {
    return std::pair(bool(attention_decode_supports<DType::kFloat16, 128, 128, DecodeMerge::kApart>(p)),
                     bool(attention_decode_supports<DType::kFloat16, 128, 128, DecodeMerge::kWithin>(p)));
  };
  EXPECT_EQ(takes(call(1, 128, 8, 8)), std::pair(true, true));
  EXPECT_EQ(takes(call(64, 65536, 16, 1)), std::pair(true, true));
  EXPECT_EQ(takes(call(64, 65536, 17, 1)), std::pair(true, false));  // two tiles of query rows
  EXPECT_EQ(takes(call(64, 65536, 32, 1)), std::pair(true, false));
  EXPECT_EQ(takes(call(64, 65536, 33, 1)), std::pair(false, false));
}

TEST(DecodePlan, LongRowsLeaveRoomForFewQueriesAndWarps) {
  const auto takes = [](std::int64_t group) {
    AttentionParams p = call(4, 4096, group, 1);
    p.head_dim = p.head_dim_v = 512;
    return bool(attention_decode_supports<DType::kFloat16, 512, 512, DecodeMerge::kApart>(p));
  };
  EXPECT_TRUE(takes(8));
  EXPECT_FALSE(takes(9));
  // A warp's ring and result take 80 KB.
  for (const auto& [kilobytes, warps] : {std::pair{99, 1}, {163, 1}, {227, 2}}) {
    const DecodePlan plan = plan_decode<512, 512, 16>(call(4, 4096, 8, 1), DecodeMerge::kApart, device(108, kilobytes));
    EXPECT_EQ(plan.warps, warps) << kilobytes;
    EXPECT_LE(plan.shared_bytes, kilobytes * 1024);
  }
}

TEST(DecodePlan, BlocksOfAllHeadsCutSequencesAlikeWhereThatCostsFewOfThem) {
  EXPECT_EQ(decode_blocks(call(1, 1, 8, 8), 16, 108), 104);
  EXPECT_EQ(decode_blocks(call(1, 1, 8, 8), 8, 108), 108);     // 8-bit keys
  EXPECT_EQ(decode_blocks(call(1, 1, 32, 32), 16, 108), 108);  // 96 are less than 15 in 16
  EXPECT_EQ(decode_blocks(call(1, 1, 44, 44), 16, 132), 132);
}

TEST(DecodePlan, WarpsFitSharedMemory) {
  for (const int kilobytes : {99, 163, 227})
    for (const std::int64_t group : {1, 8, 16, 32}) {
      const DecodePlan plan =
          plan_decode<128, 128, 16>(call(4, 4096, group, 1), DecodeMerge::kApart, device(108, kilobytes));
      EXPECT_GE(plan.key_lanes, 1);
      EXPECT_LE(plan.shared_bytes, kilobytes * 1024);
      EXPECT_EQ(plan.rows, group);
      EXPECT_TRUE(plan.combine_apart);
    }
}

TEST(DecodePlan, TheWorkspaceHoldsTwoPartsOfABlock) {
  const Plan plan = plan_attention_decode<128, 128, DecodeMerge::kWithin>(call(4, 65536, 32, 8), device(108));
  EXPECT_FALSE(plan.as<DecodePlan>().combine_apart);
  EXPECT_EQ(plan.workspace_bytes, std::size_t{2} * 104 * 4 * (128 + 4) * sizeof(float));
}

}  // namespace
}  // namespace flashkernel::cuda::sm80
