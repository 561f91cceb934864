// Reductions over any axes, softmax and log-softmax with their gradients, against float64 references.
#include "flashkernel/reduce.hpp"

#include <gtest/gtest.h>

#include "flashkernel/error.hpp"
#include "test_tensor.hpp"

namespace flashkernel {
namespace {

using namespace testing;

const std::vector<Layout> kLayouts = {Layout::kContiguous, Layout::kPadded, Layout::kSwapped, Layout::kReversed};

struct Reference {
  Shape kept, left_out;  // output shapes with the reduced dims as 1, and without them
  std::vector<double> sum, mean, max, argmax, magnitude;
};

Reference reference(const TestTensor& x, AxisMask axes) {
  Reference result;
  const Shape& shape = x.shape();
  if (axes == 0) axes = ~0u;
  std::int64_t outputs = 1, reduced = 1;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    const bool is_reduced = axes >> d & 1;
    result.kept.push_back(is_reduced ? 1 : shape[d]);
    if (!is_reduced) result.left_out.push_back(shape[d]);
    (is_reduced ? reduced : outputs) *= shape[d];
  }
  const auto n = static_cast<std::size_t>(outputs);
  result.sum.assign(n, 0), result.magnitude.assign(n, 0), result.max.assign(n, -kInf), result.argmax.assign(n, -1);
  std::vector<std::int64_t> seen(n, 0);
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    std::int64_t rest = i, out = 0, scale = 1;
    for (std::size_t d = shape.size(); d-- > 0;) {
      if (!(axes >> d & 1)) out += rest % shape[d] * scale, scale *= shape[d];
      rest /= shape[d];
    }
    const auto o = static_cast<std::size_t>(out);
    result.sum[o] += x[i], result.magnitude[o] += std::abs(x[i]);
    const bool first = seen[o] == 0;
    if (first || (!std::isnan(result.max[o]) && (std::isnan(x[i]) || x[i] > result.max[o])))
      result.max[o] = x[i], result.argmax[o] = static_cast<double>(seen[o]);
    ++seen[o];  // inputs of one output come in row-major order of the reduced dims
  }
  for (const double sum : result.sum) result.mean.push_back(sum / static_cast<double>(reduced));
  return result;
}

void check_all(const TestTensor& x, AxisMask axes) {
  const Reference want = reference(x, axes);
  for (const Shape& shape : {want.kept, want.left_out})
    for (const DType dtype : {x.dtype(), DType::kFloat32}) {
      TestTensor out(dtype, shape, Layout::kReversed), index(DType::kInt64, shape, Layout::kPadded);
      out.fill(kNaN);
      reduce_sum(x, out, axes);
      expect_close(out, want.sum, 2e-5, "sum");
      reduce_mean(x, out, axes);
      expect_close(out, want.mean, 1e-6, "mean");
      reduce_max(x, out, axes);
      expect_close(out, want.max, 0, "max");
      argmax(x, index, axes);
      EXPECT_EQ(index.values(), want.argmax);
      EXPECT_TRUE(index.canaries_intact());
    }
}

TEST(Reduce, EveryAxisSetDtypeAndLayout) {
  std::uint64_t seed = 1;
  for (const DType dtype : floating_dtypes())
    for (const Layout layout : kLayouts)
      for (AxisMask axes = 0; axes < 16; ++axes) {
        SCOPED_TRACE(std::string(dtype_name(dtype)) + " layout " + std::to_string(static_cast<int>(layout)) + " axes " +
                     std::to_string(axes));
        TestTensor x(dtype, {3, 2, 5, 7}, layout);
        x.random(seed++);
        check_all(x, axes);
      }
}

TEST(Reduce, LongRowsManyRowsAndOneDim) {
  for (const Shape& shape : {Shape{2, 4099}, Shape{1031, 3}, Shape{10000}, Shape{1, 1, 1}, Shape{}}) {
    TestTensor x(DType::kFloat32, shape);
    x.random(5, 0.1);
    check_all(x, 0);
    if (shape.size() == 2) check_all(x, 1), check_all(x, 2);
  }
}

TEST(Reduce, BroadcastAndBackwardsInputs) {
  TestTensor expanded(DType::kFloat32, {6, 5}, Shape{0, 1}), backwards(DType::kFloat32, {6, 5}, Shape{-5, -1});
  expanded.random(1), backwards.random(2);
  for (const AxisMask axes : {0u, 1u, 2u, 3u}) check_all(expanded, axes), check_all(backwards, axes);
}

TEST(Reduce, LargeSumsKeepTheirDigits) {
  // 2^20 ones in fp16: the sum is exact in fp32 and infinite in fp16; a sum kept in fp16 would stop at 2048.
  TestTensor x(DType::kFloat16, {1 << 20}), wide(DType::kFloat32, Shape{}), narrow(DType::kFloat16, Shape{});
  x.fill(1);
  reduce_sum(x, wide);
  EXPECT_EQ(wide[0], 1048576);
  reduce_sum(x, narrow);
  EXPECT_EQ(narrow[0], kInf);
  reduce_mean(x, narrow);
  EXPECT_EQ(narrow[0], 1);
}

TEST(Reduce, NanInfinityAndTies) {
  const auto expect = [](const std::vector<double>& values, double sum, double max, double index) {
    for (const DType dtype : floating_dtypes()) {
      TestTensor x(dtype, {static_cast<std::int64_t>(values.size())}), out(dtype, Shape{}), at(DType::kInt64, Shape{});
      x.fill(values);
      reduce_sum(x, out);
      expect_close(out, {sum}, 1e-6, "sum");
      reduce_max(x, out);
      expect_close(out, {max}, 0, "max");
      argmax(x, at);
      EXPECT_EQ(at[0], index);
    }
  };
  expect({1, kNaN, 3, kNaN}, kNaN, kNaN, 1);
  expect({kNaN, kInf}, kNaN, kNaN, 0);
  expect({1, 5, 5, 2, 5}, 18, 5, 1);
  expect({-kInf, -kInf, -kInf}, -kInf, -kInf, 0);
  expect({-kInf, -3, -kInf}, -kInf, -3, 1);
  expect({kInf, 1, kInf}, kInf, kInf, 0);
  expect({kInf, -kInf}, kNaN, kInf, 0);
  expect({-0.0, 0.0}, 0, 0, 0);
  // A NaN far along a long row, where vector kernels have many lanes in flight.
  for (const std::int64_t at : {0, 1, 63, 64, 500, 998, 999}) {
    TestTensor x(DType::kFloat32, {1000}), out(DType::kFloat32, Shape{}), index(DType::kInt64, Shape{});
    x.random(3);
    x.set(at, kNaN);
    if (at < 990) x.set(995, kNaN);
    reduce_max(x, out), argmax(x, index);
    EXPECT_TRUE(std::isnan(out[0]));
    EXPECT_EQ(index[0], static_cast<double>(at));
  }
}

TEST(Reduce, OverNothing) {
  TestTensor x(DType::kFloat32, {3, 0}), out(DType::kFloat32, {3}), index(DType::kInt64, {3}),
      none(DType::kFloat32, {0}), no_index(DType::kInt64, {0});
  out.fill(7), index.fill(7);
  reduce_sum(x, out, 2);
  EXPECT_EQ(out.values(), std::vector<double>(3, 0.0));
  reduce_mean(x, out, 2);
  expect_close(out, {kNaN, kNaN, kNaN});
  expect_refused<InvalidArgument>([&] { reduce_max(x, out, 2); }, "reduce_max",
                                  {"float32[3, 0]", "at least one element"}, {&out});
  expect_refused<InvalidArgument>([&] { argmax(x, index, 2); }, "argmax", {"float32[3, 0]", "at least one element"},
                                  {&index});
  reduce_sum(x, none, 1), reduce_max(x, none, 1), argmax(x, no_index, 1);  // 0 outputs of 3 elements each
  EXPECT_TRUE(none.canaries_intact());
}

TEST(Reduce, Refusals) {
  TestTensor x(DType::kFloat32, {4, 6}), out(DType::kFloat32, {4}), half(DType::kFloat16, {4}),
      wrong(DType::kFloat32, {6}), kept(DType::kFloat32, {4, 2});
  TestTensor cube(DType::kFloat32, {4, 1, 1}), ints(DType::kInt32, {4}), index(DType::kInt64, {4}),
      expanded(DType::kFloat32, {4}, Shape{0});
  TestTensor half_x(DType::kFloat16, {4, 6}), bfloat(DType::kBFloat16, {4});
  x.random(1);
  const auto refused = [&](const TensorView& a, const TensorView& o, AxisMask axes,
                           std::vector<std::string> fragments) {
    expect_refused<InvalidArgument>([&] { reduce_sum(a, o, axes); }, "reduce_sum", fragments, {&out, &x});
    expect_refused<InvalidArgument>([&] { reduce_mean(a, o, axes); }, "reduce_mean", fragments, {&out, &x});
    expect_refused<InvalidArgument>([&] { reduce_max(a, o, axes); }, "reduce_max", fragments, {&out, &x});
  };
  refused({}, out, 2, {"x is absent"});
  refused(x, {}, 2, {"out is absent"});
  refused(ints, out, 1, {"x is int32"});
  refused(x, half, 2, {"out is float16", "needs float32"});
  refused(half_x, bfloat, 2, {"out is bfloat16", "needs float32 or float16"});
  refused(x, out, 4, {"axes name dim 2", "x is float32[4, 6] on cpu"});
  refused(x, out, 0x80000002u, {"axes name dim 31"});
  refused(x, wrong, 2, {"out.shape[0]=6", "x.shape[0]=4"});
  refused(x, kept, 2, {"out.shape[1]=2", "a reduced dim's size=1"});
  refused(x, cube, 2, {"out is float32[", "needs 1 dims, or 2"});
  refused(x, expanded, 2, {"out.stride[0]=0"});
  TensorView inside = out.view();
  inside.data = x.view().data;
  refused(x, inside, 2, {"out shares memory with x"});
  expect_refused<InvalidArgument>([&] { argmax(x, out, 2); }, "argmax", {"out is float32", "needs int64"}, {&out});
  expect_refused<InvalidArgument>([&] { argmax(x, index, 3); }, "argmax", {"out is int64[", "needs 0 dims, or 2"},
                                  {&index});
}

/// softmax along `axis` of a shape, by logsumexp in double.
std::vector<double> reference_softmax(const TestTensor& x, int axis, bool log) {
  const auto a = static_cast<std::size_t>(axis);
  std::int64_t inner = 1;
  for (std::size_t d = a + 1; d < x.shape().size(); ++d) inner *= x.shape()[d];
  const std::int64_t n = x.shape()[a];
  auto result = x.values();
  for (std::int64_t r = 0; r < x.numel() / n; ++r) {
    const std::int64_t start = r / inner * inner * n + r % inner;
    double top = -kInf, sum = 0;
    for (std::int64_t i = 0; i < n; ++i)
      top = std::isnan(x[start + i * inner]) || x[start + i * inner] > top ? x[start + i * inner] : top;
    for (std::int64_t i = 0; i < n; ++i) sum += std::exp(x[start + i * inner] - top);
    bool has_nan = false;
    for (std::int64_t i = 0; i < n; ++i) has_nan = has_nan || std::isnan(x[start + i * inner]);
    for (std::int64_t i = 0; i < n; ++i) {
      double& y = result[static_cast<std::size_t>(start + i * inner)];
      if (has_nan) {
        y = kNaN;
      } else if (top == -kInf) {
        y = log ? -kInf : 0;
      } else {
        y = log ? y - top - std::log(sum) : std::exp(y - top) / sum;
      }
    }
  }
  return result;
}

void run(bool log, const TensorView& x, const TensorView& out, int axis = -1) {
  log ? log_softmax(x, out, axis) : softmax(x, out, axis);
}

TEST(Softmax, EveryAxisDtypeAndLayout) {
  std::uint64_t seed = 1;
  for (const bool log : {false, true})
    for (const DType dtype : floating_dtypes())
      for (const Layout layout : kLayouts)
        for (int axis = -3; axis < 3; ++axis) {
          TestTensor x(dtype, {3, 6, 37}, layout), out(dtype, {3, 6, 37}, axis % 2 ? Layout::kSwapped : layout);
          x.random(seed++, 3);
          run(log, x, out, axis);
          expect_close(out, reference_softmax(x, axis < 0 ? axis + 3 : axis, log), log ? 5e-6 : 1e-6,
                       log ? "log" : "softmax");
        }
}

TEST(Softmax, ColumnsOfEveryLengthAndInPlace) {
  for (const std::int64_t columns : {1, 2, 3, 15, 16, 17, 31, 33, 63, 65, 127, 1000, 4097})
    for (const bool log : {false, true}) {
      TestTensor x(DType::kFloat32, {3, columns});
      x.random(static_cast<std::uint64_t>(columns), 4);
      const auto want = reference_softmax(x, 1, log);
      run(log, x, x);
      expect_close(x, want, log ? 1e-5 : 1e-6);
    }
}

TEST(Softmax, MaskedRowsExtremesAndNan) {
  for (const DType dtype : floating_dtypes())
    for (const bool log : {false, true})
      for (const std::int64_t columns : {3, 40}) {
        TestTensor x(dtype, {6, columns}), out(dtype, {6, columns});
        x.random(1);
        for (std::int64_t c = 0; c < columns; ++c) {
          x.set(c, -kInf);                                     // all masked
          x.set(columns + c, c == 1 ? 2.0 : -kInf);            // one visible
          x.set(2 * columns + c, c % 2 ? 30000.0 : -30000.0);  // exp would overflow without the shift
          x.set(3 * columns + c, -30000.0 - 16.0 * static_cast<double>(c % 2));
        }
        x.set(4 * columns + columns - 1, kNaN);
        x.set(5 * columns + 1, kInf);
        out.fill(123);
        run(log, x, out);
        auto want = reference_softmax(x, 1, log);
        // +inf - +inf: the infinite logits' entries are NaN; what the others become is exp(-inf) / NaN.
        for (std::int64_t c = 0; c < columns; ++c) {
          EXPECT_FALSE(std::isfinite(out[5 * columns + 1]));
          want[static_cast<std::size_t>(5 * columns + c)] = out[5 * columns + c];
        }
        expect_close(out, want, log ? 1e-5 : 1e-6);
        EXPECT_EQ(out[0], log ? -kInf : 0.0);
        EXPECT_EQ(out[columns + 1], log ? 0.0 : 1.0);
      }
}

TEST(Softmax, ScalarAndEmpty) {
  TestTensor x(DType::kFloat32, Shape{}), out(DType::kFloat32, Shape{});
  x.fill(5);
  softmax(x, out, 0);
  EXPECT_EQ(out[0], 1);
  log_softmax(x, out, -1);
  EXPECT_EQ(out[0], 0);
  for (const Shape& shape : {Shape{0, 3}, Shape{3, 0}}) {
    TestTensor none(DType::kFloat32, shape), to(DType::kFloat32, shape);
    softmax(none, to);
    softmax_backward(none, none, to);
    EXPECT_TRUE(to.canaries_intact());
  }
}

TEST(Softmax, Backward) {
  std::uint64_t seed = 1;
  for (const bool log : {false, true})
    for (const DType dtype : floating_dtypes())
      for (const Layout layout : kLayouts)
        for (const int axis : {0, 1, -1}) {
          TestTensor x(dtype, {3, 6, 21}), y(dtype, {3, 6, 21}, layout), grad(dtype, {3, 6, 21}, Layout::kPadded),
              grad_x(dtype, {3, 6, 21}, layout);
          x.random(seed++), grad.random(seed++);
          run(log, x, y, axis);
          log ? log_softmax_backward(grad, y, grad_x, axis) : softmax_backward(grad, y, grad_x, axis);
          const auto a = static_cast<std::size_t>(axis < 0 ? 2 : axis);
          const std::int64_t inner = a == 0 ? 126 : (a == 1 ? 21 : 1), n = y.shape()[a];
          std::vector<double> want(static_cast<std::size_t>(y.numel()));
          for (std::int64_t r = 0; r < y.numel() / n; ++r) {
            const std::int64_t start = r / inner * inner * n + r % inner;
            double sum = 0;
            for (std::int64_t i = start; i < start + n * inner; i += inner) sum += log ? grad[i] : grad[i] * y[i];
            for (std::int64_t i = start; i < start + n * inner; i += inner)
              want[static_cast<std::size_t>(i)] = log ? grad[i] - std::exp(y[i]) * sum : y[i] * (grad[i] - sum);
          }
          expect_close(grad_x, want, 4e-6, log ? "log" : "softmax");
        }
}

TEST(Softmax, BackwardAgreesWithCentralDifferences) {
  for (const bool log : {false, true}) {
    TestTensor x(DType::kFloat32, {3, 7}), y(DType::kFloat32, {3, 7}), grad(DType::kFloat32, {3, 7}),
        grad_x(DType::kFloat32, {3, 7});
    x.random(1), grad.random(2);
    const auto loss = [&] {
      run(log, x, y);
      return dot(y, grad);
    };
    loss();
    log ? log_softmax_backward(grad, y, grad_x) : softmax_backward(grad, y, grad_x);
    expect_close(grad_x, numeric_gradient(x, std::ldexp(1.0, -7), loss), 3e-4);
  }
}

TEST(Softmax, BackwardOfAMaskedRowIsZero) {
  TestTensor y(DType::kFloat32, {2, 4}), grad(DType::kFloat32, {2, 4}), grad_x(DType::kFloat32, {2, 4});
  y.fill({0, 0, 0, 0, 0.25, 0.25, 0.5, 0}), grad.random(1);
  grad_x.fill(kNaN);
  softmax_backward(grad, y, grad_x);
  for (const std::int64_t i : {0, 1, 2, 3, 7}) EXPECT_EQ(grad_x[i], 0.0);
}

TEST(Softmax, Refusals) {
  TestTensor x(DType::kFloat32, {4, 6}), out(DType::kFloat32, {4, 6}), half(DType::kFloat16, {4, 6}),
      wide(DType::kFloat32, {4, 7});
  TestTensor expanded(DType::kFloat32, {4, 6}, Shape{0, 1}), ints(DType::kInt64, {4, 6});
  x.random(1);
  TensorView shifted = x.view();
  shifted.data = static_cast<float*>(shifted.data) + 1;
  for (const bool log : {false, true}) {
    const std::string op = log ? "log_softmax" : "softmax";
    const auto refused = [&](const TensorView& a, const TensorView& b, int axis, std::vector<std::string> fragments) {
      expect_refused<InvalidArgument>([&] { run(log, a, b, axis); }, op, fragments, {&x, &out});
    };
    refused({}, out, -1, {"x is absent"});
    refused(x, {}, -1, {"out is absent"});
    refused(ints, ints, -1, {"x is int64"});
    refused(x, half, -1, {"out is float16", "needs float32"});
    refused(x, wide, -1, {"out is float32[4, 7]", "shapes must match"});
    refused(x, out, 2, {"axis=2", "needs -2 to 1"});
    refused(x, out, -3, {"axis=-3", "needs -2 to 1"});
    refused(x, expanded, -1, {"out.stride[0]=0"});
    refused(x, shifted, -1, {"out shares part of its memory with x"});
  }
  expect_refused<InvalidArgument>([&] { softmax_backward(wide, x, out); }, "softmax_backward",
                                  {"grad_out is", "shapes must match"}, {&out});
  expect_refused<InvalidArgument>([&] { log_softmax_backward(x, x, half); }, "log_softmax_backward",
                                  {"grad_x is float16"}, {&half});
}

}  // namespace
}  // namespace flashkernel
