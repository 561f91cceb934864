// activation(x W^T + b) in one kernel, and its gradient.
#pragma once

#include "flashkernel/execution.hpp"
#include "flashkernel/tensor_view.hpp"
#include "flashkernel/types.hpp"

namespace flashkernel {

/// out = activation(x W^T + b).
/// - x [..., in_features] (up to 8 dims)
/// - weight [out_features, in_features], either dim contiguous: a transposed view of GPT-2's [in, out] weight is taken
///   as it is
/// - bias [out_features], x's dtype or fp32; or absent
/// - out [..., out_features]: written
/// - preactivation: gets x W^T + b in out's shape and dtype; or absent
///
/// Sums are fp32, and the activation is applied before rounding. Outputs need memory of their own.
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
