// Binds attention.hpp, forward: attention, attention_varlen, attention_paged, pack_mask, merge_states. Backward:
// bind_attention_backward.cpp.
#include "attention_options.hpp"
#include "array_type.hpp"
#include "kv_scales.hpp"
#include "op.hpp"

namespace flashkernel::python {
namespace {

nb::object finish(Call& call, Output& out, Output& lse, bool return_lse) {
  if (!return_lse) return call.result(out);
  return nb::make_tuple(call.result(out), call.result(lse));
}

constexpr const char* kHeadsFirst =
    "; heads come before seq here: pass q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2) of tensors in the "
    "order "
    "[batch, seq, heads, head_dim]";

// Whether the arrays make no sense as [batch, heads, seq, head_dim], but do in flash-attn's order [batch, seq, heads,
// head_dim].
bool fits_only_with_heads_last(const TensorView& q, const TensorView& k, const TensorView& v) {
  if (q.ndim != 4 || k.ndim != 4 || v.ndim != 4) return false;
  const auto fits = [&](int heads, int seq) {
    const bool same = k.shape[heads] == v.shape[heads] && k.shape[seq] == v.shape[seq];
    return same && k.shape[heads] > 0 && q.shape[heads] % k.shape[heads] == 0;
  };
  return q.shape[0] == k.shape[0] && q.shape[3] == k.shape[3] && !fits(1, 2) && fits(2, 1);
}

nb::object attention(nb::handle q, nb::handle k, nb::handle v, const DenseOptions& given, bool return_lse,
                     nb::handle out, nb::handle stream, nb::handle dtype) {
  Call call("attention", stream, dtype);
  const TensorView q_view = call.input("q", q), k_view = call.input("k", k), v_view = call.input("v", v);
  const AttentionOptions options = given.parse(call);
  Output output = call.output("out", out, q_view.dtype, Shape(q_view).with_last(extent(v_view, -1)));
  Output lse;
  if (return_lse) lse = call.output(DType::kFloat32, Shape(q_view).without_last());
  try {
    call.run([&](const ExecutionContext& context) {
      flashkernel::attention(q_view, k_view, v_view, output.view, lse.view, options, context);
    });
  } catch (const InvalidArgument& error) {
    if (!fits_only_with_heads_last(q_view, k_view, v_view)) throw;
    throw InvalidArgument(std::string(error.what()) + kHeadsFirst);
  }
  return finish(call, output, lse, return_lse);
}

// flash-attn's order, without a view made in Python for each array: q, k and v [batch, seq, heads, head_dim], result
// alike. A side of the window below 0 is unbounded, as is a softcap of 0 or less. None where a copy is needed first.
nb::object attention_tokens_first(nb::handle q, nb::handle k, nb::handle v, std::optional<double> scale, bool causal,
                                  std::int64_t left, std::int64_t right, double softcap, nb::handle alibi_slopes,
                                  nb::handle sinks, bool return_lse) {
  Call call("attention", nb::none(), nb::none());
  const TensorView given[] = {call.input("q", q), call.input("k", k), call.input("v", v)};
  for (const TensorView& view : given)
    if (view.ndim != 4 || (view.strides[3] != 1 && view.shape[3] > 1)) return nb::none();
  const AttentionOptions options = flash_options(call, scale, causal, left, right, softcap, alibi_slopes, sinks);
  Output output = call.output("out", nb::none(), given[0].dtype, Shape(given[0]).with_last(given[2].shape[3]));
  Output lse;
  if (return_lse) lse = call.output(DType::kFloat32, Shape{given[0].shape[0], given[0].shape[2], given[0].shape[1]});
  call.run([&](const ExecutionContext& context) {
    flashkernel::attention(given[0].transpose(1, 2), given[1].transpose(1, 2), given[2].transpose(1, 2),
                           output.view.transpose(1, 2), lse.view, options, context);
  });
  return finish(call, output, lse, return_lse);
}

// torch's scaled_dot_product_attention without a mask: q, k and v [batch, heads, seq, head_dim]; with causal, query i
// sees the keys 0 to i. None where tensors must be changed first, or heads differ as torch does not allow it.
nb::object attention_top_left(nb::handle q, nb::handle k, nb::handle v, nb::handle out, std::optional<double> scale,
                              bool causal, bool enable_gqa) {
  Call call("attention", nb::none(), nb::none());
  TensorView q_view = call.input("q", q), k_view = call.input("k", k), v_view = call.input("v", v);
  for (const TensorView* view : {&q_view, &k_view, &v_view})
    if (view->ndim != 4 || view->shape[0] != q_view.shape[0] || (view->strides[3] != 1 && view->shape[3] > 1))
      return nb::none();
  const std::int64_t heads = k_view.shape[1];
  if (v_view.shape[1] != heads || (heads != q_view.shape[1] && heads != 1 && !enable_gqa)) return nb::none();
  AttentionOptions options = flash_options(call, scale, false, -1, -1, 0.0, nb::none(), nb::none());
  const std::int64_t seq_q = q_view.shape[2], seq_k = k_view.shape[2];
  if (causal && v_view.shape[2] != seq_k) return nb::none();
  options.causal = causal && seq_q <= seq_k;
  if (causal && seq_q > seq_k) options.window_right = seq_q - seq_k;
  if (causal && seq_q < seq_k) k_view.shape[2] = v_view.shape[2] = seq_q;  // what no query sees
  Output output = call.output("out", out, q_view.dtype, Shape(q_view).with_last(v_view.shape[3]));
  call.run([&](const ExecutionContext& context) {
    flashkernel::attention(q_view, k_view, v_view, output.view, TensorView(), options, context);
  });
  return call.result(output);
}

nb::object attention_varlen(nb::handle q, nb::handle k, nb::handle v, nb::handle cu_seqlens_q, nb::handle cu_seqlens_k,
                            std::int64_t max_seqlen_q, std::int64_t max_seqlen_k, const SequenceOptions& given,
                            bool return_lse, nb::handle out, nb::handle stream, nb::handle dtype) {
  Call call("attention_varlen", stream, dtype);
  const TensorView q_view = call.input("q", q), k_view = call.input("k", k), v_view = call.input("v", v);
  const TensorView cu_q = call.input("cu_seqlens_q", cu_seqlens_q), cu_k = call.input("cu_seqlens_k", cu_seqlens_k);
  const AttentionOptions options = given.parse(call);
  Output output = call.output("out", out, q_view.dtype, Shape(q_view).with_last(extent(v_view, -1)));
  Output lse;
  if (return_lse) lse = call.output(DType::kFloat32, varlen_lse_shape(q_view));
  call.run([&](const ExecutionContext& context) {
    flashkernel::attention_varlen(q_view, k_view, v_view, cu_q, cu_k, max_seqlen_q, max_seqlen_k, output.view, lse.view,
                                  options, context);
  });
  return finish(call, output, lse, return_lse);
}

nb::object attention_paged(nb::handle q, nb::handle k_pages, nb::handle v_pages, nb::handle block_table,
                           nb::handle seq_lens, nb::handle cu_seqlens_q, std::optional<std::int64_t> max_seqlen_q,
                           const SequenceOptions& given, nb::handle mask, bool return_lse, bool check,
                           nb::handle kv_scales, nb::handle kv_dtype, nb::handle out, nb::handle stream,
                           nb::handle dtype) {
  Call call("attention_paged", stream, dtype);
  const TensorView q_view = call.input("q", q);
  TensorView k_view = call.input("k_pages", k_pages), v_view = call.input("v_pages", v_pages);
  apply_kv_dtype(call, kv_dtype, k_view, v_view);
  const TensorView table = call.input("block_table", block_table), lengths = call.input("seq_lens", seq_lens),
                   cu_q = call.optional_input("cu_seqlens_q", cu_seqlens_q);
  AttentionOptions options = given.parse(call);
  options.mask = call.optional_input("mask", mask);
  options.check_pages = check;
  options.kv_scales = parse_kv_scales(call, kv_scales, false);
  const std::int64_t longest = longest_of_queries(q_view, cu_q, max_seqlen_q);
  Output output = call.output("out", out, q_view.dtype, Shape(q_view).with_last(kv_columns(v_view)));
  Output lse;
  if (return_lse)
    lse = call.output(DType::kFloat32, cu_q.defined() ? varlen_lse_shape(q_view) : Shape(q_view).without_last());
  call.run([&](const ExecutionContext& context) {
    flashkernel::attention_paged(q_view, k_view, v_view, table, lengths, cu_q, longest, output.view, lse.view, options,
                                 context);
  });
  return finish(call, output, lse, return_lse);
}

// attention_varlen of the tokens in use, for flashkernel.flash_attn. out and lse are given: rows past those stay as
// they are.
void attention_varlen_used(nb::handle q, nb::handle k, nb::handle v, nb::handle cu_seqlens_q, nb::handle cu_seqlens_k,
                           std::int64_t max_seqlen_q, std::int64_t max_seqlen_k, nb::handle seqused_q,
                           nb::handle seqused_k, std::optional<double> scale, bool causal, std::int64_t left,
                           std::int64_t right, double softcap, nb::handle sinks, nb::handle out, nb::handle lse) {
  Call call("attention_varlen", nb::none(), nb::none());
  const TensorView q_view = call.input("q", q), k_view = call.input("k", k), v_view = call.input("v", v);
  const TensorView cu_q = call.input("cu_seqlens_q", cu_seqlens_q), cu_k = call.input("cu_seqlens_k", cu_seqlens_k);
  AttentionOptions options = flash_options(call, scale, causal, left, right, softcap, nb::none(), sinks);
  options.seqused_q = call.optional_input("seqused_q", seqused_q);
  options.seqused_k = call.optional_input("seqused_k", seqused_k);
  const TensorView out_view = call.inout("out", out), lse_view = call.inout("lse", lse);
  call.run([&](const ExecutionContext& context) {
    flashkernel::attention_varlen(q_view, k_view, v_view, cu_q, cu_k, max_seqlen_q, max_seqlen_k, out_view, lse_view,
                                  options, context);
  });
}

// flash-attn's order over a cache: q [batch, seq, heads, head_dim] (or [total, heads, head_dim] with cu_seqlens_q),
// pages as they are. Otherwise as attention_tokens_first. k_starts: [batch], or None.
nb::object attention_paged_tokens_first(nb::handle q, nb::handle k_pages, nb::handle v_pages, nb::handle block_table,
                                        nb::handle seq_lens, nb::handle k_starts, nb::handle cu_seqlens_q,
                                        std::int64_t max_seqlen_q, std::optional<double> scale, bool causal,
                                        std::int64_t left, std::int64_t right, double softcap, nb::handle alibi_slopes,
                                        nb::handle sinks, bool return_lse) {
  Call call("attention_paged", nb::none(), nb::none());
  const TensorView q_view = call.input("q", q), k_view = call.input("k_pages", k_pages),
                   v_view = call.input("v_pages", v_pages), table = call.input("block_table", block_table),
                   lengths = call.input("seq_lens", seq_lens), cu_q = call.optional_input("cu_seqlens_q", cu_seqlens_q);
  const bool varlen = cu_q.defined();
  for (const TensorView* view : {&q_view, &k_view, &v_view})
    if (view->ndim != (varlen && view == &q_view ? 3 : 4) ||
        (view->strides[view->ndim - 1] != 1 && view->shape[view->ndim - 1] > 1))
      return nb::none();
  AttentionOptions options = flash_options(call, scale, causal, left, right, softcap, alibi_slopes, sinks);
  options.k_starts = call.optional_input("k_starts", k_starts);
  Output output = call.output("out", nb::none(), q_view.dtype, Shape(q_view).with_last(v_view.shape[3]));
  Output lse;
  if (return_lse)
    lse = call.output(DType::kFloat32,
                      varlen ? varlen_lse_shape(q_view) : Shape{q_view.shape[0], q_view.shape[2], q_view.shape[1]});
  call.run([&](const ExecutionContext& context) {
    if (varlen)
      flashkernel::attention_paged(q_view, k_view, v_view, table, lengths, cu_q, max_seqlen_q, output.view, lse.view,
                                   options, context);
    else
      flashkernel::attention_paged(q_view.transpose(1, 2), k_view, v_view, table, lengths, cu_q, q_view.shape[1],
                                   output.view.transpose(1, 2), lse.view, options, context);
  });
  return finish(call, output, lse, return_lse);
}

nb::object pack_mask(nb::handle mask, nb::handle out, nb::handle stream) {
  Call call("pack_mask", stream, nb::none());
  const nb::object bytes = as_bytes(mask);
  const TensorView view = call.input("mask", bytes);
  Output output = call.output("out", out, DType::kInt32, Shape(view).with_last((extent(view, -1) + 31) / 32));
  call.run([&](const ExecutionContext& context) { flashkernel::pack_mask(view, output.view, context); });
  return call.result(output);
}

nb::object merge_states(nb::handle out_a, nb::handle lse_a, nb::handle out_b, nb::handle lse_b, nb::handle out,
                        nb::handle out_dtype, nb::handle stream, nb::handle dtype) {
  Call call("merge_states", stream, dtype);
  const bool is_pair = !out_b.is_none() || !lse_b.is_none();
  if (is_pair && (out_b.is_none() || lse_b.is_none()))
    call.fail(std::string(out_b.is_none() ? "out_b" : "lse_b") + " is absent; a second part has both out_b and lse_b");
  const TensorView a = call.input("out_a", out_a), a_lse = call.input("lse_a", lse_a),
                   b = is_pair ? call.input("out_b", out_b) : TensorView(),
                   b_lse = is_pair ? call.input("lse_b", lse_b) : TensorView();
  nb::object given_out = nb::none(), given_lse = nb::none();
  if (!out.is_none()) std::tie(given_out, given_lse) = parse_pair(call, "out", out, "a pair (out, lse)");
  const auto of_result = [&](const TensorView& view) {
    Shape shape;
    for (int d = is_pair ? 0 : 1; d < view.ndim; ++d) shape.dims[shape.ndim++] = view.shape[d];
    return shape;
  };
  const DType result = out_dtype.is_none() ? a.dtype : parse_dtype(call.op(), out_dtype);
  Output output = call.output("out[0]", given_out, result, of_result(a));
  Output lse = call.output("out[1]", given_lse, DType::kFloat32, of_result(a_lse));
  if (!out_dtype.is_none() && output.view.dtype != result)
    call.fail(std::string("out_dtype is ") + dtype_name(result) + " but out is " + dtype_name(output.view.dtype) +
              "; they must be one");
  call.run([&](const ExecutionContext& context) {
    flashkernel::merge_states(a, a_lse, b, b_lse, output.view, lse.view, context);
  });
  return finish(call, output, lse, true);
}

void bind_attention(nb::module_& module) {
  def_op<&attention>(
      module,
      "def attention(q: ArrayT, k: SupportsDLPack, v: SupportsDLPack, *, causal: bool = False, window: Window "
      "= None, softcap: float = 0.0, scale: float | None = None, bias: SupportsDLPack | None = None, mask: "
      "SupportsDLPack | None = None, block_mask: SupportsDLPack | BlockMask | None = None, block_size: int | "
      "tuple[int, "
      "int] = 128, alibi_slopes: SupportsDLPack | None = None, alibi: str = 'distance', sinks: "
      "SupportsDLPack | None = None, return_lse: bool = "
      "False, out: ArrayT | None = None, stream: typing.Any = None, dtype: typing.Any = None, backend: str | "
      "None = None) -> ArrayT, ArrayT if return_lse",
      R"doc(softmax(scale * q k^T) v, without ever writing the scores.

Heads come before seq: [batch, heads, seq, head_dim], as in torch's scaled_dot_product_attention. Tensors in flash-attn's order
[batch, seq, heads, head_dim] are passed as ``q.transpose(1, 2)``, a view that costs nothing; as they are they would be taken
for other heads and another seq.

q: [batch, heads_q, seq_q, head_dim]; float32, float16 or bfloat16. Every array may have any strides with a contiguous last
   dim. 3-D means batch 1, 2-D batch and heads 1.
k: [batch, heads_kv, seq_k, head_dim], q's dtype; heads_q must be a multiple of heads_kv (GQA, MQA).
v: [batch, heads_kv, seq_k, head_dim_v], q's dtype. Head dims are 1..512 and may differ between v and the others.
causal: query i sees keys up to i + seq_k - seq_q (bottom-right aligned).
window: (left, right) tokens seen on either side of that position; None or -1: unbounded.
softcap: scores s become softcap * tanh(s / softcap); 0: off.
scale: factor of the scores; default 1 / sqrt(head_dim).
bias: added to the scores after softcap; float32 or q's dtype, broadcastable to [batch, heads_q, seq_q, seq_k].
mask: int32, the bits that `pack_mask` makes of a boolean mask, broadcastable to [batch, heads_q, seq_q, (seq_k + 31) // 32]
   but for its last dim; a key whose bit is 0 is not seen. It joins causal and window.
block_mask: which blocks of queries and keys are computed at all: bool or uint8 [batch or 1, heads_q or 1, blocks of queries,
   blocks of keys], fewer dims are aligned right. 0 hides all pairs of a block; 1 (True) shows those that `mask` shows, all
   without a mask; 2 shows all of them, whatever `mask` says. It joins causal and window. Or a `BlockMask`, which brings
   block_size and mask along. On a GPU it is read while the call runs.
block_size: tokens of a block of block_mask, or a pair (of queries, of keys); a power of two from 64 on. Dims of block_mask are
   those of seq_q and seq_k divided by it, rounded up.
alibi_slopes: float32 [heads_q] or [batch, heads_q]; adds -slope * abs(d) where d = i + seq_k - seq_q - j.
alibi: "distance" is that; "signed" adds -slope * d, "sqrt" adds -slope * sqrt(d) for keys before the position and 0 for others.
sinks: float32 [heads_q]; the logit of one more key without a value.
return_lse: also return the natural logarithm of the softmax's denominator, float32 [batch, heads_q, seq_q].
out: written in place and returned; [batch, heads_q, seq_q, head_dim_v], q's dtype.

Returns out, or (out, lse). A row that sees no key gives 0 and LSE -inf. A NaN in a visible key or value propagates; one
behind a mask does not. Softmax and sums are float32; the error is at most twice that of the framework's own attention in the
same dtype. Memory beyond the output does not grow with seq_q * seq_k.

Source: Dao, FlashAttention-2 (2023), Algorithm 1; online softmax: Milakov and Gimelshein (2018).
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> q = k = v = np.ones((1, 2, 4, 8), np.float32)
>>> fk.attention(q, k, v, causal=True).shape
(1, 2, 4, 8)
>>> out, lse = fk.attention(q, k, v, scale=0.0, return_lse=True)
>>> bool(np.allclose(lse, np.log(4)))
True
)doc");

  def_op<&attention_tokens_first>(
      module,
      "def _attention_tokens_first(q: ArrayT, k: SupportsDLPack, v: SupportsDLPack, scale: float | None = None, "
      "causal: "
      "bool = False, left: int = -1, right: int = -1, softcap: float = 0.0, alibi_slopes: SupportsDLPack | None = "
      "None, "
      "sinks: SupportsDLPack | None = None, return_lse: bool = False) -> ArrayT, ArrayT if return_lse",
      "attention of [batch, seq, heads, head_dim], for flashkernel.flash_attn; None where q, k or v needs a copy.");

  def_op<&attention_top_left>(
      module,
      "def _attention_top_left(q: ArrayT, k: SupportsDLPack, v: SupportsDLPack, out: SupportsDLPack | None, scale: "
      "float "
      "| None, causal: bool, enable_gqa: bool) -> ArrayT",
      "scaled_dot_product_attention without a mask, for flashkernel.torch; None where tensors must be changed first.");

  def_op<&attention_varlen_used>(
      module,
      "def _attention_varlen_used(q: ArrayT, k: SupportsDLPack, v: SupportsDLPack, cu_seqlens_q: SupportsDLPack, "
      "cu_seqlens_k: SupportsDLPack, max_seqlen_q: int, max_seqlen_k: int, seqused_q: SupportsDLPack | None, "
      "seqused_k: "
      "SupportsDLPack | None, scale: float | None, causal: bool, left: int, right: int, softcap: float, sinks: "
      "SupportsDLPack | None, out: SupportsDLPack, lse: SupportsDLPack) -> None",
      "attention_varlen of the tokens in use, for flashkernel.flash_attn.");

  def_op<&attention_paged_tokens_first>(
      module,
      "def _attention_paged_tokens_first(q: ArrayT, k_pages: SupportsDLPack, v_pages: SupportsDLPack, block_table: "
      "SupportsDLPack, seq_lens: SupportsDLPack, k_starts: SupportsDLPack | None = None, cu_seqlens_q: SupportsDLPack "
      "| None = None, max_seqlen_q: int = -1, scale: float | None = None, causal: bool = False, left: int = -1, right: "
      "int = -1, softcap: float = 0.0, alibi_slopes: SupportsDLPack | None = None, sinks: SupportsDLPack | None = "
      "None, "
      "return_lse: bool = False) -> ArrayT, ArrayT if return_lse",
      "attention over a cache, for flashkernel.flash_attn; None where an array needs a copy.");

  def_op<&attention_varlen>(
      module,
      "def attention_varlen(q: ArrayT, k: SupportsDLPack, v: SupportsDLPack, cu_seqlens_q: SupportsDLPack, "
      "cu_seqlens_k: SupportsDLPack, max_seqlen_q: int, max_seqlen_k: int, *, causal: bool = False, window: "
      "Window = None, softcap: float = 0.0, scale: float | None = None, alibi_slopes: SupportsDLPack | None = "
      "None, alibi: str = 'distance', sinks: SupportsDLPack | None = None, return_lse: bool = False, out: ArrayT | "
      "None = None, stream: "
      "typing.Any = None, dtype: typing.Any = None, backend: str | None = None) -> ArrayT, ArrayT if return_lse",
      R"doc(Attention of sequences of various lengths laid side by side, without padding.

Sequence b has queries cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1 and likewise keys; each attends to its own keys only.

q: [total_q, heads_q, head_dim]; k: [total_k, heads_kv, head_dim]; v: [total_k, heads_kv, head_dim_v].
cu_seqlens_q, cu_seqlens_k: int32 or int64 [batch + 1], on the arrays' device: 0 first, never decreasing, the total last.
max_seqlen_q, max_seqlen_k: bounds of the lengths, in tokens.
causal, window, softcap, scale, alibi_slopes, alibi, sinks: as in `attention`, per sequence.
return_lse: also return the LSE, float32 [heads_q, total_q].
out: written in place and returned; [total_q, heads_q, head_dim_v].

Returns out, or (out, lse). A sequence without keys gives 0 and LSE -inf; lengths of 0 are fine anywhere. Lengths that decrease
or exceed the totals or the bounds are refused where they are on the host. Numerics as in `attention`.

Source: Dao, FlashAttention-2 (2023).
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> q = k = v = np.ones((5, 2, 8), np.float32)
>>> cu_seqlens = np.array([0, 2, 5], np.int32)
>>> fk.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, 3, 3, causal=True).shape
(5, 2, 8)
)doc");

  def_op<&attention_paged>(
      module,
      "def attention_paged(q: ArrayT, k_pages: SupportsDLPack, v_pages: SupportsDLPack, block_table: "
      "SupportsDLPack, seq_lens: SupportsDLPack, *, cu_seqlens_q: SupportsDLPack | None = None, max_seqlen_q: "
      "int | None = None, causal: bool = False, window: Window = None, softcap: float = 0.0, scale: float | "
      "None = None, alibi_slopes: SupportsDLPack | None = None, alibi: str = 'distance', sinks: SupportsDLPack | "
      "None = None, mask: SupportsDLPack | None = None, return_lse: bool = False, check: bool = False, kv_scales: "
      "KvScales "
      "= None, kv_dtype: typing.Any = None, out: ArrayT | None = None, stream: typing.Any = None, dtype: "
      "typing.Any = None, backend: str | None = None) -> ArrayT, ArrayT if return_lse",
      R"doc(Attention over keys and values that lie in pages of a cache.

Key j of sequence b lies in page block_table[b, j // page_size] at offset j % page_size.

q: [batch, heads_q, seq_q, head_dim], or with cu_seqlens_q [total_q, heads_q, head_dim].
k_pages: [num_pages, page_size, heads_kv, head_dim]; v_pages: [num_pages, page_size, heads_kv, head_dim_v]; q's dtype,
   or with kv_scales of 8 or 4 bits.
block_table: int32 [batch, max_pages]. Entries past a sequence's last page, and those of pages wholly before the window of
   its first query, are not used: any value is allowed there. A kernel may read them, so each row must be memory of its
   stated width.
seq_lens: int32 or int64 [batch]: keys of each sequence, those of the new queries included. On a GPU, lengths and table are
   read while the call runs, by many blocks: another stream that writes them waits for it.
cu_seqlens_q: int32 or int64 [batch + 1]: where each sequence's queries start.
max_seqlen_q: bound of the query lengths. With cu_seqlens_q by default found from it on the CPU, and total_q on a GPU, where a
   tighter one is faster.
causal, window, softcap, scale, alibi_slopes, alibi, sinks: as in `attention`, with each sequence's own seq_k.
mask: int32, bits of `pack_mask` for the last keys of each sequence, as many as it has queries; the keys before are seen by all.
   So a tree of drafts is verified: query i sees key j of the last ones where the bit says so. Broadcastable to [batch, heads_q,
   seq_q, (seq_q + 31) // 32], or with cu_seqlens_q to [heads_q, total_q, (max_seqlen_q + 31) // 32], whose last dim may be larger.
   causal and window hide keys beside it.
return_lse: also return the LSE, float32 [batch, heads_q, seq_q] or [heads_q, total_q].
check: on a GPU, look at the table first and raise BlockTableError as `check_block_table` does, at the price of waiting for
   the stream. On the CPU tables are always checked.
kv_scales: for pages of 8 and 4 bits, a pair (k_scales, v_scales). Of float8_e4m3fn and int8: float32 [heads_kv], or [num_pages,
   heads_kv, page_size]; number = element * scale. Of int4: float16 [num_pages, heads_kv, page_size, groups, 2], a scale and a
   zero for 32 neighbours; number = element * scale + zero. Of float4_e2m1fn_x2 (NVFP4): float8_e4m3fn [num_pages, heads_kv,
   page_size, groups] for 16 neighbours, and behind the pair two numbers, the scales of the whole tensors, unless both are 1.
kv_dtype: "float8_e4m3fn", "int8", "int4" or "float4_e2m1fn_x2": what the bytes of uint8 pages are. Of the last two a byte holds two
   elements, the first in the low bits, so that pages are [num_pages, page_size, heads_kv, head_dim / 2].
out: written in place and returned; q's shape with head_dim_v.

Returns out, or (out, lse). What lies past a sequence's length never reaches a result, whatever bits it holds. Page ids out of
range are refused where the table is on the host; on a GPU they read nothing that they should not. Numerics as in `attention`.

Source: Kwon et al., PagedAttention (2023); split over keys: Dao et al., Flash-Decoding (2023).
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> pages = np.ones((3, 16, 2, 8), np.float32)
>>> table = np.array([[2, 0]], np.int32)
>>> q = np.ones((1, 4, 1, 8), np.float32)
>>> fk.attention_paged(q, pages, pages, table, np.array([20], np.int32), causal=True).shape
(1, 4, 1, 8)
)doc");

  def_op<&merge_states>(
      module,
      "def merge_states(out_a: ArrayT, lse_a: SupportsDLPack, out_b: SupportsDLPack | None = None, lse_b: "
      "SupportsDLPack "
      "| None = None, *, out: tuple[ArrayT, ArrayT] | None = None, out_dtype: typing.Any = None, stream: typing.Any = "
      "None, dtype: typing.Any = None, backend: str | None = None) -> tuple[ArrayT, ArrayT]",
      R"doc(Attention over the union of disjoint sets of keys, from the results over each.

lse = log(exp(lse_a) + exp(lse_b)); out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b. Without out_b and lse_b,
out_a and lse_a hold all the parts, one after another along their first dim.

out_a, out_b: [..., head_dim], up to 4 dims, float32, float16 or bfloat16; or out_a alone: [parts, ..., head_dim].
lse_a, lse_b: float32, natural logarithm, out_a's shape less the last dim.
out: pair (out, lse) to write to; of two parts it may be (out_a, lse_a) itself.
out_dtype: of out; default: out_a's. Parts in float32 may become float16 or bfloat16, rounded once.

Returns (out, lse). A part with LSE -inf counts nothing, whatever its output holds. Computed in float32.

Source: Ye et al., FlashInfer (2025), attention states; Milakov and Gimelshein (2018).
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> a, b = np.zeros((1, 4), np.float32), np.ones((1, 4), np.float32)
>>> lse = np.zeros(1, np.float32)
>>> out, _ = fk.merge_states(a, lse, b, lse)
>>> out.tolist()
[[0.5, 0.5, 0.5, 0.5]]
>>> out, _ = fk.merge_states(np.stack([a, b, b, b]), np.zeros((4, 1), np.float32))
>>> out.tolist()
[[0.75, 0.75, 0.75, 0.75]]
)doc");
}

void bind_pack_mask(nb::module_& module) {
  def_op<&pack_mask>(
      module,
      "def pack_mask(mask: ArrayT, *, out: ArrayT | None = None, stream: typing.Any = None, backend: str | None = "
      "None) "
      "-> ArrayT",
      R"doc(A boolean mask as the bits that `attention` reads: a byte of eight keys in place of eight bytes.

mask: bool, or uint8 (not 0: seen), [..., seq_k] of 1 to 4 dims; any strides. A dim over which the mask is broadcast best has
   size 1: expanded, its rows are packed each.
out: int32 [..., (seq_k + 31) // 32], written in place and returned.

Returns out: key j of a row is bit j % 32 of word j // 32, and bits behind the last key are 0. On little-endian machines these
are the bytes of ``numpy.packbits(mask, axis=-1, bitorder="little")``, filled up to whole words.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> fk.pack_mask(np.array([[True, False, True], [False, True, False]])).tolist()
[[5], [2]]
)doc");
}

const OpFile registration(bind_attention);
const OpFile registration_of_pack_mask(bind_pack_mask);

}  // namespace
}  // namespace flashkernel::python
