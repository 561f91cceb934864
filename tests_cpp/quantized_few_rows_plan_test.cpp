// How quantized_linear of few rows is cut on 8.0 and later (cuda/linear/quantized/few_rows/sm80/few_rows.hpp), and what
// its kernel takes: host code, tested without a GPU.
#include "cuda/linear/quantized/few_rows/sm80/few_rows.hpp"

#include <gtest/gtest.h>

#include <string>

namespace flashkernel::cuda::sm80 {
namespace {

constexpr int kSms = 132;
constexpr std::size_t kShared = 227 * 1024;

QuantizedLinearParams params(std::int64_t rows, std::int64_t in, std::int64_t out,
                             WeightFormat format = WeightFormat::kQ4_0) {
  QuantizedLinearParams p;
  p.dtype = DType::kFloat16;
  p.format = format;
  p.rows = rows, p.in_features = in, p.out_features = out;
  p.stride_x_row = in, p.stride_out_row = out;
  p.stride_weight_row = quantized::row_bytes(format, in);
  p.stride_scales_row = p.stride_zeros_row = in / 32;
  return p;
}

std::string cut(const QuantizedLinearParams& p, std::size_t shared_bytes = kShared) {
  const QuantizedFewRowsPlan plan = plan_quantized_few_rows(p, kSms, shared_bytes);
  return std::to_string(8 * plan.tokens8) + " rows, " + std::to_string(plan.warps) + " warps";
}

TEST(QuantizedFewRowsPlan, WarpsSplitKWhereFeaturesAreFew) {
  EXPECT_EQ(cut(params(1, 4096, 28672)), "8 rows, 2 warps");
  EXPECT_EQ(cut(params(1, 2048, 128256)), "8 rows, 2 warps");
  EXPECT_EQ(cut(params(1, 4096, 6336)), "8 rows, 4 warps");  // 396 blocks: three a multiprocessor
  EXPECT_EQ(cut(params(1, 4096, 6320)), "8 rows, 8 warps");
  EXPECT_EQ(cut(params(1, 8192, 2048)), "8 rows, 8 warps");
  EXPECT_EQ(cut(params(1, 1024, 2048)), "8 rows, 4 warps");  // 4 chunks of k
  EXPECT_EQ(cut(params(1, 256, 2048)), "8 rows, 2 warps");
}

TEST(QuantizedFewRowsPlan, MoreRowsShareABlockWhereEachMultiprocessorGetsOne) {
  EXPECT_EQ(cut(params(8, 4096, 28672)), "8 rows, 2 warps");
  EXPECT_EQ(cut(params(9, 4096, 28672)), "16 rows, 2 warps");
  EXPECT_EQ(cut(params(16, 4096, 4096)), "16 rows, 4 warps");
  EXPECT_EQ(cut(params(17, 4096, 28672)), "32 rows, 2 warps");
  EXPECT_EQ(cut(params(64, 4096, 4096)), "32 rows, 4 warps");
  EXPECT_EQ(cut(params(16, 8192, 2048)), "8 rows, 8 warps");  // 64 blocks of 32 features
}

TEST(QuantizedFewRowsPlan, SharedMemoryHoldsEveryPlan) {
  constexpr std::size_t kLeast = 99 * 1024;  // of 8.6
  for (const WeightFormat format :
       {WeightFormat::kInt4, WeightFormat::kInt8, WeightFormat::kQ4_0, WeightFormat::kQ4_1, WeightFormat::kQ8_0})
    for (const std::int64_t rows : {1, 8, 9, 16, 17, 64, 1000})
      for (const std::int64_t out : {8, 2048, 4096, 28672})
        for (const std::size_t shared : {kLeast, kShared}) {
          const QuantizedFewRowsPlan plan = plan_quantized_few_rows(params(rows, 8192, out, format), kSms, shared);
          EXPECT_LE(static_cast<std::size_t>(plan.warps) * quantized_warp_bytes(format, plan.tokens8), shared);
          EXPECT_LE(plan.warps, quantized_most_warps(plan.tokens8));
        }
  EXPECT_EQ(cut(params(1, 8192, 2048, WeightFormat::kQ8_0)), "8 rows, 8 warps");
  EXPECT_EQ(cut(params(1, 8192, 2048, WeightFormat::kQ8_0), kLeast), "8 rows, 4 warps");
}

TEST(QuantizedFewRows, TakesWhatVectorsReach) {
  const auto takes = [](const QuantizedLinearParams& p) {
    return static_cast<bool>(quantized_few_rows_supports<DType::kFloat16>(p));
  };
  EXPECT_TRUE(takes(params(1, 256, 7)));
  EXPECT_FALSE(quantized_few_rows_supports<DType::kBFloat16>(params(1, 256, 7)));
  EXPECT_FALSE(takes(params(1, 224, 7)));  // q4_0: 126 bytes
  auto padded = params(1, 224, 7);
  padded.stride_weight_row = 128;
  EXPECT_TRUE(takes(padded));
  EXPECT_TRUE(takes(params(1, 224, 7, WeightFormat::kInt4)));
  EXPECT_FALSE(takes(params(1, 101, 7, WeightFormat::kInt8)));
  auto apart = params(2, 256, 7);
  apart.stride_x_row += 4;
  EXPECT_FALSE(takes(apart));
  auto groups = params(1, 384, 7, WeightFormat::kInt4);
  groups.group = 96;
  EXPECT_FALSE(takes(groups));
  groups.group = 128;
  EXPECT_TRUE(takes(groups));
  groups.group = 384;  // the whole row
  EXPECT_TRUE(takes(groups));
}

}  // namespace
}  // namespace flashkernel::cuda::sm80
