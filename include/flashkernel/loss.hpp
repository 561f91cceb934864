// Cross-entropy over the last dim, without writing the probabilities; fused with the product before it, without writing
// the logits.
#pragma once

#include <cstdint>

#include "flashkernel/execution.hpp"
#include "flashkernel/linear.hpp"
#include "flashkernel/tensor_view.hpp"
#include "flashkernel/types.hpp"

namespace flashkernel {

struct CrossEntropyOptions {
  std::int64_t ignore_index = -100;  ///< rows with this target count nothing: loss 0, gradient 0
  float label_smoothing = 0.0f;      ///< in [0, 1]
  Reduction reduction = Reduction::kMean;
};

/// Cross-entropy: loss_r = lse(logits_r) - logits_r[target_r], smoothed by label_smoothing.
/// - logits [rows, classes]
/// - targets int32 or int64 [rows]. One outside [0, classes) that is not ignore_index: InvalidArgument on the host, a
///   NaN loss on a GPU
/// - loss fp32: written: [rows] for kNone, else a scalar (shape [] or [1]). kMean over no counted rows is NaN, as in
///   PyTorch
/// - lse fp32 [rows]: written; may be absent
FK_API void cross_entropy(const TensorView& logits, const TensorView& targets, const TensorView& loss,
                          const TensorView& lse, const CrossEntropyOptions& options = {},
                          const ExecutionContext& context = {});

/// grad_loss has loss's shape, by any stride; grad_logits has logits' shape and dtype and may alias logits.
FK_API void cross_entropy_backward(const TensorView& grad_loss, const TensorView& logits, const TensorView& targets,
                                   const TensorView& lse, const TensorView& grad_logits,
                                   const CrossEntropyOptions& options = {}, const ExecutionContext& context = {});

struct LinearCrossEntropyOptions {
  std::int64_t ignore_index = -100;  ///< rows with this target count nothing: loss 0, gradient 0
  float label_smoothing = 0.0f;      ///< in [0, 1]
  float z_loss = 0.0f;               ///< at least 0: z_loss * lse_r^2 is added to the loss of each counted row
  float softcap = 0.0f;              ///< above 0: logits become softcap * tanh(logits / softcap)
  Reduction reduction = Reduction::kMean;
};

/// The cross-entropy of the logits x weight^T + bias, without writing them: a chunk at a time is held. Logits are
/// rounded to x's dtype, as `linear` writes them.
/// - x [tokens, features], last dim contiguous
/// - weight [classes, features] in x's dtype, either dim contiguous
/// - bias [classes] in x's dtype or fp32; or absent
/// - targets int32 or int64 [tokens]; out of range: as for `cross_entropy`
/// - class_weights fp32 [classes], or absent
/// - loss fp32: written: [tokens] for kNone, else a scalar (shape [] or [1])
/// - z_loss (loss's shape), lse (fp32 [tokens], of the capped logits): written; may be absent
///
/// With w = class_weights (1 where absent), s = label_smoothing and log p = log_softmax(logits), a row's loss is (1 -
/// s) w_t (-log p_t) + s / classes sum_c w_c (-log p_c), plus its z-loss. A mean divides the sum of cross-entropies by
/// the sum of the counted targets' weights, and that of z-losses by the number of counted rows.
FK_API void linear_cross_entropy(const TensorView& x, const TensorView& weight, const TensorView& bias,
                                 const TensorView& targets, const TensorView& class_weights, const TensorView& loss,
                                 const TensorView& z_loss, const TensorView& lse,
                                 const LinearCrossEntropyOptions& options = {}, const ExecutionContext& context = {});

/// Gradients of `linear_cross_entropy`, from its lse; the logits are computed again. grad_loss has loss's shape, by any
/// stride. gradients.weight may be fp32 where x is not: it is then a sum in fp32 that is not rounded.
FK_API void linear_cross_entropy_backward(const TensorView& grad_loss, const TensorView& x, const TensorView& weight,
                                          const TensorView& bias, const TensorView& targets,
                                          const TensorView& class_weights, const TensorView& lse,
                                          const LinearGradients& gradients,
                                          const LinearCrossEntropyOptions& options = {},
                                          const ExecutionContext& context = {});

/// log_softmax(softcap(x weight^T + bias) / temperature) at each row's target, without writing the logits.
/// - x, weight, bias, targets: as in `linear_cross_entropy`
/// - log_prob fp32 [tokens]: written; 0 for rows whose target is ignore_index
/// - lse fp32 [tokens], of what the softmax saw: written; may be absent
/// - softcap: 0: none. temperature: above 0
FK_API void linear_selected_log_prob(const TensorView& x, const TensorView& weight, const TensorView& bias,
                                     const TensorView& targets, const TensorView& log_prob, const TensorView& lse,
                                     float softcap = 0.0f, float temperature = 1.0f, std::int64_t ignore_index = -100,
                                     const ExecutionContext& context = {});

/// Gradients of `linear_selected_log_prob`: grad_log_prob fp32 [tokens], by any stride; gradients as in
/// `linear_cross_entropy_backward`.
FK_API void linear_selected_log_prob_backward(const TensorView& grad_log_prob, const TensorView& x,
                                              const TensorView& weight, const TensorView& bias,
                                              const TensorView& targets, const TensorView& lse,
                                              const LinearGradients& gradients, float softcap = 0.0f,
                                              float temperature = 1.0f, std::int64_t ignore_index = -100,
                                              const ExecutionContext& context = {});

}  // namespace flashkernel
