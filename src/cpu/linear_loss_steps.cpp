// From the states of all rows to the loss, and from the loss's gradient to each row's coefficients.
#include "ops/linear_loss_params.hpp"

namespace flashkernel::cpu {
namespace {

struct Counted {
  double weight = 0.0, rows = 0.0;
};

/// What the two means are divided by: the sum of the targets' weights, and how many rows count.
template <class Params>
Counted count(const Params& p) {
  Counted all;
  for (std::int64_t row = 0; row < p.rows; ++row) {
    const std::int64_t target = p.targets[row];
    if (target == p.ignore_index) continue;
    all.weight += p.class_weights ? static_cast<double>(p.class_weights[target]) : 1.0;
    all.rows += 1.0;
  }
  return all;
}

}  // namespace

void finish_losses(const LinearCrossEntropyParams& p) {
  double loss_sum = 0.0, z_sum = 0.0;
  for (std::int64_t row = 0; row < p.rows; ++row) {
    const LossState& state = p.state[row];
    const std::int64_t target = p.targets[row];
    const float lse = lse_of(state);
    if (p.lse) p.lse[row] = lse;
    float loss = 0.0f, z = 0.0f;
    if (target != p.ignore_index) {
      loss = loss_of(state, p.label_smoothing, p.class_weights ? p.class_weights[target] : 1.0f,
                     static_cast<float>(p.classes));
      if (p.z_loss > 0.0f) z = p.z_loss * lse * lse;
      if (p.is_log_prob) loss = -loss;
    }
    if (p.reduction == Reduction::kNone) {
      p.loss[row] = loss + z;
      if (p.z_losses) p.z_losses[row] = z;
    }
    loss_sum += static_cast<double>(loss);
    z_sum += static_cast<double>(z);
  }
  if (p.reduction == Reduction::kNone) return;
  if (p.reduction == Reduction::kMean) {
    const Counted counted = count(p);
    loss_sum /= counted.weight;  // 0 / 0: NaN
    z_sum /= counted.rows;
  }
  *p.loss = static_cast<float>(p.z_loss > 0.0f ? loss_sum + z_sum : loss_sum);
  if (p.z_losses) *p.z_losses = static_cast<float>(z_sum);
}

void loss_coefficients(const LinearCrossEntropyBackwardParams& p) {
  Counted divisor{1.0, 1.0};
  if (p.reduction == Reduction::kMean) divisor = count(p);
  const double smoothing = static_cast<double>(p.label_smoothing), classes = static_cast<double>(p.classes);
  double all_weights = classes;
  if (p.class_weights && smoothing > 0.0) {
    all_weights = 0.0;
    for (std::int64_t c = 0; c < p.classes; ++c) all_weights += static_cast<double>(p.class_weights[c]);
  }
  for (std::int64_t row = 0; row < p.rows; ++row) {
    LossCoefficients& to = p.coefficients[row];
    const std::int64_t target = p.targets[row];
    if (target == p.ignore_index) {
      to = {};
      continue;
    }
    const double given = static_cast<double>(p.grad_loss[row * p.stride_grad_loss]) * (p.is_log_prob ? -1.0 : 1.0);
    const double grad = given / divisor.weight;
    const double hit =
        grad * (1.0 - smoothing) * (p.class_weights ? static_cast<double>(p.class_weights[target]) : 1.0);
    const double uniform = grad * smoothing / classes;
    double probability = hit + uniform * all_weights;
    if (p.z_loss > 0.0f)
      probability += 2.0 * static_cast<double>(p.z_loss) * static_cast<double>(p.lse[row]) * given / divisor.rows;
    to = {static_cast<float>(probability), static_cast<float>(hit), static_cast<float>(uniform), p.lse[row], 0.0f};
    if (p.state && is_large_lse(p.lse[row])) {
      to.shift = loss_origin(p.state[row].maximum);
      to.rest = logf(p.state[row].sum);
    }
  }
}

}  // namespace flashkernel::cpu
