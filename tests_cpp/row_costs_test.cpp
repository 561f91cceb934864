// Which rows of norms and softmax are in the range of the kernels of 9.0 (cuda/row_costs.hpp): host code, tested
// without a GPU.
#include "cuda/row_costs.hpp"

#include <gtest/gtest.h>

namespace flashkernel::cuda {
namespace {

template <class Params>
Params rows_of(DType dtype) {
  Params p;
  p.dtype = dtype;
  p.rows = 64;
  return p;
}

/// Whether clusters cost less than the generic kernel.
template <class Params>
bool for_clusters(const Params& p) {
  return clusters_cost_us(p, DeviceFacts()) < cost_us<Params, rates::kRowsGeneric>(p, DeviceFacts());
}

TEST(RowCosts, ThresholdsAreWhereTheyAreNamed) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    const std::int64_t columns = dtype == DType::kFloat32 ? kLongRowOf32Bits / 4 : kLongRowOf16Bits / 2;
    auto norm = rows_of<NormParams>(dtype);
    norm.features = columns;
    EXPECT_TRUE(for_clusters(norm));
    norm.features = columns - 1;
    EXPECT_FALSE(for_clusters(norm));
    auto softmax = rows_of<SoftmaxParams>(dtype);
    softmax.columns = columns;
    EXPECT_TRUE(for_clusters(softmax));
    softmax.columns = columns - 1;
    EXPECT_FALSE(for_clusters(softmax));
    auto gradient = rows_of<NormBackwardParams>(dtype);
    gradient.features = kShortestRowOfRing / static_cast<std::int64_t>(dtype_bytes(dtype));
    EXPECT_TRUE(for_clusters(gradient));
    gradient.features -= 1;
    EXPECT_FALSE(for_clusters(gradient));
  }
}

TEST(RowCosts, ABlockHoldsRowsUpToWhatIsNamed) {
  EXPECT_TRUE(is_held_row(DType::kFloat16, kMostHeldOf16Bits / 2));
  EXPECT_FALSE(is_held_row(DType::kFloat16, kMostHeldOf16Bits / 2 + 8));
  EXPECT_TRUE(is_held_row(DType::kFloat32, kMostHeldOf32Bits / 4));
  EXPECT_FALSE(is_held_row(DType::kFloat32, kMostHeldOf32Bits / 4 + 4));
}

TEST(RowCosts, ARowIsReadAsOftenAsItMust) {
  auto p = rows_of<NormBackwardParams>(DType::kFloat16);
  for (const std::int64_t features : {1, 100, 100000}) {
    p.features = features;
    const float held = cost_us<NormBackwardParams, rates::kRowsGeneric>(p, DeviceFacts());
    const float twice = cost_us<NormBackwardParams, rates::kRowsTwice>(p, DeviceFacts());
    const float elements = cost_us<NormBackwardParams, rates::kRowsByElement>(p, DeviceFacts());
    EXPECT_LT(held, twice);
    EXPECT_LT(twice, elements);
  }
}

}  // namespace
}  // namespace flashkernel::cuda
