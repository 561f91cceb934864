// latent_append in plain device code: any GPU, any rank and strides that the op allows. Its row is in cuda/kernels.cpp.
#pragma once

#include "flashkernel/stream.hpp"
#include "ops/attention_mla_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda {

Verdict latent_append_supports(const LatentAppendParams&);
void latent_append(const LatentAppendParams&, void* workspace, Stream);

}  // namespace flashkernel::cuda
