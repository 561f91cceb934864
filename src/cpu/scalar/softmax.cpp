// softmax, log-softmax and their gradients, one row at a time: maximum, sum of exponentials, result.
#include <cmath>

#include "core/thread_pool.hpp"
#include "cpu/scalar/element.hpp"
#include "cpu/scalar/kernels.hpp"

namespace flashkernel::cpu_scalar {
namespace {

template <class T>
void softmax_row(const SoftmaxParams& p, const T* x, T* out) {
  double maximum = -INFINITY;
  for (std::int64_t c = 0; c < p.columns; ++c) {
    const double value = load<T>(x, c * p.stride_x_column);
    if (std::isnan(value) || value > maximum) maximum = value;
    if (std::isnan(maximum)) break;
  }
  // A row of -inf only has no maximum to subtract: -inf - 0 keeps every exponential 0.
  const double shift = maximum == -INFINITY ? 0.0 : maximum;
  double sum = 0.0;
  for (std::int64_t c = 0; c < p.columns; ++c) sum += std::exp(load<T>(x, c * p.stride_x_column) - shift);
  const double log_sum = std::log(sum);
  for (std::int64_t c = 0; c < p.columns; ++c) {
    const double shifted = load<T>(x, c * p.stride_x_column) - shift;
    double result;
    if (maximum == -INFINITY) {
      result = p.log ? -INFINITY : 0.0;
    } else {
      result = p.log ? shifted - log_sum : std::exp(shifted) / sum;
    }
    store<T>(out, c * p.stride_out_column, result);
  }
}

template <class T>
void softmax_backward_row(const SoftmaxBackwardParams& p, const T* grad_out, const T* out, T* grad_x) {
  // softmax: y (g - sum g y); log-softmax: g - exp(y) sum g
  double sum = 0.0;
  for (std::int64_t c = 0; c < p.columns; ++c) {
    const double grad = load<T>(grad_out, c * p.stride_grad_out_column);
    sum += p.log ? grad : grad * load<T>(out, c * p.stride_out_column);
  }
  for (std::int64_t c = 0; c < p.columns; ++c) {
    const double grad = load<T>(grad_out, c * p.stride_grad_out_column), y = load<T>(out, c * p.stride_out_column);
    store<T>(grad_x, c * p.stride_grad_x_column, p.log ? grad - std::exp(y) * sum : y * (grad - sum));
  }
}

}  // namespace

void softmax(const SoftmaxParams& p, void*, Stream) {
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto task = [&](std::int64_t begin, std::int64_t end, int) {
      for_each_offset<2>(p.ndim, p.shape, {p.stride_x, p.stride_out}, begin, end, [&](const auto& at) {
        softmax_row(p, static_cast<const T*>(p.x) + at[0], static_cast<T*>(p.out) + at[1]);
      });
    };
    parallel_for(p.rows, grain_for(p.columns), task);
  });
}

void softmax_backward(const SoftmaxBackwardParams& p, void*, Stream) {
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto task = [&](std::int64_t begin, std::int64_t end, int) {
      for_each_offset<3>(
          p.ndim, p.shape, {p.stride_grad_out, p.stride_out, p.stride_grad_x}, begin, end, [&](const auto& at) {
            softmax_backward_row(p, static_cast<const T*>(p.grad_out) + at[0], static_cast<const T*>(p.out) + at[1],
                                 static_cast<T*>(p.grad_x) + at[2]);
          });
    };
    parallel_for(p.rows, grain_for(p.columns), task);
  });
}

}  // namespace flashkernel::cpu_scalar
