// A tensor that owns its memory, for tests: any strides, values read and written as double by row-major index, and
// every byte that is no element's is a canary. Used by the tests of the ops and by the conformance cases.
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

#include "core/float_types.hpp"
#include "flashkernel/tensor_view.hpp"

namespace flashkernel::testing {

using Shape = std::vector<std::int64_t>;

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

class TestTensor {
 public:
  TestTensor(DType dtype, const Shape& shape, Layout layout = Layout::kContiguous)
      : TestTensor(dtype, shape, strides_of(shape, layout)) {}

  TestTensor(DType dtype, const Shape& shape, const Shape& strides) : shape_(shape), strides_(strides) {
    std::int64_t lowest = 0, highest = 0;
    for (std::size_t d = 0; d < shape.size(); ++d) {
      const std::int64_t reach = shape[d] > 0 ? (shape[d] - 1) * strides[d] : 0;
      (reach < 0 ? lowest : highest) += reach;
    }
    const auto bytes = static_cast<std::int64_t>(dtype_bytes(dtype));
    memory_.assign(static_cast<std::size_t>((highest - lowest + 1) * bytes) + 2 * kGuardBytes, kCanary);
    view_.data = memory_.data() + kGuardBytes - lowest * bytes;
    view_.dtype = dtype;
    view_.ndim = static_cast<int>(shape.size());
    for (std::size_t d = 0; d < shape.size(); ++d) {
      view_.shape[d] = shape[d];
      view_.strides[d] = strides[d];
    }
  }

  TestTensor(const TestTensor&) = delete;
  TestTensor& operator=(const TestTensor&) = delete;
  TestTensor(TestTensor&&) = default;  // a vector's memory stays where it is

  operator const TensorView&() const { return view_; }  // NOLINT: it is one
  const TensorView& view() const { return view_; }
  DType dtype() const { return view_.dtype; }
  const Shape& shape() const { return shape_; }
  std::int64_t numel() const { return view_.numel(); }

  std::int64_t offset(std::int64_t index) const {
    std::int64_t offset = 0;
    for (std::size_t d = shape_.size(); d-- > 0;) {
      offset += index % shape_[d] * strides_[d];
      index /= shape_[d];
    }
    return offset;
  }

  /// Element `index` of the row-major order.
  double operator[](std::int64_t index) const {
    const std::int64_t at = offset(index);
    switch (view_.dtype) {
      case DType::kFloat32: return static_cast<const float*>(view_.data)[at];
      case DType::kFloat16: return to_float(static_cast<const Half*>(view_.data)[at]);
      case DType::kBFloat16: return to_float(static_cast<const BFloat16*>(view_.data)[at]);
      case DType::kInt32: return static_cast<const std::int32_t*>(view_.data)[at];
      case DType::kInt64: return static_cast<double>(static_cast<const std::int64_t*>(view_.data)[at]);
      case DType::kUInt8: return static_cast<const std::uint8_t*>(view_.data)[at];
    }
    return kNaN;
  }

  void set(std::int64_t index, double value) {
    const std::int64_t at = offset(index);
    switch (view_.dtype) {
      case DType::kFloat32: static_cast<float*>(view_.data)[at] = static_cast<float>(value); return;
      case DType::kFloat16: static_cast<Half*>(view_.data)[at] = from_float<Half>(static_cast<float>(value)); return;
      case DType::kBFloat16:
        static_cast<BFloat16*>(view_.data)[at] = from_float<BFloat16>(static_cast<float>(value));
        return;
      case DType::kInt32: static_cast<std::int32_t*>(view_.data)[at] = static_cast<std::int32_t>(value); return;
      case DType::kInt64: static_cast<std::int64_t*>(view_.data)[at] = static_cast<std::int64_t>(value); return;
      case DType::kUInt8: static_cast<std::uint8_t*>(view_.data)[at] = static_cast<std::uint8_t>(value); return;
    }
  }

  TestTensor& fill(double value) {
    for (std::int64_t i = 0; i < numel(); ++i) set(i, value);
    return *this;
  }
  TestTensor& fill(const std::vector<double>& values) {
    for (std::int64_t i = 0; i < numel(); ++i) set(i, values.at(static_cast<std::size_t>(i)));
    return *this;
  }
  TestTensor& random(std::uint64_t seed, double scale = 1.0, double mean = 0.0) {
    std::mt19937_64 engine(seed);
    std::normal_distribution<double> normal(mean, scale);
    for (std::int64_t i = 0; i < numel(); ++i) set(i, normal(engine));
    return *this;
  }

  std::vector<double> values() const {
    std::vector<double> values(static_cast<std::size_t>(numel()));
    for (std::int64_t i = 0; i < numel(); ++i) values[static_cast<std::size_t>(i)] = (*this)[i];
    return values;
  }

  /// Every byte, elements and canaries: equal before and after means that nothing was written.
  const std::vector<unsigned char>& bytes() const { return memory_; }

  bool canaries_intact() const {
    std::vector<bool> element(memory_.size(), false);
    const auto size = dtype_bytes(view_.dtype);
    for (std::int64_t i = 0; i < numel(); ++i) {
      const auto* at = static_cast<const unsigned char*>(view_.data) + offset(i) * static_cast<std::int64_t>(size);
      for (std::size_t b = 0; b < size; ++b) element[static_cast<std::size_t>(at - memory_.data()) + b] = true;
    }
    for (std::size_t b = 0; b < memory_.size(); ++b)
      if (!element[b] && memory_[b] != kCanary) return false;
    return true;
  }

 private:
  static constexpr std::size_t kGuardBytes = 64;  // keeps the first element aligned for every dtype
  static constexpr unsigned char kCanary = 0xA5;

  Shape shape_, strides_;
  std::vector<unsigned char> memory_;
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
  for (std::size_t i = 0; i < written.size(); ++i)
    EXPECT_EQ(before[i], written[i]->bytes()) << op << " wrote before it refused";
}

}  // namespace flashkernel::testing
