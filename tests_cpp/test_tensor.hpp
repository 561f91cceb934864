// What the tests of the ops share: the tensor of the conformance cases with short ways to make one, comparison by the
// tolerance rule, numeric gradients, and the check that a bad call is refused with nothing written.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "conformance/test_tensor.hpp"
#include "core/float_types.hpp"
#include "flashkernel/tensor_view.hpp"

namespace flashkernel::testing {

using conformance::Shape;

inline constexpr double kPi = 3.14159265358979323846;  // M_PI is not C++
inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInf = std::numeric_limits<double>::infinity();

inline const std::vector<DType>& floating_dtypes() {
  static const std::vector<DType> dtypes = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  return dtypes;
}

inline std::int64_t count_of(const Shape& shape) {
  std::int64_t count = 1;
  for (const auto extent : shape) count *= extent;
  return count;
}

enum class Layout {
  kContiguous,
  kPadded,   ///< gaps after the last dim
  kSwapped,  ///< the first two dims swapped in memory (a transposed view); the last dim stays contiguous
  kReversed  ///< column-major: the first dim is contiguous
};

inline const std::vector<Layout>& row_layouts() {  // those with a contiguous last dim
  static const std::vector<Layout> layouts = {Layout::kContiguous, Layout::kPadded, Layout::kSwapped};
  return layouts;
}

inline Shape strides_of(const Shape& shape, Layout layout) {
  const int ndim = static_cast<int>(shape.size());
  std::vector<int> order;  // dims from the innermost in memory to the outermost
  for (int d = ndim - 1; d >= 0; --d) order.push_back(d);
  if (layout == Layout::kReversed) std::reverse(order.begin(), order.end());
  if (layout == Layout::kSwapped && ndim >= 3)
    std::swap(order[static_cast<std::size_t>(ndim - 1)], order[static_cast<std::size_t>(ndim - 2)]);
  Shape strides(shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const auto d = static_cast<std::size_t>(order[i]);
    strides[d] = stride;
    stride *= shape[d] > 0 ? shape[d] : 1;
    if (i == 0 && layout == Layout::kPadded) stride += 3;
  }
  return strides;
}

/// The tensor of the conformance cases on the host, with a name for each usual layout.
class TestTensor : public conformance::TestTensor {
 public:
  TestTensor(DType dtype, const Shape& shape, Layout layout = Layout::kContiguous)
      : TestTensor(dtype, shape, strides_of(shape, layout)) {}
  TestTensor(DType dtype, const Shape& shape, const Shape& strides)
      : conformance::TestTensor("tensor", dtype, shape, {strides}), view_(conformance::TestTensor::view()) {}

  operator const TensorView&() const { return view_; }  // NOLINT: it is one
  const TensorView& view() const { return view_; }

  /// Element `index` of the row-major order.
  double operator[](std::int64_t index) const { return get(index); }

  TestTensor& fill(double value) {
    conformance::TestTensor::fill([value] { return value; });
    return *this;
  }
  TestTensor& fill(const std::vector<double>& values) {
    for (std::int64_t i = 0; i < numel(); ++i) set(i, values.at(static_cast<std::size_t>(i)));
    return *this;
  }
  TestTensor& random(std::uint64_t seed, double scale = 1.0, double mean = 0.0) {
    std::mt19937_64 engine(seed);
    std::normal_distribution<double> normal(mean, scale);
    conformance::TestTensor::fill([&] { return normal(engine); });
    return *this;
  }

  /// Every byte of the elements: equal before and after, and `canaries_intact`, means that nothing was written.
  std::vector<unsigned char> bytes() const { return snapshot(); }
  bool canaries_intact() const { return damage().empty(); }

 private:
  TensorView view_;
};

/// Half the distance between neighbours around 1: the error of one rounding, relative.
inline double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return std::ldexp(1.0, -11);
    case DType::kBFloat16: return std::ldexp(1.0, -8);
    default: return std::ldexp(1.0, -24);
  }
}

/// The tolerance rule of docs/numerics.md against a float64 reference: a framework's own result is off by one rounding
/// of the output, twice that is allowed, plus `floor` for sums in fp32. NaN and infinity must match exactly; canaries
/// must be intact.
inline void expect_close(const TestTensor& got, const std::vector<double>& want, double floor = 2e-6,
                         const char* what = "") {
  ASSERT_EQ(static_cast<std::size_t>(got.numel()), want.size()) << what;
  EXPECT_TRUE(got.canaries_intact()) << what << ": wrote outside its elements";
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double value = got[static_cast<std::int64_t>(i)], reference = want[i];
    if (std::isnan(reference) || std::isinf(reference)) {
      EXPECT_TRUE(std::isnan(reference) ? std::isnan(value) : value == reference)
          << what << "[" << i << "]: got " << value << ", want " << reference;
      if (std::isnan(reference) != std::isnan(value) || (std::isinf(reference) && value != reference)) return;
      continue;
    }
    const double tolerance = 2 * unit_roundoff(got.dtype()) * std::abs(reference) + floor;
    if (!(std::abs(value - reference) <= tolerance)) {
      ADD_FAILURE() << what << "[" << i << "]: got " << value << ", want " << reference << " +- " << tolerance << " ("
                    << to_string(got.view()) << ")";
      return;
    }
  }
}

/// d loss / d x[i] by central differences, where `loss` reads `x` (fp32) and returns a sum in double.
inline std::vector<double> numeric_gradient(TestTensor& x, double step, const std::function<double()>& loss) {
  std::vector<double> gradient(static_cast<std::size_t>(x.numel()));
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    const double value = x[i];
    x.set(i, value + step);
    const double above = x[i], loss_above = loss();
    x.set(i, value - step);
    const double below = x[i], loss_below = loss();
    x.set(i, value);
    gradient[static_cast<std::size_t>(i)] = (loss_above - loss_below) / (above - below);  // the steps as fp32 took them
  }
  return gradient;
}

inline double dot(const TestTensor& a, const TestTensor& b) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < a.numel(); ++i) sum += a[i] * b[i];
  return sum;
}

/// The call throws `Error`, its text starts with "op: " and holds every fragment, and the given tensors keep every
/// byte.
template <class Error, class F>
void expect_refused(F&& call, const std::string& op, const std::vector<std::string>& fragments,
                    const std::vector<const TestTensor*>& written) {
  std::vector<std::vector<unsigned char>> before;
  for (const auto* tensor : written) before.push_back(tensor->bytes());
  try {
    call();
    ADD_FAILURE() << op << " accepted what it must refuse (" << (fragments.empty() ? "" : fragments[0]) << ")";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_EQ(text.rfind(op + ": ", 0), 0u) << text;
    for (const auto& fragment : fragments)
      EXPECT_NE(text.find(fragment), std::string::npos) << "no \"" << fragment << "\" in: " << text;
  } catch (const std::exception& error) {
    ADD_FAILURE() << op << " threw another type: " << error.what();
  }
  for (std::size_t i = 0; i < written.size(); ++i) {
    EXPECT_EQ(before[i], written[i]->bytes()) << op << " wrote before it refused";
    EXPECT_TRUE(written[i]->canaries_intact()) << op << " wrote outside a tensor before it refused";
  }
}

}  // namespace flashkernel::testing
