// quantized_linear in plain device code: any GPU, dtype, format and stride that the op allows. Its row is in
// cuda/kernels.cpp.
#pragma once

#include "flashkernel/stream.hpp"
#include "ops/kernel_entry.hpp"
#include "ops/quantized_linear_params.hpp"

namespace flashkernel::cuda {

Verdict quantized_linear_supports(const QuantizedLinearParams&);
void quantized_linear(const QuantizedLinearParams&, void* workspace, Stream);

}  // namespace flashkernel::cuda
