// See widened.hpp. A group of neighbours takes at most 16 values, so it is widened by looking them up: 16 conversions
// and as many loads as elements, on any processor.
#include "cpu/widened.hpp"

#include "core/float_types.hpp"
#include "core/thread_pool.hpp"

namespace flashkernel::cpu {
namespace {

constexpr std::int64_t kNumbersOfTask = 4096;

/// A row of numbers; `dim` is even.
template <class T>
void widen_row(const PackedRow& row, std::int64_t dim, T* to) {
  const std::int64_t group = row.dtype == DType::kInt4x2 ? kInt4Group : kNvfp4Group;
  for (std::int64_t begin = 0; begin < dim; begin += group) {
    T values[16];
    if (row.dtype == DType::kInt4x2) {
      const std::uint32_t word = row.word(begin);  // converted once, not once an element
      const float step = packed_half(word & 0xffffu), zero = packed_half(word >> 16);
      for (int e = 0; e < 16; ++e) values[e] = from_float<T>(static_cast<float>(e) * step + zero);
    } else {
      for (std::uint32_t e = 0; e < 16; ++e) values[e] = from_float<T>(row.number(e, begin));
    }
    const std::int64_t end = std::min(dim, begin + group);
    for (std::int64_t i = begin; i < end; i += 2) {
      const unsigned char two = row.elements[i / 2];
      to[i] = values[two & 15];
      to[i + 1] = values[two >> 4];
    }
  }
}

}  // namespace

void widen_pages(const AttentionParams& call, const WidenedPlan& plan, const WidenedPages& pages) {
  const std::int64_t tokens = plan.pages * kWidenedPage;
  list_pages(call, plan, pages);
  visit_floating(plan.dtype, [&](auto zero) {
    using T = decltype(zero);
    // Rows are [sequence, token, head]; what no query sees stays as the workspace was.
    auto task = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t at = begin; at < end; ++at) {
        const std::int64_t b = at / tokens, token = at % tokens, k_len = call.k_length(b);
        if (token >= k_len || token < call.first_key(b, 0, call.q_length(b), k_len)) continue;
        for (std::int64_t h = 0; h < call.heads_kv; ++h) {
          widen_row(call.k_packed(b, h, token), call.head_dim,
                    static_cast<T*>(pages.k) + (at * call.heads_kv + h) * plan.dim);
          widen_row(call.v_packed(b, h, token), call.head_dim_v,
                    static_cast<T*>(pages.v) + (at * call.heads_kv + h) * plan.dim_v);
        }
      }
    };
    const std::int64_t of_token = std::max<std::int64_t>(1, call.heads_kv * (call.head_dim + call.head_dim_v));
    parallel_for(call.batch * tokens, std::max<std::int64_t>(1, kNumbersOfTask / of_token), task);
  });
}

}  // namespace flashkernel::cpu
