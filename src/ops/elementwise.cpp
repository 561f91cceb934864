// Front doors of add, swiglu and its gradient: one shape, any strides, dims merged and ordered by the output's strides.
#include "flashkernel/elementwise.hpp"

#include "ops/check.hpp"
#include "ops/elementwise_params.hpp"
#include "ops/merge_dims.hpp"
#include "ops/select.hpp"

namespace flashkernel {
namespace {

/// out of two inputs of its own shape, which may be either of them.
void check_pair(const Checker& check, const char* a_name, const TensorView& a, const char* b_name, const TensorView& b,
                const TensorView& out) {
  check.floating(a_name, a);
  check.like(b_name, b, a_name, a);
  check.like("out", out, a_name, a);
  check.writable("out", out);
  check.same_or_apart("out", out, a_name, a);
  check.same_or_apart("out", out, b_name, b);
}

/// Copies merged dims into a params struct's arrays; kernels get at least one dim.
template <class Params, int N>
void set_dims(Params& params, const MergedDims<N>& dims, std::int64_t* const (&strides)[N]) {
  params.ndim = dims.ndim > 0 ? dims.ndim : 1;
  params.shape[0] = 1;
  for (int d = 0; d < dims.ndim; ++d) {
    params.shape[d] = dims.shape[d];
    for (int n = 0; n < N; ++n) strides[n][d] = dims.strides[n][d];
  }
  // One element: a unit stride lets a kernel take its contiguous path.
  for (int n = 0; n < N && dims.ndim == 0; ++n) strides[n][0] = 1;
}

}  // namespace

void add(const TensorView& a, const TensorView& b, const TensorView& out, const ExecutionContext& context) {
  check_pair(Checker("add", a.device), "a", a, "b", b, out);
  if (out.numel() == 0 && !context.explain) return;
  AddParams params;
  params.dtype = a.dtype;
  params.device = a.device;
  params.a = a.data;
  params.b = b.data;
  params.out = out.data;
  const auto dims = merge_leading_dims<3>({&out, &a, &b}, 0, DimOrder::kByStride);
  set_dims<AddParams, 3>(params, dims, {params.stride_out, params.stride_a, params.stride_b});
  dispatch(params, params.device, context);
}

void swiglu(const TensorView& gate, const TensorView& up, const TensorView& out, const ExecutionContext& context) {
  check_pair(Checker("swiglu", gate.device), "gate", gate, "up", up, out);
  if (out.numel() == 0 && !context.explain) return;
  SwigluParams params;
  params.dtype = gate.dtype;
  params.device = gate.device;
  params.gate = gate.data;
  params.up = up.data;
  params.out = out.data;
  const auto dims = merge_leading_dims<3>({&out, &gate, &up}, 0, DimOrder::kByStride);
  set_dims<SwigluParams, 3>(params, dims, {params.stride_out, params.stride_gate, params.stride_up});
  dispatch(params, params.device, context);
}

void swiglu_backward(const TensorView& grad_out, const TensorView& gate, const TensorView& up,
                     const TensorView& grad_gate, const TensorView& grad_up, const ExecutionContext& context) {
  const Checker check("swiglu_backward", gate.device);
  check.floating("gate", gate);
  check.like("up", up, "gate", gate);
  check.like("grad_out", grad_out, "gate", gate);
  const TensorView* const written[] = {&grad_gate, &grad_up};
  const char* const written_names[] = {"grad_gate", "grad_up"};
  for (int i = 0; i < 2; ++i) {
    if (!written[i]->defined()) continue;
    check.like(written_names[i], *written[i], "gate", gate);
    check.writable(written_names[i], *written[i]);
    check.same_or_apart(written_names[i], *written[i], "grad_out", grad_out);
    check.same_or_apart(written_names[i], *written[i], "gate", gate);
    check.same_or_apart(written_names[i], *written[i], "up", up);
  }
  check.no_overlap("grad_up", grad_up, "grad_gate", grad_gate);
  const bool nothing = gate.numel() == 0 || (!grad_gate.defined() && !grad_up.defined());
  if (nothing && !context.explain) return;
  SwigluBackwardParams params;
  params.dtype = gate.dtype;
  params.device = gate.device;
  params.grad_out = grad_out.data;
  params.gate = gate.data;
  params.up = up.data;
  params.grad_gate = element_at(grad_gate, 0);
  params.grad_up = element_at(grad_up, 0);
  const auto dims = merge_leading_dims<5>({&gate, &grad_out, &up, &grad_gate, &grad_up}, 0, DimOrder::kByStride);
  set_dims<SwigluBackwardParams, 5>(
      params, dims,
      {params.stride_gate, params.stride_grad_out, params.stride_up, params.stride_grad_gate, params.stride_grad_up});
  dispatch(params, params.device, context);
}

}  // namespace flashkernel
