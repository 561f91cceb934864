// LayerNorm and RMSNorm over the last dim, with an optional fused residual add, and their gradients.
#pragma once

#include "flashkernel/execution.hpp"
#include "flashkernel/tensor_view.hpp"

namespace flashkernel {

/// What a norm writes beside its output, and what it adds to its weight; absent views are not written.
struct NormSaved {
  TensorView residual_out;  ///< x + residual, shape and dtype of x (required when `residual` is given)
  TensorView mean;          ///< fp32, x's shape less the last dim (LayerNorm only)
  TensorView rstd;          ///< fp32, x's shape less the last dim
  float weight_offset = 0;  ///< h is scaled by weight + weight_offset: 1 for weights that are stored less 1 (Gemma)
};

/// LayerNorm of h = x + residual: out = (h - mean(h)) / sqrt(var(h) + eps) * weight + bias. h is rounded to x's dtype,
/// as residual_out stores it; without a residual it is x.
/// - x [..., features], residual of x's shape or absent; last dims contiguous
/// - weight, bias [features], each float32, float16 or bfloat16 whatever x is; may be absent
/// - out of x's shape and dtype: written
/// - saved: what else is written; mean and rstd are contiguous
///
/// Statistics are fp32 in two passes, not E[x^2] - E[x]^2. out and residual_out may each be the same tensor as x or
/// residual, but not as each other.
FK_API void layer_norm(const TensorView& x, const TensorView& residual, const TensorView& weight,
                       const TensorView& bias, const TensorView& out, const NormSaved& saved = {}, float eps = 1e-5f,
                       const ExecutionContext& context = {});

/// RMSNorm of h = x + residual (or x): out = h / sqrt(mean(h^2) + eps) * weight (Zhang and Sennrich, 2019). Arguments
/// as in `layer_norm`.
FK_API void rms_norm(const TensorView& x, const TensorView& residual, const TensorView& weight, const TensorView& out,
                     const NormSaved& saved = {}, float eps = 1e-6f, const ExecutionContext& context = {});

/// `layer_norm` with an output of 8 bits: element * scale is the number.
/// - out float8_e4m3fn or int8, x's shape, last dim contiguous: written; it shares no memory with x or residual
/// - scale: one float32 number (0 or 1 dims), read on the device. Or absent, and scales float32, x's shape without the
///   last dim, contiguous, is written: the largest magnitude of each row over 448 or 127, at least 2^-100
///
/// The norm is not rounded to x's dtype on the way. Elements are rounded to nearest even and saturated to +-448 or
/// +-127 (infinities too). float8_e4m3fn keeps NaN; int8 stores 0 for it, and a scale that is written becomes NaN.
FK_API void layer_norm_quantized(const TensorView& x, const TensorView& residual, const TensorView& weight,
                                 const TensorView& bias, const TensorView& scale, const TensorView& out,
                                 const TensorView& scales, const NormSaved& saved = {}, float eps = 1e-5f,
                                 const ExecutionContext& context = {});
/// `rms_norm` with an output of 8 bits, as in `layer_norm_quantized`.
FK_API void rms_norm_quantized(const TensorView& x, const TensorView& residual, const TensorView& weight,
                               const TensorView& scale, const TensorView& out, const TensorView& scales,
                               const NormSaved& saved = {}, float eps = 1e-6f, const ExecutionContext& context = {});

struct NormGradients {
  TensorView x;             ///< gradient of x and of residual (they are equal); shape and dtype of x
  TensorView weight, bias;  ///< shape of weight, any floating dtype; absent ones are not computed
  float weight_offset = 0;  ///< as given to the norm
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
