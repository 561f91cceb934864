// Front door of linear and its gradient: folds leading dims into rows, or runs once per run of rows that lie one stride
// apart.
#include "flashkernel/linear.hpp"

#include "ops/check.hpp"
#include "ops/linear_params.hpp"
#include "ops/merge_dims.hpp"
#include "ops/select.hpp"

namespace flashkernel {
namespace {

/// x-like view [..., features] with the leading dims of `like`.
void check_rows(const Checker& check, const char* name, const TensorView& view, const char* like_name,
                const TensorView& like, std::int64_t features, const char* why) {
  check.dtype(name, view, like.dtype);
  check.ndim(name, view, like.ndim, like.ndim);
  for (int d = 0; d < like.ndim - 1; ++d)
    check.extent(name, view, d, like.shape[d], (std::string(like_name) + ".shape[" + std::to_string(d) + "]").c_str());
  check.extent(name, view, view.ndim - 1, features, why);
  check.last_dim_contiguous(name, view);
}

struct WeightStrides {
  std::int64_t out, in;
};

/// The strides of a weight, one of which is 1: a dim of one element may take any.
WeightStrides weight_strides(const Checker& check, const char* name, const TensorView& weight) {
  WeightStrides strides{weight.strides[0], weight.strides[1]};
  if (weight.numel() == 0) return {weight.shape[1], 1};
  if (weight.shape[1] == 1 && strides.out != 1) strides.in = 1;
  if (weight.shape[0] == 1 && strides.in != 1) strides.out = 1;
  if (strides.out != 1 && strides.in != 1)
    check.fail(std::string(name) + " has strides [" + std::to_string(strides.out) + ", " + std::to_string(strides.in) +
               "]; one of its dims must be contiguous (stride 1): make a contiguous copy");
  return strides;
}

void check_activation(const Checker& check, Activation activation) {
  if (activation > Activation::kSilu)
    check.fail("activation=" + std::to_string(static_cast<int>(activation)) +
               "; needs kNone, kGeluTanh, kGelu or kSilu");
}

/// What linear and its gradient take alike: x [..., in], weight [out, in] and the activation.
template <class Params>
void take_inputs(const Checker& check, const TensorView& x, const TensorView& weight, Activation activation,
                 Params& params) {
  check_activation(check, activation);
  check.floating("x", x);
  check.ndim("x", x, 1, kMaxDims);
  check.last_dim_contiguous("x", x);
  check.dtype("weight", weight, x.dtype);
  check.ndim("weight", weight, 2, 2);
  check.extent("weight", weight, 1, x.shape[x.ndim - 1], "x's last dim");
  params.dtype = x.dtype;
  params.device = x.device;
  params.in_features = weight.shape[1];
  params.out_features = weight.shape[0];
  params.activation = activation;
  const WeightStrides strides = weight_strides(check, "weight", weight);
  params.weight = weight.data;
  params.stride_weight_out = strides.out;
  params.stride_weight_in = strides.in;
}

}  // namespace

void linear(const TensorView& x, const TensorView& weight, const TensorView& bias, const TensorView& out,
            const TensorView& preactivation, Activation activation, const ExecutionContext& context) {
  const Checker check("linear", x.device);
  LinearParams params;
  take_inputs(check, x, weight, activation, params);
  params.bias = check.optional_vector("bias", bias, params.out_features, x.dtype);
  check_rows(check, "out", out, "x", x, params.out_features, "weight.shape[0]");
  check.writable("out", out);
  check.no_overlap("out", out, "x", x);
  check.no_overlap("out", out, "weight", weight);
  check.no_overlap("out", out, "bias", bias);
  if (preactivation.defined()) {
    check_rows(check, "preactivation", preactivation, "x", x, params.out_features, "weight.shape[0]");
    check.writable("preactivation", preactivation);
    check.no_overlap("preactivation", preactivation, "x", x);
    check.no_overlap("preactivation", preactivation, "weight", weight);
    check.no_overlap("preactivation", preactivation, "bias", bias);
    check.no_overlap("preactivation", preactivation, "out", out);
  }
  if (out.numel() == 0 && !context.explain) return;

  const TensorView* const views[] = {&out, &x, &preactivation};
  const auto dims = merge_leading_dims<3>(views, 1, DimOrder::kByStride);
  for_each_run_of_rows(dims, context.explain != nullptr,
                       [&](std::int64_t rows, const std::int64_t(&stride)[3], const std::int64_t(&offset)[3]) {
                         params.rows = rows;
                         params.out = element_at(out, offset[0]);
                         params.x = element_at(x, offset[1]);
                         params.preactivation = element_at(preactivation, offset[2]);
                         params.stride_out_row = stride[0];
                         params.stride_x_row = stride[1];
                         params.stride_preactivation_row = stride[2];
                         dispatch(params, params.device, context);
                       });
}

void linear_backward(const TensorView& grad_out, const TensorView& x, const TensorView& weight,
                     const TensorView& preactivation, const LinearGradients& gradients, Activation activation,
                     const ExecutionContext& context) {
  const Checker check("linear_backward", x.device);
  LinearBackwardParams params;
  take_inputs(check, x, weight, activation, params);
  check_rows(check, "grad_out", grad_out, "x", x, params.out_features, "weight.shape[0]");
  TensorView saved;  // stays absent when no activation needs it
  if (activation != Activation::kNone) {
    if (!preactivation.defined()) check.fail("preactivation is absent; an activation needs it");
    check_rows(check, "preactivation", preactivation, "x", x, params.out_features, "weight.shape[0]");
    saved = preactivation;
  }

  const TensorView* const inputs[] = {&grad_out, &x, &weight, &saved};
  const char* const input_names[] = {"grad_out", "x", "weight", "preactivation"};
  const auto check_written = [&](const char* name, const TensorView& view) {
    check.writable(name, view);
    for (int i = 0; i < 4; ++i) check.no_overlap(name, view, input_names[i], *inputs[i]);
  };
  if (gradients.x.defined()) {
    check_rows(check, "gradients.x", gradients.x, "x", x, params.in_features, "x's last dim");
    check_written("gradients.x", gradients.x);
  }
  if (gradients.weight.defined()) {
    check.dtype("gradients.weight", gradients.weight, x.dtype);
    check.same_shape("gradients.weight", gradients.weight, "weight", weight);
    check_written("gradients.weight", gradients.weight);
    check.no_overlap("gradients.weight", gradients.weight, "gradients.x", gradients.x);
    const WeightStrides written = weight_strides(check, "gradients.weight", gradients.weight);
    params.stride_grad_weight_out = written.out;
    params.stride_grad_weight_in = written.in;
    params.grad_weight = gradients.weight.data;
  }
  if (gradients.bias.defined()) {
    check.optional_vector("gradients.bias", gradients.bias, params.out_features, x.dtype);
    check_written("gradients.bias", gradients.bias);
    check.no_overlap("gradients.bias", gradients.bias, "gradients.x", gradients.x);
    check.no_overlap("gradients.bias", gradients.bias, "gradients.weight", gradients.weight);
    params.grad_bias = gradients.bias.data;
    params.grad_bias_dtype = gradients.bias.dtype;
  }

  const TensorView* const views[] = {&gradients.x, &grad_out, &x, &saved};
  const TensorView* const without_grad_x[] = {&grad_out, &grad_out, &x, &saved};
  const auto dims = merge_leading_dims<4>(gradients.x.defined() ? views : without_grad_x, 1, DimOrder::kByStride);
  if (dims.ndim > 1 && (gradients.weight.defined() || gradients.bias.defined()))
    check.fail(
        "the leading dims of x, grad_out, preactivation and gradients.x do not fold into rows with one stride; the "
        "gradients of weight and bias need that: make contiguous copies");
  const bool wants_x = gradients.x.defined() && gradients.x.numel() > 0;
  const bool wants_weight = gradients.weight.defined() && gradients.weight.numel() > 0;
  const bool wants_bias = gradients.bias.defined() && gradients.bias.numel() > 0;
  if (!wants_x && !wants_weight && !wants_bias && !context.explain) return;

  for_each_run_of_rows(dims, context.explain != nullptr,
                       [&](std::int64_t rows, const std::int64_t(&stride)[4], const std::int64_t(&offset)[4]) {
                         params.rows = rows;
                         params.grad_x = element_at(gradients.x, offset[0]);
                         params.grad_out = element_at(grad_out, offset[1]);
                         params.x = element_at(x, offset[2]);
                         params.preactivation = element_at(saved, offset[3]);
                         params.stride_grad_x_row = stride[0];
                         params.stride_grad_out_row = stride[1];
                         params.stride_x_row = stride[2];
                         params.stride_preactivation_row = stride[3];
                         dispatch(params, params.device, context);
                       });
}

}  // namespace flashkernel
