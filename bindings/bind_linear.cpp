// Binds linear.hpp: linear, linear_backward.
#include "flashkernel/linear.hpp"

#include "activation.hpp"
#include "op.hpp"

namespace flashkernel::python {
namespace {

nb::object linear(nb::handle x, nb::handle weight, nb::handle bias, const std::optional<std::string>& activation,
                  bool return_preactivation, nb::handle out, nb::handle stream, nb::handle dtype) {
  Call call("linear", stream, dtype);
  const Activation kind = parse_activation(call, activation);
  const TensorView x_view = call.input("x", x), weight_view = call.input("weight", weight),
                   bias_view = call.optional_input("bias", bias);
  const Shape shape = Shape(x_view).with_last(extent(weight_view, 0));
  Output output = call.output("out", out, x_view.dtype, shape);
  Output preactivation;
  if (return_preactivation) preactivation = call.output(x_view.dtype, shape);
  call.run([&](const ExecutionContext& context) {
    flashkernel::linear(x_view, weight_view, bias_view, output.view, preactivation.view, kind, context);
  });
  if (!return_preactivation) return call.result(output);
  return nb::make_tuple(call.result(output), call.result(preactivation));
}

nb::tuple linear_backward(nb::handle grad_out, nb::handle x, nb::handle weight, nb::handle preactivation,
                          const std::optional<std::string>& activation, bool need_x, bool need_weight, bool need_bias,
                          nb::handle stream, nb::handle dtype) {
  Call call("linear_backward", stream, dtype);
  const Activation kind = parse_activation(call, activation);
  const TensorView grad_view = call.input("grad_out", grad_out), x_view = call.input("x", x),
                   weight_view = call.input("weight", weight),
                   preactivation_view = call.optional_input("preactivation", preactivation);
  Output grad_x, grad_weight, grad_bias;
  if (need_x) grad_x = call.output(x_view.dtype, Shape(x_view));
  if (need_weight) grad_weight = call.output(weight_view.dtype, Shape(weight_view));
  if (need_bias) grad_bias = call.output(weight_view.dtype, Shape{extent(weight_view, 0)});
  call.run([&](const ExecutionContext& context) {
    flashkernel::linear_backward(grad_view, x_view, weight_view, preactivation_view,
                                 {grad_x.view, grad_weight.view, grad_bias.view}, kind, context);
  });
  const auto result = [&](Output& output, bool needed) { return needed ? call.result(output) : nb::none(); };
  return nb::make_tuple(result(grad_x, need_x), result(grad_weight, need_weight), result(grad_bias, need_bias));
}

void bind_linear(nb::module_& module) {
  def_op<&linear>(
      module,
      "def linear(x: ArrayT, weight: SupportsDLPack, bias: SupportsDLPack | None = None, *, activation: str | "
      "None = None, return_preactivation: bool = False, out: ArrayT | None = None, stream: typing.Any = None, "
      "dtype: typing.Any = None, backend: str | None = None) -> ArrayT, ArrayT if return_preactivation",
      R"doc(activation(x weight^T + bias) in one kernel.

x: [..., in_features], up to 8 dims; float32, float16 or bfloat16.
weight: [out_features, in_features], x's dtype; either dim may be the contiguous one, so GPT-2's [in, out] weights are passed
   as ``weight.T``.
bias: [out_features], x's dtype or float32.
activation: None, "gelu_tanh" (0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))), "gelu" (0.5 x (1 + erf(x / sqrt(2)))) or
   "silu" (x / (1 + exp(-x))).
return_preactivation: also return x weight^T + bias, which `linear_backward` needs.
out: written in place and returned; [..., out_features], x's dtype.

Returns out, or (out, preactivation). Sums and the activation are float32, rounded once. in_features of 0 gives
activation(bias).

Source: Hendrycks and Gimpel, GELU (2016).
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> x, weight = np.ones((2, 3), np.float32), np.ones((4, 3), np.float32)
>>> fk.linear(x, weight, np.ones(4, np.float32)).tolist()
[[4.0, 4.0, 4.0, 4.0], [4.0, 4.0, 4.0, 4.0]]
>>> fk.linear(x, weight, activation="gelu_tanh").shape
(2, 4)
)doc");

  def_op<&linear_backward>(
      module,
      "def linear_backward(grad_out: ArrayT, x: SupportsDLPack, weight: SupportsDLPack, preactivation: "
      "SupportsDLPack | None = None, *, activation: str | None = None, need_x: bool = True, need_weight: bool "
      "= True, need_bias: bool = True, stream: typing.Any = None, dtype: typing.Any = None, backend: str | "
      "None = None) -> tuple[ArrayT if need_x else None, ArrayT if need_weight else None, ArrayT if need_bias "
      "else None]",
      R"doc(Gradients of `linear`.

g = grad_out * activation'(preactivation); grad_x = g weight; grad_weight = g^T x; grad_bias = sum of g over rows.

grad_out: [..., out_features], x's dtype; x, weight, activation: as given to `linear`.
preactivation: what `linear(..., return_preactivation=True)` gave; needed with an activation.
need_x, need_weight, need_bias: which gradients to compute.

Returns (grad_x, grad_weight, grad_bias), None for those not asked for; shapes of x, weight and [out_features]. Sums are
float32 and do not depend on the number of threads.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> x, weight = np.ones((2, 3), np.float32), np.ones((4, 3), np.float32)
>>> grad_x, grad_weight, grad_bias = fk.linear_backward(np.ones((2, 4), np.float32), x, weight)
>>> grad_x[0].tolist(), grad_bias.tolist()
([4.0, 4.0, 4.0], [2.0, 2.0, 2.0, 2.0])
)doc");
}

const OpFile registration(bind_linear);

}  // namespace
}  // namespace flashkernel::python
