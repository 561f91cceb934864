// Whether kv_append with RoPE can move a token 16 bytes a lane.
#pragma once

#include <initializer_list>

#include "cuda/host/launch.hpp"
#include "ops/kv_params.hpp"

namespace flashkernel::cuda {

/// width: elements of 16 bytes.
inline bool append_in_vectors(const KvAppendParams& p, std::int64_t width) {
  const auto fits = [&](const void* data, std::initializer_list<std::int64_t> strides) {
    bool all = is_aligned(data, 16);
    for (const std::int64_t stride : strides) all = all && stride % width == 0;
    return all;
  };
  return p.rope.rotary_dim / 2 % width == 0 && p.pages.head_dim % width == 0 && p.pages.head_dim_v % width == 0 &&
         fits(p.k, {p.stride_k_token, p.stride_k_head}) && fits(p.v, {p.stride_v_token, p.stride_v_head}) &&
         fits(p.pages.k, {p.pages.stride_k_page, p.pages.stride_k_slot, p.pages.stride_k_head}) &&
         fits(p.pages.v, {p.pages.stride_v_page, p.pages.stride_v_slot, p.pages.stride_v_head}) &&
         (p.heads_q == 0 || (fits(p.q, {p.stride_q_token, p.stride_q_head}) &&
                             fits(p.q_out, {p.stride_q_out_token, p.stride_q_out_head})));
}

}  // namespace flashkernel::cuda
