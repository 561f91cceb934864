// Attention backward with AVX2: declared for the table in cpu/kernels.cpp, defined in attention_bwd.cpp.
#pragma once

#include <cstddef>

#include "flashkernel/stream.hpp"
#include "ops/attention_params.hpp"

namespace flashkernel::cpu::avx2 {

void attention_bwd(const AttentionBackwardParams& params, void* workspace, Stream stream);
std::size_t attention_bwd_workspace(const AttentionBackwardParams& params);

}  // namespace flashkernel::cpu::avx2
