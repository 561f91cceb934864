// Cross-entropy and its gradient. The rows' losses go to workspace and are added up in row order, whatever the threads
// did.
#include <cmath>

#include "core/thread_pool.hpp"
#include "cpu/scalar/element.hpp"
#include "cpu/scalar/kernels.hpp"

namespace flashkernel::cpu_scalar {
namespace {

// LSE = maximum + log_sum: apart, since next to a maximum of -3.4e38 nothing is left of the other.
struct LogSumExp {
  double maximum, log_sum;
};

template <class T>
LogSumExp log_sum_exp(const T* logits, std::int64_t classes) {
  double maximum = -INFINITY;
  for (std::int64_t c = 0; c < classes; ++c) {
    const double value = load<T>(logits, c);
    if (std::isnan(value)) return {value, 0.0};
    if (value > maximum) maximum = value;
  }
  if (std::isinf(maximum)) return {maximum, 0.0};
  double sum = 0.0;
  for (std::int64_t c = 0; c < classes; ++c) sum += std::exp(load<T>(logits, c) - maximum);
  return {maximum, std::log(sum)};
}

template <class T>
double row_loss(const CrossEntropyParams& p, const T* logits, std::int64_t target, LogSumExp lse) {
  const double smoothing = static_cast<double>(p.label_smoothing);
  double loss = lse.log_sum + (lse.maximum - load<T>(logits, target));
  if (smoothing > 0.0) {
    double uniform = 0.0;
    for (std::int64_t c = 0; c < p.classes; ++c) uniform += lse.log_sum + (lse.maximum - load<T>(logits, c));
    loss = (1.0 - smoothing) * loss + smoothing * uniform / static_cast<double>(p.classes);
  }
  return loss;
}

}  // namespace

std::size_t cross_entropy_workspace(const CrossEntropyParams& p) {
  return static_cast<std::size_t>(p.rows) * sizeof(double);
}

void cross_entropy(const CrossEntropyParams& p, void* workspace, Stream) {
  double* const losses = static_cast<double*>(workspace);
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto task = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t row = begin; row < end; ++row) {
        const T* logits = static_cast<const T*>(p.logits) + row * p.stride_logits_row;
        const LogSumExp lse = log_sum_exp(logits, p.classes);
        losses[row] = p.targets[row] == p.ignore_index ? 0.0 : row_loss(p, logits, p.targets[row], lse);
        if (p.lse) p.lse[row] = static_cast<float>(lse.maximum + lse.log_sum);
      }
    };
    parallel_for(p.rows, grain_for(p.classes), task);
  });
  if (p.reduction == Reduction::kNone) {
    for (std::int64_t row = 0; row < p.rows; ++row) p.loss[row] = static_cast<float>(losses[row]);
    return;
  }
  double sum = 0.0;
  std::int64_t counted = 0;
  for (std::int64_t row = 0; row < p.rows; ++row) {
    sum += losses[row];
    counted += p.targets[row] != p.ignore_index;
  }
  *p.loss =
      static_cast<float>(p.reduction == Reduction::kSum ? sum : sum / static_cast<double>(counted));  // 0 / 0: NaN
}

// grad = (softmax - (1 - s) [c == target] - s / classes) * grad_loss (/ counted rows for the mean)
void cross_entropy_backward(const CrossEntropyBackwardParams& p, void*, Stream) {
  std::int64_t counted = 0;
  for (std::int64_t row = 0; row < p.rows; ++row) counted += p.targets[row] != p.ignore_index;
  const double smoothing = static_cast<double>(p.label_smoothing);
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto task = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t row = begin; row < end; ++row) {
        const T* logits = static_cast<const T*>(p.logits) + row * p.stride_logits_row;
        T* grad = static_cast<T*>(p.grad_logits) + row * p.stride_grad_logits_row;
        const std::int64_t target = p.targets[row];
        if (target == p.ignore_index) {
          for (std::int64_t c = 0; c < p.classes; ++c) store<T>(grad, c, 0.0);
          continue;
        }
        double scale = static_cast<double>(p.grad_loss[row * p.stride_grad_loss]);
        if (p.reduction == Reduction::kMean) scale /= static_cast<double>(counted);
        const double lse = static_cast<double>(p.lse[row]);
        double rest = 0.0;  // what LSE is without, next to its size
        if (std::abs(lse) >= static_cast<double>(kLargeLse) && std::isfinite(lse)) {
          for (std::int64_t c = 0; c < p.classes; ++c) rest += std::exp(load<T>(logits, c) - lse);
          rest = std::log(rest);
        }
        for (std::int64_t c = 0; c < p.classes; ++c) {
          const double probability = std::exp(load<T>(logits, c) - lse - rest);
          const double wanted = (c == target ? 1.0 - smoothing : 0.0) + smoothing / static_cast<double>(p.classes);
          store<T>(grad, c, (probability - wanted) * scale);
        }
      }
    };
    parallel_for(p.rows, grain_for(p.classes), task);
  });
}

}  // namespace flashkernel::cpu_scalar
