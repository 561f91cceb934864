// fused_linear: a row at a time, in double; its norm is rounded as norms are.
#include <cmath>
#include <vector>

#include "core/thread_pool.hpp"
#include "cpu/scalar/activation.hpp"
#include "cpu/scalar/element.hpp"
#include "cpu/scalar/kernels.hpp"

namespace flashkernel::cpu_scalar {
namespace {

template <class T>
void take_row(const FusedLinearParams& p, std::int64_t row, std::vector<double>& x) {
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = load<T>(p.x, row * p.stride_x_row + static_cast<std::int64_t>(i));
  if (!p.norm_weight) return;
  const double count = static_cast<double>(x.size());
  double mean = 0.0, squares = 0.0;
  if (p.centred) {
    for (const double value : x) mean += value;
    mean /= count;
  }
  for (const double value : x) squares += (value - mean) * (value - mean);
  const double rstd = 1.0 / std::sqrt(squares / count + static_cast<double>(p.eps));
  for (std::size_t i = 0; i < x.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    const double scaled = (x[i] - mean) * rstd * load(p.norm_weight, at) + (p.norm_bias ? load(p.norm_bias, at) : 0.0);
    T rounded;
    store<T>(&rounded, 0, scaled);
    x[i] = load<T>(&rounded, 0);
  }
}

template <class T>
double product(const FusedLinearParams& p, const std::vector<double>& x, std::int64_t feature) {
  double sum = p.bias ? load(p.bias, feature) : 0.0;
  for (std::size_t i = 0; i < x.size(); ++i)
    sum += x[i] * load<T>(p.weight, feature * p.stride_weight_out + static_cast<std::int64_t>(i) * p.stride_weight_in);
  return sum;
}

}  // namespace

void fused_linear(const FusedLinearParams& p, void*, Stream) {
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto task = [&](std::int64_t begin, std::int64_t end, int) {
      std::vector<double> x(static_cast<std::size_t>(p.in_features));
      std::int64_t taken = -1;
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t row = i / p.out_features, o = i % p.out_features;
        if (row != taken) take_row<T>(p, row, x);
        taken = row;
        double value = activate(p.activation, product<T>(p, x, o));
        if (p.gated) value *= product<T>(p, x, p.out_features + o);
        if (p.residual) value += load<T>(p.residual, row * p.stride_residual_row + o);
        store<T>(p.out, row * p.stride_out_row + o, value);
      }
    };
    parallel_for(p.rows * p.out_features, grain_for(p.in_features), task);
  });
}

}  // namespace flashkernel::cpu_scalar
