// The decode step on 9.0: which calls its rows in cuda/kernels.cpp take, and how they are cut. Host code.
#pragma once

#include <cstdint>

#include "cuda/decode_step/list.hpp"
#include "flashkernel/stream.hpp"
#include "ops/decode_step_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda::decode_step {

inline Geometry geometry_of(const DecodeStepParams& p, int blocks) {
  const auto narrow = [](std::int64_t n) { return static_cast<std::int32_t>(n); };
  Geometry g;
  g.rows = narrow(p.rows), g.layers = narrow(p.layers), g.hidden = narrow(p.hidden);
  g.heads_q = narrow(p.heads_q), g.heads_kv = narrow(p.heads_kv), g.head_dim = narrow(p.head_dim);
  g.inner = narrow(p.inner), g.outputs = narrow(p.outputs);
  return cut(g, blocks);
}

template <DType kDtype>
Verdict supports(const DecodeStepParams& p) {
  constexpr std::int64_t kMost = std::int64_t{1} << 24;  // sizes and what follows from them are 32-bit
  if (p.dtype != kDtype) return "it is built for another dtype";
  if (p.rows > kMostRows) return "it takes up to 8 rows";
  if (p.head_dim != 64 && p.head_dim != 128) return "head_dim must be 64 or 128";
  if (p.hidden % 32 != 0 || p.inner % 32 != 0) return "hidden and inner must be multiples of 32";
  if (p.hidden == 0 || p.inner == 0 || p.outputs == 0) return "a size is 0";
  if (p.hidden > kMost || p.inner > kMost || p.outputs > kMost || p.layers > 4096 ||
      (p.heads_q + 2 * p.heads_kv) * p.head_dim > kMost)
    return "a size is over 2^24";
  if (p.num_pages * p.page_size >= std::int64_t{1} << 31 || p.max_pages * p.page_size >= std::int64_t{1} << 31)
    return "the pages have 2^31 tokens or more";
  const auto rows16 = [](const void* data, std::int64_t stride) {
    return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride % 8 == 0;
  };
  const auto matrix = [&](const LayerMatrices& m) { return rows16(m.data, m.stride_row) && m.stride_layer % 8 == 0; };
  if (!matrix(p.qkv) || !matrix(p.out) || !matrix(p.gate_up) || !matrix(p.down) || !matrix(p.head) ||
      !rows16(p.embedding, p.stride_embedding_row) || !rows16(p.norms, p.stride_norms_row))
    return "rows of weights must start at multiples of 16 bytes";
  if (!rows16(p.k_pages, p.stride_k_layer | p.stride_k_page | p.stride_k_slot | p.stride_k_head) ||
      !rows16(p.v_pages, p.stride_v_layer | p.stride_v_page | p.stride_v_slot | p.stride_v_head))
    return "rows of pages must start at multiples of 16 bytes";
  return Verdict::ok();
}

/// kChained: one launch. Else a launch a phase.
template <DType kDtype, bool kChained>
void launch(const DecodeStepParams& params, const Plan& plan, void* workspace, Stream stream);

}  // namespace flashkernel::cuda::decode_step
