// Binds reduce.hpp: reduce_sum, reduce_mean, reduce_max, argmax, softmax, log_softmax and the gradients of the last
// two.
#include "flashkernel/reduce.hpp"

#include "array_type.hpp"
#include "op.hpp"

namespace flashkernel::python {
namespace {

using ReduceFunction = void (*)(const TensorView&, const TensorView&, AxisMask, const ExecutionContext&);
using SoftmaxFunction = void (*)(const TensorView&, const TensorView&, int, const ExecutionContext&);
using SoftmaxBackwardFunction = void (*)(const TensorView&, const TensorView&, const TensorView&, int,
                                         const ExecutionContext&);

// axis None, an int, or a tuple of ints; negative ones count from the end. The empty tuple reduces nothing.
AxisMask parse_axes(const Call& call, const TensorView& x, nb::handle axis) {
  AxisMask mask = 0;
  const auto add = [&](nb::handle item) {
    std::int64_t d = 0;
    if (!nb::try_cast(item, d) || d < -x.ndim || d >= x.ndim)
      call.fail("axis=" + short_repr(axis) + " with x of " + std::to_string(x.ndim) +
                " dims; None, or one or several of " + std::to_string(-x.ndim) + ".." + std::to_string(x.ndim - 1) +
                " is needed");
    const AxisMask bit = AxisMask{1} << (d < 0 ? d + x.ndim : d);
    if (mask & bit) call.fail("axis=" + short_repr(axis) + " names a dim twice");
    mask |= bit;
  };
  if (axis.is_none()) {
    for (int d = 0; d < x.ndim; ++d) mask |= AxisMask{1} << d;
  } else if (nb::isinstance<nb::tuple>(axis) || nb::isinstance<nb::list>(axis)) {
    if (nb::len(axis) == 0) call.fail("axis=() reduces nothing; None, or one or several dims is needed");
    for (const nb::handle item : axis) add(item);
  } else {
    add(axis);
  }
  return mask;
}

nb::object reduce(const char* op, ReduceFunction function, bool is_argmax, nb::handle x, nb::handle axis, bool keepdims,
                  nb::handle out, nb::handle stream, nb::handle dtype) {
  Call call(op, stream, dtype);
  const TensorView x_view = call.input("x", x);
  const AxisMask axes = parse_axes(call, x_view, axis);
  Shape shape;
  for (int d = 0; d < x_view.ndim; ++d) {
    const bool is_reduced = (axes >> d & 1) != 0;
    if (!is_reduced || keepdims) shape.dims[shape.ndim++] = is_reduced ? 1 : x_view.shape[d];
  }
  Output output = call.output("out", out, is_argmax ? DType::kInt64 : x_view.dtype, shape);
  call.run([&](const ExecutionContext& context) { function(x_view, output.view, axes, context); });
  return call.result(output);
}

nb::object soften(const char* op, SoftmaxFunction function, nb::handle x, int axis, nb::handle out, nb::handle stream,
                  nb::handle dtype) {
  Call call(op, stream, dtype);
  const TensorView x_view = call.input("x", x);
  Output output = call.output("out", out, x_view.dtype, Shape(x_view));
  call.run([&](const ExecutionContext& context) { function(x_view, output.view, axis, context); });
  return call.result(output);
}

nb::object soften_backward(const char* op, SoftmaxBackwardFunction function, nb::handle grad_out, nb::handle out,
                           int axis, nb::handle stream, nb::handle dtype) {
  Call call(op, stream, dtype);
  const TensorView grad_view = call.input("grad_out", grad_out), out_view = call.input("out", out);
  Output grad_x = call.output(out_view.dtype, Shape(out_view));
  call.run([&](const ExecutionContext& context) { function(grad_view, out_view, grad_x.view, axis, context); });
  return call.result(grad_x);
}

nb::object reduce_sum(nb::handle x, nb::handle axis, bool keepdims, nb::handle out, nb::handle stream,
                      nb::handle dtype) {
  return reduce("reduce_sum", flashkernel::reduce_sum, false, x, axis, keepdims, out, stream, dtype);
}

nb::object reduce_mean(nb::handle x, nb::handle axis, bool keepdims, nb::handle out, nb::handle stream,
                       nb::handle dtype) {
  return reduce("reduce_mean", flashkernel::reduce_mean, false, x, axis, keepdims, out, stream, dtype);
}

nb::object reduce_max(nb::handle x, nb::handle axis, bool keepdims, nb::handle out, nb::handle stream,
                      nb::handle dtype) {
  return reduce("reduce_max", flashkernel::reduce_max, false, x, axis, keepdims, out, stream, dtype);
}

nb::object argmax(nb::handle x, nb::handle axis, bool keepdims, nb::handle out, nb::handle stream, nb::handle dtype) {
  return reduce("argmax", flashkernel::argmax, true, x, axis, keepdims, out, stream, dtype);
}

nb::object softmax(nb::handle x, int axis, nb::handle out, nb::handle stream, nb::handle dtype) {
  return soften("softmax", flashkernel::softmax, x, axis, out, stream, dtype);
}

nb::object log_softmax(nb::handle x, int axis, nb::handle out, nb::handle stream, nb::handle dtype) {
  return soften("log_softmax", flashkernel::log_softmax, x, axis, out, stream, dtype);
}

nb::object softmax_backward(nb::handle grad_out, nb::handle out, int axis, nb::handle stream, nb::handle dtype) {
  return soften_backward("softmax_backward", flashkernel::softmax_backward, grad_out, out, axis, stream, dtype);
}

nb::object log_softmax_backward(nb::handle grad_out, nb::handle out, int axis, nb::handle stream, nb::handle dtype) {
  return soften_backward("log_softmax_backward", flashkernel::log_softmax_backward, grad_out, out, axis, stream, dtype);
}

void bind_reduce(nb::module_& module) {
  def_op<&reduce_sum>(
      module,
      "def reduce_sum(x: ArrayT, axis: Axis = None, *, keepdims: bool = False, out: ArrayT | None = None, "
      "stream: typing.Any = None, dtype: typing.Any = None, backend: str | None = None) -> ArrayT",
      R"doc(Sum over any set of axes.

x: float32, float16 or bfloat16; any strides, up to 8 dims.
axis: int or tuple of ints, negative ones count from the end; None: all.
keepdims: keep reduced dims with size 1.
out: written in place and returned; x's dtype (the default) or float32; reduced dims of size 1 or left out.

Returns out. Added in float32, in an order that does not depend on the number of threads. The sum over nothing is 0.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> fk.reduce_sum(np.ones((2, 3), np.float32), axis=1).tolist()
[3.0, 3.0]
)doc");
  def_op<&reduce_mean>(
      module,
      "def reduce_mean(x: ArrayT, axis: Axis = None, *, keepdims: bool = False, out: ArrayT | None = None, "
      "stream: typing.Any = None, dtype: typing.Any = None, backend: str | None = None) -> ArrayT",
      R"doc(Mean over any set of axes: `reduce_sum` divided by the number of elements.

x, axis, keepdims, out: as in `reduce_sum`.

Returns out. Added in float32, in an order that does not depend on the number of threads. The mean over nothing is NaN.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> float(fk.reduce_mean(np.arange(4, dtype=np.float32)))
1.5
)doc");
  def_op<&reduce_max>(
      module,
      "def reduce_max(x: ArrayT, axis: Axis = None, *, keepdims: bool = False, out: ArrayT | None = None, "
      "stream: typing.Any = None, dtype: typing.Any = None, backend: str | None = None) -> ArrayT",
      R"doc(Maximum over any set of axes.

x, axis, keepdims, out: as in `reduce_sum`.

Returns out. Exact. A NaN wins. The maximum over nothing is refused (ValueError).
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> fk.reduce_max(np.arange(6, dtype=np.float32).reshape(2, 3), axis=0).tolist()
[3.0, 4.0, 5.0]
)doc");
  def_op<&argmax>(
      module,
      "def argmax(x: ArrayT, axis: Axis = None, *, keepdims: bool = False, out: ArrayT | None = None, stream: "
      "typing.Any = None, dtype: typing.Any = None, backend: str | None = None) -> ArrayT",
      R"doc(Index of the first maximum over any set of axes.

x, axis, keepdims: as in `reduce_sum`.
out: written in place and returned; int64.

Returns out, int64: the row-major index within the reduced dims. The first NaN wins, if there is one. Over nothing: ValueError.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> fk.argmax(np.array([[1, 3, 2], [5, 4, 5]], np.float32), axis=-1).tolist()
[1, 0]
)doc");

  def_op<&softmax>(
      module,
      "def softmax(x: ArrayT, axis: int = -1, *, out: ArrayT | None = None, stream: typing.Any = None, dtype: "
      "typing.Any = None, backend: str | None = None) -> ArrayT",
      R"doc(exp(x - max(x)) / sum(exp(x - max(x))) along one axis.

x: float32, float16 or bfloat16; any strides, up to 8 dims.
axis: negative counts from the end.
out: written in place and returned; x's shape and dtype; may be x.

Returns out. Computed in float32. A row of -inf only gives 0; a NaN makes its row NaN.

Source: Milakov and Gimelshein, Online normalizer calculation for softmax (2018).
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> fk.softmax(np.zeros(4, np.float32)).tolist()
[0.25, 0.25, 0.25, 0.25]
)doc");
  def_op<&log_softmax>(
      module,
      "def log_softmax(x: ArrayT, axis: int = -1, *, out: ArrayT | None = None, stream: typing.Any = None, "
      "dtype: typing.Any = None, backend: str | None = None) -> ArrayT",
      R"doc(x - max(x) - log(sum(exp(x - max(x)))) along one axis.

x, axis, out: as in `softmax`.

Returns out. Computed in float32. A row of -inf only gives -inf; a NaN makes its row NaN.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> bool(np.allclose(fk.log_softmax(np.zeros(4, np.float32)), -np.log(4)))
True
)doc");
  def_op<&softmax_backward>(
      module,
      "def softmax_backward(grad_out: ArrayT, out: SupportsDLPack, axis: int = -1, *, stream: typing.Any = "
      "None, dtype: typing.Any = None, backend: str | None = None) -> ArrayT",
      R"doc(Gradient of `softmax`: out * (grad_out - sum(grad_out * out)) along the axis.

grad_out: out's shape and dtype. out: what `softmax` gave. axis: as given to it.

Returns grad_x. Computed in float32.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> out = fk.softmax(np.zeros(2, np.float32))
>>> fk.softmax_backward(np.array([1, 0], np.float32), out).tolist()
[0.25, -0.25]
)doc");
  def_op<&log_softmax_backward>(
      module,
      "def log_softmax_backward(grad_out: ArrayT, out: SupportsDLPack, axis: int = -1, *, stream: typing.Any = "
      "None, dtype: typing.Any = None, backend: str | None = None) -> ArrayT",
      R"doc(Gradient of `log_softmax`: grad_out - exp(out) * sum(grad_out) along the axis.

grad_out: out's shape and dtype. out: what `log_softmax` gave. axis: as given to it.

Returns grad_x. Computed in float32.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> out = fk.log_softmax(np.zeros(2, np.float32))
>>> bool(np.allclose(fk.log_softmax_backward(np.array([1, 0], np.float32), out), [0.5, -0.5]))
True
)doc");
}

const OpFile registration(bind_reduce);

}  // namespace
}  // namespace flashkernel::python
