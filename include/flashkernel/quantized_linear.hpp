// activation(x W^T + b) with weights of 4 or 8 bits and a scale for each block of them.
#pragma once

#include "flashkernel/execution.hpp"
#include "flashkernel/tensor_view.hpp"
#include "flashkernel/types.hpp"

namespace flashkernel {

/// out = activation(x W^T + bias) of a weight with 4 or 8 bits an element.
/// - x [..., in_features] (up to 8 dims): float32, float16 or bfloat16, last dim contiguous
/// - weight [out_features, bytes of a row]: `format` says what it holds
/// - scales, zeros [out_features, groups] fp32, fp16 or bf16, one dtype for both: of int4 and int8, where an element is
///   scale * (q - zero). Without zeros the zero of int4 is 8 and that of int8 is 0. A group is in_features / groups
///   neighbours of a row: a multiple of 32, or of int8 also the whole row. The formats of GGUF files hold their scales
///   in their blocks; scales and zeros are absent there
/// - bias [out_features], x's dtype or fp32; or absent
/// - out [..., out_features] of x's dtype: written; it needs memory of its own
///
/// Sums are fp32.
///
/// On the CPU a weight in GGUF's formats may be tiles [out_features / 16, in_features / 32, bytes of 16 blocks]. A tile
/// has the blocks of 16 rows side by side: first the first 2-byte number of each row, then the second one of each row,
/// then 4 bytes of each row's elements at a time. AVX512-VNNI and AMX read tiles fastest. AVX512-VNNI takes x as
/// integers of 24 bits (fp32) or 16 bits (fp16, bf16) with one scale for 32 neighbours (docs/low_precision.md).
FK_API void quantized_linear(const TensorView& x, const TensorView& weight, const TensorView& scales,
                             const TensorView& zeros, const TensorView& bias, const TensorView& out,
                             WeightFormat format, Activation activation = Activation::kNone,
                             const ExecutionContext& context = {});

}  // namespace flashkernel
