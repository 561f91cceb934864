// What linear_cross_entropy and its gradient do with a chunk of logits, in plain device code for any GPU. Rows are in
// cuda/kernels.cpp; linear computes the products.
#pragma once

#include "flashkernel/stream.hpp"
#include "ops/kernel_entry.hpp"
#include "ops/linear_loss_params.hpp"

namespace flashkernel::cuda {

Verdict linear_cross_entropy_supports(const LinearCrossEntropyParams&);
void linear_cross_entropy(const LinearCrossEntropyParams&, void* workspace, Stream);
Verdict linear_cross_entropy_bwd_supports(const LinearCrossEntropyBackwardParams&);
void linear_cross_entropy_bwd(const LinearCrossEntropyBackwardParams&, void* workspace, Stream);

}  // namespace flashkernel::cuda
