// pack_mask in plain device code: any GPU, any strides. Its row is in cuda/kernels.cpp.
#pragma once

#include "flashkernel/stream.hpp"
#include "ops/kernel_entry.hpp"
#include "ops/mask_params.hpp"

namespace flashkernel::cuda {

Verdict pack_mask_supports(const PackMaskParams&);
void pack_mask(const PackMaskParams&, void* workspace, Stream);

}  // namespace flashkernel::cuda
