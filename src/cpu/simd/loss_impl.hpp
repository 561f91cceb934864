// Cross-entropy and its gradient, without writing the probabilities; included by <isa>/loss.cpp.
// The rows' losses go to workspace and are added in row order in double, whatever the threads did.
#pragma once

#include "cpu/simd/rows.hpp"
#include "ops/loss_params.hpp"

namespace flashkernel::cpu {
namespace {

// LSE = maximum + log_sum: apart, since next to a maximum of 1e6 or -3.4e38 little or nothing is left of the other.
struct LogSumExp {
  float maximum, log_sum;
};

template <class T>
inline LogSumExp log_sum_exp(const T* x, std::int64_t n) {
  const float maximum = max_of(x, n);
  if (maximum == kNegInf || maximum == kInfinity) return {has_nan(x, n) ? kInfinity - kInfinity : maximum, 0.0f};
  const Reg shift = Simd::set1(maximum);
  return {
      maximum,
      logf(sum_of(n, [&](std::int64_t c, int lanes) { return vec_exp(Simd::sub(load_lanes(x + c, lanes), shift)); }))};
}

template <class T>
inline void cross_entropy_typed(const CrossEntropyParams& p, void* workspace) {
  double* const losses = static_cast<double*>(workspace);
  auto run = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row) {
      const T* const x = static_cast<const T*>(p.logits) + row * p.stride_logits_row;
      const std::int64_t target = index_at(p.targets, row);
      const LogSumExp lse = log_sum_exp(x, p.classes);
      const double maximum = static_cast<double>(lse.maximum), log_sum = static_cast<double>(lse.log_sum);
      if (p.lse) p.lse[row] = lse.maximum + lse.log_sum;
      if (target == p.ignore_index) {
        losses[row] = 0.0;
        continue;
      }
      double loss = log_sum + (maximum - static_cast<double>(scalar_value(x[target])));
      if (p.label_smoothing > 0.0f) {
        const Reg shift = Simd::set1(lse.maximum);
        const float total =
            sum_of(p.classes, [&](std::int64_t c, int lanes) { return Simd::sub(load_lanes(x + c, lanes), shift); });
        const double smoothing = static_cast<double>(p.label_smoothing);
        const double uniform = log_sum - static_cast<double>(total) / static_cast<double>(p.classes);
        loss = (1.0 - smoothing) * loss + smoothing * uniform;
      }
      losses[row] = loss;
    }
  };
  parallel_for(p.rows, rows_per_task(p.classes * static_cast<std::int64_t>(sizeof(T))), run);
  if (p.reduction == Reduction::kNone) {
    for (std::int64_t row = 0; row < p.rows; ++row) p.loss[row] = static_cast<float>(losses[row]);
    return;
  }
  double sum = 0.0;
  std::int64_t counted = 0;
  for (std::int64_t row = 0; row < p.rows; ++row) {
    sum += losses[row];
    counted += index_at(p.targets, row) != p.ignore_index;
  }
  *p.loss =
      static_cast<float>(p.reduction == Reduction::kSum ? sum : sum / static_cast<double>(counted));  // 0 / 0: NaN
}

// grad = (softmax - (1 - s) [c == target] - s / classes) * grad_loss (/ counted rows for the mean)
template <class T>
inline void cross_entropy_backward_typed(const CrossEntropyBackwardParams& p) {
  std::int64_t counted = 0;
  for (std::int64_t row = 0; row < p.rows; ++row) counted += index_at(p.targets, row) != p.ignore_index;
  auto run = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row) {
      const T* const x = static_cast<const T*>(p.logits) + row * p.stride_logits_row;
      T* const grad = static_cast<T*>(p.grad_logits) + row * p.stride_grad_logits_row;
      const std::int64_t target = index_at(p.targets, row);
      if (target == p.ignore_index) {
        for_vectors(p.classes, [&](std::int64_t c, int lanes) { save_lanes(grad + c, Simd::zero(), lanes); });
        continue;
      }
      double weight = static_cast<double>(p.grad_loss[row * p.stride_grad_loss]);
      if (p.reduction == Reduction::kMean) weight /= static_cast<double>(counted);
      const Reg lse = Simd::set1(p.lse[row]);
      float lost = 0.0f;  // what LSE is without, next to its size
      if (__builtin_fabsf(p.lse[row]) >= kLargeLse && __builtin_fabsf(p.lse[row]) < kInfinity)
        lost = logf(sum_of(
            p.classes, [&](std::int64_t c, int lanes) { return vec_exp(Simd::sub(load_lanes(x + c, lanes), lse)); }));
      const Reg rest = Simd::set1(lost), scale = Simd::set1(static_cast<float>(weight));
      const float off = p.label_smoothing / static_cast<float>(p.classes);
      const float at_target = scalar_value(x[target]);  // read before grad, which may be the logits, is written
      const Reg uniform = Simd::set1(off);
      for_vectors(p.classes, [&](std::int64_t c, int lanes) {
        const Reg probability = vec_exp(Simd::sub(Simd::sub(load_lanes(x + c, lanes), lse), rest));
        save_lanes(grad + c, Simd::mul(Simd::sub(probability, uniform), scale), lanes);
      });
      const Reg probability = vec_exp(Simd::sub(Simd::sub(Simd::set1(at_target), lse), rest));
      const Reg wanted = Simd::set1(1.0f - p.label_smoothing + off);
      Simd::store_first(grad + target, Simd::mul(Simd::sub(probability, wanted), scale), 1);
    }
  };
  parallel_for(p.rows, rows_per_task(p.classes * 2 * static_cast<std::int64_t>(sizeof(T))), run);
}

}  // namespace
}  // namespace flashkernel::cpu
