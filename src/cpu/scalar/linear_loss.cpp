// linear_cross_entropy and its gradient, element by element.
#include <cmath>

#include "core/thread_pool.hpp"
#include "cpu/scalar/element.hpp"
#include "cpu/scalar/kernels.hpp"

namespace flashkernel::cpu_scalar {
namespace {

/// A logit as the softmax sees it, and its derivative by the logit that linear wrote.
struct Capped {
  double value, slope;
};
template <class Params>
Capped capped(const Params& p, double logit) {
  const double scale = static_cast<double>(p.scale), cap = static_cast<double>(p.softcap);
  if (!(cap > 0.0)) return {scale * logit, scale};
  const double t = std::tanh(logit / cap);
  return {scale * cap * t, scale * (1.0 - t * t)};
}

double class_weight(const float* weights, std::int64_t c) { return weights ? static_cast<double>(weights[c]) : 1.0; }

template <class T>
LossState segment_state(const LinearCrossEntropyParams& p, const T* logits, std::int64_t begin, std::int64_t end) {
  double maximum = -INFINITY;
  for (std::int64_t c = begin; c < end; ++c) {
    const double value = capped(p, load<T>(logits, c)).value;
    if (value > maximum) maximum = value;  // a NaN reaches the sum
  }
  const float kept = static_cast<float>(maximum);
  const auto origin = static_cast<double>(loss_origin(kept));
  double sum = 0.0, total = 0.0, weight = 0.0;
  for (std::int64_t c = begin; c < end; ++c) {
    const double value = capped(p, load<T>(logits, c)).value;
    sum += std::exp(value - origin);
    if (p.label_smoothing > 0.0f) {
      const double w = class_weight(p.class_weights, p.first_column + c);
      total += w * (value - origin);
      weight += w;
    }
  }
  return {kept, static_cast<float>(sum), 0.0f, static_cast<float>(total), static_cast<float>(weight)};
}

void accumulate(const LinearCrossEntropyBackwardParams& p) {
  auto task = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row)
      for (std::int64_t c = 0; c < p.columns; ++c) {
        float& sum = p.sum[row * p.stride_sum_row + c];
        const auto part = static_cast<float>(load(p.part, row * p.columns + c));
        sum = p.is_first ? part : sum + part;
        if (p.out) store_as(p.out_dtype, p.out, row * p.stride_out_row + c, static_cast<double>(sum));
      }
  };
  parallel_for(p.rows, grain_for(p.columns), task);
}

}  // namespace

void linear_cross_entropy(const LinearCrossEntropyParams& p, void*, Stream) {
  if (p.step == LinearCrossEntropyParams::Step::kFinish) return cpu::finish_losses(p);
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto task = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t row = begin; row < end; ++row) {
        const T* logits = static_cast<const T*>(p.logits) + row * p.stride_logits_row;
        LossState state = p.first_column > 0 ? p.state[row] : LossState{-INFINITY, 0.0f, 0.0f, 0.0f, 0.0f};
        for (std::int64_t c = 0; c < p.columns; c += p.segment)
          join_columns(state, segment_state(p, logits, c, std::min(c + p.segment, p.columns)));
        const std::int64_t target = p.targets[row] - p.first_column;
        if (target >= 0 && target < p.columns) state.hit = static_cast<float>(capped(p, load<T>(logits, target)).value);
        p.state[row] = state;
      }
    };
    parallel_for(p.rows, grain_for(p.columns), task);
  });
}

void linear_cross_entropy_backward(const LinearCrossEntropyBackwardParams& p, void*, Stream) {
  using Step = LinearCrossEntropyBackwardParams::Step;
  if (p.step == Step::kCoefficients) return cpu::loss_coefficients(p);
  if (p.step == Step::kAccumulate) return accumulate(p);
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto task = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t row = begin; row < end; ++row) {
        T* logits = static_cast<T*>(p.logits) + row * p.stride_logits_row;
        const LossCoefficients k = p.coefficients[row];
        const bool none = k.probability == 0.0f && k.target == 0.0f && k.uniform == 0.0f;
        const std::int64_t target = p.targets[row] - p.first_column;
        for (std::int64_t c = 0; c < p.columns; ++c) {
          const Capped logit = capped(p, load<T>(logits, c));
          const double p_c = std::exp(logit.value - static_cast<double>(k.shift) - static_cast<double>(k.rest));
          double grad = static_cast<double>(k.probability) * p_c;
          if (k.uniform != 0.0f)
            grad -= static_cast<double>(k.uniform) * class_weight(p.class_weights, p.first_column + c);
          if (c == target) grad -= static_cast<double>(k.target);
          store<T>(logits, c, none ? 0.0 : grad * logit.slope);
        }
      }
    };
    parallel_for(p.rows, grain_for(p.columns), task);
  });
}

}  // namespace flashkernel::cpu_scalar
