// LayerNorm and RMSNorm over the last dim, with an optional fused residual add, and their gradients.
#pragma once

#include "flashkernel/execution.hpp"
#include "flashkernel/tensor_view.hpp"

namespace flashkernel {

/// What a norm writes beside its output; absent views are not written.
struct NormSaved {
  TensorView residual_out;  ///< x + residual, shape and dtype of x (required when `residual` is given)
  TensorView mean;          ///< fp32, x's shape less the last dim (LayerNorm only)
  TensorView rstd;          ///< fp32, x's shape less the last dim
};

/// h = x + residual, rounded to x's dtype as residual_out stores it (or h = x);
/// out = (h - mean(h)) / sqrt(var(h) + eps) * weight + bias. x [..., features]; weight and bias [features], x's dtype
/// or fp32, may be absent. Statistics in fp32, two passes (no E[x^2] - E[x]^2). Last dims are contiguous, mean and rstd
/// wholly so. out and residual_out may each be the same tensor as x or residual, but not as each other.
FK_API void layer_norm(const TensorView& x, const TensorView& residual, const TensorView& weight,
                       const TensorView& bias, const TensorView& out, const NormSaved& saved = {}, float eps = 1e-5f,
                       const ExecutionContext& context = {});

/// h = x + residual (or x); out = h / sqrt(mean(h^2) + eps) * weight (Zhang and Sennrich, 2019).
FK_API void rms_norm(const TensorView& x, const TensorView& residual, const TensorView& weight, const TensorView& out,
                     const NormSaved& saved = {}, float eps = 1e-6f, const ExecutionContext& context = {});

struct NormGradients {
  TensorView x;             ///< gradient of x and of residual (they are equal); shape and dtype of x
  TensorView weight, bias;  ///< shape of weight, its dtype or fp32; absent ones are not computed
};

/// `h` is what was normalised (x, or residual_out). `grad_residual_out` is added to the gradient of h; may be absent.
/// Where gradients of weight or bias are wanted, the leading dims must fold into rows with one stride.
FK_API void layer_norm_backward(const TensorView& grad_out, const TensorView& h, const TensorView& weight,
                                const TensorView& mean, const TensorView& rstd, const TensorView& grad_residual_out,
                                const NormGradients& gradients, const ExecutionContext& context = {});
FK_API void rms_norm_backward(const TensorView& grad_out, const TensorView& h, const TensorView& weight,
                              const TensorView& rstd, const TensorView& grad_residual_out,
                              const NormGradients& gradients, const ExecutionContext& context = {});

}  // namespace flashkernel
