// LayerNorm and RMSNorm (Zhang and Sennrich, 2019) with fused residual add, and their gradients, one row at a time.
#include <cmath>
#include <limits>
#include <vector>

#include "core/thread_pool.hpp"
#include "cpu/scalar/element.hpp"
#include "cpu/scalar/kernels.hpp"

namespace flashkernel::cpu_scalar {
namespace {

// A row's scale, its own where rows have one each, and its elements of 8 bits.
void quantize_row(const NormParams& p, std::int64_t row, const std::vector<float>& values) {
  const bool is_int8 = p.out_dtype == DType::kInt8;
  if (p.scales) {
    float largest = 0;
    bool has_nan = false;
    for (const float value : values) {
      has_nan = has_nan || std::isnan(value);
      if (std::abs(value) > largest) largest = std::abs(value);
    }
    if (has_nan && is_int8) largest = std::numeric_limits<float>::quiet_NaN();
    p.scales[row] = row_scale(largest, largest_element(p.out_dtype));
  }
  const float inverse = 1.0f / (p.scales ? p.scales[row] : *p.scale);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::int64_t at = row * p.stride_out_row + static_cast<std::int64_t>(i);
    if (is_int8)
      static_cast<Int8*>(p.out)[at] = from_float<Int8>(values[i] * inverse);
    else
      static_cast<Float8E4M3*>(p.out)[at] = from_float<Float8E4M3>(values[i] * inverse);
  }
}

template <class T>
void norm_row(const NormParams& p, std::int64_t row) {
  const T* h = static_cast<const T*>(p.x) + row * p.stride_x_row;
  if (p.residual) {
    // What is normalised is the sum as it is stored, so that backward sees the same h.
    T* sum = static_cast<T*>(p.residual_out) + row * p.stride_residual_out_row;
    for (std::int64_t i = 0; i < p.features; ++i)
      store<T>(sum, i, load<T>(h, i) + load<T>(p.residual, row * p.stride_residual_row + i));
    h = sum;
  }
  const double count = static_cast<double>(p.features);
  double mean = 0.0;
  if (p.kind == NormKind::kLayerNorm) {
    for (std::int64_t i = 0; i < p.features; ++i) mean += load<T>(h, i);
    mean /= count;
  }
  double squares = 0.0;
  for (std::int64_t i = 0; i < p.features; ++i) {
    const double centred = load<T>(h, i) - mean;
    squares += centred * centred;
  }
  const double rstd = 1.0 / std::sqrt(squares / count + static_cast<double>(p.eps));
  std::vector<float> wide(!p.is_quantized() ? 0 : static_cast<std::size_t>(p.features));
  const auto write = [&](std::int64_t i, double value) {
    if (wide.empty())
      store<T>(p.out, row * p.stride_out_row + i, value);
    else
      wide[static_cast<std::size_t>(i)] = static_cast<float>(value);
  };
  for (std::int64_t i = 0; i < p.features; ++i) {
    const double normalised = (load<T>(h, i) - mean) * rstd;
    const double scaled =
        p.weight ? normalised * (load(p.weight, i) + static_cast<double>(p.weight_offset)) : normalised;
    write(i, p.bias ? scaled + load(p.bias, i) : scaled);
  }
  if (p.is_quantized()) quantize_row(p, row, wide);
  if (p.mean) p.mean[row] = static_cast<float>(mean);
  if (p.rstd) p.rstd[row] = static_cast<float>(rstd);
}

template <class T>
double normalised(const NormBackwardParams& p, std::int64_t row, std::int64_t i) {
  const double mean = p.mean ? static_cast<double>(p.mean[row]) : 0.0;
  return (load<T>(p.h, row * p.stride_h_row + i) - mean) * static_cast<double>(p.rstd[row]);
}

// With n = (h - mean) rstd and g = grad_out * weight: grad_h = rstd (g - mean(g) - n mean(g n)); RMSNorm has no
// mean(g).
template <class T>
void grad_x_row(const NormBackwardParams& p, std::int64_t row) {
  const auto weighted = [&](std::int64_t i) {
    const double grad = load<T>(p.grad_out, row * p.stride_grad_out_row + i);
    return p.weight ? grad * (load(p.weight, i) + static_cast<double>(p.weight_offset)) : grad;
  };
  double sum = 0.0, dot = 0.0;
  for (std::int64_t i = 0; i < p.features; ++i) {
    sum += weighted(i);
    dot += weighted(i) * normalised<T>(p, row, i);
  }
  const double count = static_cast<double>(p.features);
  const double mean_grad = p.kind == NormKind::kLayerNorm ? sum / count : 0.0;
  const double rstd = static_cast<double>(p.rstd[row]);
  for (std::int64_t i = 0; i < p.features; ++i) {
    double grad = rstd * (weighted(i) - mean_grad - normalised<T>(p, row, i) * dot / count);
    if (p.grad_residual_out) grad += load<T>(p.grad_residual_out, row * p.stride_grad_residual_out_row + i);
    store<T>(p.grad_x, row * p.stride_grad_x_row + i, grad);
  }
}

template <class T>
void grad_parameters(const NormBackwardParams& p, std::int64_t i) {
  double weight = 0.0, bias = 0.0;
  for (std::int64_t row = 0; row < p.rows; ++row) {
    const double grad = load<T>(p.grad_out, row * p.stride_grad_out_row + i);
    weight += grad * normalised<T>(p, row, i);
    bias += grad;
  }
  if (p.grad_weight) store_as(p.grad_weight_dtype, p.grad_weight, i, weight);
  if (p.grad_bias) store_as(p.grad_bias_dtype, p.grad_bias, i, bias);
}

}  // namespace

void norm(const NormParams& p, void*, Stream) {
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto task = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t row = begin; row < end; ++row) norm_row<T>(p, row);
    };
    parallel_for(p.rows, grain_for(p.features), task);
  });
}

void norm_backward(const NormBackwardParams& p, void*, Stream) {
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    // The parameters' gradients first: they read all of grad_out and h, which grad_x may overwrite.
    auto parameters = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t i = begin; i < end; ++i) grad_parameters<T>(p, i);
    };
    if (p.grad_weight || p.grad_bias) parallel_for(p.features, grain_for(p.rows), parameters);
    auto rows = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t row = begin; row < end; ++row) grad_x_row<T>(p, row);
    };
    if (p.grad_x) parallel_for(p.rows, grain_for(p.features), rows);
  });
}

}  // namespace flashkernel::cpu_scalar
