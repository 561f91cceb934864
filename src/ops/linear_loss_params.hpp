// What the kernels of linear_cross_entropy and its gradient get: one step of a call, on one chunk of logits. The steps
// and their chunks are ops/linear_loss.cpp's; the products between them are linear's kernels.
#pragma once

#include <math.h>  // the C functions: an inline function of std:: may be kept as a newer CPU's code

#include "ops/large_lse.hpp"
#include "ops/params_common.hpp"

namespace flashkernel {

/// What is known of a row after some of its columns. Columns join in segments, in their order.
struct LossState {
  float maximum;  // of the logits
  float sum;      // of e^(logit - origin), where `origin` is the maximum, or 0 where that is infinite
  float hit;      // the target's logit, once it was seen
  float total;    // of w_c (logit_c - origin); only with label smoothing
  float weight;   // of w_c, likewise
};

// Internal linkage, since files that are compiled for several CPUs include them.
static inline FK_HOST_DEVICE float loss_origin(float maximum) { return maximum - maximum == 0.0f ? maximum : 0.0f; }

/// `row` with the columns of `next`, whose `hit` holds nothing.
static inline FK_HOST_DEVICE void join_columns(LossState& row, const LossState& next) {
  const float maximum = row.maximum > next.maximum ? row.maximum : next.maximum, origin = loss_origin(maximum);
  const float row_shift = loss_origin(row.maximum) - origin, next_shift = loss_origin(next.maximum) - origin;
  const float row_sum = row.sum == 0.0f ? 0.0f : row.sum * expf(row_shift);  // not 0 * infinity
  const float next_sum = next.sum == 0.0f ? 0.0f : next.sum * expf(next_shift);
  row.maximum = maximum;
  row.sum = row_sum + next_sum;
  row.total = (row.total + row_shift * row.weight) + (next.total + next_shift * next.weight);
  row.weight += next.weight;
}

/// The cross-entropy, without z-loss, of a row whose columns have all been seen.
static inline FK_HOST_DEVICE float loss_of(const LossState& row, float smoothing, float target_weight, float classes) {
  const float log_sum = logf(row.sum), origin = loss_origin(row.maximum);
  const float loss = target_weight * (log_sum + (origin - row.hit));
  return smoothing > 0.0f ? (1.0f - smoothing) * loss + smoothing / classes * (row.weight * log_sum - row.total) : loss;
}

/// Whether a gradient needs more of a row than this LSE.
static inline FK_HOST_DEVICE bool is_large_lse(float lse) {
  const float size = lse < 0.0f ? -lse : lse;
  return size >= kLargeLse && size - size == 0.0f;
}

static inline FK_HOST_DEVICE float lse_of(const LossState& row) { return loss_origin(row.maximum) + logf(row.sum); }

/// A row's gradient by its logit c is probability * p_c - target * [c is the target] - uniform * w_c. All three are 0
/// where the row counts nothing, and NaN where its target does not exist. p_c is e^(logit_c - shift - rest): LSE, in
/// two parts where fp32 does not hold it (ops/large_lse.hpp).
struct LossCoefficients {
  float probability, target, uniform, shift, rest;
};

struct LinearCrossEntropyParams {
  static constexpr const char* kOp = "linear_cross_entropy";
  enum class Step : std::int8_t {
    kUpdate,  // a chunk of logits -> state
    kFinish,  // the states of all rows -> loss, z_loss, lse
  };

  Step step = Step::kUpdate;
  bool is_log_prob = false;  // the finished loss is the target's log-probability: less the cross-entropy
  DType dtype = DType::kFloat32;
  Device device{};
  std::int64_t rows = 0, columns = 0;  // of the chunk
  std::int64_t first_column = 0, classes = 0;
  std::int64_t segment = 0;  // columns that are summed at once; a chunk begins where one begins
  std::int64_t ignore_index = -100;
  float label_smoothing = 0.0f, z_loss = 0.0f;
  float softcap = 0.0f, scale = 1.0f;  // of the logits: scale * softcap * tanh(logit / softcap)
  Reduction reduction = Reduction::kMean;
  const void* logits = nullptr;  // [rows, columns], rows stride_logits_row apart
  std::int64_t stride_logits_row = 0;
  IndexArray targets;                    // [rows]
  const float* class_weights = nullptr;  // [classes]; may be null
  LossState* state = nullptr;            // [rows]; not read at first_column 0
  float* loss = nullptr;                 // [rows] for kNone, else one value
  float* z_losses = nullptr;             // the same; may be null
  float* lse = nullptr;                  // [rows]; may be null
};

struct LinearCrossEntropyBackwardParams {
  static constexpr const char* kOp = "linear_cross_entropy_bwd";
  enum class Step : std::int8_t {
    kCoefficients,  // of all rows
    kGradient,      // a chunk of logits becomes their gradient
    kAccumulate,    // sum (+)= part, a matrix; out = sum where there is one
  };

  Step step = Step::kGradient;
  bool is_log_prob = false;
  bool is_first = false;  // kAccumulate: sum = part
  DType dtype = DType::kFloat32;
  Device device{};
  std::int64_t rows = 0, columns = 0;
  std::int64_t first_column = 0, classes = 0;
  std::int64_t ignore_index = -100;
  float label_smoothing = 0.0f, z_loss = 0.0f, softcap = 0.0f, scale = 1.0f;
  Reduction reduction = Reduction::kMean;
  void* logits = nullptr;
  std::int64_t stride_logits_row = 0;
  IndexArray targets;
  const float* class_weights = nullptr;
  const float* grad_loss = nullptr;   // of row r at r * stride_grad_loss
  std::int64_t stride_grad_loss = 0;  // any, 0 for one value of all rows
  const float* lse = nullptr;
  const LossState* state = nullptr;          // [rows], once more, where some LSE is large; else null
  LossCoefficients* coefficients = nullptr;  // [rows]

  TypedPointer part;     // [rows, columns] without gaps
  float* sum = nullptr;  // [rows, columns], rows stride_sum_row apart
  void* out = nullptr;   // the same; may be null
  DType out_dtype = DType::kFloat32;
  std::int64_t stride_sum_row = 0, stride_out_row = 0;
};

// The steps that go over rows, not over logits: every CPU row of the op runs the same ones, in double and in the order
// of the rows (cpu/linear_loss_steps.cpp).
namespace cpu {
void finish_losses(const LinearCrossEntropyParams& params);
void loss_coefficients(const LinearCrossEntropyBackwardParams& params);
}  // namespace cpu

/// What a call has to do (params_common.hpp).
inline double work_of(const LinearCrossEntropyParams& p) { return work::product(p.rows, p.columns); }
inline double work_of(const LinearCrossEntropyBackwardParams& p) { return work::product(p.rows, p.columns); }

}  // namespace flashkernel
