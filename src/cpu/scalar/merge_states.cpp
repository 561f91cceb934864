// out = (e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b), lse = log(e^lse_a + e^lse_b), row by row.
// Called through src/cpu/kernels.cpp. A part with LSE -inf is not read. Out may lie where part a lies.
// Paper: FlashDecoding / Cascade inference ("merge of attention states").
#include <algorithm>

#include "core/thread_pool.hpp"
#include "cpu/scalar/attention_score.hpp"
#include "cpu/scalar/kernels.hpp"

namespace flashkernel::cpu_scalar {
namespace {

template <class T>
void merge_row(const MergeStatesParams& p, const std::int64_t index[3]) {
  const auto offset = [&](const std::int64_t strides[3]) {
    return index[0] * strides[0] + index[1] * strides[1] + index[2] * strides[2];
  };
  const double lse_a = p.lse_a[offset(p.stride_lse_a)], lse_b = p.lse_b[offset(p.stride_lse_b)];
  const double max = std::max(lse_a, lse_b);
  const bool has_a = lse_a != kMinusInfinity, has_b = lse_b != kMinusInfinity;
  const double weight_a = has_a ? std::exp(lse_a - max) : 0, weight_b = has_b ? std::exp(lse_b - max) : 0;
  const double sum = weight_a + weight_b;
  const std::int64_t row_a = offset(p.stride_out_a), row_b = offset(p.stride_out_b), row = offset(p.stride_out);
  for (std::int64_t d = 0; d < p.head_dim; ++d) {
    double value = 0;
    if (has_a) value += weight_a / sum * load<T>(p.out_a, row_a + d);
    if (has_b) value += weight_b / sum * load<T>(p.out_b, row_b + d);
    store<T>(p.out, row + d, value);
  }
  if (p.lse) p.lse[offset(p.stride_lse)] = static_cast<float>(has_a || has_b ? max + std::log(sum) : kMinusInfinity);
}

}  // namespace

void merge_states(const MergeStatesParams& p, void*, Stream) {
  auto task = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t index[3] = {row / p.shape[2] / p.shape[1], row / p.shape[2] % p.shape[1], row % p.shape[2]};
      visit_floating(p.dtype, [&](auto zero) { merge_row<decltype(zero)>(p, index); });
    }
  };
  parallel_for(p.shape[0] * p.shape[1] * p.shape[2], 64, task);
}

}  // namespace flashkernel::cpu_scalar
