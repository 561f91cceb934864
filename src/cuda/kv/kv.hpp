// The paged KV-cache ops in plain device code: any GPU, any shape and stride that the op allows. Rows are in
// cuda/kernels.cpp.
#pragma once

#include <cstddef>

#include "flashkernel/stream.hpp"
#include "ops/kv_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda {

/// Largest head that kv_append norms: its weights lie in shared memory.
inline constexpr int kMostNormedDim = 512;

Verdict kv_append_supports(const KvAppendParams&);
void kv_append(const KvAppendParams&, void* workspace, Stream);
void kv_append_rope(const KvAppendParams&, Stream);           // its part for calls with RoPE
void kv_append_norm(const KvAppendParams&, Stream);           // and with norms of heads before it
Verdict kv_append_quantized_supports(const KvAppendParams&);  // kv_append and kv_read for 8-bit pages
void kv_append_quantized(const KvAppendParams&, Stream);
bool kv_append_in_registers(const KvAppendParams&);  // whether kv_append_quantized_rows takes it
void kv_append_quantized_rows(const KvAppendParams&, Stream);
void kv_read_quantized(const KvReadParams&, Stream);
Verdict kv_read_supports(const KvReadParams&);
void kv_read(const KvReadParams&, void* workspace, Stream);
Verdict kv_copy_supports(const KvCopyParams&);
void kv_copy(const KvCopyParams&, void* workspace, Stream);
Verdict find_bad_page_supports(const FindBadPageParams&);
std::size_t find_bad_page_workspace(const FindBadPageParams&);
void find_bad_page(const FindBadPageParams&, void* workspace, Stream);

}  // namespace flashkernel::cuda
