// Binds the fused losses of loss.hpp: linear_cross_entropy, linear_selected_log_prob and their gradients.
#include "flashkernel/loss.hpp"

#include "op.hpp"
#include "reduction.hpp"

namespace flashkernel::python {
namespace {

LinearCrossEntropyOptions parse_options(const Call& call, std::int64_t ignore_index, double label_smoothing,
                                        double z_loss, double softcap, const std::string& reduction) {
  LinearCrossEntropyOptions options;
  options.ignore_index = ignore_index;
  options.label_smoothing = static_cast<float>(label_smoothing);
  options.z_loss = static_cast<float>(z_loss);
  options.softcap = static_cast<float>(softcap);
  options.reduction = parse_reduction(call, reduction);
  return options;
}

/// The gradients of x, weight and bias that were asked for.
struct Gradients {
  Output x, weight, bias;
  bool need_x, need_weight, need_bias;

  Gradients(Call& call, const TensorView& x_view, const TensorView& weight_view, bool need_x, bool need_weight,
            bool need_bias, bool float32_weight)
      : need_x(need_x), need_weight(need_weight), need_bias(need_bias) {
    if (need_x) x = call.output(x_view.dtype, Shape(x_view));
    if (need_weight) weight = call.output(float32_weight ? DType::kFloat32 : weight_view.dtype, Shape(weight_view));
    if (need_bias) bias = call.output(weight_view.dtype, Shape{extent(weight_view, 0)});
  }
  LinearGradients views() const { return {x.view, weight.view, bias.view}; }
  nb::tuple results(Call& call) {
    const auto result = [&](Output& output, bool needed) { return needed ? call.result(output) : nb::none(); };
    return nb::make_tuple(result(x, need_x), result(weight, need_weight), result(bias, need_bias));
  }
};

nb::object linear_cross_entropy(nb::handle x, nb::handle weight, nb::handle targets, nb::handle bias,
                                nb::handle class_weights, std::int64_t ignore_index, double label_smoothing,
                                double z_loss, double softcap, const std::string& reduction, bool return_z_loss,
                                bool return_lse, nb::handle stream, nb::handle dtype) {
  Call call("linear_cross_entropy", stream, dtype);
  const LinearCrossEntropyOptions options =
      parse_options(call, ignore_index, label_smoothing, z_loss, softcap, reduction);
  const TensorView x_view = call.input("x", x), weight_view = call.input("weight", weight),
                   targets_view = call.input("targets", targets), bias_view = call.optional_input("bias", bias),
                   class_view = call.optional_input("class_weights", class_weights);
  const Shape rows{extent(x_view, 0)};
  const Shape loss_shape = options.reduction == Reduction::kNone ? rows : Shape{};
  Output loss = call.output(DType::kFloat32, loss_shape);
  Output z, lse;
  if (return_z_loss) z = call.output(DType::kFloat32, loss_shape);
  if (return_lse) lse = call.output(DType::kFloat32, rows);
  call.run([&](const ExecutionContext& context) {
    flashkernel::linear_cross_entropy(x_view, weight_view, bias_view, targets_view, class_view, loss.view, z.view,
                                      lse.view, options, context);
  });
  if (return_z_loss && return_lse) return nb::make_tuple(call.result(loss), call.result(z), call.result(lse));
  if (return_z_loss) return nb::make_tuple(call.result(loss), call.result(z));
  if (return_lse) return nb::make_tuple(call.result(loss), call.result(lse));
  return call.result(loss);
}

nb::tuple linear_cross_entropy_backward(nb::handle grad_loss, nb::handle x, nb::handle weight, nb::handle targets,
                                        nb::handle lse, nb::handle bias, nb::handle class_weights,
                                        std::int64_t ignore_index, double label_smoothing, double z_loss,
                                        double softcap, const std::string& reduction, bool need_x, bool need_weight,
                                        bool need_bias, bool float32_weight, nb::handle stream, nb::handle dtype) {
  Call call("linear_cross_entropy_backward", stream, dtype);
  const LinearCrossEntropyOptions options =
      parse_options(call, ignore_index, label_smoothing, z_loss, softcap, reduction);
  const TensorView grad_view = call.input("grad_loss", grad_loss), x_view = call.input("x", x),
                   weight_view = call.input("weight", weight), targets_view = call.input("targets", targets),
                   lse_view = call.input("lse", lse), bias_view = call.optional_input("bias", bias),
                   class_view = call.optional_input("class_weights", class_weights);
  Gradients gradients(call, x_view, weight_view, need_x, need_weight, need_bias, float32_weight);
  call.run([&](const ExecutionContext& context) {
    flashkernel::linear_cross_entropy_backward(grad_view, x_view, weight_view, bias_view, targets_view, class_view,
                                               lse_view, gradients.views(), options, context);
  });
  return gradients.results(call);
}

nb::object linear_selected_log_prob(nb::handle x, nb::handle weight, nb::handle targets, nb::handle bias,
                                    double softcap, double temperature, std::int64_t ignore_index, bool return_lse,
                                    nb::handle stream, nb::handle dtype) {
  Call call("linear_selected_log_prob", stream, dtype);
  const TensorView x_view = call.input("x", x), weight_view = call.input("weight", weight),
                   targets_view = call.input("targets", targets), bias_view = call.optional_input("bias", bias);
  const Shape rows{extent(x_view, 0)};
  Output log_prob = call.output(DType::kFloat32, rows);
  Output lse;
  if (return_lse) lse = call.output(DType::kFloat32, rows);
  call.run([&](const ExecutionContext& context) {
    flashkernel::linear_selected_log_prob(x_view, weight_view, bias_view, targets_view, log_prob.view, lse.view,
                                          static_cast<float>(softcap), static_cast<float>(temperature), ignore_index,
                                          context);
  });
  if (!return_lse) return call.result(log_prob);
  return nb::make_tuple(call.result(log_prob), call.result(lse));
}

nb::tuple linear_selected_log_prob_backward(nb::handle grad_log_prob, nb::handle x, nb::handle weight,
                                            nb::handle targets, nb::handle lse, nb::handle bias, double softcap,
                                            double temperature, std::int64_t ignore_index, bool need_x,
                                            bool need_weight, bool need_bias, bool float32_weight, nb::handle stream,
                                            nb::handle dtype) {
  Call call("linear_selected_log_prob_backward", stream, dtype);
  const TensorView grad_view = call.input("grad_log_prob", grad_log_prob), x_view = call.input("x", x),
                   weight_view = call.input("weight", weight), targets_view = call.input("targets", targets),
                   lse_view = call.input("lse", lse), bias_view = call.optional_input("bias", bias);
  Gradients gradients(call, x_view, weight_view, need_x, need_weight, need_bias, float32_weight);
  call.run([&](const ExecutionContext& context) {
    flashkernel::linear_selected_log_prob_backward(grad_view, x_view, weight_view, bias_view, targets_view, lse_view,
                                                   gradients.views(), static_cast<float>(softcap),
                                                   static_cast<float>(temperature), ignore_index, context);
  });
  return gradients.results(call);
}

void bind_linear_loss(nb::module_& module) {
  def_op<&linear_cross_entropy>(
      module,
      "def linear_cross_entropy(x: ArrayT, weight: SupportsDLPack, targets: SupportsDLPack, bias: SupportsDLPack | "
      "None = None, *, class_weights: SupportsDLPack | None = None, ignore_index: int = -100, label_smoothing: float "
      "= 0.0, z_loss: float = 0.0, softcap: float = 0.0, reduction: typing.Literal['none', 'sum', 'mean'] = 'mean', "
      "return_z_loss: bool = False, return_lse: bool = False, stream: typing.Any = None, dtype: typing.Any = None) -> "
      "ArrayT, ArrayT if return_z_loss, ArrayT if return_lse",
      R"doc(Cross-entropy of the logits x weight^T + bias, of which a chunk at a time is held.

x: [tokens, features]; float32, float16 or bfloat16; contiguous last dim.
weight: [classes, features], x's dtype; either dim may be the contiguous one.
targets: int32 or int64 [tokens].
bias: [classes], x's dtype or float32.
class_weights: float32 [classes]; None for 1. A mean divides by the sum of the counted targets' weights, as in PyTorch.
ignore_index: rows with this target have loss 0 and are not counted.
label_smoothing: in [0, 1): that share of the target is spread evenly over all classes.
z_loss: at least 0; adds z_loss * lse^2 to each counted row, whose mean is over counted rows.
softcap: above 0, logits become softcap * tanh(logits / softcap); 0 for none.
reduction: "none" (float32 [tokens]), "sum" or "mean" (float32 scalar).
return_z_loss: also return the part of the loss that is z-loss, of the loss's shape.
return_lse: also return log(sum(exp(logits))), float32 [tokens], which `linear_cross_entropy_backward` needs.

Returns loss, or (loss, z_loss and lse, those asked for). The logits are rounded to x's dtype, as `linear` returns them;
all else is float32. Workspace is a chunk of logits and 20 bytes a token. On the CPU a row's loss has the same bits
whatever the other rows are. The mean over no counted rows is NaN. A target outside [0, classes) that is not ignore_index
is refused on the CPU and gives NaN on a GPU.

Source: Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models (2024).
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> x, weight = np.zeros((2, 8), np.float32), np.ones((4, 8), np.float32)
>>> loss = fk.linear_cross_entropy(x, weight, np.array([1, -100]))
>>> bool(np.isclose(loss, np.log(4)))
True
)doc");

  def_op<&linear_cross_entropy_backward>(
      module,
      "def linear_cross_entropy_backward(grad_loss: ArrayT, x: SupportsDLPack, weight: SupportsDLPack, targets: "
      "SupportsDLPack, lse: SupportsDLPack, bias: SupportsDLPack | None = None, *, class_weights: SupportsDLPack | "
      "None = None, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = "
      "0.0, reduction: typing.Literal['none', 'sum', 'mean'] = 'mean', need_x: bool = True, need_weight: bool = True, "
      "need_bias: bool = True, float32_weight: bool = False, stream: typing.Any = None, dtype: typing.Any = None) -> "
      "tuple[ArrayT if need_x else None, ArrayT if need_weight else None, ArrayT if need_bias else None]",
      R"doc(Gradients of `linear_cross_entropy`; the logits are computed again, a chunk at a time.

grad_loss: float32, the loss's shape, by any stride.
x, weight, targets, bias and the options: as given to `linear_cross_entropy`.
lse: what `linear_cross_entropy(..., return_lse=True)` gave.
need_x, need_weight, need_bias: which gradients to compute.
float32_weight: return the weight's gradient in float32, unrounded, where x's dtype is another.

Returns (grad_x, grad_weight, grad_bias), None for those not asked for; shapes of x, weight and [classes]. Gradients of
logits are rounded to x's dtype for the products, whose sums are float32. Parts of chunks are rounded to x's dtype and
added in float32. Ignored rows have gradient 0.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> x, weight, targets = np.ones((1, 2), np.float32), np.zeros((2, 2), np.float32), np.array([1])
>>> loss, lse = fk.linear_cross_entropy(x, weight, targets, return_lse=True)
>>> grads = fk.linear_cross_entropy_backward(np.ones_like(loss), x, weight, targets, lse)
>>> grads[1].round(3).tolist()
[[0.5, 0.5], [-0.5, -0.5]]
)doc");

  def_op<&linear_selected_log_prob>(
      module,
      "def linear_selected_log_prob(x: ArrayT, weight: SupportsDLPack, targets: SupportsDLPack, bias: SupportsDLPack "
      "| None = None, *, softcap: float = 0.0, temperature: float = 1.0, ignore_index: int = -100, return_lse: bool = "
      "False, stream: typing.Any = None, dtype: typing.Any = None) -> ArrayT, ArrayT if return_lse",
      R"doc(Each row's log-probability of its target under softmax((x weight^T + bias) / temperature), without writing the logits.

What reinforcement learning calls selected log-probs.

x, weight, targets, bias: as for `linear_cross_entropy`.
softcap: above 0, logits become softcap * tanh(logits / softcap) before the temperature; 0 for none.
temperature: above 0.
ignore_index: rows with this target have 0.
return_lse: also return log(sum(exp(...))) of what the softmax saw, float32 [tokens].

Returns log_prob, float32 [tokens], or (log_prob, lse). Accuracy, workspace and refusals are those of
`linear_cross_entropy`.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> x, weight = np.zeros((2, 8), np.float32), np.ones((4, 8), np.float32)
>>> fk.linear_selected_log_prob(x, weight, np.array([1, -100])).round(3).tolist()
[-1.3860000371932983, 0.0]
)doc");

  def_op<&linear_selected_log_prob_backward>(
      module,
      "def linear_selected_log_prob_backward(grad_log_prob: ArrayT, x: SupportsDLPack, weight: SupportsDLPack, "
      "targets: SupportsDLPack, lse: SupportsDLPack, bias: SupportsDLPack | None = None, *, softcap: float = 0.0, "
      "temperature: float = 1.0, ignore_index: int = -100, need_x: bool = True, need_weight: bool = True, need_bias: "
      "bool = True, float32_weight: bool = False, stream: typing.Any = None, dtype: typing.Any = None) -> "
      "tuple[ArrayT if need_x else None, ArrayT if need_weight else None, ArrayT if need_bias else None]",
      R"doc(Gradients of `linear_selected_log_prob`.

grad_log_prob: float32 [tokens], by any stride.
x, weight, targets, bias and the options: as given to `linear_selected_log_prob`.
lse: what `linear_selected_log_prob(..., return_lse=True)` gave.
need_x, need_weight, need_bias, float32_weight: as for `linear_cross_entropy_backward`.

Returns (grad_x, grad_weight, grad_bias), None for those not asked for, as `linear_cross_entropy_backward`.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> x, weight, targets = np.ones((1, 2), np.float32), np.zeros((2, 2), np.float32), np.array([1])
>>> log_prob, lse = fk.linear_selected_log_prob(x, weight, targets, return_lse=True)
>>> grads = fk.linear_selected_log_prob_backward(np.ones_like(log_prob), x, weight, targets, lse)
>>> grads[1].round(3).tolist()
[[-0.5, -0.5], [0.5, 0.5]]
)doc");
}

const OpFile registration(bind_linear_loss);

}  // namespace
}  // namespace flashkernel::python
