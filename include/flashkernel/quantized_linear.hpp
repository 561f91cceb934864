// activation(x W^T + b) with weights of 4 or 8 bits and a scale for each block of them.
#pragma once

#include "flashkernel/execution.hpp"
#include "flashkernel/tensor_view.hpp"
#include "flashkernel/types.hpp"

namespace flashkernel {

/// x [..., in_features] (up to 8 dims; float32, float16 or bfloat16), out [..., out_features] (x's dtype), bias
/// [out_features] (x's dtype or fp32) or absent. `format` says what weight [out_features, bytes of a row] holds:
/// int4 and int8 take scales and, where given, zeros [out_features, groups] (fp32, fp16 or bf16, one dtype for both),
/// and an element is scale * (q - zero); without zeros an int4 has the zero 8 and an int8 the zero 0. A group is
/// in_features / groups neighbours of a row: a multiple of 32, or one group for the whole row of int8. The formats of
/// GGUF files hold their scales in their blocks; scales and zeros are absent there. Sums are fp32. Last dims are
/// contiguous. Outputs need memory of their own.
///
/// On the CPU a weight in GGUF's formats may be tiles [out_features / 16, in_features / 32, bytes of 16 blocks], each
/// the blocks of 16 rows side by side: their numbers of 2 bytes, the first of each row, the second of each row, then 4
/// bytes of each row's elements at a time. AVX512-VNNI and AMX read them fastest. AVX512-VNNI takes x as integers of 24
/// bits (fp32) or 16 bits (fp16, bf16) with one scale for 32 neighbours: docs/low_precision.md.
FK_API void quantized_linear(const TensorView& x, const TensorView& weight, const TensorView& scales,
                             const TensorView& zeros, const TensorView& bias, const TensorView& out,
                             WeightFormat format, Activation activation = Activation::kNone,
                             const ExecutionContext& context = {});

}  // namespace flashkernel
