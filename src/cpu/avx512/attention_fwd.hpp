// Attention forward with AVX-512, see attention_fwd.cpp.
#pragma once

#include <cstddef>

#include "flashkernel/stream.hpp"
#include "ops/attention_params.hpp"

namespace flashkernel::cpu::avx512 {

std::size_t attention_fwd_workspace(const AttentionParams& p);
void attention_fwd(const AttentionParams& p, void* workspace, Stream);
/// Over pages of 8-bit elements; `attention_fwd` calls it.
void attention_fwd_quantized(const AttentionParams& p, void* workspace);

}  // namespace flashkernel::cpu::avx512
