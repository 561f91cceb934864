// LayerNorm and RMSNorm of rows that the blocks of a cluster share: what the rows of cuda/kernels.cpp name.
#pragma once

#include "flashkernel/stream.hpp"
#include "ops/kernel_entry.hpp"
#include "ops/norm_params.hpp"

namespace flashkernel::cuda::sm90a {

Verdict norm_long_rows_supports(const NormParams&);
/// A ClusterRows.
Plan plan_norm_long_rows(const NormParams&, const DeviceFacts&);
void norm_long_rows(const NormParams&, const Plan&, void* workspace, Stream);

}  // namespace flashkernel::cuda::sm90a
