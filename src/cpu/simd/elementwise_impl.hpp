// add, swiglu and its gradient where the innermost dim is contiguous in every tensor; included by
// <isa>/elementwise.cpp.
#pragma once

#include "cpu/simd/rows.hpp"
#include "ops/elementwise_params.hpp"

namespace flashkernel::cpu {
namespace {

constexpr std::int64_t kSpan = 8192;  // elements of a row handed out at a time

/// f(offsets, count) for spans of the innermost dim; offsets[i] is where the span starts by strides[i].
template <int kTensors, class F>
inline void for_spans(int ndim, const std::int64_t* shape, const std::int64_t* const (&strides)[kTensors],
                      std::int64_t bytes_per_element, F&& f) {
  const std::int64_t columns = shape[ndim - 1], spans = ceil_div(columns, kSpan);
  std::int64_t rows = 1;
  for (int d = 0; d < ndim - 1; ++d) rows *= shape[d];
  auto run = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t row = i / spans, c = i % spans * kSpan;
      std::int64_t offsets[kTensors];
      for (int t = 0; t < kTensors; ++t) offsets[t] = offset_at(row, ndim - 1, shape, strides[t]) + c;
      f(offsets, imin(kSpan, columns - c));
    }
  };
  parallel_for(rows * spans, rows_per_task(imin(columns, kSpan) * bytes_per_element), run);
}

template <class T>
inline void add_typed(const AddParams& p) {
  const std::int64_t* const strides[3] = {p.stride_a, p.stride_b, p.stride_out};
  for_spans<3>(p.ndim, p.shape, strides, 3 * sizeof(T), [&](const std::int64_t* at, std::int64_t n) {
    const T* const a = static_cast<const T*>(p.a) + at[0];
    const T* const b = static_cast<const T*>(p.b) + at[1];
    T* const out = static_cast<T*>(p.out) + at[2];
    for_vectors(n, [&](std::int64_t c, int lanes) {
      save_lanes(out + c, Simd::add(load_lanes(a + c, lanes), load_lanes(b + c, lanes)), lanes);
    });
  });
}

template <class T>
inline void swiglu_typed(const SwigluParams& p) {
  const std::int64_t* const strides[3] = {p.stride_gate, p.stride_up, p.stride_out};
  for_spans<3>(p.ndim, p.shape, strides, 3 * sizeof(T), [&](const std::int64_t* at, std::int64_t n) {
    const T* const gate = static_cast<const T*>(p.gate) + at[0];
    const T* const up = static_cast<const T*>(p.up) + at[1];
    T* const out = static_cast<T*>(p.out) + at[2];
    for_vectors(n, [&](std::int64_t c, int lanes) {
      save_lanes(out + c, Simd::mul(vec_silu(load_lanes(gate + c, lanes)), load_lanes(up + c, lanes)), lanes);
    });
  });
}

template <class T>
inline void swiglu_backward_typed(const SwigluBackwardParams& p) {
  const std::int64_t* const strides[5] = {p.stride_grad_out, p.stride_gate, p.stride_up, p.stride_grad_gate,
                                          p.stride_grad_up};
  for_spans<5>(p.ndim, p.shape, strides, 5 * sizeof(T), [&](const std::int64_t* at, std::int64_t n) {
    const T* const grad = static_cast<const T*>(p.grad_out) + at[0];
    const T* const gate = static_cast<const T*>(p.gate) + at[1];
    const T* const up = static_cast<const T*>(p.up) + at[2];
    T* const grad_gate = p.grad_gate ? static_cast<T*>(p.grad_gate) + at[3] : nullptr;
    T* const grad_up = p.grad_up ? static_cast<T*>(p.grad_up) + at[4] : nullptr;
    for_vectors(n, [&](std::int64_t c, int lanes) {
      const Reg g = load_lanes(grad + c, lanes), x = load_lanes(gate + c, lanes), u = load_lanes(up + c, lanes);
      if (grad_gate) save_lanes(grad_gate + c, Simd::mul(Simd::mul(g, u), vec_silu_gradient(x)), lanes);
      if (grad_up) save_lanes(grad_up + c, Simd::mul(g, vec_silu(x)), lanes);
    });
  });
}

}  // namespace
}  // namespace flashkernel::cpu
