// sample by one block a row, which reads the row again for each step: any GPU, any vocabulary that the op allows. Rows
// are in cuda/kernels.cpp.
#pragma once

#include "flashkernel/stream.hpp"
#include "ops/kernel_entry.hpp"
#include "ops/sample_params.hpp"

namespace flashkernel::cuda {

Verdict sample_supports(const SampleParams&);
void sample(const SampleParams&, void* workspace, Stream);

}  // namespace flashkernel::cuda
