// cross_entropy and its gradient against float64 references and central differences.
#include "flashkernel/loss.hpp"

#include <gtest/gtest.h>

#include "flashkernel/error.hpp"
#include "test_tensor.hpp"

namespace flashkernel {
namespace {

using namespace testing;

const std::vector<Reduction> kReductions = {Reduction::kNone, Reduction::kSum, Reduction::kMean};

struct Reference {
  std::vector<double> loss, lse, grad;  // grad of the summed, averaged or weighted loss
};

Reference reference(const TestTensor& logits, const TestTensor& targets, const CrossEntropyOptions& o,
                    const TestTensor& grad_loss) {
  const std::int64_t rows = logits.shape()[0], classes = logits.shape()[1];
  Reference result;
  double total = 0, counted = 0;
  for (std::int64_t r = 0; r < rows; ++r) counted += targets[r] != static_cast<double>(o.ignore_index);
  for (std::int64_t r = 0; r < rows; ++r) {
    double top = -kInf, sum = 0, loss = 0;
    for (std::int64_t c = 0; c < classes; ++c) top = std::max(top, logits[r * classes + c]);
    for (std::int64_t c = 0; c < classes; ++c) sum += std::exp(logits[r * classes + c] - top);
    const double lse = top + std::log(sum);
    const bool ignored = targets[r] == static_cast<double>(o.ignore_index);
    double scale = ignored ? 0 : grad_loss[o.reduction == Reduction::kNone ? r : 0];
    if (o.reduction == Reduction::kMean && !ignored) scale /= counted;
    for (std::int64_t c = 0; c < classes; ++c) {
      const double weight = (static_cast<double>(c) == targets[r] ? 1 - static_cast<double>(o.label_smoothing) : 0) +
                            static_cast<double>(o.label_smoothing) / static_cast<double>(classes);
      if (weight > 0) loss += weight * (lse - logits[r * classes + c]);
      result.grad.push_back(ignored ? 0 : (std::exp(logits[r * classes + c] - lse) - weight) * scale);
    }
    result.lse.push_back(lse);
    result.loss.push_back(ignored ? 0 : loss);
    total += result.loss.back();
  }
  if (o.reduction == Reduction::kSum) result.loss = {total};
  if (o.reduction == Reduction::kMean) result.loss = {total / counted};
  return result;
}

TEST(CrossEntropy, MatchesFloat64ForEveryDtypeReductionAndSmoothing) {
  std::uint64_t seed = 1;
  for (const DType dtype : floating_dtypes())
    for (const Reduction reduction : kReductions)
      for (const float smoothing : {0.0f, 0.1f})
        for (const std::int64_t classes : {2, 17, 300}) {
          SCOPED_TRACE(std::string(dtype_name(dtype)) + " reduction " + std::to_string(static_cast<int>(reduction)) +
                       " classes " + std::to_string(classes));
          const Layout layout = seed % 2 ? Layout::kPadded : Layout::kContiguous;
          TestTensor logits(dtype, {9, classes}, layout), grad_logits(dtype, {9, classes}, Layout::kPadded),
              targets(seed % 2 ? DType::kInt32 : DType::kInt64, {9});
          const Shape loss_shape = reduction == Reduction::kNone ? Shape{9} : (seed % 2 ? Shape{} : Shape{1});
          TestTensor loss(DType::kFloat32, loss_shape), grad_loss(DType::kFloat32, loss_shape),
              lse(DType::kFloat32, {9});
          logits.random(seed++, 3), grad_loss.random(seed++);
          for (std::int64_t r = 0; r < 9; ++r)
            targets.set(r, r % 4 == 3 ? -100.0 : static_cast<double>((r * 31) % classes));
          CrossEntropyOptions options;
          options.reduction = reduction;
          options.label_smoothing = smoothing;
          cross_entropy(logits, targets, loss, lse, options);
          const Reference want = reference(logits, targets, options, grad_loss);
          expect_close(loss, want.loss, 2e-5, "loss");
          expect_close(lse, want.lse, 5e-6, "lse");
          cross_entropy_backward(grad_loss, logits, targets, lse, grad_logits, options);
          expect_close(grad_logits, want.grad, 5e-6, "grad");
          cross_entropy_backward(grad_loss, logits, targets, lse, logits, options);  // in place
          expect_close(logits, want.grad, 5e-6, "grad in place");
        }
}

TEST(CrossEntropy, ClosedForms) {
  // Equal logits: log(classes), whatever the target. Far apart: 0 and the distance.
  TestTensor logits(DType::kFloat32, {3, 4}), targets(DType::kInt64, {3}), loss(DType::kFloat32, {3});
  logits.fill({7, 7, 7, 7, 1e4, 0, 0, 0, 1e4, 0, 0, 0}), targets.fill({2, 0, 3});
  CrossEntropyOptions options;
  options.reduction = Reduction::kNone;
  cross_entropy(logits, targets, loss, {}, options);
  expect_close(loss, {std::log(4.0), 0, 1e4}, 1e-6);
}

TEST(CrossEntropy, BackwardAgreesWithCentralDifferences) {
  for (const Reduction reduction : kReductions)
    for (const float smoothing : {0.0f, 0.2f}) {
      const Shape shape = reduction == Reduction::kNone ? Shape{4} : Shape{};
      TestTensor logits(DType::kFloat32, {4, 6}), targets(DType::kInt32, {4}), loss(DType::kFloat32, shape),
          grad_loss(DType::kFloat32, shape);
      TestTensor lse(DType::kFloat32, {4}), grad(DType::kFloat32, {4, 6});
      logits.random(1), grad_loss.random(2), targets.fill({5, 0, -100, 3});
      CrossEntropyOptions options;
      options.reduction = reduction;
      options.label_smoothing = smoothing;
      const auto run = [&] {
        cross_entropy(logits, targets, loss, lse, options);
        return dot(loss, grad_loss);
      };
      run();
      cross_entropy_backward(grad_loss, logits, targets, lse, grad, options);
      expect_close(grad, numeric_gradient(logits, std::ldexp(1.0, -7), run), 3e-4);
    }
}

TEST(CrossEntropy, IgnoredRows) {
  TestTensor logits(DType::kFloat32, {3, 5}), targets(DType::kInt64, {3}), loss(DType::kFloat32, Shape{}),
      lse(DType::kFloat32, {3}), grad(DType::kFloat32, {3, 5});
  TestTensor one(DType::kFloat32, Shape{});
  logits.random(1), targets.fill(-100), one.fill(1), grad.fill(kNaN);
  cross_entropy(logits, targets, loss, lse);
  EXPECT_TRUE(std::isnan(loss[0]));  // mean over no rows
  cross_entropy_backward(one, logits, targets, lse, grad);
  EXPECT_EQ(grad.values(), std::vector<double>(15, 0.0));
  CrossEntropyOptions sum;
  sum.reduction = Reduction::kSum;
  cross_entropy(logits, targets, loss, lse, sum);
  EXPECT_EQ(loss[0], 0.0);
  // A NaN in an ignored row touches nothing; ignore_index may be a class, which then is never learnt.
  CrossEntropyOptions class_two;
  class_two.ignore_index = 2;
  targets.fill({2, 4, 0});
  logits.set(1, kNaN);
  cross_entropy(logits, targets, loss, lse, class_two);
  EXPECT_TRUE(std::isfinite(loss[0]));
  cross_entropy_backward(one, logits, targets, lse, grad, class_two);
  for (std::int64_t c = 0; c < 5; ++c) EXPECT_EQ(grad[c], 0.0);
  EXPECT_TRUE(std::isfinite(grad[7]));
}

TEST(CrossEntropy, NanMaskedClassesAndEmpty) {
  TestTensor logits(DType::kFloat32, {3, 4}), targets(DType::kInt64, {3}), loss(DType::kFloat32, {3}),
      lse(DType::kFloat32, {3}), grad(DType::kFloat32, {3, 4});
  TestTensor ones(DType::kFloat32, {3});
  logits.fill({0, -kInf, 0, -kInf, 1, kNaN, 1, 1, -kInf, 0, 0, 0}), targets.fill({0, 0, 0}), ones.fill(1);
  CrossEntropyOptions options;
  options.reduction = Reduction::kNone;
  cross_entropy(logits, targets, loss, lse, options);
  expect_close(loss, {std::log(2.0), kNaN, kInf});
  expect_close(lse, {std::log(2.0), kNaN, std::log(3.0)});
  cross_entropy_backward(ones, logits, targets, lse, grad, options);
  for (int c = 4; c < 8; ++c) EXPECT_TRUE(std::isnan(grad[c]));
  EXPECT_EQ(grad[1], 0.0);
  TestTensor none(DType::kFloat32, {0, 4}), no_targets(DType::kInt64, {0}), scalar(DType::kFloat32, Shape{}),
      no_loss(DType::kFloat32, {0});
  cross_entropy(none, no_targets, scalar, {});
  EXPECT_TRUE(std::isnan(scalar[0]));
  options.reduction = Reduction::kSum;
  cross_entropy(none, no_targets, scalar, {}, options);
  EXPECT_EQ(scalar[0], 0.0);
  options.reduction = Reduction::kNone;
  cross_entropy(none, no_targets, no_loss, no_loss, options);
  EXPECT_TRUE(no_loss.canaries_intact());
}

TEST(CrossEntropy, Refusals) {
  const DType f32 = DType::kFloat32;
  TestTensor logits(f32, {3, 4}), targets(DType::kInt64, {3}), loss(f32, Shape{}), lse(f32, {3}), per_row(f32, {3}),
      grad(f32, {3, 4});
  logits.random(1), targets.fill({0, 3, 2});
  CrossEntropyOptions none;
  none.reduction = Reduction::kNone;
  const auto refused = [&](const TensorView& x, const TensorView& t, const TensorView& l, const TensorView& s,
                           const CrossEntropyOptions& options, std::vector<std::string> fragments) {
    expect_refused<InvalidArgument>([&] { cross_entropy(x, t, l, s, options); }, "cross_entropy", fragments,
                                    {&loss, &lse, &per_row, &logits});
  };
  TestTensor floats(f32, {3}), short_targets(DType::kInt64, {2}), half_loss(DType::kFloat16, Shape{}),
      cube(f32, {3, 4, 1}), no_classes(f32, {3, 0});
  TestTensor reversed(f32, {3, 4}, Layout::kReversed);
  refused({}, targets, loss, lse, {}, {"logits is absent"});
  refused(logits, {}, loss, lse, {}, {"targets is absent"});
  refused(logits, targets, {}, lse, {}, {"loss is absent"});
  refused(cube, targets, loss, lse, {}, {"logits is float32[3, 4, 1] on cpu; needs 2 dims"});
  refused(no_classes, targets, loss, lse, {}, {"logits.shape[1]=0", "at least one class"});
  refused(reversed, targets, loss, lse, {}, {"logits.stride[1]=3", "contiguous"});
  refused(logits, floats, loss, lse, {}, {"targets is float32", "needs int32 or int64"});
  refused(logits, short_targets, loss, lse, {}, {"targets.shape[0]=2", "needs 3"});
  refused(logits, targets, half_loss, lse, {}, {"loss is float16", "needs float32"});
  refused(logits, targets, per_row, lse, {}, {"loss.shape[0]=3", "needs 1"});
  refused(logits, targets, loss, lse, none, {"loss is float32[] on cpu; needs 1 dim"});
  refused(logits, targets, per_row, per_row, none, {"lse shares memory with loss"});
  for (const double bad : {4.0, -1.0, -101.0, 2147483648.0}) {
    targets.set(1, bad);
    refused(logits, targets, loss, lse, {},
            {"targets[1]=" + std::to_string(static_cast<std::int64_t>(bad)), "needs 0 to 3", "ignore_index=-100"});
    expect_refused<InvalidArgument>([&] { cross_entropy_backward(loss, logits, targets, lse, grad); },
                                    "cross_entropy_backward", {"targets[1]="}, {&grad});
  }
  targets.set(1, 3);
  for (const float bad : {-0.1f, 1.1f, static_cast<float>(kNaN)}) {
    CrossEntropyOptions options;
    options.label_smoothing = bad;
    refused(logits, targets, loss, lse, options, {"label_smoothing=", "a number from 0 to 1"});
  }
  TestTensor half_grad(DType::kFloat16, {3, 4});
  expect_refused<InvalidArgument>([&] { cross_entropy_backward(loss, logits, targets, {}, grad); },
                                  "cross_entropy_backward", {"lse is absent"}, {&grad});
  expect_refused<InvalidArgument>([&] { cross_entropy_backward(loss, logits, targets, lse, half_grad); },
                                  "cross_entropy_backward", {"grad_logits is float16", "needs float32"}, {&half_grad});
  expect_refused<InvalidArgument>([&] { cross_entropy_backward(per_row, logits, targets, lse, grad); },
                                  "cross_entropy_backward", {"grad_loss.shape[0]=3", "needs 1"}, {&grad});
}

}  // namespace
}  // namespace flashkernel
