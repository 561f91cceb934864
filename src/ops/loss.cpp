// Front door of cross-entropy and its gradient; targets on the host are checked before anything is written.
#include "flashkernel/loss.hpp"

#include "ops/check.hpp"
#include "ops/loss_check.hpp"
#include "ops/loss_params.hpp"
#include "ops/select.hpp"

namespace flashkernel {
namespace {

template <class Index>
std::int64_t first_bad_target(const Index* targets, std::int64_t rows, std::int64_t classes,
                              std::int64_t ignore_index) {
  for (std::int64_t row = 0; row < rows; ++row)
    if ((targets[row] < 0 || targets[row] >= classes) && targets[row] != ignore_index) return row;
  return -1;
}

/// What forward and backward have in common. `copies` holds the targets that the params point to.
template <class Params>
Params common_params(const Checker& check, const TensorView& logits, const TensorView& targets,
                     const CrossEntropyOptions& options, IndexCopies& copies) {
  check.floating("logits", logits);
  check.ndim("logits", logits, 2, 2);
  check.last_dim_contiguous("logits", logits);
  if (logits.shape[1] == 0) check.fail("logits.shape[1]=0; needs at least one class");
  if (!(options.label_smoothing >= 0.0f && options.label_smoothing <= 1.0f))
    check.fail("label_smoothing=" + std::to_string(options.label_smoothing) + "; needs a number from 0 to 1");
  if (options.reduction > Reduction::kMean)
    check.fail("reduction=" + std::to_string(static_cast<int>(options.reduction)) + "; needs kNone, kSum or kMean");
  Params params;
  params.dtype = logits.dtype;
  params.device = logits.device;
  params.rows = logits.shape[0];
  params.classes = logits.shape[1];
  params.ignore_index = options.ignore_index;
  params.label_smoothing = options.label_smoothing;
  params.reduction = options.reduction;
  params.logits = logits.data;
  params.stride_logits_row = logits.strides[0];
  params.targets = check.index_array("targets", targets, params.rows, copies);
  if (logits.device.is_cpu()) {
    const std::int64_t bad = params.targets.is_int64
                                 ? first_bad_target(static_cast<const std::int64_t*>(params.targets.data), params.rows,
                                                    params.classes, options.ignore_index)
                                 : first_bad_target(static_cast<const std::int32_t*>(params.targets.data), params.rows,
                                                    params.classes, options.ignore_index);
    if (bad >= 0)
      check.fail("targets[" + std::to_string(bad) + "]=" + std::to_string(params.targets[bad]) + "; needs 0 to " +
                 std::to_string(params.classes - 1) + ", or ignore_index=" + std::to_string(options.ignore_index));
  }
  return params;
}

}  // namespace

void cross_entropy(const TensorView& logits, const TensorView& targets, const TensorView& loss, const TensorView& lse,
                   const CrossEntropyOptions& options, const ExecutionContext& context) {
  const Checker check("cross_entropy", logits.device);
  IndexCopies copies(check.device());
  auto params = common_params<CrossEntropyParams>(check, logits, targets, options, copies);
  check_loss(check, "loss", loss, params.rows, options.reduction, "logits.shape[0]");
  check.contiguous("loss", loss);
  check.no_overlap("loss", loss, "logits", logits);
  check.no_overlap("loss", loss, "targets", targets);
  if (lse.defined()) {
    check_per_row(check, "lse", lse, params.rows, "logits.shape[0]");
    check.contiguous("lse", lse);
    check.no_overlap("lse", lse, "logits", logits);
    check.no_overlap("lse", lse, "targets", targets);
    check.no_overlap("lse", lse, "loss", loss);
    params.lse = static_cast<float*>(lse.data);
  }
  params.loss = static_cast<float*>(loss.data);
  if (loss.numel() == 0 && !context.explain) return;
  dispatch(params, params.device, context);
}

void cross_entropy_backward(const TensorView& grad_loss, const TensorView& logits, const TensorView& targets,
                            const TensorView& lse, const TensorView& grad_logits, const CrossEntropyOptions& options,
                            const ExecutionContext& context) {
  const Checker check("cross_entropy_backward", logits.device);
  IndexCopies copies(check.device());
  auto params = common_params<CrossEntropyBackwardParams>(check, logits, targets, options, copies);
  check_loss(check, "grad_loss", grad_loss, params.rows, options.reduction, "logits.shape[0]");
  check_per_row(check, "lse", lse, params.rows, "logits.shape[0]");
  check.contiguous("lse", lse);
  check.dtype("grad_logits", grad_logits, logits.dtype);
  check.same_shape("grad_logits", grad_logits, "logits", logits);
  check.last_dim_contiguous("grad_logits", grad_logits);
  check.writable("grad_logits", grad_logits);
  check.same_or_apart("grad_logits", grad_logits, "logits", logits);
  check.no_overlap("grad_logits", grad_logits, "targets", targets);
  check.no_overlap("grad_logits", grad_logits, "lse", lse);
  check.no_overlap("grad_logits", grad_logits, "grad_loss", grad_loss);
  params.grad_loss = static_cast<const float*>(grad_loss.data);
  params.stride_grad_loss = options.reduction == Reduction::kNone ? grad_loss.strides[0] : 0;
  params.lse = static_cast<const float*>(lse.data);
  params.grad_logits = grad_logits.data;
  params.stride_grad_logits_row = grad_logits.strides[0];
  if (grad_logits.numel() == 0 && !context.explain) return;
  dispatch(params, params.device, context);
}

}  // namespace flashkernel
