// Elementwise ops in plain device code: any GPU, any shape and stride that the op allows. Rows are in
// cuda/kernels.cpp.
#pragma once

#include <cstddef>

#include "flashkernel/stream.hpp"
#include "ops/elementwise_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda {

Verdict add_supports(const AddParams&);
void add(const AddParams&, void* workspace, Stream);
Verdict swiglu_supports(const SwigluParams&);
void swiglu(const SwigluParams&, void* workspace, Stream);
Verdict swiglu_bwd_supports(const SwigluBackwardParams&);
void swiglu_bwd(const SwigluBackwardParams&, void* workspace, Stream);

}  // namespace flashkernel::cuda
