// Binds attention_cascade.hpp: attention_cascade.
#include "flashkernel/attention_cascade.hpp"

#include "attention_options.hpp"
#include "kv_scales.hpp"

namespace flashkernel::python {
namespace {

nb::object attention_cascade(nb::handle q, nb::handle k_pages, nb::handle v_pages, nb::handle prefix_table,
                             nb::handle prefix_lens, nb::handle block_table, nb::handle seq_lens,
                             nb::handle cu_prefix_q, nb::handle cu_seqlens_q, std::optional<std::int64_t> max_seqlen_q,
                             bool causal, double softcap, std::optional<double> scale, nb::handle sinks,
                             bool return_lse, bool check, nb::handle kv_scales, nb::handle kv_dtype, nb::handle out,
                             nb::handle stream, nb::handle dtype) {
  Call call("attention_cascade", stream, dtype);
  const TensorView q_view = call.input("q", q);
  TensorView k_view = call.input("k_pages", k_pages), v_view = call.input("v_pages", v_pages);
  apply_kv_dtype(call, kv_dtype, k_view, v_view);
  const TensorView prefix = call.input("prefix_table", prefix_table),
                   prefix_lengths = call.input("prefix_lens", prefix_lens),
                   table = call.input("block_table", block_table), lengths = call.input("seq_lens", seq_lens),
                   groups = call.optional_input("cu_prefix_q", cu_prefix_q),
                   cu_q = call.optional_input("cu_seqlens_q", cu_seqlens_q);
  AttentionOptions options;
  options.causal = causal;
  options.softcap = static_cast<float>(softcap);
  if (scale) options.scale = static_cast<float>(*scale);
  options.sinks = call.optional_input("sinks", sinks);
  options.check_pages = check;
  options.kv_scales = parse_kv_scales(call, kv_scales, false);
  const std::int64_t longest = longest_of_queries(q_view, cu_q, max_seqlen_q);
  Output output = call.output("out", out, q_view.dtype, Shape(q_view).with_last(kv_columns(v_view)));
  Output lse;
  if (return_lse)
    lse = call.output(DType::kFloat32, cu_q.defined() ? varlen_lse_shape(q_view) : Shape(q_view).without_last());
  call.run([&](const ExecutionContext& context) {
    flashkernel::attention_cascade(q_view, k_view, v_view, prefix, prefix_lengths, groups, table, lengths, cu_q,
                                   longest, output.view, lse.view, options, context);
  });
  if (!return_lse) return call.result(output);
  return nb::make_tuple(call.result(output), call.result(lse));
}

void bind_attention_cascade(nb::module_& module) {
  def_op<&attention_cascade>(
      module,
      "def attention_cascade(q: ArrayT, k_pages: SupportsDLPack, v_pages: SupportsDLPack, prefix_table: "
      "SupportsDLPack, prefix_lens: SupportsDLPack, block_table: SupportsDLPack, seq_lens: SupportsDLPack, *, "
      "cu_prefix_q: SupportsDLPack | None = None, cu_seqlens_q: SupportsDLPack | None = None, max_seqlen_q: int | None "
      "= None, causal: bool = False, softcap: float = 0.0, scale: float | None = None, sinks: SupportsDLPack | None = "
      "None, return_lse: bool = False, check: bool = False, kv_scales: KvScales = "
      "None, kv_dtype: typing.Any = None, out: ArrayT | None = None, stream: typing.Any = None, dtype: typing.Any = "
      "None) -> ArrayT, ArrayT if return_lse",
      R"doc(Attention over pages of sequences that begin with the same tokens, whose pages are read once for all of them.

Sequences stand in groups with a common prefix: a system prompt, a document, the beams of a search. Each query sees its group's
whole prefix, then the keys of its own sequence; the result is that of `attention_paged` over both in one table. The queries of a
group are taken as those of one sequence over the prefix, and the two results are merged by their LSEs.

q: [batch, heads_q, seq_q, head_dim], or with cu_seqlens_q [total_q, heads_q, head_dim]. With seq_q above 1 seq must lie next to
   batch in memory: a transposed [batch, seq_q, heads_q, head_dim].
k_pages, v_pages: [num_pages, page_size, heads_kv, head_dim or head_dim_v]; q's dtype, or with kv_scales of 8 or 4 bits.
prefix_table: int32 [groups, max_prefix_pages]: the pages of each prefix. Entries past the last one are not used.
prefix_lens: int32 or int64 [groups]: tokens of each prefix; 0 is none.
block_table: int32 [batch, max_pages]: the pages of what follows the prefix. A page belongs to one of the two tables' rows: a
   prefix ends where a page ends, unless its last tokens are in each sequence's own pages.
seq_lens: int32 or int64 [batch]: keys of each sequence behind its prefix, those of the new queries included.
cu_prefix_q: int32 or int64 [groups + 1]: the rows of q (batch * seq_q, or total_q, in order) of each group: 0 first, never
   decreasing, their number last. None: there is one group, of all rows. A sequence's queries belong to one group.
cu_seqlens_q, max_seqlen_q, softcap, scale, return_lse, check, kv_scales, kv_dtype: as in `attention_paged`.
causal: query i of a sequence stands at position i + seq_lens[b] - seq_q behind its prefix, which has to be 0 or more.
sinks: float32 [heads_q], as in `attention`.
out: written in place and returned; q's shape with head_dim_v.

Returns out, or (out, lse), the LSE over all keys of a query. Windows, ALiBi and k_starts, which change what a query sees of its
prefix, are attention_paged's. Each part is rounded to q's dtype before they are merged. Nothing is read from the device on the
host, so that a captured graph replays with other lengths and pages.

Source: Juravsky et al., Hydragen (2024); Ye et al., FlashInfer (2025).
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> pages = np.random.default_rng(0).standard_normal((6, 16, 2, 8)).astype(np.float32)
>>> q = np.ones((3, 4, 1, 8), np.float32)
>>> own, lengths = np.array([[3], [4], [5]], np.int32), np.array([7, 16, 1], np.int32)
>>> out = fk.attention_cascade(q, pages, pages, np.array([[2, 0]], np.int32), np.array([32], np.int32), own, lengths)
>>> whole = np.array([[2, 0, 3], [2, 0, 4], [2, 0, 5]], np.int32)
>>> np.allclose(out, fk.attention_paged(q, pages, pages, whole, lengths + 32), atol=1e-6)
True
)doc");
}

const OpFile registration(bind_attention_cascade);

}  // namespace
}  // namespace flashkernel::python
