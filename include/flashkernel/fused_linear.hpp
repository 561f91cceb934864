// A linear with the norm before it and with what follows it, for decode steps.
#pragma once

#include "flashkernel/execution.hpp"
#include "flashkernel/tensor_view.hpp"
#include "flashkernel/types.hpp"

namespace flashkernel {

/// out = activation(norm(x) W^T + bias) + residual. With `gated`, out = activation(gate) * up + residual, where gate
/// and up are the first and the last out_features of norm(x) W^T + bias.
/// - x [..., in_features] (up to 8 dims)
/// - weight [out_features, in_features], with `gated` [2 out_features, in_features]; either dim contiguous
/// - bias: one for each row of weight, x's dtype or fp32; or absent
/// - norm_weight [in_features] (any floating dtype) asks for a norm of x; absent: there is none. The norm is RMSNorm,
///   with `centred` LayerNorm, whose norm_bias may be given
/// - residual: out's shape, or absent
/// - out [..., out_features]: written; may be the same tensor as residual
/// - activation: with `gated` kSilu (SwiGLU) alone
/// - constant_weights: a promise that no work which is still under way on the stream writes weight, bias, norm_weight
///   or norm_bias. A kernel may then read them while the kernel in front of it still runs. Work that writes them counts
///   as over once a kernel behind it was not launched early (programmatic dependent launch), as kernels of other
///   libraries are not
///
/// The norm is rounded to x's dtype, as `rms_norm` and `layer_norm` give it. Sums are fp32. A kernel may round what
/// stands before the residual or the gate to x's dtype, as the single ops do.
FK_API void fused_linear(const TensorView& x, const TensorView& weight, const TensorView& bias,
                         const TensorView& norm_weight, const TensorView& norm_bias, const TensorView& residual,
                         const TensorView& out, Activation activation = Activation::kNone, bool gated = false,
                         bool centred = false, float eps = 1e-6f, bool constant_weights = false,
                         const ExecutionContext& context = {});

}  // namespace flashkernel
