// linear and its gradient: one dot product per element, in double.
#include <algorithm>
#include <vector>

#include "core/thread_pool.hpp"
#include "cpu/scalar/activation.hpp"
#include "cpu/scalar/dot.hpp"
#include "cpu/scalar/element.hpp"
#include "cpu/scalar/kernels.hpp"

namespace flashkernel::cpu_scalar {

void linear(const LinearParams& p, void*, Stream) {
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto task = [&](std::int64_t begin, std::int64_t end, int) {
      std::vector<double> x(static_cast<std::size_t>(p.in_features)), sums;
      for (std::int64_t i = begin; i < end;) {  // a row's outputs, as far as they are in the task
        const std::int64_t row = i / p.out_features, first = i % p.out_features;
        const std::int64_t count = std::min(p.out_features - first, end - i);
        for (std::int64_t j = 0; j < p.in_features; ++j)
          x[static_cast<std::size_t>(j)] = load<T>(p.x, row * p.stride_x_row + j);
        sums.assign(static_cast<std::size_t>(count), 0.0);
        if (p.stride_weight_in == 1) {
          for (std::int64_t o = 0; o < count; ++o)
            sums[static_cast<std::size_t>(o)] =
                dot<T>(x.data(), p.weight, (first + o) * p.stride_weight_out, p.in_features);
        } else {  // memory is walked in its order here, too
          for (std::int64_t j = 0; j < p.in_features; ++j)
            for (std::int64_t o = 0; o < count; ++o)
              sums[static_cast<std::size_t>(o)] +=
                  x[static_cast<std::size_t>(j)] *
                  load<T>(p.weight, (first + o) * p.stride_weight_out + j * p.stride_weight_in);
        }
        for (std::int64_t o = first; o < first + count; ++o, ++i) {
          const double sum = sums[static_cast<std::size_t>(o - first)] + (p.bias ? load(p.bias, o) : 0.0);
          if (p.preactivation) store<T>(p.preactivation, row * p.stride_preactivation_row + o, sum);
          store<T>(p.out, row * p.stride_out_row + o, activate(p.activation, sum));
        }
      }
    };
    parallel_for(p.rows * p.out_features, grain_for(p.in_features), task);
  });
}

// The gradient of the pre-activation, [rows, out_features] in double: every gradient is a product with it.
std::size_t linear_backward_workspace(const LinearBackwardParams& p) {
  return static_cast<std::size_t>(p.rows * p.out_features) * sizeof(double);
}

void linear_backward(const LinearBackwardParams& p, void* workspace, Stream) {
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    double* const grad = static_cast<double*>(workspace);
    auto through_activation = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t row = i / p.out_features, o = i % p.out_features;
        grad[i] = load<T>(p.grad_out, row * p.stride_grad_out_row + o);
        if (p.activation != Activation::kNone)
          grad[i] *=
              activation_derivative(p.activation, load<T>(p.preactivation, row * p.stride_preactivation_row + o));
      }
    };
    parallel_for(p.rows * p.out_features, grain_for(1), through_activation);

    // A row of the result at a time, so that memory is walked in its order; the order of each sum is the same.
    auto grad_x = [&](std::int64_t begin, std::int64_t end, int) {
      std::vector<double> sums;
      for (std::int64_t row = begin; row < end; ++row) {
        sums.assign(static_cast<std::size_t>(p.in_features), 0.0);
        for (std::int64_t o = 0; o < p.out_features; ++o) {
          const double g = grad[row * p.out_features + o];
          for (std::int64_t j = 0; j < p.in_features; ++j)
            sums[static_cast<std::size_t>(j)] +=
                g * load<T>(p.weight, o * p.stride_weight_out + j * p.stride_weight_in);
        }
        for (std::int64_t j = 0; j < p.in_features; ++j)
          store<T>(p.grad_x, row * p.stride_grad_x_row + j, sums[static_cast<std::size_t>(j)]);
      }
    };
    if (p.grad_x) parallel_for(p.rows, grain_for(p.in_features * p.out_features), grad_x);

    auto grad_weight = [&](std::int64_t begin, std::int64_t end, int) {
      std::vector<double> sums;
      for (std::int64_t o = begin; o < end; ++o) {
        sums.assign(static_cast<std::size_t>(p.in_features), 0.0);
        for (std::int64_t row = 0; row < p.rows; ++row) {
          const double g = grad[row * p.out_features + o];
          for (std::int64_t j = 0; j < p.in_features; ++j)
            sums[static_cast<std::size_t>(j)] += g * load<T>(p.x, row * p.stride_x_row + j);
        }
        for (std::int64_t j = 0; j < p.in_features; ++j)
          store<T>(p.grad_weight, o * p.stride_grad_weight_out + j * p.stride_grad_weight_in,
                   sums[static_cast<std::size_t>(j)]);
      }
    };
    if (p.grad_weight) parallel_for(p.out_features, grain_for(p.rows * p.in_features), grad_weight);

    auto grad_bias = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t o = begin; o < end; ++o) {
        double sum = 0.0;
        for (std::int64_t row = 0; row < p.rows; ++row) sum += grad[row * p.out_features + o];
        store_as(p.grad_bias_dtype, p.grad_bias, o, sum);
      }
    };
    if (p.grad_bias) parallel_for(p.out_features, grain_for(p.rows), grad_bias);
  });
}

}  // namespace flashkernel::cpu_scalar
