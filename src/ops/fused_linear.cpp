// Front door of fused_linear: folds leading dims into rows, or runs once per run of rows that lie one stride apart.
#include "flashkernel/fused_linear.hpp"

#include "ops/check.hpp"
#include "ops/fused_linear_check.hpp"
#include "ops/fused_linear_params.hpp"
#include "ops/merge_dims.hpp"
#include "ops/select.hpp"

namespace flashkernel {
namespace {

void take_options(const Checker& check, Activation activation, FusedLinearParams& params) {
  if (activation > Activation::kSilu)
    check.fail("activation=" + std::to_string(static_cast<int>(activation)) +
               "; needs kNone, kGeluTanh, kGelu or kSilu");
  if (params.gated && activation != Activation::kSilu)
    check.fail("gated with activation=" + std::to_string(static_cast<int>(activation)) + "; kSilu is needed");
  params.activation = activation;
}

/// A view like x with another last dim.
void check_rows(const Checker& check, const char* name, const TensorView& view, const TensorView& x,
                std::int64_t features) {
  check.dtype(name, view, x.dtype);
  check.ndim(name, view, x.ndim, x.ndim);
  for (int d = 0; d < x.ndim - 1; ++d)
    check.extent(name, view, d, x.shape[d], ("x.shape[" + std::to_string(d) + "]").c_str());
  check.extent(name, view, view.ndim - 1, features, "the rows of weight, with gated half of them");
  check.last_dim_contiguous(name, view);
}

}  // namespace

void fused_linear(const TensorView& x, const TensorView& weight, const TensorView& bias, const TensorView& norm_weight,
                  const TensorView& norm_bias, const TensorView& residual, const TensorView& out, Activation activation,
                  bool gated, bool centred, float eps, bool constant_weights, const ExecutionContext& context) {
  const Checker check("fused_linear", x.device);
  FusedLinearParams params;
  params.gated = gated;
  params.constant = constant_weights;
  take_options(check, activation, params);
  take_product(check, x, weight, bias, kMaxDims, params);
  take_norm(check, norm_weight, norm_bias, centred, eps, params);
  if (residual.defined()) check_rows(check, "residual", residual, x, params.out_features);
  check_rows(check, "out", out, x, params.out_features);
  check.writable("out", out);
  check.apart("out", out,
              {{"x", x}, {"weight", weight}, {"bias", bias}, {"norm_weight", norm_weight}, {"norm_bias", norm_bias}});
  if (residual.defined()) check.same_or_apart("out", out, "residual", residual);
  if (out.numel() == 0 && !context.explain) return;

  const TensorView* const views[] = {&out, &x, &residual};
  const auto dims = merge_leading_dims<3>(views, 1, DimOrder::kByStride);
  for_each_run_of_rows(dims, context.explain != nullptr,
                       [&](std::int64_t rows, const std::int64_t(&stride)[3], const std::int64_t(&offset)[3]) {
                         params.rows = rows;
                         params.out = element_at(out, offset[0]);
                         params.x = element_at(x, offset[1]);
                         params.residual = element_at(residual, offset[2]);
                         params.stride_out_row = stride[0];
                         params.stride_x_row = stride[1];
                         params.stride_residual_row = stride[2];
                         dispatch(params, params.device, context);
                       });
}

}  // namespace flashkernel
