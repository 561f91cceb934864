// Softmax of rows that the blocks of a cluster share: what the rows of cuda/kernels.cpp name.
#pragma once

#include "flashkernel/stream.hpp"
#include "ops/kernel_entry.hpp"
#include "ops/reduce_params.hpp"

namespace flashkernel::cuda::sm90a {

Verdict softmax_long_rows_supports(const SoftmaxParams&);
Verdict softmax_bwd_long_rows_supports(const SoftmaxBackwardParams&);
/// Whether rows of as many columns are served so in the invariant mode: those that clusters are the fastest for, where
/// the GPU runs clusters of so many blocks. The columns alone decide, here and in how a row is added.
bool softmax_long_rows_are_invariant(const SoftmaxParams&);
bool softmax_bwd_long_rows_are_invariant(const SoftmaxBackwardParams&);
// ClusterRows.
Plan plan_softmax_long_rows(const SoftmaxParams&, const DeviceFacts&);
Plan plan_softmax_bwd_long_rows(const SoftmaxBackwardParams&, const DeviceFacts&);
void softmax_long_rows(const SoftmaxParams&, const Plan&, void* workspace, Stream);
void softmax_bwd_long_rows(const SoftmaxBackwardParams&, const Plan&, void* workspace, Stream);

}  // namespace flashkernel::cuda::sm90a
