// Attention forward with AVX-512, see attention_fwd.cpp.
#pragma once

#include <cstddef>

#include "flashkernel/stream.hpp"
#include "cpu/simd/few_rows.hpp"
#include "ops/attention_params.hpp"

namespace flashkernel::cpu::avx512 {

std::size_t attention_fwd_workspace(const AttentionParams& p);
void attention_fwd(const AttentionParams& p, void* workspace, Stream);
/// For any number of rows by the kernel that packs keys and values: the order of its sums is always the same.
std::size_t attention_fwd_packed_workspace(const AttentionParams& p);
void attention_fwd_packed(const AttentionParams& p, void* workspace, Stream);
/// Over pages of 8-bit elements; the other two call it.
void attention_fwd_quantized(const AttentionParams& p, void* workspace, FewRows few_rows);

}  // namespace flashkernel::cpu::avx512
