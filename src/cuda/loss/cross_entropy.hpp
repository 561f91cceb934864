// Cross-entropy and its gradient in plain device code: any GPU, any shape and stride that the op allows. Rows are in
// cuda/kernels.cpp.
#pragma once

#include <cstddef>

#include "flashkernel/stream.hpp"
#include "ops/loss_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda {

Verdict cross_entropy_supports(const CrossEntropyParams&);
/// The plan is the number of rows that rows are cut for.
Plan plan_cross_entropy(const CrossEntropyParams&, const DeviceFacts&);
void cross_entropy(const CrossEntropyParams&, const Plan&, void* workspace, Stream);
Verdict cross_entropy_bwd_supports(const CrossEntropyBackwardParams&);
std::size_t cross_entropy_bwd_workspace(const CrossEntropyBackwardParams&);
void cross_entropy_bwd(const CrossEntropyBackwardParams&, void* workspace, Stream);

}  // namespace flashkernel::cuda
