// Binds elementwise.hpp: add, swiglu, swiglu_backward.
#include "flashkernel/elementwise.hpp"

#include "op.hpp"

namespace flashkernel::python {
namespace {

nb::object add(nb::handle a, nb::handle b, nb::handle out, nb::handle stream, nb::handle dtype) {
  Call call("add", stream, dtype);
  const TensorView a_view = call.input("a", a), b_view = call.input("b", b);
  Output output = call.output("out", out, a_view.dtype, Shape(a_view));
  call.run([&](const ExecutionContext& context) { flashkernel::add(a_view, b_view, output.view, context); });
  return call.result(output);
}

nb::object swiglu(nb::handle gate, nb::handle up, nb::handle out, nb::handle stream, nb::handle dtype) {
  Call call("swiglu", stream, dtype);
  const TensorView gate_view = call.input("gate", gate), up_view = call.input("up", up);
  Output output = call.output("out", out, gate_view.dtype, Shape(gate_view));
  call.run([&](const ExecutionContext& context) { flashkernel::swiglu(gate_view, up_view, output.view, context); });
  return call.result(output);
}

nb::tuple swiglu_backward(nb::handle grad_out, nb::handle gate, nb::handle up, nb::handle stream, nb::handle dtype) {
  Call call("swiglu_backward", stream, dtype);
  const TensorView grad_view = call.input("grad_out", grad_out), gate_view = call.input("gate", gate),
                   up_view = call.input("up", up);
  Output grad_gate = call.output(gate_view.dtype, Shape(gate_view)),
         grad_up = call.output(up_view.dtype, Shape(up_view));
  call.run([&](const ExecutionContext& context) {
    flashkernel::swiglu_backward(grad_view, gate_view, up_view, grad_gate.view, grad_up.view, context);
  });
  return nb::make_tuple(call.result(grad_gate), call.result(grad_up));
}

void bind_elementwise(nb::module_& module) {
  def_op<&add>(module,
               "def add(a: ArrayT, b: SupportsDLPack, *, out: ArrayT | None = None, stream: typing.Any = None, dtype: "
               "typing.Any = None, backend: str | None = None) -> ArrayT",
               R"doc(a + b, elementwise: the residual connection.

a, b: the same shape (no broadcasting) and dtype, float32, float16 or bfloat16; any strides, up to 8 dims.
out: written in place and returned; may be a or b.

Returns out. Added in float32 and rounded once.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> x = np.arange(3, dtype=np.float32)
>>> fk.add(x, x, out=x).tolist()
[0.0, 2.0, 4.0]
)doc");

  def_op<&swiglu>(
      module,
      "def swiglu(gate: ArrayT, up: SupportsDLPack, *, out: ArrayT | None = None, stream: typing.Any = None, "
      "dtype: typing.Any = None, backend: str | None = None) -> ArrayT",
      R"doc(gate / (1 + exp(-gate)) * up, elementwise: the gated unit of Llama's MLP.

gate, up: the same shape (no broadcasting) and dtype, float32, float16 or bfloat16; any strides.
out: written in place and returned; may be gate or up.

Returns out. Computed in float32 and rounded once.

Source: Shazeer, GLU Variants Improve Transformer (2020).
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> fk.swiglu(np.zeros(2, np.float32), np.ones(2, np.float32)).tolist()
[0.0, 0.0]
)doc");

  def_op<&swiglu_backward>(
      module,
      "def swiglu_backward(grad_out: ArrayT, gate: SupportsDLPack, up: SupportsDLPack, *, stream: typing.Any = "
      "None, dtype: typing.Any = None, backend: str | None = None) -> tuple[ArrayT, ArrayT]",
      R"doc(Gradients of `swiglu`.

s = 1 / (1 + exp(-gate)); grad_gate = grad_out * up * s * (1 + gate * (1 - s)); grad_up = grad_out * gate * s.

grad_out, gate, up: the same shape and dtype, float32, float16 or bfloat16; any strides.

Returns (grad_gate, grad_up). Computed in float32.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> one = np.ones(1, np.float32)
>>> grad_gate, grad_up = fk.swiglu_backward(one, 0 * one, one)
>>> grad_gate.tolist(), grad_up.tolist()
([0.5], [0.0])
)doc");
}

const OpFile registration(bind_elementwise);

}  // namespace
}  // namespace flashkernel::python
