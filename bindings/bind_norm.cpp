// Binds norm.hpp: layer_norm and rms_norm, with outputs of their arrays' dtype or in 8 bits, and their gradients.
#include "flashkernel/norm.hpp"

#include "array_type.hpp"
#include "op.hpp"

namespace flashkernel::python {
namespace {

nb::object one_or_tuple(const nb::list& results) {
  return nb::len(results) == 1 ? nb::object(results[0]) : nb::tuple(results);
}

struct NormOutputs {
  Output out, residual, mean, rstd;
  bool has_residual = false, has_mean = false, has_rstd = false;

  NormSaved saved(double weight_offset) const {
    return {residual.view, mean.view, rstd.view, static_cast<float>(weight_offset)};
  }

  nb::object results(Call& call) {
    nb::list list;
    list.append(call.result(out));
    if (has_residual) list.append(call.result(residual));
    if (has_mean) list.append(call.result(mean));
    if (has_rstd) list.append(call.result(rstd));
    return one_or_tuple(list);
  }
};

NormOutputs make_outputs(Call& call, const TensorView& x, const TensorView& residual, bool return_stats, bool has_mean,
                         nb::handle out, nb::handle residual_out) {
  NormOutputs outputs;
  outputs.out = call.output("out", out, x.dtype, Shape(x));
  outputs.has_residual = residual.defined();
  if (outputs.has_residual)
    outputs.residual = call.output("residual_out", residual_out, x.dtype, Shape(x));
  else if (!residual_out.is_none())
    call.fail("residual_out without residual");
  outputs.has_mean = return_stats && has_mean;
  if (outputs.has_mean) outputs.mean = call.output(DType::kFloat32, Shape(x).without_last());
  outputs.has_rstd = return_stats;
  if (outputs.has_rstd) outputs.rstd = call.output(DType::kFloat32, Shape(x).without_last());
  return outputs;
}

nb::object layer_norm(nb::handle x, nb::handle weight, nb::handle bias, double eps, double weight_offset,
                      nb::handle residual, bool return_stats, nb::handle out, nb::handle residual_out,
                      nb::handle stream, nb::handle dtype) {
  Call call("layer_norm", stream, dtype);
  const TensorView x_view = call.input("x", x), weight_view = call.optional_input("weight", weight),
                   bias_view = call.optional_input("bias", bias),
                   residual_view = call.optional_input("residual", residual);
  NormOutputs outputs = make_outputs(call, x_view, residual_view, return_stats, true, out, residual_out);
  call.run([&](const ExecutionContext& context) {
    flashkernel::layer_norm(x_view, residual_view, weight_view, bias_view, outputs.out.view,
                            outputs.saved(weight_offset), static_cast<float>(eps), context);
  });
  return outputs.results(call);
}

nb::object rms_norm(nb::handle x, nb::handle weight, double eps, double weight_offset, nb::handle residual,
                    bool return_stats, nb::handle out, nb::handle residual_out, nb::handle stream, nb::handle dtype) {
  Call call("rms_norm", stream, dtype);
  const TensorView x_view = call.input("x", x), weight_view = call.optional_input("weight", weight),
                   residual_view = call.optional_input("residual", residual);
  NormOutputs outputs = make_outputs(call, x_view, residual_view, return_stats, false, out, residual_out);
  call.run([&](const ExecutionContext& context) {
    flashkernel::rms_norm(x_view, residual_view, weight_view, outputs.out.view, outputs.saved(weight_offset),
                          static_cast<float>(eps), context);
  });
  return outputs.results(call);
}

struct QuantizedOutputs {
  Output out, scales, residual;
  bool has_residual = false;
  TensorView scale;

  TensorView written_scales() const { return scale.defined() ? TensorView() : scales.view; }
  NormSaved saved(double weight_offset) const { return {residual.view, {}, {}, static_cast<float>(weight_offset)}; }

  nb::object results(Call& call, nb::handle given_scale) {
    nb::list list;
    list.append(call.result(out));
    list.append(scale.defined() ? nb::borrow(given_scale) : call.result(scales));
    if (has_residual) list.append(call.result(residual));
    return nb::tuple(list);
  }
};

QuantizedOutputs make_quantized_outputs(Call& call, const TensorView& x, const TensorView& residual, nb::handle scale,
                                        nb::handle out_dtype, nb::handle out, nb::handle scales,
                                        nb::handle residual_out) {
  QuantizedOutputs outputs;
  const DType dtype = parse_dtype(call.op(), out_dtype);
  if (!is_quantized(dtype)) call.fail("out_dtype=" + short_repr(out_dtype) + "; 'float8_e4m3fn' or 'int8' is needed");
  outputs.out = call.output("out", out, dtype, Shape(x));
  // Bytes of frameworks without float8 are what out_dtype says.
  if (outputs.out.view.dtype == DType::kUInt8) outputs.out.view.dtype = dtype;
  if (outputs.out.view.dtype != dtype)
    call.fail(std::string("out is ") + dtype_name(outputs.out.view.dtype) + " but out_dtype is " + dtype_name(dtype));
  outputs.scale = call.optional_input("scale", scale);
  if (!outputs.scale.defined())
    outputs.scales = call.output("scales", scales, DType::kFloat32, Shape(x).without_last());
  else if (!scales.is_none())
    call.fail("scales with scale: a given scale is for all rows, so that none is written");
  outputs.has_residual = residual.defined();
  if (outputs.has_residual)
    outputs.residual = call.output("residual_out", residual_out, x.dtype, Shape(x));
  else if (!residual_out.is_none())
    call.fail("residual_out without residual");
  return outputs;
}

nb::object layer_norm_quantized(nb::handle x, nb::handle weight, nb::handle bias, nb::handle out_dtype,
                                nb::handle scale, double eps, double weight_offset, nb::handle residual, nb::handle out,
                                nb::handle scales, nb::handle residual_out, nb::handle stream, nb::handle dtype) {
  Call call("layer_norm_quantized", stream, dtype);
  const TensorView x_view = call.input("x", x), weight_view = call.optional_input("weight", weight),
                   bias_view = call.optional_input("bias", bias),
                   residual_view = call.optional_input("residual", residual);
  QuantizedOutputs outputs =
      make_quantized_outputs(call, x_view, residual_view, scale, out_dtype, out, scales, residual_out);
  call.run([&](const ExecutionContext& context) {
    flashkernel::layer_norm_quantized(x_view, residual_view, weight_view, bias_view, outputs.scale, outputs.out.view,
                                      outputs.written_scales(), outputs.saved(weight_offset), static_cast<float>(eps),
                                      context);
  });
  return outputs.results(call, scale);
}

nb::object rms_norm_quantized(nb::handle x, nb::handle weight, nb::handle out_dtype, nb::handle scale, double eps,
                              double weight_offset, nb::handle residual, nb::handle out, nb::handle scales,
                              nb::handle residual_out, nb::handle stream, nb::handle dtype) {
  Call call("rms_norm_quantized", stream, dtype);
  const TensorView x_view = call.input("x", x), weight_view = call.optional_input("weight", weight),
                   residual_view = call.optional_input("residual", residual);
  QuantizedOutputs outputs =
      make_quantized_outputs(call, x_view, residual_view, scale, out_dtype, out, scales, residual_out);
  call.run([&](const ExecutionContext& context) {
    flashkernel::rms_norm_quantized(x_view, residual_view, weight_view, outputs.scale, outputs.out.view,
                                    outputs.written_scales(), outputs.saved(weight_offset), static_cast<float>(eps),
                                    context);
  });
  return outputs.results(call, scale);
}

nb::tuple layer_norm_backward(nb::handle grad_out, nb::handle h, nb::handle weight, nb::handle mean, nb::handle rstd,
                              nb::handle grad_residual_out, double weight_offset, bool need_weight, bool need_bias,
                              nb::handle stream, nb::handle dtype) {
  Call call("layer_norm_backward", stream, dtype);
  const TensorView grad_view = call.input("grad_out", grad_out), h_view = call.input("h", h),
                   weight_view = call.optional_input("weight", weight), mean_view = call.input("mean", mean),
                   rstd_view = call.input("rstd", rstd),
                   residual_view = call.optional_input("grad_residual_out", grad_residual_out);
  const DType parameter_dtype = weight_view.defined() ? weight_view.dtype : h_view.dtype;
  const bool with_weight = need_weight && weight_view.defined();
  Output grad_x = call.output(h_view.dtype, Shape(h_view)), grad_weight, grad_bias;
  if (with_weight) grad_weight = call.output(parameter_dtype, Shape(weight_view));
  if (need_bias) grad_bias = call.output(parameter_dtype, Shape{extent(h_view, -1)});
  call.run([&](const ExecutionContext& context) {
    flashkernel::layer_norm_backward(grad_view, h_view, weight_view, mean_view, rstd_view, residual_view,
                                     {grad_x.view, grad_weight.view, grad_bias.view, static_cast<float>(weight_offset)},
                                     context);
  });
  return nb::make_tuple(call.result(grad_x), with_weight ? call.result(grad_weight) : nb::none(),
                        need_bias ? call.result(grad_bias) : nb::none());
}

nb::tuple rms_norm_backward(nb::handle grad_out, nb::handle h, nb::handle weight, nb::handle rstd,
                            nb::handle grad_residual_out, double weight_offset, bool need_weight, nb::handle stream,
                            nb::handle dtype) {
  Call call("rms_norm_backward", stream, dtype);
  const TensorView grad_view = call.input("grad_out", grad_out), h_view = call.input("h", h),
                   weight_view = call.optional_input("weight", weight), rstd_view = call.input("rstd", rstd),
                   residual_view = call.optional_input("grad_residual_out", grad_residual_out);
  const bool with_weight = need_weight && weight_view.defined();
  Output grad_x = call.output(h_view.dtype, Shape(h_view)), grad_weight;
  if (with_weight) grad_weight = call.output(weight_view.dtype, Shape(weight_view));
  call.run([&](const ExecutionContext& context) {
    flashkernel::rms_norm_backward(grad_view, h_view, weight_view, rstd_view, residual_view,
                                   {grad_x.view, grad_weight.view, TensorView{}, static_cast<float>(weight_offset)},
                                   context);
  });
  return nb::make_tuple(call.result(grad_x), with_weight ? call.result(grad_weight) : nb::none());
}

void bind_norm(nb::module_& module) {
  def_op<&layer_norm>(
      module,
      "def layer_norm(x: ArrayT, weight: SupportsDLPack | None = None, bias: SupportsDLPack | None = None, *, "
      "eps: float = 1e-05, weight_offset: float = 0.0, residual: SupportsDLPack | None = None, return_stats: bool = "
      "False, out: ArrayT | "
      "None = None, residual_out: ArrayT | None = None, stream: typing.Any = None, dtype: typing.Any = None, "
      "backend: str | None = None) -> ArrayT, ArrayT if residual, ArrayT if return_stats, ArrayT if "
      "return_stats",
      R"doc((h - mean(h)) / sqrt(var(h) + eps) * (weight + weight_offset) + bias over the last dim, where h = x + residual.

x: [..., features]; float32, float16 or bfloat16; any strides with a contiguous last dim.
weight, bias: [features], each float32, float16 or bfloat16, whatever x is.
weight_offset: added to each weight: 1 for weights that are stored less 1. It needs a weight.
residual: x's shape and dtype; added to x first.
return_stats: also return mean and 1 / sqrt(var + eps), float32, x's shape less the last dim.
out: written in place and returned; may be x. residual_out: receives h; may be residual.

Returns out; then h (rounded to x's dtype) if residual is given; then mean and rstd if return_stats: a tuple when there is more
than one. Statistics are float32 in two passes over the row.

Source: Ba, Kiros and Hinton, Layer Normalization (2016).
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> fk.layer_norm(np.array([[-1, 1]], np.float32), eps=0.0).tolist()
[[-1.0, 1.0]]
)doc");

  def_op<&rms_norm>(
      module,
      "def rms_norm(x: ArrayT, weight: SupportsDLPack | None = None, *, eps: float = 1e-06, weight_offset: float = "
      "0.0, residual: "
      "SupportsDLPack | None = None, return_stats: bool = False, out: ArrayT | None = None, residual_out: "
      "ArrayT | None = None, stream: typing.Any = None, dtype: typing.Any = None, backend: str | None = None) "
      "-> ArrayT, ArrayT if residual, ArrayT if return_stats",
      R"doc(h / sqrt(mean(h^2) + eps) * (weight + weight_offset) over the last dim, where h = x + residual.

x: [..., features]; float32, float16 or bfloat16; any strides with a contiguous last dim.
weight: [features], float32, float16 or bfloat16, whatever x is.
weight_offset: as in `layer_norm`; 1 is Gemma's RMSNorm.
residual, out, residual_out: as in `layer_norm`.
return_stats: also return 1 / sqrt(mean(h^2) + eps), float32, x's shape less the last dim.

Returns out; then h (rounded to x's dtype) if residual is given; then rstd if return_stats: a tuple when there is more than one.
Statistics are float32.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> fk.rms_norm(np.full((1, 4), 2, np.float32), eps=0.0).tolist()
[[1.0, 1.0, 1.0, 1.0]]
)doc");

  def_op<&layer_norm_quantized>(
      module,
      "def layer_norm_quantized(x: ArrayT, weight: SupportsDLPack | None = None, bias: SupportsDLPack | None = "
      "None, *, out_dtype: typing.Any = 'float8_e4m3fn', scale: ArrayT | None = None, eps: float = 1e-05, "
      "weight_offset: float = 0.0, residual: SupportsDLPack | None = None, out: ArrayT | None = None, scales: "
      "ArrayT | None = None, residual_out: ArrayT | None = None, stream: typing.Any = None, dtype: typing.Any = "
      "None) -> tuple[ArrayT, ArrayT, ArrayT if residual]",
      R"doc(`layer_norm` with an output in 8 bits: element * scale is the number.

x, weight, bias, eps, weight_offset, residual, residual_out: as in `layer_norm`.
out_dtype: "float8_e4m3fn" or "int8" (or a framework's object for it).
scale: one number for all rows, float32, of 0 dims or [1]; read on the device. None: each row gets its own.
out: out_dtype, written in place and returned; uint8 where the framework has no float8 (NumPy).
scales: float32, x's shape less the last dim, contiguous; receives the scale of each row.

Returns (out, scale), then h if residual is given; scale is what was given, or the rows' own: the largest magnitude of a row
over 448 (float8_e4m3fn) or 127 (int8), at least 2^-100. The norm is not rounded to x's dtype on the way. Elements are rounded to
nearest even and saturated to +-448 or +-127 (infinities too); float8_e4m3fn keeps NaN, int8 stores 0 for it and the row's scale
becomes NaN. There is no gradient.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> elements, scales = fk.layer_norm_quantized(np.array([[-1, 1]], np.float32), out_dtype="int8", eps=0.0)
>>> elements.tolist(), bool(np.allclose(scales, 1 / 127))
([[-127, 127]], True)
)doc");

  def_op<&rms_norm_quantized>(
      module,
      "def rms_norm_quantized(x: ArrayT, weight: SupportsDLPack | None = None, *, out_dtype: typing.Any = "
      "'float8_e4m3fn', scale: ArrayT | None = None, eps: float = 1e-06, weight_offset: float = 0.0, residual: "
      "SupportsDLPack | None = None, out: ArrayT | None = None, scales: ArrayT | None = None, residual_out: ArrayT "
      "| None = None, stream: typing.Any = None, dtype: typing.Any = None) -> tuple[ArrayT, ArrayT, ArrayT if "
      "residual]",
      R"doc(`rms_norm` with an output in 8 bits: element * scale is the number.

x, weight, eps, weight_offset, residual, residual_out: as in `rms_norm`. out_dtype, scale, out, scales: as in
`layer_norm_quantized`.

Returns (out, scale), then h if residual is given, as `layer_norm_quantized`. There is no gradient.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> elements, scales = fk.rms_norm_quantized(np.full((2, 4), 2, np.float32), out_dtype="int8", eps=0.0)
>>> elements[0].tolist(), bool(np.allclose(scales, 1 / 127))
([127, 127, 127, 127], True)
)doc");

  def_op<&layer_norm_backward>(
      module,
      "def layer_norm_backward(grad_out: ArrayT, h: SupportsDLPack, weight: SupportsDLPack | None, mean: "
      "SupportsDLPack, rstd: SupportsDLPack, *, grad_residual_out: SupportsDLPack | None = None, weight_offset: float "
      "= 0.0, need_weight: "
      "bool = True, need_bias: bool = True, stream: typing.Any = None, dtype: typing.Any = None, backend: str "
      "| None = None) -> tuple[ArrayT, ArrayT if weight and need_weight else None, ArrayT if need_bias else "
      "None]",
      R"doc(Gradients of `layer_norm`.

n = (h - mean) * rstd; g = grad_out * (weight + weight_offset); grad_x = rstd * (g - mean(g) - n * mean(g * n)) + grad_residual_out;
grad_weight = sum of grad_out * n over rows; grad_bias = sum of grad_out over rows.

grad_out: h's shape and dtype. h: what was normalised: x, or residual_out. weight: as given to `layer_norm`, or None.
mean, rstd: what `layer_norm(..., return_stats=True)` gave.
grad_residual_out: the gradient that arrives at residual_out, if any. weight_offset: as given to the norm.
need_weight, need_bias: which of those gradients to compute.

Returns (grad_x, grad_weight, grad_bias), None for those not computed; grad_x is also the residual's gradient. Sums are float32
and do not depend on the number of threads.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> x, weight = np.array([[-1, 1]], np.float32), np.ones(2, np.float32)
>>> out, mean, rstd = fk.layer_norm(x, weight, return_stats=True)
>>> grad_x, grad_weight, grad_bias = fk.layer_norm_backward(np.ones_like(x), x, weight, mean, rstd)
>>> bool(np.allclose(grad_x, 0)), grad_bias.tolist()
(True, [1.0, 1.0])
)doc");

  def_op<&rms_norm_backward>(
      module,
      "def rms_norm_backward(grad_out: ArrayT, h: SupportsDLPack, weight: SupportsDLPack | None, rstd: "
      "SupportsDLPack, *, grad_residual_out: SupportsDLPack | None = None, weight_offset: float = 0.0, need_weight: "
      "bool = True, stream: "
      "typing.Any = None, dtype: typing.Any = None, backend: str | None = None) -> tuple[ArrayT, ArrayT if "
      "weight and need_weight else None]",
      R"doc(Gradients of `rms_norm`.

n = h * rstd; g = grad_out * (weight + weight_offset); grad_x = rstd * (g - n * mean(g * n)) + grad_residual_out;
grad_weight = sum of grad_out * n over rows.

grad_out: h's shape and dtype. h: what was normalised: x, or residual_out. weight: as given to `rms_norm`, or None.
rstd: what `rms_norm(..., return_stats=True)` gave.
grad_residual_out: the gradient that arrives at residual_out, if any. weight_offset: as given to the norm.
need_weight: whether to compute that gradient.

Returns (grad_x, grad_weight), None if not computed; grad_x is also the residual's gradient. Sums are float32 and do not depend
on the number of threads.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> x, weight = np.ones((1, 4), np.float32), np.ones(4, np.float32)
>>> out, rstd = fk.rms_norm(x, weight, return_stats=True)
>>> grad_x, grad_weight = fk.rms_norm_backward(np.ones_like(x), x, weight, rstd)
>>> bool(np.allclose(grad_x, 0, atol=1e-5)), bool(np.allclose(grad_weight, 1))
(True, True)
)doc");
}

const OpFile registration(bind_norm);

}  // namespace
}  // namespace flashkernel::python
