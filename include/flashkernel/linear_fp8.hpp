// activation(x W^T + b) of x and W in float8_e4m3fn with scales, and what makes such an x.
#pragma once

#include "flashkernel/execution.hpp"
#include "flashkernel/tensor_view.hpp"
#include "flashkernel/types.hpp"

namespace flashkernel {

/// out = activation(x W^T + b) of float8_e4m3fn elements: an element times its scale is the number.
/// - x [..., in_features] (up to 8 dims), last dim contiguous; or float32, float16 or bfloat16 with x_scale absent: it
///   is then rounded into workspace as `quantize_fp8_blocks` does
/// - weight [out_features, in_features], last dim contiguous
/// - x_scale float32, any strides: [..., ceil(in_features / 128)], one for 128 neighbours of a row; [..., 1], one a
///   row; or one number (0 dims, or [1])
/// - weight_scale float32, any strides: [ceil(out_features / 128), ceil(in_features / 128)], one for a block of 128 x
///   128; [out_features, ceil(in_features / 128)], one for 128 neighbours of a row; [out_features, 1] or
///   [out_features], one a row; or one number
/// - bias [out_features], out's dtype or float32; or absent
/// - out [..., out_features] float32, float16 or bfloat16: written
///
/// Sums are float32. On tensor cores, whose sums of 8-bit numbers are shorter, they are float32 over parts of 128 of
/// in_features. The activation is applied before rounding. Outputs need memory of their own.
FK_API void linear_fp8(const TensorView& x, const TensorView& weight, const TensorView& x_scale,
                       const TensorView& weight_scale, const TensorView& bias, const TensorView& out,
                       Activation activation = Activation::kNone, const ExecutionContext& context = {});

/// Rounds x to 8 bits with a scale for each 128 neighbours of a row.
/// - x [..., features] (up to 8 dims): float32, float16 or bfloat16, last dim contiguous
/// - out float8_e4m3fn, x's shape, last dim contiguous: written
/// - scales float32 [..., ceil(features / 128)], any strides: written: the largest magnitude of the 128 over 448, at
///   least 2^-100
///
/// An element is x / scale, rounded to nearest even. Infinities become 448 and -448, NaN stays. Outputs need memory of
/// their own.
FK_API void quantize_fp8_blocks(const TensorView& x, const TensorView& out, const TensorView& scales,
                                const ExecutionContext& context = {});

}  // namespace flashkernel
