// out = sum of e^lse_i out_i / sum of e^lse_i, lse = log(sum of e^lse_i), over the parts i, row by row.
// Called through src/cpu/kernels.cpp. A part with LSE -inf is not read. Out may lie where part a lies.
// Paper: FlashDecoding / Cascade inference ("merge of attention states").
#include <algorithm>

#include "core/thread_pool.hpp"
#include "cpu/scalar/attention_score.hpp"
#include "cpu/scalar/kernels.hpp"

namespace flashkernel::cpu_scalar {
namespace {

/// Part i of a row: where its output begins, and its LSE.
struct Part {
  const void* out;
  std::int64_t offset;
  double lse;
};

template <class T, class Out>
void merge_row(const MergeStatesParams& p, const std::int64_t index[3]) {
  const auto offset = [&](const std::int64_t strides[3]) {
    return index[0] * strides[0] + index[1] * strides[1] + index[2] * strides[2];
  };
  const auto part = [&](std::int64_t i) {
    if (p.is_pair && i == 1) return Part{p.out_b, offset(p.stride_out_b), p.lse_b[offset(p.stride_lse_b)]};
    return Part{p.out_a, offset(p.stride_out_a) + i * p.stride_out_part,
                p.lse_a[offset(p.stride_lse_a) + i * p.stride_lse_part]};
  };
  double max = kMinusInfinity, sum = 0;
  for (std::int64_t i = 0; i < p.parts; ++i) {
    const double lse = part(i).lse;
    if (lse > max || std::isnan(lse)) max = lse;  // a NaN stays
  }
  for (std::int64_t i = 0; i < p.parts; ++i) {
    const double lse = part(i).lse;
    if (lse != kMinusInfinity) sum += std::exp(lse - max);
  }
  const std::int64_t row = offset(p.stride_out);
  // A few dims at a time: their sums are kept while the parts are read one after another, and out, which may be part a,
  // is written when they have been read.
  constexpr std::int64_t kDims = 64;
  for (std::int64_t first = 0; first < p.head_dim; first += kDims) {
    const std::int64_t count = std::min(kDims, p.head_dim - first);
    double values[kDims] = {};
    for (std::int64_t i = 0; i < p.parts; ++i) {
      const Part from = part(i);
      if (from.lse == kMinusInfinity) continue;
      const double weight = std::exp(from.lse - max) / sum;
      for (std::int64_t d = 0; d < count; ++d) values[d] += weight * load<T>(from.out, from.offset + first + d);
    }
    for (std::int64_t d = 0; d < count; ++d) store<Out>(p.out, row + first + d, values[d]);
  }
  if (p.lse)
    p.lse[offset(p.stride_lse)] = static_cast<float>(max == kMinusInfinity ? kMinusInfinity : max + std::log(sum));
}

}  // namespace

void merge_states(const MergeStatesParams& p, void*, Stream) {
  auto task = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t index[3] = {row / p.shape[2] / p.shape[1], row / p.shape[2] % p.shape[1], row % p.shape[2]};
      visit_floating(p.dtype, [&](auto in) {
        using T = decltype(in);
        if (p.out_dtype == p.dtype) return merge_row<T, T>(p, index);
        visit_floating(p.out_dtype, [&](auto to) { merge_row<float, decltype(to)>(p, index); });
      });
    }
  };
  parallel_for(p.shape[0] * p.shape[1] * p.shape[2], 64, task);
}

}  // namespace flashkernel::cpu_scalar
