// Softmax, log-softmax and their gradients in plain device code: any GPU, any shape and stride that the op allows. Rows
// are in cuda/kernels.cpp.
#pragma once

#include <cstddef>

#include "flashkernel/stream.hpp"
#include "ops/reduce_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda {

Verdict softmax_supports(const SoftmaxParams&);
void softmax(const SoftmaxParams&, void* workspace, Stream);
Verdict softmax_bwd_supports(const SoftmaxBackwardParams&);
void softmax_bwd(const SoftmaxBackwardParams&, void* workspace, Stream);

}  // namespace flashkernel::cuda
