// LayerNorm and RMSNorm (Zhang and Sennrich, 2019), forward with fused residual, and backward; included by
// <isa>/norm.cpp. A row passes from memory once and is read again from cache: mean, centred squares, output. Backward
// adds the gradients of weight and bias per chunk of rows (chunks depend on the number of rows only) and then over the
// chunks in order.
#pragma once

#include "cpu/simd/quantize.hpp"
#include "cpu/simd/row_plan.hpp"
#include "cpu/simd/rows.hpp"
#include "ops/norm_params.hpp"

namespace flashkernel::cpu {
namespace {

template <class T>
inline void norm_row(const NormParams& p, std::int64_t row) {
  const std::int64_t n = p.features;
  const T* h = static_cast<const T*>(p.x) + row * p.stride_x_row;
  if (p.residual) {
    // What is normalised is the sum as it is stored, so that backward sees the same h.
    T* const sum = static_cast<T*>(p.residual_out) + row * p.stride_residual_out_row;
    const T* const residual = static_cast<const T*>(p.residual) + row * p.stride_residual_row;
    for_vectors(n, [&](std::int64_t c, int lanes) {
      save_lanes(sum + c, Simd::add(load_lanes(h + c, lanes), load_lanes(residual + c, lanes)), lanes);
    });
    h = sum;
  }
  const float count = static_cast<float>(n);
  const float mean = p.kind == NormKind::kLayerNorm
                         ? sum_of(n, [&](std::int64_t c, int lanes) { return load_lanes(h + c, lanes); }) / count
                         : 0.0f;
  const Reg center = Simd::set1(mean);
  const float squares = sum_of(n, [&](std::int64_t c, int lanes) {
    const Reg d = Simd::sub(load_lanes(h + c, lanes), center);
    return Simd::mul(d, d);
  });
  const float rstd = 1.0f / sqrtf(squares / count + p.eps);
  const Reg scale = Simd::set1(rstd);
  const MixedVector weight{p.weight.data, p.weight.dtype}, bias{p.bias.data, p.bias.dtype};
  const Reg offset = Simd::set1(p.weight_offset);
  const auto result = [&](std::int64_t c, int lanes) {
    Reg y = Simd::mul(Simd::sub(load_lanes(h + c, lanes), center), scale);
    if (weight.data) y = Simd::mul(y, Simd::add(weight.at(c, n), offset));
    if (bias.data) y = Simd::add(y, bias.at(c, n));
    return y;
  };
  if (!p.is_quantized()) {
    T* const out = static_cast<T*>(p.out) + row * p.stride_out_row;
    for_vectors(n, [&](std::int64_t c, int lanes) { save_lanes(out + c, result(c, lanes), lanes); });
  } else {
    auto* const out = static_cast<std::uint8_t*>(p.out) + row * p.stride_out_row;
    if (p.scales) p.scales[row] = scale_of_row(n, p.out_dtype, result);
    quantize_row(n, p.out_dtype, p.scales ? p.scales[row] : *p.scale, out, result);
  }
  if (p.mean) p.mean[row] = mean;
  if (p.rstd) p.rstd[row] = rstd;
}

template <class T>
inline void norm_typed(const NormParams& p) {
  auto run = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row) norm_row<T>(p, row);
  };
  parallel_for(p.rows, rows_per_task(p.features * 2 * static_cast<std::int64_t>(sizeof(T))), run);
}

// With n = (h - mean) rstd and g = grad_out * weight: grad_h = rstd (g - mean(g) - n mean(g n)); RMSNorm has no
// mean(g). Adds grad_out * n and grad_out to the sums. Reads a row before it writes it: grad_x may be h or grad_out.
template <class T>
inline void norm_backward_row(const NormBackwardParams& p, std::int64_t row, float* weight_sums, float* bias_sums) {
  const std::int64_t n = p.features;
  const T* const grad = static_cast<const T*>(p.grad_out) + row * p.stride_grad_out_row;
  const T* const h = static_cast<const T*>(p.h) + row * p.stride_h_row;
  const Reg center = Simd::set1(p.mean ? p.mean[row] : 0.0f), rstd = Simd::set1(p.rstd[row]);
  const MixedVector weight{p.weight.data, p.weight.dtype};
  const Reg offset = Simd::set1(p.weight_offset);
  Reg sum = Simd::zero(), dot = Simd::zero();
  for_vectors(n, [&](std::int64_t c, int lanes) {
    const Reg raw = load_lanes(grad + c, lanes);
    // Lanes past the row: grad is 0 there, but 0 * rstd * mean may be NaN where rstd is infinite.
    Reg normalised = Simd::mul(Simd::sub(load_lanes(h + c, lanes), center), rstd);
    if (lanes < Simd::kWidth) normalised = Simd::select(Simd::lanes(lanes), normalised, Simd::zero());
    const Reg g = weight.data ? Simd::mul(raw, Simd::add(weight.at(c, n), offset)) : raw;
    sum = Simd::add(sum, g);
    dot = Simd::fma(g, normalised, dot);
    if (weight_sums) Simd::save(weight_sums + c, Simd::fma(raw, normalised, Simd::load(weight_sums + c)));
    if (bias_sums) Simd::save(bias_sums + c, Simd::add(raw, Simd::load(bias_sums + c)));
  });
  if (!p.grad_x) return;
  const float count = static_cast<float>(n);
  const Reg mean_grad = Simd::set1(p.kind == NormKind::kLayerNorm ? Simd::sum(sum) / count : 0.0f);
  const Reg mean_dot = Simd::set1(Simd::sum(dot) / count);
  T* const out = static_cast<T*>(p.grad_x) + row * p.stride_grad_x_row;
  const T* const more =
      p.grad_residual_out ? static_cast<const T*>(p.grad_residual_out) + row * p.stride_grad_residual_out_row : nullptr;
  for_vectors(n, [&](std::int64_t c, int lanes) {
    const Reg raw = load_lanes(grad + c, lanes);
    const Reg normalised = Simd::mul(Simd::sub(load_lanes(h + c, lanes), center), rstd);
    const Reg g = weight.data ? Simd::mul(raw, Simd::add(weight.at(c, n), offset)) : raw;
    Reg y = Simd::mul(rstd, Simd::fnma(normalised, mean_dot, Simd::sub(g, mean_grad)));
    if (more) y = Simd::add(y, load_lanes(more + c, lanes));
    save_lanes(out + c, y, lanes);
  });
}

/// Adds up the chunks' sums of one parameter.
template <class Out>
inline void add_chunks(const float* sums, std::int64_t chunks, std::int64_t pitch, std::int64_t n, Out* out) {
  auto run = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t v = begin; v < end; ++v) {
      const std::int64_t c = v * Simd::kWidth;
      Reg total = Simd::zero();
      for (std::int64_t chunk = 0; chunk < chunks; ++chunk)
        total = Simd::add(total, Simd::load(sums + chunk * pitch + c));
      save_columns(out, c, n, total);
    }
  };
  parallel_for(ceil_div(n, Simd::kWidth), 64, run);
}

template <class T>
inline void norm_backward_typed(const NormBackwardParams& p, void* workspace) {
  const std::int64_t pitch = norm_sum_pitch(p.features), chunk_rows = norm_chunk_rows(p.rows);
  const std::int64_t chunks = norm_chunks(p.rows);
  float* const weight_sums = p.grad_weight ? static_cast<float*>(workspace) : nullptr;
  float* const bias_sums =
      p.grad_bias ? static_cast<float*>(workspace) + (p.grad_weight ? chunks * pitch : 0) : nullptr;
  auto run = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t chunk = begin; chunk < end; ++chunk) {
      float* const ws = weight_sums ? weight_sums + chunk * pitch : nullptr;
      float* const bs = bias_sums ? bias_sums + chunk * pitch : nullptr;
      for (std::int64_t c = 0; c < pitch; c += Simd::kWidth) {
        if (ws) Simd::save(ws + c, Simd::zero());
        if (bs) Simd::save(bs + c, Simd::zero());
      }
      const std::int64_t last = imin(p.rows, (chunk + 1) * chunk_rows);
      for (std::int64_t row = chunk * chunk_rows; row < last; ++row) norm_backward_row<T>(p, row, ws, bs);
    }
  };
  parallel_for(chunks, 1, run);
  // Without rows there is no workspace and the gradients are 0.
  const auto finish = [&](const float* sums, void* out, DType dtype) {
    visit_type(dtype,
               [&](auto type) { add_chunks(sums, chunks, pitch, p.features, static_cast<decltype(type)*>(out)); });
  };
  if (p.grad_weight) finish(weight_sums, p.grad_weight, p.grad_weight_dtype);
  if (p.grad_bias) finish(bias_sums, p.grad_bias, p.grad_bias_dtype);
}

}  // namespace
}  // namespace flashkernel::cpu
