// Cases of linear_cross_entropy and linear_cross_entropy_bwd: one chunk and several, of classes and of rows; every
// option. Elements of x are -1, 0 or 1 and those of the weight quarters, so that logits are exact in every dtype,
// whatever kernel of linear makes them and in whatever order it adds.
#include <cmath>
#include <limits>

#include "conformance/conformance.hpp"
#include "conformance/each_dtype.hpp"
#include "flashkernel/loss.hpp"

namespace flashkernel::conformance {
namespace {

struct Spec {
  DType dtype;
  std::int64_t tokens, features, classes;
  LinearCrossEntropyOptions options = {};
  bool bias = false, bias_fp32 = false, class_weights = false, float32_weight = false;
  bool log_prob = false;  // linear_selected_log_prob
  float temperature = 1;
  bool more_outputs = true;
  int ignore_every = 0;
  bool special = false;  // a NaN, infinities
  double far = 0;        // what every class's bias is
  Layout x = {}, weight = {};
};

TensorView view_of(const TestTensor* tensor) { return tensor ? tensor->view() : TensorView(); }

struct Inputs {
  TestTensor *x, *weight, *bias, *targets, *class_weights;
};

Inputs inputs_of(Call& call, const Spec& s) {
  Inputs in{};
  in.x = &call.input("x", s.dtype, {s.tokens, s.features}, s.x);
  in.x->transform([](double x) { return x < -0.5 ? -1.0 : (x > 0.5 ? 1.0 : 0.0); });
  in.weight = &call.input("weight", s.dtype, {s.classes, s.features}, s.weight);
  in.weight->transform([](double w) { return std::round(std::fmax(-2, std::fmin(2, 2 * w))) / 4; });
  if (s.bias) {
    in.bias = &call.input("bias", s.bias_fp32 ? DType::kFloat32 : s.dtype, {s.classes});
    in.bias->transform([](double b) { return std::round(4 * b) / 4; });
    if (s.far != 0) in.bias->transform([&](double) { return s.far; });
    if (s.special) {
      in.bias->set(0, -std::numeric_limits<double>::infinity());
      in.bias->set(s.classes - 1, -std::numeric_limits<double>::infinity());
    }
  }
  if (s.special) in.x->set(0, std::numeric_limits<double>::quiet_NaN());
  std::vector<std::int64_t> targets;
  for (std::int64_t r = 0; r < s.tokens; ++r) {
    const bool ignored = s.ignore_every > 0 && r % s.ignore_every == 0;
    targets.push_back(ignored ? s.options.ignore_index : call.random.integer(0, s.classes - 1));
  }
  in.targets = &call.indices("targets", s.tokens % 2 ? DType::kInt32 : DType::kInt64, {s.tokens}, targets);
  if (s.class_weights) {
    in.class_weights = &call.input("class_weights", DType::kFloat32, {s.classes});
    in.class_weights->transform([](double w) { return std::abs(w); });
  }
  return in;
}

Shape loss_shape(const Spec& s) {
  return s.log_prob || s.options.reduction == Reduction::kNone ? Shape{s.tokens} : Shape{};
}

void build(Call& call, const Spec& s) {
  const Inputs in = inputs_of(call, s);
  TestTensor& loss = call.output("loss", DType::kFloat32, loss_shape(s));
  TestTensor* z = s.more_outputs && !s.log_prob ? &call.output("z_loss", DType::kFloat32, loss_shape(s)) : nullptr;
  TestTensor* lse = s.more_outputs ? &call.output("lse", DType::kFloat32, {s.tokens}) : nullptr;
  call.run = [=, &loss](const ExecutionContext& context) {
    if (s.log_prob)
      linear_selected_log_prob(in.x->view(), in.weight->view(), view_of(in.bias), in.targets->view(), loss.view(),
                               view_of(lse), s.options.softcap, s.temperature, s.options.ignore_index, context);
    else
      linear_cross_entropy(in.x->view(), in.weight->view(), view_of(in.bias), in.targets->view(),
                           view_of(in.class_weights), loss.view(), view_of(z), view_of(lse), s.options, context);
  };
}

void build_backward(Call& call, const Spec& s) {
  const Inputs in = inputs_of(call, s);
  TestTensor& grad_loss = call.input("grad_loss", DType::kFloat32, loss_shape(s));
  TestTensor& lse = call.input("lse", DType::kFloat32, {s.tokens});
  call.compute_once({&lse}, [&] {
    const auto host = [&](const TestTensor* tensor) { return tensor ? call.on_host(tensor->view()) : TensorView(); };
    std::vector<float> losses(static_cast<std::size_t>(s.tokens));
    linear_selected_log_prob(host(in.x), host(in.weight), host(in.bias), host(in.targets),
                             TensorView(losses.data(), DType::kFloat32, {s.tokens}), host(&lse), s.options.softcap,
                             s.log_prob ? s.temperature : 1.0f, s.options.ignore_index);
  });
  // Gradients of logits are rounded to the dtype, one unit apart where two kernels' exponentials are, and so are parts.
  const bool half = s.dtype != DType::kFloat32;
  const double factor = half ? 4 : 1;
  TestTensor& grad_x = call.output("grad_x", s.dtype, {s.tokens, s.features}, s.x, factor);
  TestTensor& grad_weight = call.output("grad_weight", s.float32_weight ? DType::kFloat32 : s.dtype,
                                        {s.classes, s.features}, {}, s.float32_weight && half ? 800 : factor);
  TestTensor* grad_bias = s.bias ? &call.output("grad_bias", s.bias_fp32 ? DType::kFloat32 : s.dtype, {s.classes}, {},
                                                s.bias_fp32 && half ? 800 : factor)
                                 : nullptr;
  call.run = [=, &grad_loss, &lse, &grad_x, &grad_weight](const ExecutionContext& context) {
    const LinearGradients gradients{grad_x.view(), grad_weight.view(), view_of(grad_bias)};
    if (s.log_prob)
      linear_selected_log_prob_backward(grad_loss.view(), in.x->view(), in.weight->view(), view_of(in.bias),
                                        in.targets->view(), lse.view(), gradients, s.options.softcap, s.temperature,
                                        s.options.ignore_index, context);
    else
      linear_cross_entropy_backward(grad_loss.view(), in.x->view(), in.weight->view(), view_of(in.bias),
                                    in.targets->view(), view_of(in.class_weights), lse.view(), gradients, s.options,
                                    context);
  };
}

template <void (*kBuild)(Call&, const Spec&)>
void cases(CaseList& list) {
  each_dtype([&](DType dtype, const std::string& suffix) {
    const auto add = [&](const std::string& name, const Spec& spec) {
      list.add(name + suffix, [=](Call& call) { kBuild(call, spec); });
    };
    LinearCrossEntropyOptions none;
    none.reduction = Reduction::kNone;
    for (const std::int64_t n : {1, 2, 7, 33, 256, 1000, 1024, 1025, 2500})
      add("classes" + std::to_string(n), {dtype, 5, 16, n, none});
    add("segments_of_a_gpu", {dtype, 3, 8, 8205, none});
    for (const std::int64_t tokens : {1, 2, 63, 64, 65})
      add("tokens" + std::to_string(tokens), {dtype, tokens, 16, 40, none});
    Spec rows{dtype, 520, 8, 1100, {}, true};  // two chunks of rows on the CPU
    add("chunks_of_rows", rows);
    rows.float32_weight = rows.bias_fp32 = true;
    add("chunks_of_rows_fp32_weight", rows);
    add("no_tokens", {dtype, 0, 16, 40, {}});
    add("no_features", {dtype, 3, 0, 40, none, true});
    for (const Reduction reduction : {Reduction::kNone, Reduction::kSum, Reduction::kMean}) {
      const std::string name = reduction == Reduction::kNone ? "none" : (reduction == Reduction::kSum ? "sum" : "mean");
      Spec spec{dtype, 30, 16, 1300};
      spec.options.reduction = reduction;
      add(name, spec);
      spec.bias = true, spec.ignore_every = 4, spec.options.ignore_index = 5;
      add(name + "_ignoring", spec);
      spec.class_weights = true;
      add(name + "_class_weights", spec);
      spec.options.label_smoothing = 0.2f;
      add(name + "_class_weights_smoothed", spec);
      spec.options.z_loss = 0.01f, spec.options.softcap = 3.0f, spec.bias_fp32 = spec.float32_weight = true;
      add(name + "_everything", spec);
      spec.more_outputs = false, spec.class_weights = false;
      add(name + "_smoothed", spec);
      spec.ignore_every = 1;
      add(name + "_ignoring_all", spec);
    }
    Spec special{dtype, 4, 16, 1300, none, true};
    special.special = true;
    add("special", special);
    Spec far{dtype, 30, 16, 1300, none, true};  // LSEs beside which the number of classes is lost
    far.ignore_every = 7;
    far.far = dtype == DType::kFloat16 ? -60000 : -3e38;
    add("far_below", far);
    far.far = dtype == DType::kFloat16 ? 60000 : 1e6;
    far.options.label_smoothing = 0.2f;
    add("far_above", far);
    Spec layouts{dtype, 9, 16, 50, none};
    layouts.x.gap = 8, layouts.weight.order = {1, 0};
    add("gaps_and_a_turned_weight", layouts);
    Spec log_prob{dtype, 9, 16, 1300, {}, true};
    log_prob.log_prob = true;
    add("log_prob", log_prob);
    log_prob.temperature = 0.7f, log_prob.options.softcap = 4.0f, log_prob.ignore_every = 3;
    add("log_prob_everything", log_prob);
  });
}

const OpCases forward("linear_cross_entropy", cases<build>);
const OpCases backward("linear_cross_entropy_bwd", cases<build_backward>);

}  // namespace
}  // namespace flashkernel::conformance
