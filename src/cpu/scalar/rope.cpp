// RoPE, in-kernel and by table. Reference of every other rope kernel; the rotation itself is in rotation.hpp.
#include "core/thread_pool.hpp"
#include "cpu/scalar/kernels.hpp"
#include "cpu/scalar/rotation.hpp"

namespace flashkernel::cpu_scalar {
namespace {

Rotation rotation_of(const RopeParams& p, std::int64_t batch, std::int64_t token, std::int64_t pair) {
  if (!p.cos) return rotation_at(p.spec, pair, p.position(batch, token));
  const std::int64_t row = p.table_is_per_token ? token : p.position(batch, token);
  return {load_as(p.table_dtype, p.cos, batch * p.stride_table_batch + row * p.stride_table_row + pair),
          load_as(p.table_dtype, p.sin, batch * p.stride_sin_batch + row * p.stride_sin_row + pair)};
}

template <class T>
void rotate_token(const RopeParams& p, std::int64_t batch, std::int64_t token) {
  const T* q = static_cast<const T*>(p.q) + batch * p.stride_q_batch + token * p.stride_q_token;
  const T* k = static_cast<const T*>(p.k) + (p.heads_kv ? batch * p.stride_k_batch + token * p.stride_k_token : 0);
  T* q_out = static_cast<T*>(p.q_out) + batch * p.stride_q_out_batch + token * p.stride_q_out_token;
  T* k_out = static_cast<T*>(p.k_out) + (p.heads_kv ? batch * p.stride_k_out_batch + token * p.stride_k_out_token : 0);
  for (std::int64_t pair = 0; pair < p.spec.rotary_dim / 2; ++pair) {
    const Rotation rotation = rotation_of(p, batch, token, pair);
    for (std::int64_t h = 0; h < p.heads_q; ++h)
      rotate_pair(p.spec, pair, rotation, q + h * p.stride_q_head, q_out + h * p.stride_q_out_head);
    for (std::int64_t h = 0; h < p.heads_kv; ++h)
      rotate_pair(p.spec, pair, rotation, k + h * p.stride_k_head, k_out + h * p.stride_k_out_head);
  }
  for (std::int64_t h = 0; h < p.heads_q; ++h)
    copy_unrotated(p.spec, p.head_dim, q + h * p.stride_q_head, q_out + h * p.stride_q_out_head);
  for (std::int64_t h = 0; h < p.heads_kv; ++h)
    copy_unrotated(p.spec, p.head_dim, k + h * p.stride_k_head, k_out + h * p.stride_k_out_head);
}

}  // namespace

void rope(const RopeParams& params, void*, Stream) {
  visit_floating(params.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto task = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t i = begin; i < end; ++i) rotate_token<T>(params, i / params.seq, i % params.seq);
    };
    parallel_for(params.batch * params.seq, grain_for((params.heads_q + params.heads_kv) * params.head_dim), task);
  });
}

}  // namespace flashkernel::cpu_scalar
