// Binds fused_linear.hpp: fused_linear.
#include "flashkernel/fused_linear.hpp"

#include "activation.hpp"
#include "op.hpp"

namespace flashkernel::python {
namespace {

struct Following {
  Activation activation = Activation::kNone;
  bool gated = false;
};

Following parse_following(const Call& call, const std::optional<std::string>& name) {
  if (name == "swiglu") return {Activation::kSilu, true};
  return {parse_activation(call, name, ", 'silu' or 'swiglu'")};
}

bool is_centred(const Call& call, const std::string& norm, bool present) {
  if (norm != "rms" && norm != "layer") call.fail("norm='" + norm + "'; 'rms' or 'layer' is needed");
  return present && norm == "layer";
}

nb::object fused_linear(nb::handle x, nb::handle weight, nb::handle bias, nb::handle norm_weight, nb::handle norm_bias,
                        nb::handle residual, const std::string& norm, double eps,
                        const std::optional<std::string>& activation, bool constant_weights, nb::handle out,
                        nb::handle stream, nb::handle dtype) {
  Call call("fused_linear", stream, dtype);
  const Following following = parse_following(call, activation);
  const TensorView x_view = call.input("x", x), weight_view = call.input("weight", weight),
                   bias_view = call.optional_input("bias", bias),
                   norm_weight_view = call.optional_input("norm_weight", norm_weight),
                   norm_bias_view = call.optional_input("norm_bias", norm_bias),
                   residual_view = call.optional_input("residual", residual);
  const bool centred = is_centred(call, norm, norm_weight_view.defined());
  const std::int64_t out_features = extent(weight_view, 0) / (following.gated ? 2 : 1);
  Output output = call.output("out", out, x_view.dtype, Shape(x_view).with_last(out_features));
  call.run([&](const ExecutionContext& context) {
    flashkernel::fused_linear(x_view, weight_view, bias_view, norm_weight_view, norm_bias_view, residual_view,
                              output.view, following.activation, following.gated, centred, static_cast<float>(eps),
                              constant_weights, context);
  });
  return call.result(output);
}

void bind_fused_linear(nb::module_& module) {
  def_op<&fused_linear>(
      module,
      "def fused_linear(x: ArrayT, weight: SupportsDLPack, bias: SupportsDLPack | None = None, norm_weight: "
      "SupportsDLPack | None = None, norm_bias: SupportsDLPack | None = None, residual: SupportsDLPack | None = None, "
      "*, "
      "norm: str = 'rms', eps: float = 1e-06, activation: str | None = None, constant_weights: bool = False, out: "
      "ArrayT | None = None, stream: typing.Any = None, dtype: typing.Any = None) -> ArrayT",
      R"doc(activation(norm(x) weight^T + bias) + residual: a linear with the norm before it and what follows it.

For the row of a decode step, where each launch counts: in 16 bits it is one kernel on a GPU from 8.0 on, where its weights are few. Other
calls run the ops that the call stands for one after the other.

x: [..., in_features], up to 8 dims; float32, float16 or bfloat16.
weight: [out_features, in_features], x's dtype; either dim may be the contiguous one. With activation "swiglu" [2 out_features,
   in_features]: the rows of the gate, then those of up.
bias: one for each row of weight, x's dtype or float32.
norm_weight, norm_bias: [in_features], any floating dtype. norm_weight asks for a norm of x; norm_bias goes with norm "layer".
norm: "rms" (RMSNorm) or "layer" (LayerNorm), where norm_weight is given; eps is what is added to the mean square or the variance.
   The norm is rounded to x's dtype, as `rms_norm` and `layer_norm` give it.
activation: None, "gelu_tanh", "gelu" or "silu" as in `linear`, or "swiglu": silu(gate) * up.
residual: [..., out_features], x's dtype; added to what comes of all that.
constant_weights: a promise that no work still under way on the stream writes weight, bias, norm_weight or norm_bias. A kernel may
   then read them before the kernel in front of it has ended. Weights that were loaded before a model's step keep it.
out: written in place and returned; [..., out_features], x's dtype. It may be residual.

Returns out. Sums are float32. Where it runs as one kernel, only the norm and the result are rounded; else each op's result is.

Source: Shazeer, GLU Variants Improve Transformer (2020).
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> x, weight = np.ones((2, 4), np.float32), np.ones((6, 4), np.float32)
>>> fk.fused_linear(x, weight, norm_weight=np.ones(4, np.float32), eps=0.0, residual=np.ones((2, 6), np.float32))[0].tolist()
[5.0, 5.0, 5.0, 5.0, 5.0, 5.0]
>>> fk.fused_linear(x, weight, activation="swiglu").shape
(2, 3)
)doc");
}

const OpFile registration(bind_fused_linear);

}  // namespace
}  // namespace flashkernel::python
