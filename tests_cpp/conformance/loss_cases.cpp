// Cases of cross_entropy and cross_entropy_bwd.
#include <algorithm>
#include <cmath>
#include <limits>

#include "conformance/conformance.hpp"
#include "conformance/each_dtype.hpp"
#include "flashkernel/loss.hpp"

namespace flashkernel::conformance {
namespace {

struct Spec {
  DType dtype;
  std::int64_t rows, classes;
  Reduction reduction = Reduction::kMean;
  float smoothing = 0;
  bool lse = true, in_place = false;
  int ignore_every = 0;  // every n-th row
  Layout logits = {}, grad = {};
  bool special = false;
  bool far_from_zero = false;  // rows of one number of large size, or about it
};

TensorView view_of(const TestTensor* tensor) { return tensor ? tensor->view() : TensorView(); }

struct Inputs {
  TestTensor *logits, *targets;
  CrossEntropyOptions options;
  Shape loss_shape;
};

Inputs inputs_of(Call& call, const Spec& s, bool in_place) {
  Inputs in;
  const Shape shape{s.rows, s.classes};
  in.logits =
      in_place ? &call.in_out("logits", s.dtype, shape, s.logits) : &call.input("logits", s.dtype, shape, s.logits);
  in.logits->transform([](double logit) { return 3 * logit; });
  std::vector<std::int64_t> targets;
  for (std::int64_t r = 0; r < s.rows; ++r) {
    const bool ignored = s.ignore_every > 0 && r % s.ignore_every == 0;
    targets.push_back(ignored ? -100 : call.random.integer(0, s.classes - 1));
  }
  if (s.special) {
    for (std::int64_t c = 0; c < s.classes; ++c) {
      in.logits->set(c, c == targets[0] ? 5 : -std::numeric_limits<double>::infinity());
      in.logits->set(s.classes + c, c % 2 ? 30000 : -30000);
    }
    in.logits->set(3 * s.classes - 1, std::numeric_limits<double>::quiet_NaN());
  }
  if (s.far_from_zero) {
    const double lowest = s.dtype == DType::kFloat16    ? -65504
                          : s.dtype == DType::kBFloat16 ? -3.3895e38
                                                        : -3.4028234e38;
    const double sizes[] = {lowest, std::max(lowest, -1e9), -8192, 8192};
    for (std::int64_t r = 0; r < s.rows; ++r)
      for (std::int64_t c = 0; c < s.classes; ++c)
        in.logits->set(r * s.classes + c, sizes[r % 4] + c % 2 * (r % 8 / 4));
  }
  in.targets = &call.indices("targets", s.rows % 2 ? DType::kInt32 : DType::kInt64, {s.rows}, targets);
  in.options.reduction = s.reduction;
  in.options.label_smoothing = s.smoothing;
  in.loss_shape = s.reduction == Reduction::kNone ? Shape{s.rows} : Shape{};
  return in;
}

void build(Call& call, const Spec& s) {
  const Inputs in = inputs_of(call, s, false);
  TestTensor& loss = call.output("loss", DType::kFloat32, in.loss_shape);
  TestTensor* lse = s.lse ? &call.output("lse", DType::kFloat32, {s.rows}) : nullptr;
  call.run = [=, &loss](const ExecutionContext& context) {
    cross_entropy(in.logits->view(), in.targets->view(), loss.view(), view_of(lse), in.options, context);
  };
}

void build_backward(Call& call, const Spec& s) {
  const Inputs in = inputs_of(call, s, s.in_place);
  TestTensor& grad_loss = call.input("grad_loss", DType::kFloat32, in.loss_shape);
  TestTensor& lse = call.input("lse", DType::kFloat32, {s.rows});
  for (std::int64_t r = 0; r < s.rows; ++r) {
    double top = -std::numeric_limits<double>::infinity(), sum = 0;
    for (std::int64_t c = 0; c < s.classes; ++c) top = std::max(top, in.logits->get(r * s.classes + c));
    for (std::int64_t c = 0; c < s.classes; ++c) sum += std::exp(in.logits->get(r * s.classes + c) - top);
    lse.set(r, top + std::log(sum));
  }
  TestTensor* grad = s.in_place ? in.logits : &call.output("grad_logits", s.dtype, {s.rows, s.classes}, s.grad);
  call.run = [=, &grad_loss, &lse](const ExecutionContext& context) {
    cross_entropy_backward(grad_loss.view(), in.logits->view(), in.targets->view(), lse.view(), grad->view(),
                           in.options, context);
  };
}

template <void (*kBuild)(Call&, const Spec&)>
void cases(CaseList& list) {
  constexpr bool kGradient = kBuild == build_backward;  // which alone can be written in the place of the logits
  each_dtype([&](DType dtype, const std::string& suffix) {
    const auto add = [&](const std::string& name, const Spec& spec) {
      list.add(name + suffix, [=](Call& call) { kBuild(call, spec); });
    };
    for (const std::int64_t n : {1, 2, 7, 16, 17, 33, 64, 100, 1000, 5003})
      for (const float smoothing : {0.0f, 0.1f})
        add("classes" + std::to_string(n) + (smoothing > 0 ? "_smoothed" : ""),
            {dtype, 5, n, Reduction::kNone, smoothing});
    for (const Reduction reduction : {Reduction::kNone, Reduction::kSum, Reduction::kMean}) {
      const std::string name = reduction == Reduction::kNone ? "none" : (reduction == Reduction::kSum ? "sum" : "mean");
      Spec spec{dtype, 30, 40, reduction};
      add(name, spec);
      spec.smoothing = 0.2f, spec.ignore_every = 4;
      add(name + "_ignoring", spec);
      spec.ignore_every = 1;
      add(name + "_ignoring_all", spec);
      spec.ignore_every = 0, spec.smoothing = 0, spec.special = true, spec.lse = false;
      add(name + "_special", spec);
      add(name + "_no_rows", {dtype, 0, 40, reduction});
    }
    Spec spec{dtype, 11, 70, Reduction::kNone};
    spec.logits.gap = 3, spec.logits.offset = 1, spec.grad.gap = 5;
    add("gaps", spec);
    spec.in_place = true;
    if (kGradient) add("in_place", spec);
    Spec far{dtype, 2, 50, Reduction::kNone};
    far.logits.strides = far.grad.strides = {kFarStride, 1};
    add("strides_past_2_31", far);
    // Rows of vectors that are walked, and gradients of several pieces; with a gap, of vectors and classes that fill
    // none.
    for (const std::int64_t n : {2056, 10000, 33000}) {
      add("long" + std::to_string(n), {dtype, 3, n});
      Spec uneven{dtype, 4, n + 3, Reduction::kSum, 0.1f};
      uneven.logits.gap = uneven.grad.gap = 5;
      add("long_uneven" + std::to_string(n), uneven);
      uneven.in_place = true;
      if (kGradient) add("long_in_place" + std::to_string(n), uneven);
      uneven.smoothing = 0, uneven.special = true, uneven.lse = false;
      add("long_special" + std::to_string(n), uneven);
      uneven.special = false, uneven.ignore_every = 2, uneven.reduction = Reduction::kNone;
      uneven.logits.gap = uneven.grad.gap = 2;
      add("long_unaligned" + std::to_string(n), uneven);
    }
    for (const std::int64_t n : {7, 40, 1000, 5003, 10000, 33000}) {
      Spec rows{dtype, 8, n, Reduction::kNone};
      rows.far_from_zero = true;
      add("far_from_zero" + std::to_string(n), rows);
      rows.smoothing = 0.1f;
      add("far_from_zero_smoothed" + std::to_string(n), rows);
      rows.in_place = true;
      if (kGradient) add("far_from_zero_in_place" + std::to_string(n), rows);
    }
    add("many_rows", {dtype, 900, 12, Reduction::kMean, 0.1f, true, false, 7});
  });
}

const OpCases forward("cross_entropy", cases<build>);
const OpCases backward("cross_entropy_bwd", cases<build_backward>);

}  // namespace
}  // namespace flashkernel::conformance
