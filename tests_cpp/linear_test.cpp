// linear and linear_backward against float64 references and central differences.
#include "flashkernel/linear.hpp"

#include <gtest/gtest.h>

#include "flashkernel/error.hpp"
#include "test_tensor.hpp"

namespace flashkernel {
namespace {

using namespace testing;

double reference_activation(Activation activation, double x) {
  switch (activation) {
    case Activation::kGeluTanh: return 0.5 * x * (1 + std::tanh(std::sqrt(2 / kPi) * (x + 0.044715 * std::pow(x, 3))));
    case Activation::kGelu: return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case Activation::kSilu: return x / (1 + std::exp(-x));
    default: return x;
  }
}

const std::vector<Activation> kActivations = {Activation::kNone, Activation::kGeluTanh, Activation::kGelu,
                                              Activation::kSilu};

std::vector<double> reference_product(const TestTensor& x, const TestTensor& weight, const TestTensor* bias) {
  const std::int64_t in = weight.shape()[1], out = weight.shape()[0], rows = in ? x.numel() / in : count_of(x.shape());
  std::vector<double> result;
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t o = 0; o < out; ++o) {
      double sum = bias ? (*bias)[o] : 0.0;
      for (std::int64_t i = 0; i < in; ++i) sum += x[r * in + i] * weight[o * in + i];
      result.push_back(sum);
    }
  return result;
}

TEST(Linear, MatchesFloat64ForEveryDtypeLayoutAndActivation) {
  std::uint64_t seed = 1;
  for (const DType dtype : floating_dtypes())
    for (const Layout layout : row_layouts())
      for (const bool transposed : {false, true})
        for (const Activation activation : kActivations) {
          SCOPED_TRACE(std::string(dtype_name(dtype)) + " layout " + std::to_string(static_cast<int>(layout)) +
                       " transposed " + std::to_string(transposed) + " activation " +
                       std::to_string(static_cast<int>(activation)));
          TestTensor x(dtype, {3, 5, 37}, layout), out(dtype, {3, 5, 19}, layout),
              pre(dtype, {3, 5, 19}, Layout::kPadded);
          TestTensor weight(dtype, {19, 37}, transposed ? Layout::kReversed : Layout::kPadded);
          TestTensor bias(seed % 2 ? DType::kFloat32 : dtype, {19});
          x.random(seed++), weight.random(seed++, 1 / std::sqrt(37.0)), bias.random(seed++);
          linear(x, weight, bias, out, pre, activation);
          auto want = reference_product(x, weight, &bias);
          expect_close(pre, want, 4e-6, "preactivation");
          for (auto& value : want) value = reference_activation(activation, value);
          expect_close(out, want, 4e-6, "out");
        }
}

TEST(Linear, ClosedForms) {
  TestTensor x(DType::kFloat32, {2, 2}), eye(DType::kFloat32, {2, 2}), out(DType::kFloat32, {2, 2});
  x.fill({1, -2, 3, 4}), eye.fill({1, 0, 0, 1});
  linear(x, eye, {}, out, {});
  EXPECT_EQ(out.values(), (std::vector<double>{1, -2, 3, 4}));
  linear(x, eye, {}, out, {}, Activation::kGelu);
  expect_close(out, {0.8413447460685429, -0.045500263896358417, 2.99595030906198, 3.9998733150320147}, 1e-6);
  linear(x, eye, {}, out, {}, Activation::kSilu);
  expect_close(out, {0.7310585786300049, -0.2384058440442351, 2.8577223804673, 3.928055160151634}, 1e-6);
}

TEST(Linear, RowsThatDoNotFoldRunInPieces) {
  TestTensor x(DType::kFloat32, {3, 4, 8}, Layout::kSwapped), out(DType::kFloat32, {3, 4, 6}),
      weight(DType::kFloat32, {6, 8});
  x.random(1), weight.random(2);
  linear(x, weight, {}, out, {});
  expect_close(out, reference_product(x, weight, nullptr), 4e-6);
}

TEST(Linear, BroadcastRowsAndVectors) {
  TestTensor x(DType::kFloat32, {5, 8}, Shape{0, 1}), out(DType::kFloat32, {5, 6}), weight(DType::kFloat32, {6, 8});
  x.random(1), weight.random(2);
  linear(x, weight, {}, out, {});
  expect_close(out, reference_product(x, weight, nullptr), 4e-6);
  TestTensor vector(DType::kFloat32, {8}), one(DType::kFloat32, {6});
  vector.random(3);
  linear(vector, weight, {}, one, {});
  expect_close(one, reference_product(vector, weight, nullptr), 4e-6);
}

TEST(Linear, DimsOfOneTakeAnyStride) {
  TestTensor x(DType::kFloat32, {4, 1}, Shape{7, 9}), weight(DType::kFloat32, {3, 1}, Shape{5, 11}),
      out(DType::kFloat32, {4, 3});
  x.random(1), weight.random(2);
  linear(x, weight, {}, out, {});
  expect_close(out, reference_product(x, weight, nullptr), 1e-6);
  TestTensor wide(DType::kFloat32, {4, 3}), row(DType::kFloat32, {1, 3}, Shape{2, 5}), single(DType::kFloat32, {4, 1});
  wide.random(3), row.random(4);
  linear(wide, row, {}, single, {});
  expect_close(single, reference_product(wide, row, nullptr), 1e-6);
}

TEST(Linear, EmptyDims) {
  TestTensor no_rows(DType::kFloat32, {0, 4}), weight(DType::kFloat32, {3, 4}), none(DType::kFloat32, {0, 3});
  weight.random(1);
  linear(no_rows, weight, {}, none, {});
  EXPECT_TRUE(none.canaries_intact());
  TestTensor no_features(DType::kFloat32, {2, 0}), empty_weight(DType::kFloat32, {3, 0}), bias(DType::kFloat32, {3});
  TestTensor out(DType::kFloat32, {2, 3});
  bias.fill({1, 2, -3}), out.fill(kNaN);
  linear(no_features, empty_weight, bias, out, {});
  EXPECT_EQ(out.values(), (std::vector<double>{1, 2, -3, 1, 2, -3}));
  linear(no_features, empty_weight, {}, out, {});
  EXPECT_EQ(out.values(), std::vector<double>(6, 0.0));
}

TEST(Linear, NanAndInfinityPropagateInTheirRowOnly) {
  TestTensor x(DType::kFloat32, {3, 16}), weight(DType::kFloat32, {5, 16}), out(DType::kFloat32, {3, 5});
  x.random(1), weight.fill(0.5);
  x.set(16 + 3, kNaN), x.set(32 + 2, kInf);
  linear(x, weight, {}, out, {}, Activation::kGeluTanh);
  expect_close(out, [&] {
    auto want = reference_product(x, weight, nullptr);
    for (auto& value : want) value = reference_activation(Activation::kGeluTanh, value);
    return want;
  }());
}

TEST(Linear, Refusals) {
  const DType f32 = DType::kFloat32;
  TestTensor x(f32, {2, 4}), weight(f32, {3, 4}), bias(f32, {3}), out(f32, {2, 3}), pre(f32, {2, 3});
  const auto refused = [&](const TensorView& a, const TensorView& w, const TensorView& b, const TensorView& o,
                           const TensorView& p, std::vector<std::string> fragments) {
    expect_refused<InvalidArgument>([&] { linear(a, w, b, o, p); }, "linear", fragments, {&out, &pre, &x});
  };
  TestTensor half(DType::kFloat16, {2, 4}), ints(DType::kInt32, {2, 4}), wide(f32, {3, 5}), bad_bias(f32, {4}),
      cube(f32, {3, 4, 1});
  TestTensor strided(f32, {2, 4}, Layout::kReversed), gaps(f32, {3, 4}, Shape{11, 2}),
      out_half(DType::kFloat16, {2, 3});
  TestTensor half_bias(DType::kFloat16, {3}), overlapped(f32, {2, 3}, Shape{0, 1}), strided_bias(f32, {3}, Shape{2});
  refused({}, weight, bias, out, pre, {"x is absent"});
  refused(x, {}, bias, out, pre, {"weight is absent"});
  refused(x, weight, bias, {}, pre, {"out is absent"});
  refused(ints, weight, bias, out, pre, {"x is int32", "needs float32, float16 or bfloat16"});
  refused(half, weight, bias, out, pre, {"weight is float32", "needs float16"});
  refused(x, wide, bias, out, pre, {"weight.shape[1]=5", "x's last dim=4"});
  refused(x, cube, bias, out, pre, {"weight is float32[", "] on cpu; needs 2 dims"});
  refused(x, gaps, bias, out, pre, {"weight has strides [11, 2]", "must be contiguous"});
  refused(strided, weight, bias, out, pre, {"x.stride[1]=2", "must be contiguous"});
  refused(x, weight, bad_bias, out, pre, {"bias.shape[0]=4", "needs 3"});
  refused(x, weight, half_bias, out, pre, {"bias is float16", "needs float32"});
  refused(x, weight, strided_bias, out, pre, {"bias is not contiguous"});
  refused(x, weight, bias, out_half, pre, {"out is float16", "needs float32"});
  refused(x, weight, bias, x, pre, {"out.shape[1]=4", "weight.shape[0]=3"});
  refused(x, weight, bias, overlapped, pre, {"out.stride[0]=0", "must not overlap itself"});
  refused(x, weight, bias, out, out, {"preactivation shares memory with out"});
  TensorView elsewhere = weight.view();
  elsewhere.device = Device::cuda(0);
  refused(x, elsewhere, bias, out, pre, {"weight is on cuda:0", "needs cpu"});
  TensorView null = weight.view();
  null.data = nullptr;
  refused(x, null, bias, out, pre, {"weight has 12 elements but a null pointer"});
  TensorView odd = weight.view();
  odd.data = static_cast<char*>(odd.data) + 1;
  refused(x, odd, bias, out, pre, {"weight is not aligned"});
  TestTensor square(f32, {4, 4});
  expect_refused<InvalidArgument>([&] { linear(x, square, {}, x, {}); }, "linear", {"out shares memory with x"}, {&x});
}

struct Gradients {
  std::vector<double> x, weight, bias;
};

Gradients reference_backward(const TestTensor& grad_out, const TestTensor& x, const TestTensor& weight,
                             const TestTensor& pre, Activation activation) {
  const std::int64_t in = weight.shape()[1], out = weight.shape()[0], rows = grad_out.numel() / out;
  Gradients g{std::vector<double>(static_cast<std::size_t>(rows * in)),
              std::vector<double>(static_cast<std::size_t>(out * in)),
              std::vector<double>(static_cast<std::size_t>(out))};
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t o = 0; o < out; ++o) {
      const double z = pre[r * out + o], h = 1e-5;
      const double slope =
          (reference_activation(activation, z + h) - reference_activation(activation, z - h)) / (2 * h);
      const double grad = grad_out[r * out + o] * slope;
      g.bias[static_cast<std::size_t>(o)] += grad;
      for (std::int64_t i = 0; i < in; ++i) {
        g.x[static_cast<std::size_t>(r * in + i)] += grad * weight[o * in + i];
        g.weight[static_cast<std::size_t>(o * in + i)] += grad * x[r * in + i];
      }
    }
  return g;
}

TEST(LinearBackward, MatchesFloat64ForEveryDtypeLayoutAndActivation) {
  std::uint64_t seed = 100;
  for (const DType dtype : floating_dtypes())
    for (const bool transposed : {false, true})
      for (const Activation activation : kActivations) {
        SCOPED_TRACE(std::string(dtype_name(dtype)) + " activation " + std::to_string(static_cast<int>(activation)));
        const Layout weight_layout = transposed ? Layout::kReversed : Layout::kPadded;
        TestTensor x(dtype, {2, 7, 13}, Layout::kPadded), weight(dtype, {11, 13}, weight_layout),
            pre(dtype, {2, 7, 11});
        TestTensor grad_out(dtype, {2, 7, 11}, Layout::kPadded);
        TestTensor grad_x(dtype, {2, 7, 13}), grad_weight(dtype, {11, 13}, weight_layout);
        TestTensor grad_bias(transposed ? DType::kFloat32 : dtype, {11});
        x.random(seed++), weight.random(seed++, 0.3), pre.random(seed++), grad_out.random(seed++);
        linear_backward(grad_out, x, weight, pre, {grad_x, grad_weight, grad_bias}, activation);
        const Gradients want = reference_backward(grad_out, x, weight, pre, activation);
        // A kernel may round the gradient of the pre-activation to the dtype once: an error of one rounding per term.
        const double floor = dtype == DType::kFloat32 ? 8e-6 : 4 * unit_roundoff(dtype);
        expect_close(grad_x, want.x, floor, "grad_x");
        expect_close(grad_weight, want.weight, floor, "grad_weight");
        expect_close(grad_bias, want.bias, floor, "grad_bias");
      }
}

TEST(LinearBackward, AgreesWithCentralDifferencesOfTheForward) {
  for (const Activation activation : kActivations) {
    TestTensor x(DType::kFloat32, {3, 5}), weight(DType::kFloat32, {4, 5}), bias(DType::kFloat32, {4}),
        out(DType::kFloat32, {3, 4});
    TestTensor pre(DType::kFloat32, {3, 4}), grad_out(DType::kFloat32, {3, 4});
    TestTensor grad_x(DType::kFloat32, {3, 5}), grad_weight(DType::kFloat32, {4, 5}), grad_bias(DType::kFloat32, {4});
    x.random(1), weight.random(2), bias.random(3), grad_out.random(4);
    const auto loss = [&] {
      linear(x, weight, bias, out, pre, activation);
      return dot(out, grad_out);
    };
    loss();
    linear_backward(grad_out, x, weight, pre, {grad_x, grad_weight, grad_bias}, activation);
    // fp32 outputs near 1 are off by 1e-7, a step of 2^-7 makes that 1e-5 of the slope; the third derivative adds 1e-5.
    const double step = std::ldexp(1.0, -7), floor = 3e-4;
    expect_close(grad_x, numeric_gradient(x, step, loss), floor, "x");
    expect_close(grad_weight, numeric_gradient(weight, step, loss), floor, "weight");
    expect_close(grad_bias, numeric_gradient(bias, step, loss), floor, "bias");
  }
}

TEST(LinearBackward, AbsentGradientsAndEmptyRows) {
  TestTensor x(DType::kFloat32, {3, 5}), weight(DType::kFloat32, {4, 5}), grad_out(DType::kFloat32, {3, 4}),
      grad_x(DType::kFloat32, {3, 5});
  TestTensor grad_weight(DType::kFloat32, {4, 5}), grad_bias(DType::kFloat32, {4});
  x.random(1), weight.random(2), grad_out.random(3);
  linear_backward(grad_out, x, weight, {}, {});
  linear_backward(grad_out, x, weight, {}, {grad_x, {}, {}});
  expect_close(grad_x, reference_backward(grad_out, x, weight, grad_out, Activation::kNone).x, 4e-6);
  TestTensor no_x(DType::kFloat32, {0, 5}), no_grad(DType::kFloat32, {0, 4}), no_grad_x(DType::kFloat32, {0, 5});
  grad_weight.fill(kNaN), grad_bias.fill(kNaN);
  linear_backward(no_grad, no_x, weight, {}, {no_grad_x, grad_weight, grad_bias});
  EXPECT_EQ(grad_weight.values(), std::vector<double>(20, 0.0));
  EXPECT_EQ(grad_bias.values(), std::vector<double>(4, 0.0));
}

TEST(LinearBackward, RowsThatDoNotFold) {
  TestTensor x(DType::kFloat32, {3, 4, 5}, Layout::kSwapped), weight(DType::kFloat32, {6, 5}),
      grad_out(DType::kFloat32, {3, 4, 6});
  TestTensor grad_x(DType::kFloat32, {3, 4, 5}), grad_weight(DType::kFloat32, {6, 5});
  x.random(1), weight.random(2), grad_out.random(3);
  linear_backward(grad_out, x, weight, {}, {grad_x, {}, {}});
  expect_close(grad_x, reference_backward(grad_out, x, weight, grad_out, Activation::kNone).x, 4e-6);
  expect_refused<InvalidArgument>(
      [&] {
        linear_backward(grad_out, x, weight, {}, {grad_x, grad_weight, {}});
      },
      "linear_backward", {"do not fold", "make contiguous copies"}, {&grad_x, &grad_weight});
  // All swapped alike: the order of rows does not matter, so they fold.
  TestTensor grad_swapped(DType::kFloat32, {3, 4, 6}, Layout::kSwapped),
      grad_x_swapped(DType::kFloat32, {3, 4, 5}, Layout::kSwapped);
  grad_swapped.random(3);
  linear_backward(grad_swapped, x, weight, {}, {grad_x_swapped, grad_weight, {}});
  const Gradients want = reference_backward(grad_swapped, x, weight, grad_swapped, Activation::kNone);
  expect_close(grad_x_swapped, want.x, 4e-6);
  expect_close(grad_weight, want.weight, 8e-6);
}

TEST(LinearBackward, Refusals) {
  const DType f32 = DType::kFloat32;
  TestTensor x(f32, {3, 5}), weight(f32, {4, 5}), grad_out(f32, {3, 4}), grad_x(f32, {3, 5}), grad_weight(f32, {4, 5}),
      grad_bias(f32, {4});
  TestTensor wrong(f32, {5, 4}), half(DType::kFloat16, {4}), narrow(f32, {3, 3});
  const auto refused = [&](const TensorView& g, const TensorView& p, const LinearGradients& gradients,
                           Activation activation, std::vector<std::string> fragments) {
    expect_refused<InvalidArgument>([&] { linear_backward(g, x, weight, p, gradients, activation); }, "linear_backward",
                                    fragments, {&grad_x, &grad_weight, &grad_bias});
  };
  refused(grad_out, {}, {grad_x, {}, {}}, Activation::kGelu, {"preactivation is absent"});
  refused(narrow, {}, {grad_x, {}, {}}, Activation::kNone, {"grad_out.shape[1]=3", "weight.shape[0]=4"});
  refused(grad_out, {}, {grad_x, wrong, {}}, Activation::kNone, {"gradients.weight", "shapes must match"});
  refused(grad_out, {}, {grad_x, grad_weight, half}, Activation::kNone, {"gradients.bias is float16", "needs float32"});
  refused(grad_out, {}, {x, {}, {}}, Activation::kNone, {"gradients.x shares memory with x"});
  refused({}, {}, {grad_x, {}, {}}, Activation::kNone, {"grad_out is absent"});
}

}  // namespace
}  // namespace flashkernel
