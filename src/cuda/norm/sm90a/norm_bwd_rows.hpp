// Norm backward whose rows come through a ring in shared memory, long ones shared by a cluster: what a row of
// cuda/kernels.cpp names.
#pragma once

#include <cstddef>

#include "flashkernel/stream.hpp"
#include "ops/kernel_entry.hpp"
#include "ops/norm_params.hpp"

namespace flashkernel::cuda::sm90a {

Verdict norm_bwd_rows_supports(const NormBackwardParams&);
std::size_t norm_bwd_rows_workspace(const NormBackwardParams&);
void norm_bwd_rows(const NormBackwardParams&, void* workspace, Stream);

}  // namespace flashkernel::cuda::sm90a
