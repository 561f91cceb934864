// Softmax, log-softmax and their gradients in plain device code: any GPU, any shape and stride that the op allows. Rows
// are in cuda/kernels.cpp.
#pragma once

#include <cstddef>

#include "flashkernel/stream.hpp"
#include "ops/reduce_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda {

// held: whole vectors, in rows that a block holds, each read once. walked: any rows, read again for the results.
Verdict softmax_held_supports(const SoftmaxParams&);
void softmax_held(const SoftmaxParams&, void* workspace, Stream);
Verdict softmax_walked_supports(const SoftmaxParams&);
void softmax_walked(const SoftmaxParams&, void* workspace, Stream);
Verdict softmax_bwd_held_supports(const SoftmaxBackwardParams&);
void softmax_bwd_held(const SoftmaxBackwardParams&, void* workspace, Stream);
Verdict softmax_bwd_walked_supports(const SoftmaxBackwardParams&);
void softmax_bwd_walked(const SoftmaxBackwardParams&, void* workspace, Stream);

}  // namespace flashkernel::cuda
