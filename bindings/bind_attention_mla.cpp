// Binds attention_mla.hpp: attention_mla_decode.
#include "flashkernel/attention_mla.hpp"

#include "array_type.hpp"
#include "op.hpp"

namespace flashkernel::python {
namespace {

nb::object attention_mla_decode(nb::handle q, nb::handle latent_pages, nb::handle block_table, nb::handle seq_lens,
                                double scale, std::int64_t head_dim_v, bool causal, bool return_lse, bool check,
                                nb::handle out, nb::handle stream, nb::handle dtype) {
  Call call("attention_mla_decode", stream, dtype);
  const TensorView q_view = call.input("q", q), latent = call.input("latent_pages", latent_pages),
                   table = call.input("block_table", block_table), lengths = call.input("seq_lens", seq_lens);
  if (head_dim_v < 1) call.fail("head_dim_v=" + std::to_string(head_dim_v) + "; at least 1 is needed");
  Output output = call.output("out", out, q_view.dtype, Shape(q_view).with_last(head_dim_v));
  Output lse;
  if (return_lse) lse = call.output(DType::kFloat32, Shape(q_view).without_last());
  call.run([&](const ExecutionContext& context) {
    flashkernel::attention_mla_decode(q_view, latent, table, lengths, output.view, lse.view, static_cast<float>(scale),
                                      causal, check, context);
  });
  if (!return_lse) return call.result(output);
  return nb::make_tuple(call.result(output), call.result(lse));
}

void bind_attention_mla(nb::module_& module) {
  def_op<&attention_mla_decode>(
      module,
      "def attention_mla_decode(q: ArrayT, latent_pages: SupportsDLPack, block_table: SupportsDLPack, seq_lens: "
      "SupportsDLPack, scale: float, *, head_dim_v: int = 512, causal: bool = False, return_lse: bool = False, check: "
      "bool = False, out: ArrayT | None = None, stream: typing.Any = None, dtype: typing.Any = None) -> ArrayT, ArrayT "
      "if return_lse",
      R"doc(Multi-head latent attention (MLA) over a paged cache: all heads attend to one latent row a token.

softmax(scale * q L^T) L[:, :head_dim_v], where L are the latent rows of a sequence. DeepSeek-V2 and V3 keep 512 columns of
the compressed key and value, and 64 of the rotated key beside them; queries come with the key's up-projection absorbed, and
the result goes through the value's. Row j of sequence b lies in page block_table[b, j // page_size] at offset j % page_size.

q: [batch, heads_q, seq_q, head_dim]; float32, float16 or bfloat16; head_dim 1 to 576.
latent_pages: [num_pages, page_size, head_dim], q's dtype; any page size.
block_table: int32 [batch, max_pages]. Entries past a sequence's last page are not used.
seq_lens: int32 or int64 [batch]: rows of each sequence, those of the queries included.
scale: what scores are multiplied with, 1 / sqrt(the head dim before the latent): 1 / sqrt(192) for DeepSeek-V2 and V3.
head_dim_v: how many columns are values; 1 to 512, and at most head_dim.
causal: query i stands at position i + seq_lens[b] - seq_q and sees no row behind it.
return_lse: also return the LSE, float32 [batch, heads_q, seq_q].
check: on a GPU, look at the table first, as `attention_paged` does.
out: written in place and returned; [batch, heads_q, seq_q, head_dim_v].

Returns out, or (out, lse). A query that sees no row gives 0 and an LSE of -inf. What lies past a sequence's length never reaches
a result. Sums and softmax are float32, and weights are rounded to q's dtype before the second product. There is no gradient.
Tensor cores of 8.0 and later serve float16 and bfloat16 with head_dim 576 and head_dim_v 512, whose rows start at multiples of
16 bytes; another kernel takes the rest. 9.0 has a kernel of its own for calls without a causal mask.

Source: DeepSeek-AI, DeepSeek-V2 (2024); split over keys: Dao et al., Flash-Decoding (2023).
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> pages = np.ones((3, 16, 24), np.float32)
>>> table, lengths = np.array([[2, 0]], np.int32), np.array([20], np.int32)
>>> fk.attention_mla_decode(np.ones((1, 4, 1, 24), np.float32), pages, table, lengths, scale=0.2, head_dim_v=3)[0, 0].round(3).tolist()
[[1.0, 1.0, 1.0]]
)doc");
}

const OpFile registration(bind_attention_mla);

}  // namespace
}  // namespace flashkernel::python
