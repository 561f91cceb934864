// How sequences of 8-bit pages are widened for attention (ops/widened_plan.hpp): host code,
// tested without a GPU.
#include "ops/widened_plan.hpp"

#include <gtest/gtest.h>

namespace flashkernel {
namespace {

AttentionParams call(std::int64_t batch, std::int64_t pages, std::int64_t dim = 128) {
  AttentionParams p;
  p.dtype = DType::kFloat8E4M3, p.dtype_q = DType::kBFloat16;
  p.batch = batch, p.seq_q = 64, p.page_size = 16, p.max_pages = pages, p.seq_k = 16 * pages;
  p.heads_q = 32, p.heads_kv = 8, p.head_dim = p.head_dim_v = dim;
  return p;
}

TEST(WidenedPlan, ASequenceHasItsTokensInWholePages) {
  EXPECT_EQ(plan_widened(call(1, 1)).pages, 1);
  EXPECT_EQ(plan_widened(call(1, 16)).pages, 1);
  EXPECT_EQ(plan_widened(call(1, 17)).pages, 2);
  EXPECT_EQ(plan_widened(call(1, 0)).pages, 1);
}

TEST(WidenedPlan, RowsAreWholeVectors) {
  const WidenedPlan plan = plan_widened(call(1, 1, 33));
  EXPECT_EQ(plan.dim, 40);
  AttentionParams wide = call(1, 1, 33);
  wide.dtype_q = DType::kFloat32;
  EXPECT_EQ(plan_widened(wide).dim, 36);
}

TEST(WidenedPlan, AsManySequencesAsFitItsBytesAndAtLeastOne) {
  // 1024 tokens of 8 heads, 128 columns of K and of V, 2 bytes: 4 MiB a sequence.
  EXPECT_EQ(plan_widened(call(16, 64)).sequences, 16);
  EXPECT_EQ(plan_widened(call(500, 64)).sequences, static_cast<std::int64_t>(kWidenedBytes >> 22));
  EXPECT_EQ(plan_widened(call(8, 65536)).sequences, 1);  // 4 GiB each
  const WidenedPlan plan = plan_widened(call(16, 64));
  EXPECT_GE(plan.workspace_bytes(8), std::size_t{16} << 22);
  EXPECT_LE(plan.workspace_bytes(8), (std::size_t{16} << 22) + 4096);
}

TEST(WidenedPlan, PartsDoNotOverlap) {
  const WidenedPlan plan = plan_widened(call(3, 100, 72));
  auto* const base = reinterpret_cast<unsigned char*>(std::uintptr_t{4096});
  const WidenedPages pages(plan, 8, base);
  const auto at = [&](const void* part) { return static_cast<const unsigned char*>(part) - base; };
  EXPECT_EQ(at(pages.k), 0);
  EXPECT_EQ(at(pages.v), static_cast<std::ptrdiff_t>(plan.k_bytes(8)));
  EXPECT_EQ(at(pages.table), at(pages.v) + static_cast<std::ptrdiff_t>(plan.v_bytes(8)));
  EXPECT_GE(at(pages.lengths), at(pages.table) + 4 * 3 * plan.pages);
  EXPECT_EQ(plan.workspace_bytes(8), static_cast<std::size_t>(at(pages.lengths)) + plan.lengths_bytes());
  for (const void* part : {pages.v, static_cast<void*>(pages.table), static_cast<void*>(pages.lengths)})
    EXPECT_EQ(at(part) % 256, 0);
}

TEST(WidenedPlan, SequencesOfACallAreACallOfTheirOwn) {
  AttentionParams p = call(4, 64);
  std::int32_t lengths[4] = {1, 2, 3, 4}, table[4 * 64] = {};
  std::uint16_t q[1] = {}, out[1] = {};
  float lse[1] = {}, bias[1] = {};
  p.seq_lens = {lengths, false};
  p.block_table = table, p.stride_block_table = 64;
  p.q = q, p.out = out, p.lse = lse, p.bias.data = bias;
  p.stride_q_batch = 10, p.stride_out_batch = 20, p.stride_lse_batch = 30, p.bias.stride_batch = 40;
  const AttentionParams part = sequences_of(p, 2, 2);
  EXPECT_EQ(part.batch, 2);
  EXPECT_EQ(part.seq_lens[0], 3);
  EXPECT_EQ(part.block_table, table + 128);
  EXPECT_EQ(part.q, static_cast<const void*>(reinterpret_cast<const unsigned char*>(q) + 2 * 10 * 2));
  EXPECT_EQ(part.out, static_cast<void*>(reinterpret_cast<unsigned char*>(out) + 2 * 20 * 2));
  EXPECT_EQ(part.lse, lse + 60);
  EXPECT_EQ(part.bias.data, static_cast<const void*>(bias + 80));
  EXPECT_FALSE(part.cu_seqlens_q || part.k_starts || part.seqused_q);

  p.cu_seqlens_q = {lengths, false};  // rows of queries side by side: they are found by the offsets
  const AttentionParams uneven = sequences_of(p, 1, 3);
  EXPECT_EQ(uneven.q, p.q);
  EXPECT_EQ(uneven.lse, p.lse);
  EXPECT_EQ(uneven.cu_seqlens_q[0], 2);
}

}  // namespace
}  // namespace flashkernel
