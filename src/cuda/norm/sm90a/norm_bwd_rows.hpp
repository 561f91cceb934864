// Norm backward whose rows come through a ring in shared memory, long ones shared by a cluster: what a row of
// cuda/kernels.cpp names.
#pragma once

#include "flashkernel/stream.hpp"
#include "ops/kernel_entry.hpp"
#include "ops/norm_params.hpp"

namespace flashkernel::cuda::sm90a {

Verdict norm_bwd_rows_supports(const NormBackwardParams&);
Plan plan_norm_bwd_rows(const NormBackwardParams&, const DeviceFacts&);
void norm_bwd_rows(const NormBackwardParams&, const Plan&, void* workspace, Stream);

}  // namespace flashkernel::cuda::sm90a
