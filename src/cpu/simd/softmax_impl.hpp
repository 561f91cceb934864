// softmax, log-softmax and their gradients along a contiguous dim; included by <isa>/softmax.cpp.
// Exponentials of a row wait on the stack for their sum; those of a row too long for that are computed twice, which is
// cheaper than a trip through memory. out may alias x.
#pragma once

#include "cpu/simd/rows.hpp"
#include "ops/reduce_params.hpp"

namespace flashkernel::cpu {
namespace {

constexpr std::int64_t kKeptColumns = 4096;  // 16 KiB of the stack, which stay in L1 beside the row

template <class T>
inline void softmax_row(const T* x, T* out, std::int64_t n, bool log) {
  const float maximum = max_of(x, n);
  // A row of -inf only has no maximum to subtract: its sum is 0, and stays NaN if there is a NaN.
  const Reg shift = Simd::set1(maximum == kNegInf ? 0.0f : maximum);
  const bool keeps = !log && n <= kKeptColumns;
  float kept[kKeptColumns + Simd::kWidth];
  const float sum = sum_of(n, [&](std::int64_t c, int lanes) {
    const Reg e = vec_exp(Simd::sub(load_lanes(x + c, lanes), shift));
    if (keeps) Simd::save(kept + c, e);
    return e;
  });
  if (log) {
    const Reg log_sum = Simd::set1(logf(sum));  // log 0 = -inf, and -inf is what such a row gets
    const bool empty = sum == 0.0f;
    for_vectors(n, [&](std::int64_t c, int lanes) {
      const Reg y = empty ? Simd::set1(kNegInf) : Simd::sub(Simd::sub(load_lanes(x + c, lanes), shift), log_sum);
      save_lanes(out + c, y, lanes);
    });
  } else {
    const Reg scale = Simd::set1(sum == 0.0f ? 0.0f : 1.0f / sum);
    for_vectors(n, [&](std::int64_t c, int lanes) {
      const Reg e = keeps ? Simd::load(kept + c) : vec_exp(Simd::sub(load_lanes(x + c, lanes), shift));
      save_lanes(out + c, Simd::mul(e, scale), lanes);
    });
  }
}

template <class T>
inline void softmax_typed(const SoftmaxParams& p) {
  auto run = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row)
      softmax_row(static_cast<const T*>(p.x) + offset_at(row, p.ndim, p.shape, p.stride_x),
                  static_cast<T*>(p.out) + offset_at(row, p.ndim, p.shape, p.stride_out), p.columns, p.log);
  };
  parallel_for(p.rows, rows_per_task(p.columns * 2 * static_cast<std::int64_t>(sizeof(T))), run);
}

// softmax: y (g - sum g y); log-softmax: g - exp(y) sum g
template <class T>
inline void softmax_backward_row(const T* grad, const T* y, T* out, std::int64_t n, bool log) {
  const float sum = sum_of(n, [&](std::int64_t c, int lanes) {
    const Reg g = load_lanes(grad + c, lanes);
    return log ? g : Simd::mul(g, load_lanes(y + c, lanes));
  });
  const Reg total = Simd::set1(sum);
  for_vectors(n, [&](std::int64_t c, int lanes) {
    const Reg g = load_lanes(grad + c, lanes), v = load_lanes(y + c, lanes);
    save_lanes(out + c, log ? Simd::fnma(vec_exp(v), total, g) : Simd::mul(v, Simd::sub(g, total)), lanes);
  });
}

template <class T>
inline void softmax_backward_typed(const SoftmaxBackwardParams& p) {
  auto run = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row)
      softmax_backward_row(static_cast<const T*>(p.grad_out) + offset_at(row, p.ndim, p.shape, p.stride_grad_out),
                           static_cast<const T*>(p.out) + offset_at(row, p.ndim, p.shape, p.stride_out),
                           static_cast<T*>(p.grad_x) + offset_at(row, p.ndim, p.shape, p.stride_grad_x), p.columns,
                           p.log);
  };
  parallel_for(p.rows, rows_per_task(p.columns * 3 * static_cast<std::int64_t>(sizeof(T))), run);
}

}  // namespace
}  // namespace flashkernel::cpu
