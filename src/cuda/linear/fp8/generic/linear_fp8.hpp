// linear_fp8 and quantize_fp8_blocks in plain device code: any GPU, scales and strides that the ops allow. Their rows
// are in cuda/kernels.cpp.
#pragma once

#include "flashkernel/stream.hpp"
#include "ops/kernel_entry.hpp"
#include "ops/linear_fp8_params.hpp"

namespace flashkernel::cuda {

Verdict linear_fp8_supports(const LinearFp8Params&);
void linear_fp8(const LinearFp8Params&, void* workspace, Stream);

Verdict quantize_fp8_supports(const QuantizeFp8Params&);
void quantize_fp8_blocks(const QuantizeFp8Params&, void* workspace, Stream);

}  // namespace flashkernel::cuda
