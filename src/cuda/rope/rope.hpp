// RoPE in plain device code: any GPU, any shape and stride that the op allows. Rows are in
// cuda/kernels.cpp.
#pragma once

#include <cstddef>

#include "flashkernel/stream.hpp"
#include "ops/rope_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda {

Verdict rope_supports(const RopeParams&);
void rope(const RopeParams&, void* workspace, Stream);

}  // namespace flashkernel::cuda
