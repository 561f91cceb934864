// Softmax, log-softmax and their gradients in plain device code: any GPU, any shape and stride that the op allows. Rows
// are in cuda/kernels.cpp.
#pragma once

#include <cstddef>

#include "flashkernel/stream.hpp"
#include "ops/reduce_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda {

// held: whole vectors, in rows that a block holds, each read once. walked: any rows, read again for the results.
// The plan of either is a BlockRows.
Verdict softmax_held_supports(const SoftmaxParams&);
Plan plan_softmax_held(const SoftmaxParams&, const DeviceFacts&);
Verdict softmax_walked_supports(const SoftmaxParams&);
Plan plan_softmax_walked(const SoftmaxParams&, const DeviceFacts&);
/// Whether walked rows are added in an order that follows from their columns alone: rows of whole vectors begin at
/// multiples of 16 bytes, others are walked element by element wherever they begin.
bool softmax_walks_alike(const SoftmaxParams&);
void softmax(const SoftmaxParams&, const Plan&, void* workspace, Stream);
Verdict softmax_bwd_held_supports(const SoftmaxBackwardParams&);
Plan plan_softmax_bwd_held(const SoftmaxBackwardParams&, const DeviceFacts&);
Verdict softmax_bwd_walked_supports(const SoftmaxBackwardParams&);
Plan plan_softmax_bwd_walked(const SoftmaxBackwardParams&, const DeviceFacts&);
bool softmax_bwd_walks_alike(const SoftmaxBackwardParams&);
void softmax_bwd(const SoftmaxBackwardParams&, const Plan&, void* workspace, Stream);

}  // namespace flashkernel::cuda
