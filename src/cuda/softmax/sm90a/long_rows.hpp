// Softmax of rows that the blocks of a cluster share: what the rows of cuda/kernels.cpp name.
#pragma once

#include "flashkernel/stream.hpp"
#include "ops/kernel_entry.hpp"
#include "ops/reduce_params.hpp"

namespace flashkernel::cuda::sm90a {

Verdict softmax_long_rows_supports(const SoftmaxParams&);
Verdict softmax_bwd_long_rows_supports(const SoftmaxBackwardParams&);
// ClusterRows.
Plan plan_softmax_long_rows(const SoftmaxParams&, const DeviceFacts&);
Plan plan_softmax_bwd_long_rows(const SoftmaxBackwardParams&, const DeviceFacts&);
void softmax_long_rows(const SoftmaxParams&, const Plan&, void* workspace, Stream);
void softmax_bwd_long_rows(const SoftmaxBackwardParams&, const Plan&, void* workspace, Stream);

}  // namespace flashkernel::cuda::sm90a
