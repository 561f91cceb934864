// activation(x W^T + b) in one kernel, and its gradient.
#pragma once

#include "flashkernel/execution.hpp"
#include "flashkernel/tensor_view.hpp"
#include "flashkernel/types.hpp"

namespace flashkernel {

/// x [..., in_features] (up to 8 dims), weight [out_features, in_features] (either of its two dims contiguous: a
/// transposed view of GPT-2's [in, out] weight is taken as it is), bias [out_features] or absent (x's dtype or fp32),
/// out [..., out_features], preactivation (x W^T + b, shape and dtype of out) or absent. Accumulates in fp32; the
/// activation is applied before rounding. Outputs need memory of their own.
FK_API void linear(const TensorView& x, const TensorView& weight, const TensorView& bias, const TensorView& out,
                   const TensorView& preactivation, Activation activation = Activation::kNone,
                   const ExecutionContext& context = {});

struct LinearGradients {
  TensorView x, weight, bias;  ///< shapes of x, weight, bias; an absent view is not computed
};

/// Gradients of `linear`. `preactivation` is needed when `activation` is not kNone; where it is infinite, the
/// activation's derivative is its limit (0 or 1). Gradients of weight and bias sum over all rows, so they need leading
/// dims that fold into rows with one stride.
FK_API void linear_backward(const TensorView& grad_out, const TensorView& x, const TensorView& weight,
                            const TensorView& preactivation, const LinearGradients& gradients,
                            Activation activation = Activation::kNone, const ExecutionContext& context = {});

}  // namespace flashkernel
