// fused_linear as the ops that it stands for, one after the other: the rows `fused_linear/cpu/composed` and
// `fused_linear/cuda/generic`. Each of them runs by its own best kernel, so the call takes no longer than they do.
#include "flashkernel/elementwise.hpp"
#include "flashkernel/execution.hpp"
#include "flashkernel/linear.hpp"
#include "flashkernel/norm.hpp"
#include "ops/fused_linear_params.hpp"

namespace flashkernel {
namespace {

constexpr std::size_t kAlignment = 256;

std::size_t bytes_of(const FusedLinearParams& p, std::int64_t columns) {
  const auto bytes = static_cast<std::size_t>(p.rows * columns) * static_cast<std::size_t>(dtype_bytes(p.dtype));
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

/// Of the workspace: norm(x), and what comes of the product where something follows it.
std::size_t norm_bytes(const FusedLinearParams& p) { return p.norm_weight ? bytes_of(p, p.in_features) : 0; }
std::size_t product_bytes(const FusedLinearParams& p) {
  return p.gated || p.residual ? bytes_of(p, p.weight_rows()) : 0;
}

TensorView vector(const TypedPointer& pointer, std::int64_t length, Device device) {
  return pointer ? TensorView(const_cast<void*>(pointer.data), pointer.dtype, {length}, device) : TensorView();
}

}  // namespace

Plan plan_composed_fused_linear(const FusedLinearParams& p, const DeviceFacts& facts) {
  return Plan::of(facts.invariant, norm_bytes(p) + product_bytes(p));
}

void composed_fused_linear(const FusedLinearParams& p, const Plan& plan, void* workspace, Stream stream) {
  ExecutionContext context;
  context.stream = stream;
  context.invariant = plan.as<bool>();
  const auto matrix = [&](const void* data, std::int64_t columns, std::int64_t stride) {
    return TensorView(const_cast<void*>(data), p.dtype, {p.rows, columns}, {stride, 1}, p.device);
  };
  TensorView x = matrix(p.x, p.in_features, p.stride_x_row);
  if (p.norm_weight) {
    const TensorView normed = matrix(workspace, p.in_features, p.in_features);
    const TensorView weight = vector(p.norm_weight, p.in_features, p.device);
    if (p.centred)
      layer_norm(x, {}, weight, vector(p.norm_bias, p.in_features, p.device), normed, {}, p.eps, context);
    else
      rms_norm(x, {}, weight, normed, {}, p.eps, context);
    x = normed;
  }
  const TensorView weight(const_cast<void*>(p.weight), p.dtype, {p.weight_rows(), p.in_features},
                          {p.stride_weight_out, p.stride_weight_in}, p.device);
  const TensorView bias = vector(p.bias, p.weight_rows(), p.device);
  const TensorView out = matrix(p.out, p.out_features, p.stride_out_row);
  if (!p.gated && !p.residual) return linear(x, weight, bias, out, {}, p.activation, context);
  const TensorView product = matrix(static_cast<char*>(workspace) + norm_bytes(p), p.weight_rows(), p.weight_rows());
  linear(x, weight, bias, product, {}, p.gated ? Activation::kNone : p.activation, context);
  TensorView result = matrix(product.data, p.out_features, p.weight_rows());
  if (p.gated) {
    const char* const up = static_cast<const char*>(product.data) + p.out_features * dtype_bytes(p.dtype);
    const TensorView& to = p.residual ? result : out;  // the gate's place may be written
    swiglu(result, matrix(up, p.out_features, p.weight_rows()), to, context);
  }
  if (p.residual) add(result, matrix(p.residual, p.out_features, p.stride_residual_row), out, context);
}

}  // namespace flashkernel
