// See attention_fp8.hpp.
#include "cpu/attention_fp8.hpp"

#include "core/float_types.hpp"
#include "core/thread_pool.hpp"

namespace flashkernel::cpu {
namespace {

// The numbers of all 256 elements.
struct Numbers {
  float of[256];
  Numbers() {
    for (int bits = 0; bits < 256; ++bits) of[bits] = to_float(Float8E4M3{static_cast<std::uint8_t>(bits)});
  }
};

void widen_row(const Numbers& numbers, const void* from, std::int64_t offset, void* to, std::int64_t to_offset,
               std::int64_t count, float scale) {
  const auto* const elements = static_cast<const std::uint8_t*>(from) + offset;
  float* const row = static_cast<float*>(to) + to_offset;
  for (std::int64_t d = 0; d < count; ++d) row[d] = numbers.of[elements[d]] * scale;
}

// f(b, h, i) for all rows of `heads` heads and up to `tokens` tokens.
template <class F>
void for_each_row(std::int64_t batch, std::int64_t heads, std::int64_t tokens, F&& f) {
  auto task = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row) f(row / heads / tokens, row % heads, row / heads % tokens);
  };
  parallel_for(batch * heads * tokens, 64, task);
}

}  // namespace

void widen_float8(const Float8AttentionParams& params, const Float8Over& over) {
  static const Numbers numbers;
  const AttentionParams &p = params.attention, &to = over.call;
  for_each_row(p.batch, p.heads_q, p.seq_q, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    if (i >= p.q_length(b)) return;
    widen_row(numbers, p.q, p.q_offset(b, h, i), const_cast<void*>(to.q), to.q_offset(b, h, i), p.head_dim,
              params.q.at(b, params.kv_head(h)));
  });
  for_each_row(p.batch, p.heads_kv, p.seq_k, [&](std::int64_t b, std::int64_t h, std::int64_t j) {
    if (j >= p.k_length(b)) return;
    widen_row(numbers, p.k, p.k_offset(b, h, j), const_cast<void*>(to.k), to.k_offset(b, h, j), p.head_dim,
              params.k.at(b, h));
    widen_row(numbers, p.v, p.v_offset(b, h, j), const_cast<void*>(to.v), to.v_offset(b, h, j), p.head_dim_v,
              params.v.at(b, h));
  });
}

void round_float8_output(const Float8AttentionParams& params, const Float8Over& over) {
  const AttentionParams& p = params.attention;
  visit_floating(params.dtype_out, [&](auto zero) {
    using T = decltype(zero);
    for_each_row(p.batch, p.heads_q, p.seq_q, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
      if (i >= p.q_length(b)) return;
      const float* const from = static_cast<const float*>(over.call.out) + over.call.out_offset(b, h, i);
      T* const row = static_cast<T*>(p.out) + p.out_offset(b, h, i);
      for (std::int64_t d = 0; d < p.head_dim_v; ++d) row[d] = from_float<T>(from[d]);
    });
  });
}

}  // namespace flashkernel::cpu
