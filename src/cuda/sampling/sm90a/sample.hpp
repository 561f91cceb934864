// sample by a cluster a row, whose blocks hold the row in shared memory. Rows are in cuda/kernels.cpp.
#pragma once

#include "flashkernel/stream.hpp"
#include "ops/kernel_entry.hpp"
#include "ops/sample_params.hpp"

namespace flashkernel::cuda::sm90a {

Verdict sample_supports(const SampleParams&);
Plan plan_sample(const SampleParams&, const DeviceFacts&);
void sample(const SampleParams&, const Plan&, void* workspace, Stream);

}  // namespace flashkernel::cuda::sm90a
