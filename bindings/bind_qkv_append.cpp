// Binds qkv_append.hpp: qkv_append.
#include "flashkernel/qkv_append.hpp"

#include "kv_rope.hpp"
#include "op.hpp"

namespace flashkernel::python {
namespace {

nb::object qkv_append(nb::handle x, nb::handle weight, nb::handle k_pages, nb::handle v_pages, nb::handle slots,
                      nb::handle bias, nb::handle norm_weight, nb::handle norm_bias, nb::handle rope,
                      const std::string& norm, double eps, bool constant_weights, nb::handle out, nb::handle stream,
                      nb::handle dtype) {
  Call call("qkv_append", stream, dtype);
  if (norm != "rms" && norm != "layer") call.fail("norm='" + norm + "'; 'rms' or 'layer' is needed");
  const TensorView x_view = call.input("x", x), weight_view = call.input("weight", weight);
  const TensorView k_page_view = call.inout("k_pages", k_pages), v_page_view = call.inout("v_pages", v_pages);
  const TensorView slot_view = call.input("slots", slots), bias_view = call.optional_input("bias", bias),
                   norm_weight_view = call.optional_input("norm_weight", norm_weight),
                   norm_bias_view = call.optional_input("norm_bias", norm_bias);
  const RopeArgument parsed = parse_rope(call, rope);
  const std::int64_t head_dim = extent(k_page_view, 3), heads_kv = extent(k_page_view, 2);
  const std::int64_t heads = head_dim > 0 ? extent(weight_view, 0) / head_dim - 2 * heads_kv : 0;
  Output output = call.output("out", out, x_view.dtype, Shape{extent(x_view, 0), heads > 0 ? heads : 0, head_dim});
  call.run([&](const ExecutionContext& context) {
    flashkernel::qkv_append(x_view, weight_view, bias_view, norm_weight_view, norm_bias_view, k_page_view, v_page_view,
                            slot_view, parsed.rope, output.view, norm_weight_view.defined() && norm == "layer",
                            static_cast<float>(eps), constant_weights, context);
  });
  return call.result(output);
}

void bind_qkv_append(nb::module_& module) {
  def_op<&qkv_append>(
      module,
      "def qkv_append(x: ArrayT, weight: SupportsDLPack, k_pages: SupportsDLPack, v_pages: SupportsDLPack, slots: "
      "SupportsDLPack, bias: SupportsDLPack | None = None, norm_weight: SupportsDLPack | None = None, norm_bias: "
      "SupportsDLPack | None = None, *, rope: KvAppendRope | None = None, norm: str = 'rms', eps: float = 1e-06, "
      "constant_weights: bool = False, out: ArrayT | None = None, stream: typing.Any = None, dtype: typing.Any = None) "
      "-> ArrayT",
      R"doc(The heads of norm(x) weight^T + bias: q turned by RoPE and returned, k turned and v written to pages.

For the row of a decode step, where each launch counts: in 16 bits it is one kernel on a GPU from 8.0 on, where its weights are few. Other
calls run `fused_linear` and `kv_append` one after the other.

x: [tokens, in_features]; float32, float16 or bfloat16.
weight: [(heads_q + 2 heads_kv) head_dim, in_features], x's dtype: heads of q, then of k, then of v.
k_pages, v_pages: [num_pages, page_size, heads_kv, head_dim], x's dtype; written in place.
slots: int32 or int64 [tokens]; a negative slot is skipped. As in `kv_append`.
bias, norm_weight, norm_bias, norm, eps, constant_weights: as in `fused_linear`.
rope: None, or a dict with "positions" and what else `kv_append` takes, without "q" and "q_out".
out: q, written in place and returned; [tokens, heads_q, head_dim], heads side by side.

Returns q. Sums are float32; they may be rounded to x's dtype before they are turned.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> x, weight = np.ones((1, 8), np.float32), np.ones((4 * 4, 8), np.float32)
>>> k_pages, v_pages = np.zeros((1, 16, 1, 4), np.float32), np.zeros((1, 16, 1, 4), np.float32)
>>> q = fk.qkv_append(x, weight, k_pages, v_pages, np.array([2]), rope={"positions": np.array([0])})
>>> q.shape, v_pages[0, 2, 0].tolist()
((1, 2, 4), [8.0, 8.0, 8.0, 8.0])
)doc");
}

const OpFile registration(bind_qkv_append);

}  // namespace
}  // namespace flashkernel::python
