// add, swiglu and swiglu_backward against float64 references.
#include "flashkernel/elementwise.hpp"

#include <gtest/gtest.h>

#include "flashkernel/error.hpp"
#include "test_tensor.hpp"

namespace flashkernel {
namespace {

using namespace testing;

const std::vector<Layout> kLayouts = {Layout::kContiguous, Layout::kPadded, Layout::kSwapped, Layout::kReversed};

double silu(double x) { return x / (1 + std::exp(-x)); }

template <class F>
std::vector<double> zip(const TestTensor& a, const TestTensor& b, F f) {
  std::vector<double> result;
  for (std::int64_t i = 0; i < a.numel(); ++i) result.push_back(f(a[i], b[i]));
  return result;
}

TEST(Elementwise, AddAndSwigluForEveryDtypeAndMixOfLayouts) {
  std::uint64_t seed = 1;
  for (const DType dtype : floating_dtypes())
    for (const Layout a_layout : kLayouts)
      for (const Layout b_layout : kLayouts)
        for (const Layout out_layout : kLayouts) {
          TestTensor a(dtype, {3, 4, 5, 17}, a_layout), b(dtype, {3, 4, 5, 17}, b_layout),
              out(dtype, {3, 4, 5, 17}, out_layout);
          a.random(seed++), b.random(seed++);
          add(a, b, out);
          expect_close(out, zip(a, b, [](double x, double y) { return x + y; }), 0, "add");
          swiglu(a, b, out);
          expect_close(out, zip(a, b, [](double x, double y) { return silu(x) * y; }), 1e-6, "swiglu");
        }
}

TEST(Elementwise, AddRoundsOnce) {
  TestTensor a(DType::kFloat16, {4}), b(DType::kFloat16, {4}), out(DType::kFloat16, {4});
  a.fill({2048, 60000, 1, 6e-8}), b.fill({1, 60000, 0.000488281, 6e-8});
  add(a, b, out);
  EXPECT_EQ(out[0], 2048);  // 2049 lies between 2048 and 2050: to even
  EXPECT_EQ(out[1], kInf);  // 120000
  EXPECT_EQ(out[2], 1.0);   // 1 + 2^-11: to even
  EXPECT_EQ(out[3], a[3] + b[3]);
}

TEST(Elementwise, SpecialValues) {
  TestTensor a(DType::kFloat32, {6}), b(DType::kFloat32, {6}), out(DType::kFloat32, {6});
  a.fill({kNaN, kInf, kInf, -0.0, 1, -1000}), b.fill({1, 1, -kInf, -0.0, kNaN, 2});
  add(a, b, out);
  expect_close(out, {kNaN, kInf, kNaN, 0.0, kNaN, -998});
  EXPECT_TRUE(std::signbit(out[3]));
  a.fill({kNaN, kInf, 0, 80, -80, -200}), b.fill({1, 1, 5, 1, 1, 1});
  swiglu(a, b, out);
  expect_close(out, {kNaN, kInf, 0, 80, -80 * std::exp(-80.0), 0});
}

TEST(Elementwise, BroadcastInputsAndNegativeStrides) {
  TestTensor row(DType::kFloat32, {4, 9}, Shape{0, 1}), backwards(DType::kFloat32, {4, 9}, Shape{-9, -1}),
      out(DType::kFloat32, {4, 9});
  row.random(1), backwards.random(2);
  add(row, backwards, out);
  expect_close(out, zip(row, backwards, [](double x, double y) { return x + y; }), 0);
  TestTensor all(DType::kFloat32, {4, 9}, Shape{0, 0});
  all.fill(3);
  add(all, row, out);
  expect_close(out, zip(all, row, [](double x, double y) { return x + y; }), 0);
}

TEST(Elementwise, InPlaceEmptyAndScalar) {
  TestTensor a(DType::kFloat32, {5, 7}, Layout::kReversed), b(DType::kFloat32, {5, 7});
  a.random(1), b.random(2);
  const auto sum = zip(a, b, [](double x, double y) { return x + y; });
  add(a, b, a);
  expect_close(a, sum, 0);
  a.random(1);
  const auto gated = zip(a, b, [](double x, double y) { return silu(x) * y; });
  swiglu(a, b, b);
  expect_close(b, gated, 1e-6);
  add(a, a, a);
  for (const Shape& shape : {Shape{0}, Shape{3, 0, 2}}) {
    TestTensor none(DType::kFloat16, shape), out(DType::kFloat16, shape);
    add(none, none, out);
    swiglu(none, none, out);
    swiglu_backward(none, none, none, out, {});
    EXPECT_TRUE(out.canaries_intact());
  }
  TestTensor x(DType::kFloat32, Shape{}), y(DType::kFloat32, Shape{});
  x.fill(2), y.fill(3);
  add(x, y, y);
  EXPECT_EQ(y[0], 5);
}

TEST(Elementwise, SwigluBackward) {
  std::uint64_t seed = 1;
  for (const DType dtype : floating_dtypes())
    for (const Layout layout : kLayouts) {
      TestTensor gate(dtype, {3, 4, 19}, layout), up(dtype, {3, 4, 19}), grad_out(dtype, {3, 4, 19}, Layout::kPadded);
      TestTensor grad_gate(dtype, {3, 4, 19}), grad_up(dtype, {3, 4, 19}, layout);
      gate.random(seed++, 2), up.random(seed++), grad_out.random(seed++);
      swiglu_backward(grad_out, gate, up, grad_gate, grad_up);
      std::vector<double> want_gate, want_up;
      for (std::int64_t i = 0; i < gate.numel(); ++i) {
        const double h = 1e-5;
        want_gate.push_back(grad_out[i] * up[i] * (silu(gate[i] + h) - silu(gate[i] - h)) / (2 * h));
        want_up.push_back(grad_out[i] * silu(gate[i]));
      }
      expect_close(grad_gate, want_gate, 2e-6, "gate");
      expect_close(grad_up, want_up, 2e-6, "up");
      grad_up.fill(kNaN);
      swiglu_backward(grad_out, gate, up, {}, grad_up);
      expect_close(grad_up, want_up, 2e-6, "up alone");
      swiglu_backward(grad_out, gate, up, gate, up);  // in place
      expect_close(gate, want_gate, 2e-6, "gate in place");
      expect_close(up, want_up, 2e-6, "up in place");
    }
}

TEST(Elementwise, Refusals) {
  const DType f32 = DType::kFloat32;
  TestTensor a(f32, {4, 6}), b(f32, {4, 6}), out(f32, {4, 6}), wide(f32, {4, 7}), half(DType::kFloat16, {4, 6}),
      ints(DType::kInt64, {4, 6});
  TestTensor expanded(f32, {4, 6}, Shape{0, 1}), flat(f32, {24});
  a.random(1), b.random(2);
  TensorView shifted = a.view();
  shifted.data = static_cast<float*>(shifted.data) + 1;
  const auto refused = [&](const TensorView& x, const TensorView& y, const TensorView& z,
                           std::vector<std::string> fragments) {
    expect_refused<InvalidArgument>([&] { add(x, y, z); }, "add", fragments, {&a, &b, &out});
    for (auto& fragment : fragments) {
      if (fragment.rfind("a ", 0) == 0) fragment = "gate " + fragment.substr(2);
      if (fragment.rfind("b ", 0) == 0) fragment = "up " + fragment.substr(2);
      if (fragment == "with a;") fragment = "with gate;";
    }
    expect_refused<InvalidArgument>([&] { swiglu(x, y, z); }, "swiglu", fragments, {&a, &b, &out});
  };
  refused({}, b, out, {"a is absent"});
  refused(a, {}, out, {"b is absent"});
  refused(a, b, {}, {"out is absent"});
  refused(ints, ints, ints, {"a is int64", "needs float32, float16 or bfloat16"});
  refused(a, half, out, {"b is float16", "needs float32"});
  refused(a, wide, out, {"b is float32[4, 7]", "shapes must match"});
  refused(a, flat, out, {"b is float32[24]", "shapes must match"});
  refused(a, b, expanded, {"out.stride[0]=0", "must not overlap itself"});
  refused(a, b, shifted, {"out shares part of its memory", "with a;"});
  TestTensor grad_gate(f32, {4, 6});
  expect_refused<InvalidArgument>([&] { swiglu_backward(a, b, out, grad_gate, grad_gate); }, "swiglu_backward",
                                  {"grad_up shares memory with grad_gate"}, {&grad_gate});
  expect_refused<InvalidArgument>([&] { swiglu_backward(wide, b, out, grad_gate, {}); }, "swiglu_backward",
                                  {"grad_out is float32[4, 7]", "shapes must match"}, {&grad_gate});
}

}  // namespace
}  // namespace flashkernel
