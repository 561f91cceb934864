// Binds linear_fp8.hpp: linear_fp8 and quantize_fp8_blocks.
#include "flashkernel/linear_fp8.hpp"

#include "activation.hpp"
#include "op.hpp"

namespace flashkernel::python {
namespace {

/// Bytes of frameworks without float8 are float8_e4m3fn.
TensorView as_float8(TensorView view) {
  if (view.dtype == DType::kUInt8) view.dtype = DType::kFloat8E4M3;
  return view;
}

nb::object linear_fp8(nb::handle x, nb::handle weight, nb::handle x_scale, nb::handle weight_scale, nb::handle bias,
                      const std::optional<std::string>& activation, nb::handle out_dtype, nb::handle out,
                      nb::handle stream, nb::handle dtype) {
  Call call("linear_fp8", stream, dtype);
  const Activation kind = parse_activation(call, activation);
  const TensorView x_view = as_float8(call.input("x", x)), weight_view = as_float8(call.input("weight", weight)),
                   x_scale_view = call.optional_input("x_scale", x_scale),
                   weight_scale_view = call.input("weight_scale", weight_scale),
                   bias_view = call.optional_input("bias", bias);
  const DType result = !out_dtype.is_none()                 ? parse_dtype(call.op(), out_dtype)
                       : x_view.dtype == DType::kFloat8E4M3 ? DType::kBFloat16
                                                            : x_view.dtype;
  Output output = call.output("out", out, result, Shape(x_view).with_last(extent(weight_view, 0)));
  if (!out_dtype.is_none() && output.view.dtype != result)
    call.fail(std::string("out_dtype is ") + dtype_name(result) + " but out is " + dtype_name(output.view.dtype));
  call.run([&](const ExecutionContext& context) {
    flashkernel::linear_fp8(x_view, weight_view, x_scale_view, weight_scale_view, bias_view, output.view, kind,
                            context);
  });
  return call.result(output);
}

nb::tuple quantize_fp8_blocks(nb::handle x, nb::handle out, nb::handle scales, nb::handle stream, nb::handle dtype) {
  Call call("quantize_fp8_blocks", stream, dtype);
  const TensorView x_view = call.input("x", x);
  Output output = call.output("out", out, DType::kFloat8E4M3, Shape(x_view));
  output.view = as_float8(output.view);
  const std::int64_t blocks = (extent(x_view, -1) + 127) / 128;
  Output written = call.output("scales", scales, DType::kFloat32, Shape(x_view).with_last(blocks));
  call.run([&](const ExecutionContext& context) {
    flashkernel::quantize_fp8_blocks(x_view, output.view, written.view, context);
  });
  return nb::make_tuple(call.result(output), call.result(written));
}

void bind_linear_fp8(nb::module_& module) {
  def_op<&linear_fp8>(
      module,
      "def linear_fp8(x: ArrayT, weight: SupportsDLPack, x_scale: SupportsDLPack | None, weight_scale: SupportsDLPack, "
      "bias: SupportsDLPack | None = None, *, activation: str | None = None, out_dtype: typing.Any = None, out: ArrayT "
      "| None = None, stream: typing.Any = None, dtype: typing.Any = None) -> ArrayT",
      R"doc(activation(x W^T + bias) of x and W in float8_e4m3fn: an element times its scale is the number.

x: [..., in_features], up to 8 dims; float8_e4m3fn, or float32, float16 or bfloat16 with x_scale None: such an x is rounded on
   the way, as `quantize_fp8_blocks` does.
weight: [out_features, in_features], float8_e4m3fn. uint8 arrays hold float8_e4m3fn (NumPy has no such type).
x_scale: float32, [..., in_features / 128], one for 128 neighbours of a row; [..., 1], one a row; or one number.
weight_scale: float32, [out_features / 128, in_features / 128], one for a block of 128 x 128 (DeepSeek-V3's and DeepGEMM's
   format); [out_features, in_features / 128], one for 128 neighbours of a row; [out_features, 1] or [out_features], one a row; or
   one number. Numbers of blocks are rounded up. Scales may have any strides.
bias: [out_features], out's dtype or float32.
activation: as of `linear`.
out_dtype: float32, float16 or bfloat16; default: x's dtype, bfloat16 where x is of 8 bits.
out: written in place and returned; [..., out_features].

Returns out. Sums are float32. Tensor cores of 9.0 add 8-bit numbers with some 14 bits, so that they are asked for 128 of
in_features at a time and the rest is added outside. On 9.0 rows that start at multiples of 16 bytes are taken by wgmma, few of them
and many; everything else, and every other GPU, by a kernel that is slower than `linear`. There is no gradient here
(`flashkernel.torch` has that of x and of the bias).

Source: DeepSeek-AI, DeepSeek-V3 (2024), 3.3; the format is that of DeepGEMM and of checkpoints with "weight_scale_inv".
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> ones = np.full((2, 256), 0x38, np.uint8)  # 1.0
>>> fk.linear_fp8(ones, ones, np.ones((2, 2), np.float32), np.full((1, 2), 0.5, np.float32), out_dtype="float32").tolist()
[[128.0, 128.0], [128.0, 128.0]]
)doc");

  def_op<&quantize_fp8_blocks>(
      module,
      "def quantize_fp8_blocks(x: ArrayT, *, out: ArrayT | None = None, scales: ArrayT | None = None, stream: "
      "typing.Any = None, dtype: typing.Any = None) -> tuple[ArrayT, ArrayT]",
      R"doc(x in float8_e4m3fn with a scale for each 128 neighbours of a row: element * scale is the number.

x: [..., features], up to 8 dims; float32, float16 or bfloat16, last dim contiguous.
out: float8_e4m3fn, x's shape; written in place and returned; uint8 where the framework has no float8 (NumPy).
scales: float32, [..., features / 128] (rounded up), any strides; receives the largest magnitude of each 128 over 448, at least
   2^-100.

Returns (out, scales). Elements are rounded to nearest even; infinities become +-448, NaN stays and counts in no scale.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> elements, scales = fk.quantize_fp8_blocks(np.array([[1, -2]], np.float32))
>>> elements.tolist(), bool(np.allclose(scales, 2 / 448))
([[118, 254]], True)
)doc");
}

const OpFile registration(bind_linear_fp8);

}  // namespace
}  // namespace flashkernel::python
