// Attention forward on AMX tiles, see attention_fwd.cpp.
#pragma once

#include <cstddef>

#include "flashkernel/stream.hpp"
#include "ops/attention_params.hpp"

namespace flashkernel::cpu::amx {

std::size_t attention_fwd_workspace(const AttentionParams& p);
void attention_fwd(const AttentionParams& p, void* workspace, Stream);
// On tiles for any number of rows: the order of its sums is always the same.
std::size_t attention_fwd_packed_workspace(const AttentionParams& p);
void attention_fwd_packed(const AttentionParams& p, void* workspace, Stream);

// fp16 only, on AMX-FP16.
std::size_t attention_fwd_fp16_workspace(const AttentionParams& p);
void attention_fwd_fp16(const AttentionParams& p, void* workspace, Stream);
std::size_t attention_fwd_fp16_packed_workspace(const AttentionParams& p);
void attention_fwd_fp16_packed(const AttentionParams& p, void* workspace, Stream);

}  // namespace flashkernel::cpu::amx
