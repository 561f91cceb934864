// Binds attention.hpp, backward: attention_backward, attention_varlen_backward.
#include "attention_options.hpp"
#include "op.hpp"

namespace flashkernel::python {
namespace {

struct GradientOutputs {
  Output q, k, v, bias, sinks;

  AttentionGradients views() const { return {q.view, k.view, v.view, bias.view, sinks.view}; }
};

GradientOutputs make_gradients(Call& call, const TensorView& q, const TensorView& k, const TensorView& v,
                               nb::handle grads, const AttentionOptions& options, bool need_bias, bool need_sinks) {
  GradientOutputs gradients;
  nb::object given[3] = {nb::none(), nb::none(), nb::none()};
  if (!grads.is_none()) parse_three(call, "grads", grads, "(grad_q, grad_k, grad_v)", given);
  gradients.q = call.output("grads[0]", given[0], q.dtype, Shape(q));
  gradients.k = call.output("grads[1]", given[1], k.dtype, Shape(k));
  gradients.v = call.output("grads[2]", given[2], v.dtype, Shape(v));
  if (need_bias) {
    if (!options.bias.defined()) call.fail("need_bias=True without a bias");
    gradients.bias = call.output(options.bias.dtype, Shape(options.bias));
  }
  if (need_sinks) {
    if (!options.sinks.defined()) call.fail("need_sinks=True without sinks");
    gradients.sinks = call.output(DType::kFloat32, Shape(options.sinks));
  }
  return gradients;
}

nb::tuple finish(Call& call, GradientOutputs& gradients, bool need_bias, bool need_sinks) {
  nb::list list;
  list.append(call.result(gradients.q));
  list.append(call.result(gradients.k));
  list.append(call.result(gradients.v));
  if (need_bias) list.append(call.result(gradients.bias));
  if (need_sinks) list.append(call.result(gradients.sinks));
  return nb::tuple(list);
}

nb::tuple attention_backward(nb::handle grad_out, nb::handle q, nb::handle k, nb::handle v, nb::handle out,
                             nb::handle lse, const DenseOptions& given, nb::handle grad_lse, bool need_bias,
                             bool need_sinks, bool deterministic, nb::handle grads, nb::handle stream,
                             nb::handle dtype) {
  Call call("attention_backward", stream, dtype);
  const TensorView grad_view = call.input("grad_out", grad_out), q_view = call.input("q", q),
                   k_view = call.input("k", k), v_view = call.input("v", v), out_view = call.input("out", out),
                   lse_view = call.input("lse", lse), grad_lse_view = call.optional_input("grad_lse", grad_lse);
  const AttentionOptions options = given.parse(call);
  GradientOutputs gradients = make_gradients(call, q_view, k_view, v_view, grads, options, need_bias, need_sinks);
  call.run([&](const ExecutionContext& context) {
    flashkernel::attention_backward(grad_view, q_view, k_view, v_view, out_view, lse_view, grad_lse_view,
                                    gradients.views(), options, deterministic, context);
  });
  return finish(call, gradients, need_bias, need_sinks);
}

nb::tuple attention_varlen_backward(nb::handle grad_out, nb::handle q, nb::handle k, nb::handle v, nb::handle out,
                                    nb::handle lse, nb::handle cu_seqlens_q, nb::handle cu_seqlens_k,
                                    std::int64_t max_seqlen_q, std::int64_t max_seqlen_k, const SequenceOptions& given,
                                    nb::handle grad_lse, bool need_sinks, bool deterministic, nb::handle grads,
                                    nb::handle stream, nb::handle dtype) {
  Call call("attention_varlen_backward", stream, dtype);
  const TensorView grad_view = call.input("grad_out", grad_out), q_view = call.input("q", q),
                   k_view = call.input("k", k), v_view = call.input("v", v), out_view = call.input("out", out),
                   lse_view = call.input("lse", lse), cu_q = call.input("cu_seqlens_q", cu_seqlens_q),
                   cu_k = call.input("cu_seqlens_k", cu_seqlens_k),
                   grad_lse_view = call.optional_input("grad_lse", grad_lse);
  const AttentionOptions options = given.parse(call);
  GradientOutputs gradients = make_gradients(call, q_view, k_view, v_view, grads, options, false, need_sinks);
  call.run([&](const ExecutionContext& context) {
    flashkernel::attention_varlen_backward(grad_view, q_view, k_view, v_view, out_view, lse_view, grad_lse_view, cu_q,
                                           cu_k, max_seqlen_q, max_seqlen_k, gradients.views(), options, deterministic,
                                           context);
  });
  return finish(call, gradients, false, need_sinks);
}

// attention_varlen_backward of the tokens in use, for flashkernel.flash_attn. The gradients are given, grad_sinks or
// None: rows past those tokens stay as they are.
void attention_varlen_used_backward(nb::handle grad_out, nb::handle grad_lse, nb::handle q, nb::handle k, nb::handle v,
                                    nb::handle out, nb::handle lse, nb::handle cu_seqlens_q, nb::handle cu_seqlens_k,
                                    std::int64_t max_seqlen_q, std::int64_t max_seqlen_k, nb::handle seqused_q,
                                    nb::handle seqused_k, std::optional<double> scale, bool causal, std::int64_t left,
                                    std::int64_t right, double softcap, nb::handle sinks, nb::handle grad_q,
                                    nb::handle grad_k, nb::handle grad_v, nb::handle grad_sinks) {
  Call call("attention_varlen_backward", nb::none(), nb::none());
  const TensorView grad_view = call.input("grad_out", grad_out),
                   grad_lse_view = call.optional_input("grad_lse", grad_lse), q_view = call.input("q", q),
                   k_view = call.input("k", k), v_view = call.input("v", v), out_view = call.input("out", out),
                   lse_view = call.input("lse", lse), cu_q = call.input("cu_seqlens_q", cu_seqlens_q),
                   cu_k = call.input("cu_seqlens_k", cu_seqlens_k);
  AttentionOptions options = flash_options(call, scale, causal, left, right, softcap, nb::none(), sinks);
  options.seqused_q = call.optional_input("seqused_q", seqused_q);
  options.seqused_k = call.optional_input("seqused_k", seqused_k);
  AttentionGradients gradients;
  gradients.q = call.inout("grad_q", grad_q);
  gradients.k = call.inout("grad_k", grad_k);
  gradients.v = call.inout("grad_v", grad_v);
  if (!grad_sinks.is_none()) gradients.sinks = call.inout("grad_sinks", grad_sinks);
  call.run([&](const ExecutionContext& context) {
    flashkernel::attention_varlen_backward(grad_view, q_view, k_view, v_view, out_view, lse_view, grad_lse_view, cu_q,
                                           cu_k, max_seqlen_q, max_seqlen_k, gradients, options, true, context);
  });
}

void bind_attention_backward(nb::module_& module) {
  def_op<&attention_varlen_used_backward>(
      module,
      "def _attention_varlen_used_backward(grad_out: ArrayT, grad_lse: SupportsDLPack | None, q: SupportsDLPack, k: "
      "SupportsDLPack, v: SupportsDLPack, out: SupportsDLPack, lse: SupportsDLPack, cu_seqlens_q: SupportsDLPack, "
      "cu_seqlens_k: SupportsDLPack, max_seqlen_q: int, max_seqlen_k: int, seqused_q: SupportsDLPack | None, "
      "seqused_k: "
      "SupportsDLPack | None, scale: float | None, causal: bool, left: int, right: int, softcap: float, sinks: "
      "SupportsDLPack | None, grad_q: SupportsDLPack, grad_k: SupportsDLPack, grad_v: SupportsDLPack, grad_sinks: "
      "SupportsDLPack | None) -> None",
      "attention_varlen_backward of the tokens in use, for flashkernel.flash_attn.");

  def_op<&attention_backward>(
      module,
      "def attention_backward(grad_out: ArrayT, q: SupportsDLPack, k: SupportsDLPack, v: SupportsDLPack, out: "
      "SupportsDLPack, lse: SupportsDLPack, *, causal: bool = False, window: Window = None, softcap: float = "
      "0.0, scale: float | None = None, bias: SupportsDLPack | None = None, mask: SupportsDLPack | None = "
      "None, block_mask: SupportsDLPack | BlockMask | None = None, block_size: int | tuple[int, int] = 128, "
      "alibi_slopes: SupportsDLPack | None = None, alibi: str = 'distance', sinks: SupportsDLPack | None = None, "
      "grad_lse: SupportsDLPack | None = None, need_bias: "
      "bool = False, need_sinks: bool = False, deterministic: bool = True, grads: tuple[ArrayT, ArrayT, "
      "ArrayT] | None = None, stream: typing.Any = None, dtype: typing.Any = None, backend: str | None = None) "
      "-> tuple[ArrayT, ArrayT, ArrayT, ArrayT if need_bias, ArrayT if need_sinks]",
      R"doc(Gradients of `attention`, recomputed from what the forward pass took and gave.

dV = P^T dO; dS = P * (dO V^T - rowsum(dO * O)); dQ = scale * dS K; dK = scale * dS^T Q.

grad_out: [batch, heads_q, seq_q, head_dim_v], q's dtype.
q, k, v, causal, window, softcap, scale, bias, mask, block_mask, block_size, alibi_slopes, alibi, sinks: as given to `attention`.
out, lse: what `attention(..., return_lse=True)` gave.
grad_lse: float32, lse's shape: the gradient that arrives at the LSE, if any.
need_bias, need_sinks: also return those gradients; bias's in bias's shape (broadcast dims are summed), sinks' [heads_q].
deterministic: bit for bit the same on every run; False allows faster kernels that add in any order.
grads: three arrays to write grad_q, grad_k and grad_v to, each with a contiguous last dim (views of one packed array, say);
    new row-major ones otherwise.

Returns (grad_q, grad_k, grad_v), then grad_bias and grad_sinks when asked for. A row that sees no key has gradient 0. Sums are
float32.

Source: Dao, FlashAttention-2 (2023), Algorithm 2.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> q = k = v = np.ones((1, 1, 4, 8), np.float32)
>>> out, lse = fk.attention(q, k, v, return_lse=True)
>>> grad_q, grad_k, grad_v = fk.attention_backward(np.ones_like(out), q, k, v, out, lse)
>>> bool(np.allclose(grad_v, 1)), bool(np.allclose(grad_q, 0))
(True, True)
)doc");

  def_op<&attention_varlen_backward>(
      module,
      "def attention_varlen_backward(grad_out: ArrayT, q: SupportsDLPack, k: SupportsDLPack, v: "
      "SupportsDLPack, out: SupportsDLPack, lse: SupportsDLPack, cu_seqlens_q: SupportsDLPack, cu_seqlens_k: "
      "SupportsDLPack, max_seqlen_q: int, max_seqlen_k: int, *, causal: bool = False, window: Window = None, "
      "softcap: float = 0.0, scale: float | None = None, alibi_slopes: SupportsDLPack | None = None, alibi: str = "
      "'distance', sinks: "
      "SupportsDLPack | None = None, grad_lse: SupportsDLPack | None = None, need_sinks: bool = False, "
      "deterministic: bool = True, grads: tuple[ArrayT, ArrayT, ArrayT] | None = None, stream: typing.Any = "
      "None, dtype: typing.Any = None, backend: str | None = None) -> tuple[ArrayT, ArrayT, ArrayT, ArrayT if "
      "need_sinks]",
      R"doc(Gradients of `attention_varlen`, recomputed from what the forward pass took and gave.

The formulas of `attention_backward`, sequence by sequence.

grad_out: [total_q, heads_q, head_dim_v], q's dtype.
q, k, v, cu_seqlens_*, max_seqlen_*, causal, window, softcap, scale, alibi_slopes, alibi, sinks: as given to `attention_varlen`.
out, lse: what `attention_varlen(..., return_lse=True)` gave; lse and grad_lse are float32 [heads_q, total_q].
need_sinks: also return the gradient of sinks, float32 [heads_q].
grads: as `attention_backward`.
deterministic: bit for bit the same on every run; False allows faster kernels that add in any order.

Returns (grad_q, grad_k, grad_v), then grad_sinks when asked for. Tokens that nobody sees have gradient 0. Sums are float32.

Source: Dao, FlashAttention-2 (2023), Algorithm 2.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> q = k = v = np.ones((5, 1, 8), np.float32)
>>> cu_seqlens = np.array([0, 2, 5], np.int32)
>>> out, lse = fk.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, 3, 3, return_lse=True)
>>> grads = fk.attention_varlen_backward(np.ones_like(out), q, k, v, out, lse, cu_seqlens, cu_seqlens, 3, 3)
>>> [g.shape for g in grads]
[(5, 1, 8), (5, 1, 8), (5, 1, 8)]
)doc");
}

const OpFile registration(bind_attention_backward);

}  // namespace
}  // namespace flashkernel::python
