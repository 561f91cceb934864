// Cases of fused_linear: each part alone and all of them, k of every cut, tails of features, rows that lie apart.
#include <cmath>
#include <limits>

#include "conformance/conformance.hpp"
#include "conformance/each_dtype.hpp"
#include "flashkernel/fused_linear.hpp"

namespace flashkernel::conformance {
namespace {

enum class Norm { kNone, kRms, kLayer };

struct Spec {
  DType dtype;
  std::int64_t rows, in, out;
  Norm norm = Norm::kNone;
  bool norm_bias = false, norm_fp32 = false, bias = false, bias_fp32 = false, gated = false, residual = false;
  Activation activation = Activation::kNone;
  bool in_place = false;  // the residual is out
  bool constant = false, transposed = false;
  Layout x = {}, y = {};
  std::int64_t weight_gap = 0;
  std::function<void(TestTensor&)> adjust = {};  // x
};

TensorView view_of(const TestTensor* tensor) { return tensor ? tensor->view() : TensorView(); }

void build(Call& call, const Spec& spec) {
  // Kernels may round what stands before the gate or the residual, and the norm's last bit is another one where its
  // sums are: three roundings for one.
  const double factor = spec.dtype == DType::kFloat32 ? 1 : 3;
  TestTensor& x = call.input("x", spec.dtype, {spec.rows, spec.in}, spec.x);
  Layout of_weight;
  if (spec.transposed) of_weight.order = {1, 0};
  of_weight.gap = spec.weight_gap;
  const std::int64_t features = spec.gated ? 2 * spec.out : spec.out;
  TestTensor& weight = call.input("weight", spec.dtype, {features, spec.in}, of_weight);
  weight.transform([&](double w) { return w / std::sqrt(static_cast<double>(spec.in)); });
  TestTensor* bias =
      spec.bias ? &call.input("bias", spec.bias_fp32 ? DType::kFloat32 : spec.dtype, {features}) : nullptr;
  const DType of_norm = spec.norm_fp32 ? DType::kFloat32 : spec.dtype;
  TestTensor* norm = spec.norm == Norm::kNone ? nullptr : &call.input("norm_weight", of_norm, {spec.in});
  TestTensor* norm_bias = spec.norm_bias ? &call.input("norm_bias", of_norm, {spec.in}) : nullptr;
  TestTensor& out = spec.in_place ? call.in_out("out", spec.dtype, {spec.rows, spec.out}, spec.y, factor)
                                  : call.output("out", spec.dtype, {spec.rows, spec.out}, spec.y, factor);
  TestTensor* residual = spec.in_place   ? &out
                         : spec.residual ? &call.input("residual", spec.dtype, {spec.rows, spec.out}, spec.y)
                                         : nullptr;
  if (spec.adjust) spec.adjust(x);
  call.run = [=, &x, &weight, &out](const ExecutionContext& context) {
    fused_linear(x.view(), weight.view(), view_of(bias), view_of(norm), view_of(norm_bias), view_of(residual),
                 out.view(), spec.activation, spec.gated, spec.norm == Norm::kLayer, 1e-5f, spec.constant, context);
  };
}

void cases(CaseList& list) {
  each_dtype([&](DType dtype, const std::string& suffix) {
    const auto add = [&](const std::string& name, const Spec& spec) -> Case& {
      return list.add(name + suffix, [=](Call& call) { build(call, spec); });
    };
    // In 16 bits for the kernel of few rows, which must take it.
    const auto add_few = [&](const std::string& name, const Spec& spec) {
      Case& added = add("few_" + name, spec);
      if (dtype != DType::kFloat32)
        added.is_for(std::string("fused_linear/cuda/sm80/") + (dtype == DType::kFloat16 ? "f16" : "bf16") +
                     "/few_rows");
    };
    Spec spec{dtype, 1, 2048, 72, Norm::kRms};
    spec.constant = true;
    add_few("rms_r1", spec);  // 16 chunks of 4 warps
    spec = {dtype, 3, 1056, 140, Norm::kRms, false, true};
    spec.x.gap = 8, spec.weight_gap = 16, spec.y.gap = 3;
    add_few("rms_fp32_gaps_r3", spec);  // a tail of k and of features, some tiles a block
    spec = {dtype, 4, 2080, 40, Norm::kRms};
    spec.bias = spec.residual = true;
    add_few("rms_residual_r4", spec);  // 8 warps
    spec = {dtype, 1, 768, 70, Norm::kLayer, true};
    spec.bias = spec.constant = true, spec.activation = Activation::kGeluTanh;
    add_few("layer_gelu_tanh_r1", spec);  // 8 chunks
    spec = {dtype, 3, 96, 300, Norm::kLayer, false};
    spec.bias = spec.bias_fp32 = true, spec.activation = Activation::kGelu;
    add_few("layer_gelu_r3", spec);
    spec = {dtype, 2, 64, 42, Norm::kRms};
    spec.gated = spec.constant = true, spec.activation = Activation::kSilu;
    add_few("swiglu_r2", spec);
    spec = {dtype, 4, 160, 90, Norm::kRms};
    spec.gated = spec.bias = spec.residual = true, spec.activation = Activation::kSilu;
    add_few("swiglu_all_r4", spec);
    spec = {dtype, 1, 1024, 36};
    spec.gated = true, spec.activation = Activation::kSilu;
    add_few("swiglu_alone_r1", spec);
    spec = {dtype, 1, 8192, 24};  // two pieces of k
    spec.residual = spec.constant = true;
    add_few("residual_r1", spec);
    spec = {dtype, 4, 4128, 200};  // the second of one chunk
    spec.in_place = true;
    add_few("residual_in_place_r4", spec);
    spec = {dtype, 2, 3072, 300};
    spec.activation = Activation::kSilu, spec.in_place = spec.bias = spec.constant = true;
    add_few("silu_in_place_r2", spec);
    spec = {dtype, 4, 128, 24, Norm::kRms};
    spec.adjust = [](TestTensor& x) {  // not in the rows beside it
      x.set(128 + 3, std::numeric_limits<double>::quiet_NaN());
      x.set(2 * 128 + 5, std::numeric_limits<double>::infinity());
    };
    add_few("special_values_r4", spec);

    spec = {dtype, 19, 40, 30, Norm::kRms};
    spec.bias = spec.residual = true, spec.activation = Activation::kGelu;
    add("rows19", spec);
    spec = {dtype, 33, 72, 48, Norm::kLayer, true};
    spec.gated = spec.in_place = true, spec.activation = Activation::kSilu;
    add("rows33_swiglu", spec);
    spec = {dtype, 3, 33, 17, Norm::kRms};
    spec.gated = true, spec.activation = Activation::kSilu;
    spec.x.offset = 1, spec.x.gap = 3;
    add("odd", spec);
    spec = {dtype, 2, 64, 40, Norm::kRms};
    spec.transposed = spec.residual = true;
    add("in_out", spec);
    add("plain", {dtype, 5, 24, 9});
    add("no_rows", {dtype, 0, 32, 5, Norm::kRms});
  });
}

const OpCases registration("fused_linear", cases);

}  // namespace
}  // namespace flashkernel::conformance
