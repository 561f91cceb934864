// Cross-entropy over the last dim, without writing the probabilities.
#pragma once

#include <cstdint>

#include "flashkernel/execution.hpp"
#include "flashkernel/tensor_view.hpp"
#include "flashkernel/types.hpp"

namespace flashkernel {

struct CrossEntropyOptions {
  std::int64_t ignore_index = -100;  ///< rows with this target count nothing: loss 0, gradient 0
  float label_smoothing = 0.0f;      ///< in [0, 1)
  Reduction reduction = Reduction::kMean;
};

/// loss_r = lse(logits_r) - logits_r[target_r] (smoothed by label_smoothing). logits [rows, classes], targets int32 or
/// int64 [rows]; loss fp32 [rows] for kNone, else a scalar (shape [] or [1]); lse fp32 [rows] (written, may be absent).
/// kMean over no counted rows is NaN, as in PyTorch. A target outside [0, classes) that is not ignore_index:
/// InvalidArgument on the host, NaN loss on a GPU.
FK_API void cross_entropy(const TensorView& logits, const TensorView& targets, const TensorView& loss,
                          const TensorView& lse, const CrossEntropyOptions& options = {},
                          const ExecutionContext& context = {});

/// grad_loss has loss's shape, by any stride; grad_logits has logits' shape and dtype and may alias logits.
FK_API void cross_entropy_backward(const TensorView& grad_loss, const TensorView& logits, const TensorView& targets,
                                   const TensorView& lse, const TensorView& grad_logits,
                                   const CrossEntropyOptions& options = {}, const ExecutionContext& context = {});

}  // namespace flashkernel
