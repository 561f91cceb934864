// linear and its gradient in plain device code: any GPU, any shape and stride that the op allows. Rows are in
// cuda/kernels.cpp.
#pragma once

#include <cstddef>

#include "flashkernel/stream.hpp"
#include "ops/linear_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda {

Verdict linear_supports(const LinearParams&);
void linear_tiles(const LinearParams&, void* workspace, Stream);
Verdict linear_few_rows_supports(const LinearParams&);
void linear_few_rows(const LinearParams&, void* workspace, Stream);
Verdict linear_bwd_supports(const LinearBackwardParams&);
void linear_bwd(const LinearBackwardParams&, void* workspace, Stream);

}  // namespace flashkernel::cuda
