// activation(x W^T + b) of x and W in float8_e4m3fn with scales, and what makes such an x.
#pragma once

#include "flashkernel/execution.hpp"
#include "flashkernel/tensor_view.hpp"
#include "flashkernel/types.hpp"

namespace flashkernel {

/// x [..., in_features] (up to 8 dims) and weight [out_features, in_features] are float8_e4m3fn, last dims contiguous;
/// an element times its scale is the number. Scales are float32, of any strides.
/// x_scale: [..., ceil(in_features / 128)], one for 128 neighbours of a row; [..., 1], one a row; or one number (0
/// dims, or [1]). weight_scale: [ceil(out_features / 128), ceil(in_features / 128)], one for a block of 128 x 128;
/// [out_features, ceil(in_features / 128)], one for 128 neighbours of a row; [out_features, 1] or [out_features], one a
/// row; or one number. bias [out_features] (out's dtype or float32) or absent. out [..., out_features]: float32,
/// float16 or bfloat16. Sums are float32; on tensor cores, whose sums of 8-bit numbers are shorter, over 128 of
/// in_features at a time. The activation is applied before rounding. Outputs need memory of their own.
///
/// x may be float32, float16 or bfloat16 with x_scale absent: it is rounded as quantize_fp8_blocks does, into
/// workspace.
FK_API void linear_fp8(const TensorView& x, const TensorView& weight, const TensorView& x_scale,
                       const TensorView& weight_scale, const TensorView& bias, const TensorView& out,
                       Activation activation = Activation::kNone, const ExecutionContext& context = {});

/// x [..., features] (up to 8 dims; float32, float16 or bfloat16, last dim contiguous) in 8 bits with a scale for each
/// 128 neighbours of a row: scales [..., ceil(features / 128)] float32 (any strides) get the largest magnitude of 128
/// over 448, at least 2^-100, and out (float8_e4m3fn, x's shape, last dim contiguous) the elements over it, rounded to
/// nearest even. Infinities become 448 and -448, NaN stays. Outputs need memory of their own.
FK_API void quantize_fp8_blocks(const TensorView& x, const TensorView& out, const TensorView& scales,
                                const ExecutionContext& context = {});

}  // namespace flashkernel
