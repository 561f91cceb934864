// Binds quantized_linear.hpp: quantized_linear.
#include "flashkernel/quantized_linear.hpp"

#include "activation.hpp"
#include "op.hpp"

namespace flashkernel::python {
namespace {

WeightFormat parse_format(const Call& call, const std::string& name) {
  if (name == "int4") return WeightFormat::kInt4;
  if (name == "int8") return WeightFormat::kInt8;
  if (name == "q4_0") return WeightFormat::kQ4_0;
  if (name == "q4_1") return WeightFormat::kQ4_1;
  if (name == "q8_0") return WeightFormat::kQ8_0;
  call.fail("format='" + name + "'; 'int4', 'int8', 'q4_0', 'q4_1' or 'q8_0' is needed");
}

nb::object quantized_linear(nb::handle x, nb::handle weight, nb::handle scales, nb::handle zeros, nb::handle bias,
                            const std::string& format, const std::optional<std::string>& activation, nb::handle out,
                            nb::handle stream, nb::handle dtype) {
  Call call("quantized_linear", stream, dtype);
  const WeightFormat layout = parse_format(call, format);
  const Activation kind = parse_activation(call, activation);
  const TensorView x_view = call.input("x", x), weight_view = call.input("weight", weight),
                   scales_view = call.optional_input("scales", scales),
                   zeros_view = call.optional_input("zeros", zeros), bias_view = call.optional_input("bias", bias);
  // A weight of three dims has 16 rows side by side.
  const std::int64_t out_features = extent(weight_view, 0) * (weight_view.ndim == 3 ? 16 : 1);
  Output output = call.output("out", out, x_view.dtype, Shape(x_view).with_last(out_features));
  call.run([&](const ExecutionContext& context) {
    flashkernel::quantized_linear(x_view, weight_view, scales_view, zeros_view, bias_view, output.view, layout, kind,
                                  context);
  });
  return call.result(output);
}

void bind_quantized_linear(nb::module_& module) {
  def_op<&quantized_linear>(
      module,
      "def quantized_linear(x: ArrayT, weight: SupportsDLPack, scales: SupportsDLPack | None = None, zeros: "
      "SupportsDLPack | None = None, bias: SupportsDLPack | None = None, *, format: str = 'int4', activation: str | "
      "None = None, out: ArrayT | None = None, stream: typing.Any = None, dtype: typing.Any = None) -> ArrayT",
      R"doc(activation(x W^T + bias) for a weight W of 4 or 8 bits with a scale for each block of it.

x: [..., in_features], up to 8 dims; float32, float16 or bfloat16. It is not quantised; beside tiles it may become integers of 24
   or 16 bits (docs/low_precision.md).
weight: [out_features, bytes of a row]. What a row holds, in blocks of 32 elements, `format` says:
   "int4" (uint8, in_features / 2 bytes): byte i of a block's 16 has element i in its low half, element 16 + i in its high half;
   "int8" (int8, in_features bytes);
   "q4_0", "q4_1", "q8_0" (uint8): the blocks of a GGUF file as they are, 18, 20 and 34 bytes.
   Three dims are tiles of "q4_0", "q4_1" or "q8_0" as `flashkernel.quantized.tiled` makes them, for the CPU:
   [out_features / 16, in_features / 32, bytes of 16 blocks].
scales, zeros: [out_features, groups], float32, float16 or bfloat16, for "int4" and "int8" alone; an element is scale * (q - zero).
   in_features / groups neighbours of a row are a group: a multiple of 32, or, of int8, the whole row.
   Without zeros the zero is 8 for "int4" and 0 for "int8".
bias: [out_features], x's dtype or float32.
activation: as of `linear`.
out: written in place and returned; [..., out_features], x's dtype.

Returns out. Sums are float32, rounded once. On the CPU float32 results are those of `linear` with the dequantised weight,
bit for bit, where a vector kernel serves both. On CUDA the kernel for few rows takes float16 and bfloat16 x (8.0 and later) and
rows of weight that start at multiples of 16 bytes; another kernel, slower, takes the rest.
`flashkernel.quantized` reads the layouts of GPTQ and AWQ, quantises and dequantises.

Source: GGUF's blocks, ggml-org/ggml; Frantar et al., GPTQ (2023); Lin et al., AWQ (2024).
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> weight = np.full((3, 16), 0x99, np.uint8)  # every element is 9
>>> fk.quantized_linear(np.ones((2, 32), np.float32), weight, np.full((3, 1), 0.5, np.float32)).tolist()
[[16.0, 16.0, 16.0], [16.0, 16.0, 16.0]]
)doc");
}

const OpFile registration(bind_quantized_linear);

}  // namespace
}  // namespace flashkernel::python
