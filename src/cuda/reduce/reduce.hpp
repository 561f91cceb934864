// Reductions in plain device code: any GPU, any shape and stride that the op allows. Rows are in
// cuda/kernels.cpp.
#pragma once

#include <cstddef>

#include "flashkernel/stream.hpp"
#include "ops/reduce_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda {

Verdict reduce_supports(const ReduceParams&);
std::size_t reduce_workspace(const ReduceParams&);
void reduce(const ReduceParams&, void* workspace, Stream);

}  // namespace flashkernel::cuda
