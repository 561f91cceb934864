// qkv_append: the product as fused_linear has it, rounded; then its heads go where kv_append puts them.
#include "cpu/scalar/element.hpp"
#include "cpu/scalar/kernels.hpp"

namespace flashkernel::cpu_scalar {

void qkv_append(const QkvAppendParams& p, void*, Stream stream) {
  fused_linear(p.linear, nullptr, stream);
  kv_append(p.append, nullptr, stream);
  if (p.append.has_rope) return;  // else the queries are in their place
  const std::int64_t queries = p.heads_q * p.append.pages.head_dim;
  visit_floating(p.linear.dtype, [&](auto zero) {
    using T = decltype(zero);
    for (std::int64_t row = 0; row < p.linear.rows; ++row)
      for (std::int64_t i = 0; i < queries; ++i)
        static_cast<T*>(p.q_out)[row * p.stride_q_out_token + i] =
            static_cast<const T*>(p.linear.out)[row * p.linear.stride_out_row + i];
  });
}

}  // namespace flashkernel::cpu_scalar
