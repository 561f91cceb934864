// Binds loss.hpp: cross_entropy, cross_entropy_backward.
#include "flashkernel/loss.hpp"

#include "op.hpp"
#include "reduction.hpp"

namespace flashkernel::python {
namespace {

CrossEntropyOptions parse_options(const Call& call, std::int64_t ignore_index, double label_smoothing,
                                  const std::string& reduction) {
  CrossEntropyOptions options;
  options.ignore_index = ignore_index;
  options.label_smoothing = static_cast<float>(label_smoothing);
  options.reduction = parse_reduction(call, reduction);
  return options;
}

nb::object cross_entropy(nb::handle logits, nb::handle targets, std::int64_t ignore_index, double label_smoothing,
                         const std::string& reduction, bool return_lse, nb::handle stream, nb::handle dtype) {
  Call call("cross_entropy", stream, dtype);
  const CrossEntropyOptions options = parse_options(call, ignore_index, label_smoothing, reduction);
  const TensorView logits_view = call.input("logits", logits), targets_view = call.input("targets", targets);
  const Shape rows{extent(logits_view, 0)};
  Output loss = call.output(DType::kFloat32, options.reduction == Reduction::kNone ? rows : Shape{});
  Output lse;
  if (return_lse) lse = call.output(DType::kFloat32, rows);
  call.run([&](const ExecutionContext& context) {
    flashkernel::cross_entropy(logits_view, targets_view, loss.view, lse.view, options, context);
  });
  if (!return_lse) return call.result(loss);
  return nb::make_tuple(call.result(loss), call.result(lse));
}

nb::object cross_entropy_backward(nb::handle grad_loss, nb::handle logits, nb::handle targets, nb::handle lse,
                                  std::int64_t ignore_index, double label_smoothing, const std::string& reduction,
                                  nb::handle out, nb::handle stream, nb::handle dtype) {
  Call call("cross_entropy_backward", stream, dtype);
  const CrossEntropyOptions options = parse_options(call, ignore_index, label_smoothing, reduction);
  const TensorView grad_view = call.input("grad_loss", grad_loss), logits_view = call.input("logits", logits),
                   targets_view = call.input("targets", targets), lse_view = call.input("lse", lse);
  Output grad_logits = call.output("out", out, logits_view.dtype, Shape(logits_view));
  call.run([&](const ExecutionContext& context) {
    flashkernel::cross_entropy_backward(grad_view, logits_view, targets_view, lse_view, grad_logits.view, options,
                                        context);
  });
  return call.result(grad_logits);
}

void bind_loss(nb::module_& module) {
  def_op<&cross_entropy>(
      module,
      "def cross_entropy(logits: ArrayT, targets: SupportsDLPack, *, ignore_index: int = -100, "
      "label_smoothing: float = 0.0, reduction: typing.Literal['none', 'sum', 'mean'] = 'mean', return_lse: "
      "bool = False, stream: typing.Any = None, dtype: typing.Any = None, backend: str | None = None) -> "
      "ArrayT, ArrayT if return_lse",
      R"doc(lse(logits[r]) - logits[r, targets[r]] per row, without writing the probabilities.

logits: [rows, classes]; float32, float16 or bfloat16; contiguous last dim.
targets: int32 or int64 [rows].
ignore_index: rows with this target have loss 0 and are not counted.
label_smoothing: in [0, 1): that share of the target is spread evenly over all classes.
reduction: "none" (float32 [rows]), "sum" or "mean" over the counted rows (float32 scalar).
return_lse: also return log(sum(exp(logits))), float32 [rows], which `cross_entropy_backward` needs.

Returns loss, or (loss, lse). Computed in float32. The mean over no counted rows is NaN, as in PyTorch. A target outside
[0, classes) that is not ignore_index is refused on the CPU and gives NaN on a GPU.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> loss = fk.cross_entropy(np.zeros((2, 4), np.float32), np.array([1, -100]))
>>> bool(np.isclose(loss, np.log(4)))
True
)doc");

  def_op<&cross_entropy_backward>(
      module,
      "def cross_entropy_backward(grad_loss: ArrayT, logits: SupportsDLPack, targets: SupportsDLPack, lse: "
      "SupportsDLPack, *, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: "
      "typing.Literal['none', 'sum', 'mean'] = 'mean', out: ArrayT | None = None, stream: typing.Any = None, "
      "dtype: typing.Any = None, backend: str | None = None) -> ArrayT",
      R"doc(Gradient of `cross_entropy` with respect to the logits.

grad_logits[r] = w[r] * (softmax(logits[r]) - target distribution[r]); w is grad_loss, divided by the counted rows for "mean".

grad_loss: float32, the loss's shape, by any stride.
logits, targets, ignore_index, label_smoothing, reduction: as given to `cross_entropy`.
lse: what `cross_entropy(..., return_lse=True)` gave.
out: written in place and returned; logits' shape and dtype; may be logits.

Returns grad_logits. Ignored rows have gradient 0. Computed in float32.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> logits, targets = np.zeros((1, 2), np.float32), np.array([1])
>>> loss, lse = fk.cross_entropy(logits, targets, return_lse=True)
>>> fk.cross_entropy_backward(np.ones_like(loss), logits, targets, lse).tolist()
[[0.5, -0.5]]
)doc");
}

const OpFile registration(bind_loss);

}  // namespace
}  // namespace flashkernel::python
