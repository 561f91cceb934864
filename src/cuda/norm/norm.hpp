// Norms and their gradients in plain device code: any GPU, any shape and stride that the op allows. Rows are in
// cuda/kernels.cpp.
#pragma once

#include <cstddef>

#include "flashkernel/stream.hpp"
#include "ops/norm_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda {

Verdict norm_fwd_supports(const NormParams&);
void norm_fwd(const NormParams&, void* workspace, Stream);
Verdict norm_bwd_supports(const NormBackwardParams&);
std::size_t norm_bwd_workspace(const NormBackwardParams&);
void norm_bwd(const NormBackwardParams&, void* workspace, Stream);

}  // namespace flashkernel::cuda
