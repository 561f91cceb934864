// Binds decode_step.hpp: decode_step.
#include "flashkernel/decode_step.hpp"

#include <cmath>

#include "op.hpp"

namespace flashkernel::python {
namespace {

nb::object decode_step(nb::handle tokens, nb::handle positions, nb::handle slots, nb::handle block_table,
                       nb::handle seq_lens, nb::handle embedding, nb::handle norms, nb::handle qkv_weight,
                       nb::handle out_weight, nb::handle gate_up_weight, nb::handle down_weight, nb::handle head_weight,
                       nb::handle inv_freq, nb::handle k_pages, nb::handle v_pages, double eps,
                       std::optional<double> scale, nb::handle out, nb::handle timeline, nb::handle stream,
                       nb::handle dtype) {
  Call call("decode_step", stream, dtype);
  const TensorView token_view = call.input("tokens", tokens), position_view = call.input("positions", positions),
                   slot_view = call.input("slots", slots), table = call.input("block_table", block_table),
                   lengths = call.input("seq_lens", seq_lens), embedding_view = call.input("embedding", embedding),
                   norm_view = call.input("norms", norms), qkv = call.input("qkv_weight", qkv_weight),
                   out_view = call.input("out_weight", out_weight),
                   gate_up = call.input("gate_up_weight", gate_up_weight),
                   down = call.input("down_weight", down_weight), head = call.input("head_weight", head_weight),
                   frequencies = call.input("inv_freq", inv_freq);
  const TensorView k_view = call.inout("k_pages", k_pages), v_view = call.inout("v_pages", v_pages);
  TensorView times;
  if (!timeline.is_none()) times = call.inout("timeline", timeline);
  const std::int64_t head_dim = extent(k_view, 4);
  const double factor = scale.value_or(1 / std::sqrt(static_cast<double>(head_dim > 0 ? head_dim : 1)));
  Output output = call.output("out", out, embedding_view.dtype, Shape{extent(token_view, 0), extent(head, 0)});
  call.run([&](const ExecutionContext& context) {
    flashkernel::decode_step(token_view, position_view, slot_view, table, lengths, embedding_view, norm_view, qkv,
                             out_view, gate_up, down, head, frequencies, k_view, v_view, output.view,
                             static_cast<float>(eps), static_cast<float>(factor), times, context);
  });
  return call.result(output);
}

void bind_decode_step(nb::module_& module) {
  def_op<&decode_step>(
      module,
      "def decode_step(tokens: SupportsDLPack, positions: SupportsDLPack, slots: SupportsDLPack, block_table: "
      "SupportsDLPack, seq_lens: SupportsDLPack, embedding: ArrayT, norms: SupportsDLPack, qkv_weight: SupportsDLPack, "
      "out_weight: SupportsDLPack, gate_up_weight: SupportsDLPack, down_weight: SupportsDLPack, head_weight: "
      "SupportsDLPack, inv_freq: SupportsDLPack, k_pages: SupportsDLPack, v_pages: SupportsDLPack, *, eps: float = "
      "1e-5, scale: float | None = None, out: ArrayT | None = None, timeline: SupportsDLPack | None = None, stream: "
      "typing.Any = None, dtype: typing.Any = None) -> ArrayT",
      R"doc(A whole decode step of a dense decoder of Llama's kind: one new token a row in, logits out.

The same as embedding, and in each layer rms_norm, linear (q, k, v), kv_append with RoPE, attention_paged, linear, add, rms_norm,
linear (gate, up), swiglu, linear, add; then rms_norm and the linear of the head. Everything is of embedding's dtype (float32,
float16 or bfloat16), sums are float32, and results are rounded between these as they are between the ops.

tokens: [rows], int32 or int64 ids of the embedding. positions: [rows], for RoPE (halves of a head turn together).
slots: [rows], page * page_size + offset of the new token; negative: its key and value are not written.
block_table: int32 [rows, max_pages]. seq_lens: [rows], the tokens that a row sees, the new one included; 0: none.
embedding: [vocab, hidden]. norms: [2 layers + 1, hidden]: of each layer before attention and before the MLP; the last one.
qkv_weight: [layers, (heads_q + 2 heads_kv) head_dim, hidden]. out_weight: [layers, hidden, heads_q head_dim].
gate_up_weight: [layers, 2 inner, hidden]. down_weight: [layers, hidden, inner]. head_weight: [outputs, hidden].
inv_freq: float32 [head_dim / 2], RoPE's frequencies.
k_pages, v_pages: [layers, num_pages, page_size, heads_kv, head_dim], as `KvPagePool.k_layers` gives them; the tokens' are written.
eps: of the norms. scale: of the scores; None: 1 / sqrt(head_dim).
out: [rows, outputs], written in place and returned.
timeline: int64 [multiprocessors, 5 layers + 1, 4]; CUDA writes there, for each block and phase (q, k, v; attention; output; gate
   and up; down; at last the head), the nanosecond in which the block came to it, in which its inputs were there, in which it
   had them, and in which it was done. Where nothing happened it stays as it is.

Returns out. On CUDA it takes float16 and bfloat16, 1 to 8 rows and head_dim 64 or 128 on 9.0: one launch whose blocks are all on
the GPU at once (docs/ops/decode_step.md). A token, a length or a page that
there is not gives NaN logits of its row there, and a slot past the last page is skipped; on the CPU they are refused.

Source: Spector et al., No Bubbles: a megakernel for Llama-1B (2025), for the idea of one launch a step.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> ones = lambda *shape: np.ones(shape, np.float32)
>>> pages = np.zeros((1, 1, 16, 1, 2), np.float32), np.zeros((1, 1, 16, 1, 2), np.float32)
>>> fk.decode_step(np.array([0]), np.array([0]), np.array([0]), np.zeros((1, 1), np.int32), np.array([1]), ones(3, 4),
...     ones(3, 4), ones(1, 6, 4), 0 * ones(1, 4, 2), ones(1, 4, 4), 0 * ones(1, 4, 2), ones(5, 4), ones(1), *pages,
...     eps=0.0).tolist()
[[4.0, 4.0, 4.0, 4.0, 4.0]]
)doc");
}

const OpFile registration(bind_decode_step);

}  // namespace
}  // namespace flashkernel::python
