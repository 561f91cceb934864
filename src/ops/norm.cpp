// Front doors of LayerNorm and RMSNorm: both fill NormParams; leading dims become rows, or runs of rows.
#include "flashkernel/norm.hpp"

#include <cmath>

#include "ops/check.hpp"
#include "ops/merge_dims.hpp"
#include "ops/norm_params.hpp"
#include "ops/select.hpp"

namespace flashkernel {
namespace {

void check_input(const Checker& check, const char* name, const TensorView& view) {
  check.floating(name, view);
  check.ndim(name, view, 1, kMaxDims);
  check.last_dim_contiguous(name, view);
}

void check_rows_like(const Checker& check, const char* name, const TensorView& view, const char* first_name,
                     const TensorView& first) {
  check.like(name, view, first_name, first);
  check.last_dim_contiguous(name, view);
}

/// fp32 of x's shape less the last dim, contiguous.
void check_statistic(const Checker& check, const char* name, const TensorView& view, const char* x_name,
                     const TensorView& x) {
  check.dtype(name, view, DType::kFloat32);
  check.ndim(name, view, x.ndim - 1, x.ndim - 1);
  for (int d = 0; d < x.ndim - 1; ++d)
    check.extent(name, view, d, x.shape[d], (std::string(x_name) + ".shape[" + std::to_string(d) + "]").c_str());
  check.contiguous(name, view);
}

float* row_pointer(const TensorView& view, std::int64_t offset) {
  return static_cast<float*>(element_at(view, offset));
}

/// What is added to each weight.
float offset_of(const Checker& check, const TensorView& weight, const char* name, float offset) {
  if (!std::isfinite(offset)) check.fail(std::string(name) + "=" + std::to_string(offset) + "; needs a finite number");
  if (offset != 0.0f && !weight.defined())
    check.fail(std::string(name) + "=" + std::to_string(offset) + " but weight is absent; give a weight or leave it 0");
  return offset;
}

/// The order in which rows are walked. Kernels take a run's statistics as neighbours in memory; statistics are
/// contiguous, so with them rows keep the order of the shape, whatever the strides of the others.
DimOrder row_order(const TensorView& mean, const TensorView& rstd) {
  return mean.defined() || rstd.defined() ? DimOrder::kKeep : DimOrder::kByStride;
}

/// An output of 8 bits: one scale that is read, or one a row that is written. Both absent: out is of x's dtype.
struct Scales {
  TensorView scale, scales;
};

void check_quantized(const Checker& check, const TensorView& x, const TensorView& out, const Scales& by) {
  check.tensor("out", out);
  if (!is_quantized(out.dtype))
    check.fail(std::string("out is ") + dtype_name(out.dtype) + "; needs float8_e4m3fn or int8");
  check.same_shape("out", out, "x", x);
  check.last_dim_contiguous("out", out);
  check.no_overlap("out", out, "x", x);
  if (by.scale.defined() == by.scales.defined())
    check.fail(
        by.scale.defined()
            ? "scale and scales are given; give one of them: what divides all rows, or where each row's is written"
            : "scale and scales are absent; give one of them: what divides all rows, or where each row's is written");
  if (by.scales.defined()) return check_statistic(check, "scales", by.scales, "x", x);
  check.dtype("scale", by.scale, DType::kFloat32);
  check.ndim("scale", by.scale, 0, 1);
  if (by.scale.numel() != 1) check.fail("scale has " + std::to_string(by.scale.numel()) + " numbers; needs one");
}

void normalise(NormKind kind, const char* op, const TensorView& x, const TensorView& residual, const TensorView& weight,
               const TensorView& bias, const Scales* by, const TensorView& out, const NormSaved& saved, float eps,
               const ExecutionContext& context) {
  const Checker check(op, x.device);
  check_input(check, "x", x);
  NormParams params;
  params.kind = kind;
  params.dtype = x.dtype;
  params.device = x.device;
  params.features = x.shape[x.ndim - 1];
  params.eps = eps;
  if (!(eps >= 0.0f) || std::isinf(eps))
    check.fail("eps=" + std::to_string(eps) + "; needs a finite number, 0 or more");
  params.weight = check.optional_floating_vector("weight", weight, params.features);
  params.weight_offset = offset_of(check, weight, "saved.weight_offset", saved.weight_offset);
  params.bias = check.optional_floating_vector("bias", bias, params.features);
  if (by) {
    check_quantized(check, x, out, *by);
    params.scale = static_cast<const float*>(element_at(by->scale, 0));
  } else {
    check_rows_like(check, "out", out, "x", x);
  }
  if (by) params.out_dtype = out.dtype;
  const TensorView scales = by ? by->scales : TensorView();
  if (residual.defined()) {
    check_rows_like(check, "residual", residual, "x", x);
    if (!saved.residual_out.defined())
      check.fail("saved.residual_out is absent; it is required when residual is given");
    check_rows_like(check, "saved.residual_out", saved.residual_out, "x", x);
  } else if (saved.residual_out.defined()) {
    check.fail("saved.residual_out is given but residual is absent; give both or neither");
  }
  if (saved.mean.defined()) {
    check.require(kind == NormKind::kLayerNorm, "saved.mean is given; RMSNorm has no mean: leave it out");
    check_statistic(check, "saved.mean", saved.mean, "x", x);
  }
  if (saved.rstd.defined()) check_statistic(check, "saved.rstd", saved.rstd, "x", x);

  const TensorView* const written[] = {&out, &saved.residual_out, &saved.mean, &saved.rstd, &scales};
  const char* const names[] = {"out", "saved.residual_out", "saved.mean", "saved.rstd", "scales"};
  for (int i = 0; i < 5; ++i) {
    if (!written[i]->defined()) continue;
    check.writable(names[i], *written[i]);
    check.same_or_apart(names[i], *written[i], "x", x);
    check.same_or_apart(names[i], *written[i], "residual", residual);
    if (by) check.no_overlap(names[i], *written[i], "scale", by->scale);
    check.no_overlap(names[i], *written[i], "weight", weight);
    check.no_overlap(names[i], *written[i], "bias", bias);
    for (int j = 0; j < i; ++j) check.no_overlap(names[i], *written[i], names[j], *written[j]);
  }
  if (x.numel() == 0 && params.features > 0 && !context.explain) return;
  if (params.features == 0) check.fail("x's last dim is 0; needs at least one feature");

  const auto dims = merge_leading_dims<7>({&out, &x, &residual, &saved.residual_out, &saved.mean, &saved.rstd, &scales},
                                          1, scales.defined() ? DimOrder::kKeep : row_order(saved.mean, saved.rstd));
  for_each_run_of_rows(dims, context.explain != nullptr,
                       [&](std::int64_t rows, const std::int64_t(&stride)[7], const std::int64_t(&offset)[7]) {
                         params.rows = rows;
                         params.scales = row_pointer(scales, offset[6]);
                         params.out = element_at(out, offset[0]);
                         params.x = element_at(x, offset[1]);
                         params.residual = element_at(residual, offset[2]);
                         params.residual_out = element_at(saved.residual_out, offset[3]);
                         params.mean = row_pointer(saved.mean, offset[4]);
                         params.rstd = row_pointer(saved.rstd, offset[5]);
                         params.stride_out_row = stride[0];
                         params.stride_x_row = stride[1];
                         params.stride_residual_row = stride[2];
                         params.stride_residual_out_row = stride[3];
                         dispatch(params, params.device, context);
                       });
}

void normalise_backward(NormKind kind, const char* op, const TensorView& grad_out, const TensorView& h,
                        const TensorView& weight, const TensorView& mean, const TensorView& rstd,
                        const TensorView& grad_residual_out, const NormGradients& gradients,
                        const ExecutionContext& context) {
  const Checker check(op, h.device);
  check_input(check, "h", h);
  check_rows_like(check, "grad_out", grad_out, "h", h);
  NormBackwardParams params;
  params.kind = kind;
  params.dtype = h.dtype;
  params.device = h.device;
  params.features = h.shape[h.ndim - 1];
  if (params.features == 0) check.fail("h's last dim is 0; needs at least one feature");
  params.weight = check.optional_floating_vector("weight", weight, params.features);
  params.weight_offset = offset_of(check, weight, "gradients.weight_offset", gradients.weight_offset);
  if (kind == NormKind::kLayerNorm) check_statistic(check, "mean", mean, "h", h);
  check_statistic(check, "rstd", rstd, "h", h);
  if (grad_residual_out.defined()) check_rows_like(check, "grad_residual_out", grad_residual_out, "h", h);

  const TensorView* const inputs[] = {&grad_out, &h, &weight, &mean, &rstd};
  const char* const input_names[] = {"grad_out", "h", "weight", "mean", "rstd"};
  const auto check_written = [&](const char* name, const TensorView& view) {
    check.writable(name, view);
    for (int i = 0; i < 5; ++i) check.no_overlap(name, view, input_names[i], *inputs[i]);
  };
  if (gradients.x.defined()) {
    check_rows_like(check, "gradients.x", gradients.x, "h", h);
    check_written("gradients.x", gradients.x);
    check.same_or_apart("gradients.x", gradients.x, "grad_residual_out", grad_residual_out);
  }
  const TensorView* const vectors[] = {&gradients.weight, &gradients.bias};
  const char* const vector_names[] = {"gradients.weight", "gradients.bias"};
  for (int i = 0; i < 2; ++i) {
    if (!vectors[i]->defined()) continue;
    check.optional_floating_vector(vector_names[i], *vectors[i], params.features);
    check_written(vector_names[i], *vectors[i]);
    check.no_overlap(vector_names[i], *vectors[i], "grad_residual_out", grad_residual_out);
    check.no_overlap(vector_names[i], *vectors[i], "gradients.x", gradients.x);
  }
  check.no_overlap("gradients.bias", gradients.bias, "gradients.weight", gradients.weight);
  params.grad_weight = element_at(gradients.weight, 0);
  params.grad_weight_dtype = gradients.weight.dtype;
  params.grad_bias = element_at(gradients.bias, 0);
  params.grad_bias_dtype = gradients.bias.dtype;

  // The parameters' gradients sum over all rows, so their rows must be one run; those of x alone may come in runs.
  const TensorView* const with_x[] = {&gradients.x, &grad_out, &h, &grad_residual_out, &mean, &rstd};
  const TensorView* const without_x[] = {&grad_out, &grad_out, &h, &grad_residual_out, &mean, &rstd};
  const auto dims = merge_leading_dims<6>(gradients.x.defined() ? with_x : without_x, 1, row_order(mean, rstd));
  if (dims.ndim > 1 && (params.grad_weight || params.grad_bias))
    check.fail(
        "the leading dims of h, grad_out, mean, rstd and gradients.x do not fold into rows with one stride; the "
        "gradients of weight and bias need that: make contiguous copies");
  const bool nothing = !params.grad_weight && !params.grad_bias && (!gradients.x.defined() || gradients.x.numel() == 0);
  if (nothing && !context.explain) return;

  for_each_run_of_rows(dims, context.explain != nullptr,
                       [&](std::int64_t rows, const std::int64_t(&stride)[6], const std::int64_t(&offset)[6]) {
                         params.rows = rows;
                         params.grad_x = element_at(gradients.x, offset[0]);
                         params.grad_out = element_at(grad_out, offset[1]);
                         params.h = element_at(h, offset[2]);
                         params.grad_residual_out = element_at(grad_residual_out, offset[3]);
                         params.mean = row_pointer(mean, offset[4]);
                         params.rstd = row_pointer(rstd, offset[5]);
                         params.stride_grad_x_row = stride[0];
                         params.stride_grad_out_row = stride[1];
                         params.stride_h_row = stride[2];
                         params.stride_grad_residual_out_row = stride[3];
                         dispatch(params, params.device, context);
                       });
}

}  // namespace

void layer_norm(const TensorView& x, const TensorView& residual, const TensorView& weight, const TensorView& bias,
                const TensorView& out, const NormSaved& saved, float eps, const ExecutionContext& context) {
  normalise(NormKind::kLayerNorm, "layer_norm", x, residual, weight, bias, nullptr, out, saved, eps, context);
}

void rms_norm(const TensorView& x, const TensorView& residual, const TensorView& weight, const TensorView& out,
              const NormSaved& saved, float eps, const ExecutionContext& context) {
  normalise(NormKind::kRmsNorm, "rms_norm", x, residual, weight, {}, nullptr, out, saved, eps, context);
}

void layer_norm_quantized(const TensorView& x, const TensorView& residual, const TensorView& weight,
                          const TensorView& bias, const TensorView& scale, const TensorView& out,
                          const TensorView& scales, const NormSaved& saved, float eps,
                          const ExecutionContext& context) {
  const Scales by{scale, scales};
  normalise(NormKind::kLayerNorm, "layer_norm_quantized", x, residual, weight, bias, &by, out, saved, eps, context);
}

void rms_norm_quantized(const TensorView& x, const TensorView& residual, const TensorView& weight,
                        const TensorView& scale, const TensorView& out, const TensorView& scales,
                        const NormSaved& saved, float eps, const ExecutionContext& context) {
  const Scales by{scale, scales};
  normalise(NormKind::kRmsNorm, "rms_norm_quantized", x, residual, weight, {}, &by, out, saved, eps, context);
}

void layer_norm_backward(const TensorView& grad_out, const TensorView& h, const TensorView& weight,
                         const TensorView& mean, const TensorView& rstd, const TensorView& grad_residual_out,
                         const NormGradients& gradients, const ExecutionContext& context) {
  normalise_backward(NormKind::kLayerNorm, "layer_norm_backward", grad_out, h, weight, mean, rstd, grad_residual_out,
                     gradients, context);
}

void rms_norm_backward(const TensorView& grad_out, const TensorView& h, const TensorView& weight,
                       const TensorView& rstd, const TensorView& grad_residual_out, const NormGradients& gradients,
                       const ExecutionContext& context) {
  const Checker check("rms_norm_backward", h.device);
  check.require(!gradients.bias.defined(), "gradients.bias is given; RMSNorm has no bias: leave it out");
  normalise_backward(NormKind::kRmsNorm, "rms_norm_backward", grad_out, h, weight, {}, rstd, grad_residual_out,
                     gradients, context);
}

}  // namespace flashkernel
