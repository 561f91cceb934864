// Reductions in plain device code: any GPU, any shape and stride that the op allows. Rows are in
// cuda/kernels.cpp.
#pragma once

#include <cstddef>

#include "flashkernel/stream.hpp"
#include "ops/reduce_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda {

Verdict reduce_supports(const ReduceParams&);
// In the invariant mode an output is cut as if it were the only one.
std::size_t reduce_workspace(const ReduceParams&, bool invariant);
void reduce(const ReduceParams&, bool invariant, void* workspace, Stream);

}  // namespace flashkernel::cuda
