// layer_norm, rms_norm and their gradients against float64 references and central differences.
#include "flashkernel/norm.hpp"

#include <gtest/gtest.h>

#include "flashkernel/error.hpp"
#include "test_tensor.hpp"

namespace flashkernel {
namespace {

using namespace testing;

struct Reference {
  std::vector<double> out, mean, rstd;
};

/// h is what was normalised; weight and bias may be null.
Reference reference(bool rms, const TestTensor& h, const TestTensor* weight, const TestTensor* bias, double eps) {
  const std::int64_t n = h.shape().back();
  Reference result;
  for (std::int64_t r = 0; r < h.numel() / n; ++r) {
    double mean = 0, variance = 0;
    for (std::int64_t i = 0; i < n && !rms; ++i) mean += h[r * n + i] / static_cast<double>(n);
    for (std::int64_t i = 0; i < n; ++i) variance += std::pow(h[r * n + i] - mean, 2) / static_cast<double>(n);
    const double rstd = 1 / std::sqrt(variance + eps);
    result.mean.push_back(mean);
    result.rstd.push_back(rstd);
    for (std::int64_t i = 0; i < n; ++i)
      result.out.push_back((h[r * n + i] - mean) * rstd * (weight ? (*weight)[i] : 1) + (bias ? (*bias)[i] : 0));
  }
  return result;
}

void run(bool rms, const TensorView& x, const TensorView& residual, const TensorView& weight, const TensorView& bias,
         const TensorView& out, const NormSaved& saved = {}, float eps = 1e-5f) {
  if (rms) {
    rms_norm(x, residual, weight, out, saved, eps);
  } else {
    layer_norm(x, residual, weight, bias, out, saved, eps);
  }
}

TEST(Norm, MatchesFloat64ForEveryDtypeAndLayout) {
  std::uint64_t seed = 1;
  for (const bool rms : {false, true})
    for (const DType dtype : floating_dtypes())
      for (const Layout layout : row_layouts())
        for (const std::int64_t features : {1, 7, 64, 129}) {
          SCOPED_TRACE((rms ? "rms " : "layer ") + std::string(dtype_name(dtype)) + " features " +
                       std::to_string(features));
          TestTensor x(dtype, {3, 5, features}, layout), out(dtype, {3, 5, features}, Layout::kPadded);
          const DType parameter = seed % 2 ? DType::kFloat32 : dtype;
          TestTensor weight(parameter, {features}), bias(parameter, {features});
          TestTensor mean(DType::kFloat32, {3, 5}), rstd(DType::kFloat32, {3, 5});
          x.random(seed++, 1, 0.5), weight.random(seed++), bias.random(seed++);
          NormSaved saved;
          saved.rstd = rstd;
          if (!rms) saved.mean = mean;
          run(rms, x, {}, weight, bias, out, saved, 1e-3f);
          const Reference want = reference(rms, x, &weight, rms ? nullptr : &bias, 1e-3f);
          expect_close(out, want.out, 1e-5, "out");
          expect_close(rstd, want.rstd, 1e-5, "rstd");
          if (!rms) expect_close(mean, want.mean, 1e-6, "mean");
          run(rms, x, {}, {}, {}, out);
          expect_close(out, reference(rms, x, nullptr, nullptr, 1e-5f).out, 2e-5, "plain");
        }
}

// Rows are walked in another order than that of the statistics, which stay contiguous.
TEST(Norm, StatisticsBelongToTheirRowsWhateverTheStridesOfTheOthers) {
  const Shape shape = {3, 4, 2, 16}, rows = {3, 4, 2};
  const std::vector<Shape> layouts = {strides_of(shape, Layout::kContiguous), strides_of(shape, Layout::kSwapped),
                                      Shape{16, 96, 48, 1}, Shape{80, 20, 260, 1}};
  for (const bool rms : {false, true})
    for (const Shape& x_layout : layouts)
      for (const Shape& out_layout : layouts) {
        TestTensor x(DType::kFloat32, shape, x_layout), out(DType::kFloat32, shape, out_layout);
        TestTensor residual(DType::kFloat32, shape, layouts[2]), sum(DType::kFloat32, shape, layouts[3]);
        TestTensor mean(DType::kFloat32, rows), rstd(DType::kFloat32, rows), weight(DType::kFloat32, {16});
        x.random(1, 1, 0.5), weight.random(2), residual.random(3);
        NormSaved saved;
        saved.rstd = rstd;
        if (!rms) saved.mean = mean;
        run(rms, x, {}, weight, {}, out, saved);
        const Reference want = reference(rms, x, &weight, nullptr, 1e-5);
        expect_close(out, want.out, 1e-5, "out");
        expect_close(rstd, want.rstd, 1e-5, "rstd");
        if (!rms) expect_close(mean, want.mean, 1e-6, "mean");
        saved.residual_out = sum;
        run(rms, x, residual, weight, {}, out, saved);
        const Reference summed = reference(rms, sum, &weight, nullptr, 1e-5);
        expect_close(rstd, summed.rstd, 1e-5, "rstd of the sum");
        expect_close(out, summed.out, 1e-5, "out of the sum");

        TestTensor plain_x(DType::kFloat32, shape), grad(DType::kFloat32, shape), plain_grad(DType::kFloat32, shape);
        plain_x.random(1, 1, 0.5), grad.random(4);
        TestTensor grad_out(DType::kFloat32, shape, out_layout), grad_x(DType::kFloat32, shape, x_layout);
        grad_out.random(4);
        saved.residual_out = {};
        run(rms, x, {}, weight, {}, out, saved);
        const auto backward = [&](const TestTensor& from, const TestTensor& h, const TestTensor& to) {
          NormGradients gradients;
          gradients.x = to;
          if (rms) {
            rms_norm_backward(from, h, weight, rstd, {}, gradients);
          } else {
            layer_norm_backward(from, h, weight, mean, rstd, {}, gradients);
          }
        };
        backward(grad, plain_x, plain_grad);
        backward(grad_out, x, grad_x);
        EXPECT_EQ(grad_x.values(), plain_grad.values());
      }
}

TEST(Norm, ResidualIsAddedAndNormalisedAsStored) {
  for (const bool rms : {false, true})
    for (const DType dtype : floating_dtypes())
      for (const Layout layout : row_layouts()) {
        TestTensor x(dtype, {2, 3, 33}), residual(dtype, {2, 3, 33}, layout), out(dtype, {2, 3, 33}),
            sum(dtype, {2, 3, 33}, Layout::kPadded);
        TestTensor weight(dtype, {33});
        x.random(1), residual.random(2), weight.random(3);
        NormSaved saved;
        saved.residual_out = sum;
        run(rms, x, residual, weight, {}, out, saved);
        for (std::int64_t i = 0; i < x.numel(); ++i) {
          TestTensor rounded(dtype, {1});
          rounded.set(0, x[i] + residual[i]);
          ASSERT_EQ(sum[i], rounded[0]);
        }
        expect_close(out, reference(rms, sum, &weight, nullptr, 1e-5f).out, 1e-5);
      }
}

TEST(Norm, InPlace) {
  for (const bool rms : {false, true}) {
    TestTensor x(DType::kFloat32, {4, 16}), residual(DType::kFloat32, {4, 16}), out(DType::kFloat32, {4, 16}),
        expected_sum(DType::kFloat32, {4, 16});
    x.random(1), residual.random(2);
    NormSaved saved;
    saved.residual_out = expected_sum;
    run(rms, x, residual, {}, {}, out, saved);
    const auto want = out.values(), want_sum = expected_sum.values();
    saved.residual_out = residual;  // the residual stream in place, the output over x
    run(rms, x, residual, {}, {}, x, saved);
    EXPECT_EQ(x.values(), want);
    EXPECT_EQ(residual.values(), want_sum);
    x.random(1), residual.random(2);
    saved.residual_out = x;
    run(rms, x, residual, {}, {}, residual, saved);
    EXPECT_EQ(residual.values(), want);
    EXPECT_EQ(x.values(), want_sum);
    run(rms, x, {}, {}, {}, x);
    expect_close(x, reference(rms, expected_sum, nullptr, nullptr, 1e-5f).out, 1e-5);
  }
}

TEST(Norm, LargeMeansDoNotCancel) {
  // A mean of 1e4 with unit variance: E[x^2] - E[x]^2 in fp32 would lose every digit of the variance.
  TestTensor x(DType::kFloat32, {2, 1024}), out(DType::kFloat32, {2, 1024});
  x.random(1, 1.0, 1e4);
  layer_norm(x, {}, {}, {}, out);
  expect_close(out, reference(false, x, nullptr, nullptr, 1e-5f).out, 2e-3);  // fp32's mean of 1e4 is off by up to 5e-4
}

TEST(Norm, NanInfinityAndConstantRows) {
  TestTensor x(DType::kFloat32, {3, 8}), out(DType::kFloat32, {3, 8});
  x.random(1);
  for (int i = 0; i < 8; ++i) x.set(i, 3.0);
  x.set(8, kNaN);
  layer_norm(x, {}, {}, {}, out);
  auto want = reference(false, x, nullptr, nullptr, 1e-5f).out;
  expect_close(out, want, 1e-5);
  EXPECT_EQ(out[0], 0.0);
  EXPECT_TRUE(std::isnan(out[15]));
  EXPECT_FALSE(std::isnan(out[16]));
  x.set(8, kInf);
  rms_norm(x, {}, {}, out);
  want = reference(true, x, nullptr, nullptr, 1e-6f).out;  // inf * 0: NaN; the others 0
  expect_close(out, want, 1e-5);
}

TEST(Norm, EmptyRowsAndVectors) {
  TestTensor none(DType::kFloat32, {0, 8}), out(DType::kFloat32, {0, 8}), vector(DType::kFloat32, {8}),
      vector_out(DType::kFloat32, {8});
  layer_norm(none, {}, {}, {}, out);
  vector.random(1);
  TestTensor rstd(DType::kFloat32, Shape{});
  NormSaved saved;
  saved.rstd = rstd;
  rms_norm(vector, {}, {}, vector_out, saved);
  const Reference want = reference(true, vector, nullptr, nullptr, 1e-6f);
  expect_close(vector_out, want.out, 2e-6);
  expect_close(rstd, want.rstd, 2e-6);
}

TEST(Norm, Refusals) {
  const DType f32 = DType::kFloat32;
  TestTensor x(f32, {2, 8}), residual(f32, {2, 8}), weight(f32, {8}), bias(f32, {8}), out(f32, {2, 8}),
      sum(f32, {2, 8}), mean(f32, {2}), rstd(f32, {2});
  x.random(1), residual.random(2), weight.random(3), bias.random(4);
  const auto refused = [&](const TensorView& a, const TensorView& r, const TensorView& w, const TensorView& b,
                           const TensorView& o, const NormSaved& saved, float eps, std::vector<std::string> fragments) {
    expect_refused<InvalidArgument>([&] { layer_norm(a, r, w, b, o, saved, eps); }, "layer_norm", fragments,
                                    {&out, &sum, &mean, &rstd, &x, &residual});
  };
  TestTensor seven(f32, {7}), half(DType::kFloat16, {2, 8}), whole_weight(DType::kInt32, {8}),
      reversed(f32, {2, 8}, Layout::kReversed);
  TestTensor scalar(f32, Shape{}), nothing(f32, {2, 0}), gaps(f32, {2}, Shape{3}), half_mean(DType::kFloat16, {2}),
      overlapped(f32, {2, 8}, Shape{0, 1});
  refused({}, {}, weight, bias, out, {}, 1e-5f, {"x is absent"});
  refused(x, {}, weight, bias, {}, {}, 1e-5f, {"out is absent"});
  refused(scalar, {}, weight, bias, scalar, {}, 1e-5f, {"x is float32[] on cpu; needs 1 to 8 dims"});
  refused(nothing, {}, {}, {}, nothing, {}, 1e-5f, {"last dim is 0", "at least one feature"});
  refused(x, {}, seven, bias, out, {}, 1e-5f, {"weight.shape[0]=7", "needs 8"});
  refused(x, {}, whole_weight, bias, out, {}, 1e-5f, {"weight is int32", "needs float32, float16 or bfloat16"});
  refused(x, {}, {}, {}, out, {{}, {}, {}, 1.0f}, 1e-5f, {"saved.weight_offset=1", "weight is absent"});
  refused(x, {}, weight, {}, out, {{}, {}, {}, std::numeric_limits<float>::infinity()}, 1e-5f,
          {"saved.weight_offset=inf", "needs a finite number"});
  refused(half, {}, weight, bias, out, {}, 1e-5f, {"out is float32", "needs float16"});
  refused(reversed, {}, weight, bias, out, {}, 1e-5f, {"x.stride[1]=2", "contiguous"});
  refused(x, residual, weight, bias, out, {}, 1e-5f,
          {"saved.residual_out is absent", "required when residual is given"});
  refused(x, {}, weight, bias, out, {sum, {}, {}}, 1e-5f, {"residual is absent"});
  refused(x, residual, weight, bias, out, {out, {}, {}}, 1e-5f, {"saved.residual_out shares memory with out"});
  refused(x, {}, weight, bias, out, {{}, gaps, {}}, 1e-5f, {"saved.mean is not contiguous"});
  refused(x, {}, weight, bias, out, {{}, half_mean, {}}, 1e-5f, {"saved.mean is float16", "needs float32"});
  refused(x, {}, weight, bias, out, {{}, seven, {}}, 1e-5f, {"saved.mean.shape[0]=7", "x.shape[0]=2"});
  refused(x, {}, weight, bias, overlapped, {}, 1e-5f, {"out.stride[0]=0"});
  refused(x, {}, weight, bias, out, {}, -1.0f, {"eps=-1", "0 or more"});
  refused(x, {}, weight, bias, out, {}, static_cast<float>(kNaN), {"eps=", "0 or more"});
  expect_refused<InvalidArgument>(
      [&] {
        rms_norm(x, {}, weight, out, {{}, mean, {}});
      },
      "rms_norm", {"saved.mean is given", "RMSNorm has no mean"}, {&out, &mean});
}

struct Gradients {
  std::vector<double> x, weight, bias;
};

Gradients reference_backward(bool rms, const TestTensor& grad_out, const TestTensor& h, const TestTensor* weight,
                             const TestTensor* mean, const TestTensor& rstd, const TestTensor* grad_residual) {
  const std::int64_t n = h.shape().back(), rows = h.numel() / n;
  Gradients g{{}, std::vector<double>(static_cast<std::size_t>(n)), std::vector<double>(static_cast<std::size_t>(n))};
  for (std::int64_t r = 0; r < rows; ++r) {
    std::vector<double> y, w;
    double sum = 0, dot = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      y.push_back((h[r * n + i] - (mean ? (*mean)[r] : 0)) * rstd[r]);
      w.push_back(grad_out[r * n + i] * (weight ? (*weight)[i] : 1));
      sum += w.back(), dot += w.back() * y.back();
      g.weight[static_cast<std::size_t>(i)] += grad_out[r * n + i] * y.back();
      g.bias[static_cast<std::size_t>(i)] += grad_out[r * n + i];
    }
    for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i)
      g.x.push_back((w[i] - (rms ? 0 : sum / static_cast<double>(n)) - y[i] * dot / static_cast<double>(n)) * rstd[r] +
                    (grad_residual ? (*grad_residual)[r * n + static_cast<std::int64_t>(i)] : 0));
  }
  return g;
}

void run_backward(bool rms, const TensorView& grad_out, const TensorView& h, const TensorView& weight,
                  const TensorView& mean, const TensorView& rstd, const TensorView& grad_residual,
                  NormGradients gradients) {
  if (rms) {
    gradients.bias = {};
    rms_norm_backward(grad_out, h, weight, rstd, grad_residual, gradients);
  } else {
    layer_norm_backward(grad_out, h, weight, mean, rstd, grad_residual, gradients);
  }
}

TEST(NormBackward, MatchesFloat64ForEveryDtypeAndLayout) {
  std::uint64_t seed = 1;
  for (const bool rms : {false, true})
    for (const DType dtype : floating_dtypes())
      for (const Layout layout : {Layout::kContiguous, Layout::kPadded})
        for (const bool with_residual : {false, true}) {
          SCOPED_TRACE((rms ? "rms " : "layer ") + std::string(dtype_name(dtype)));
          TestTensor h(dtype, {2, 9, 40}, layout), grad_out(dtype, {2, 9, 40}, Layout::kPadded),
              grad_residual(dtype, {2, 9, 40});
          TestTensor grad_x(dtype, {2, 9, 40}, layout), out(dtype, {2, 9, 40});
          const DType parameter = with_residual ? DType::kFloat32 : dtype;
          TestTensor weight(parameter, {40}), grad_weight(parameter, {40}), grad_bias(DType::kFloat32, {40});
          TestTensor mean(DType::kFloat32, {2, 9}), rstd(DType::kFloat32, {2, 9});
          h.random(seed++), grad_out.random(seed++), grad_residual.random(seed++), weight.random(seed++);
          NormSaved saved;
          saved.rstd = rstd;
          if (!rms) saved.mean = mean;
          run(rms, h, {}, weight, {}, out, saved);
          run_backward(rms, grad_out, h, weight, mean, rstd, with_residual ? grad_residual.view() : TensorView{},
                       {grad_x, grad_weight, grad_bias});
          const Gradients want = reference_backward(rms, grad_out, h, &weight, rms ? nullptr : &mean, rstd,
                                                    with_residual ? &grad_residual : nullptr);
          expect_close(grad_x, want.x, 1e-5, "x");
          expect_close(grad_weight, want.weight, 1e-5, "weight");
          if (!rms) expect_close(grad_bias, want.bias, 1e-5, "bias");
        }
}

TEST(NormBackward, AgreesWithCentralDifferencesOfTheForward) {
  for (const bool rms : {false, true}) {
    TestTensor x(DType::kFloat32, {3, 6}), weight(DType::kFloat32, {6}), bias(DType::kFloat32, {6}),
        out(DType::kFloat32, {3, 6}), grad_out(DType::kFloat32, {3, 6});
    TestTensor mean(DType::kFloat32, {3}), rstd(DType::kFloat32, {3}), grad_x(DType::kFloat32, {3, 6}),
        grad_weight(DType::kFloat32, {6}), grad_bias(DType::kFloat32, {6});
    TestTensor residual(DType::kFloat32, {3, 6}), sum(DType::kFloat32, {3, 6}), grad_sum(DType::kFloat32, {3, 6});
    x.random(1), weight.random(2), bias.random(3), grad_out.random(4), residual.random(5), grad_sum.random(6);
    const auto loss = [&] {
      run(rms, x, residual, weight, bias, out, {sum, rms ? TensorView{} : mean.view(), rstd});
      return dot(out, grad_out) + dot(sum, grad_sum);
    };
    loss();
    run_backward(rms, grad_out, sum, weight, mean, rstd, grad_sum, {grad_x, grad_weight, grad_bias});
    const double step = std::ldexp(1.0, -7), floor = 1e-3;  // h^2/6 f''' is 1e-5 times third derivatives of some 10
    expect_close(grad_x, numeric_gradient(x, step, loss), floor, "x");
    expect_close(grad_x, numeric_gradient(residual, step, loss), floor, "residual");
    expect_close(grad_weight, numeric_gradient(weight, step, loss), floor, "weight");
    if (!rms) expect_close(grad_bias, numeric_gradient(bias, step, loss), floor, "bias");
  }
}

TEST(NormBackward, AbsentPiecesEmptyRowsAndLayoutsThatDoNotFold) {
  TestTensor h(DType::kFloat32, {3, 4, 5}, Layout::kSwapped), grad_out(DType::kFloat32, {3, 4, 5}),
      grad_x(DType::kFloat32, {3, 4, 5});
  TestTensor mean(DType::kFloat32, {3, 4}), rstd(DType::kFloat32, {3, 4}), out(DType::kFloat32, {3, 4, 5}),
      grad_weight(DType::kFloat32, {5});
  h.random(1), grad_out.random(2);
  layer_norm(h, {}, {}, {}, out, {{}, mean, rstd});
  layer_norm_backward(grad_out, h, {}, mean, rstd, {}, {});  // nothing wanted
  layer_norm_backward(grad_out, h, {}, mean, rstd, {}, {grad_x, {}, {}});
  expect_close(grad_x, reference_backward(false, grad_out, h, nullptr, &mean, rstd, nullptr).x, 1e-5);
  expect_refused<InvalidArgument>(
      [&] {
        layer_norm_backward(grad_out, h, {}, mean, rstd, {}, {grad_x, grad_weight, {}});
      },
      "layer_norm_backward", {"do not fold", "make contiguous copies"}, {&grad_x, &grad_weight});
  TestTensor none(DType::kFloat32, {0, 5}), no_rows(DType::kFloat32, {0}), none_out(DType::kFloat32, {0, 5}),
      grad_bias(DType::kFloat32, {5});
  grad_weight.fill(kNaN), grad_bias.fill(kNaN);
  layer_norm_backward(none, none, {}, no_rows, no_rows, {}, {none_out, grad_weight, grad_bias});
  EXPECT_EQ(grad_weight.values(), std::vector<double>(5, 0.0));
  EXPECT_EQ(grad_bias.values(), std::vector<double>(5, 0.0));
}

TEST(NormBackward, Refusals) {
  const DType f32 = DType::kFloat32;
  TestTensor h(f32, {2, 8}), grad_out(f32, {2, 8}), weight(f32, {8}), mean(f32, {2}), rstd(f32, {2}),
      grad_x(f32, {2, 8}), grad_weight(f32, {8});
  TestTensor whole(DType::kInt32, {8}), three(f32, {3}), narrow(f32, {2, 7});
  const auto refused = [&](const TensorView& g, const TensorView& m, const TensorView& r,
                           const NormGradients& gradients, std::vector<std::string> fragments) {
    expect_refused<InvalidArgument>([&] { layer_norm_backward(g, h, weight, m, r, {}, gradients); },
                                    "layer_norm_backward", fragments, {&grad_x, &grad_weight, &h});
  };
  refused(grad_out, {}, rstd, {grad_x, {}, {}}, {"mean is absent"});
  refused(grad_out, mean, {}, {grad_x, {}, {}}, {"rstd is absent"});
  refused(grad_out, mean, three, {grad_x, {}, {}}, {"rstd.shape[0]=3", "h.shape[0]=2"});
  refused(narrow, mean, rstd, {grad_x, {}, {}}, {"grad_out is", "shapes must match"});
  refused(grad_out, mean, rstd, {grad_x, whole, {}}, {"gradients.weight is int32", "needs float32"});
  refused(grad_out, mean, rstd, {h, {}, {}}, {"gradients.x shares memory with h"});
  expect_refused<InvalidArgument>(
      [&] {
        rms_norm_backward(grad_out, h, weight, rstd, {}, {grad_x, {}, grad_weight});
      },
      "rms_norm_backward", {"gradients.bias is given", "RMSNorm has no bias"}, {&grad_x, &grad_weight});
}

}  // namespace
}  // namespace flashkernel
