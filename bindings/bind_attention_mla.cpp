// Binds attention_mla.hpp: attention_mla_decode and latent_append.
#include "flashkernel/attention_mla.hpp"

#include "array_type.hpp"
#include "given_scale.hpp"
#include "op.hpp"

namespace flashkernel::python {
namespace {

nb::object attention_mla_decode(nb::handle q, nb::handle latent_pages, nb::handle block_table, nb::handle seq_lens,
                                double scale, nb::handle latent_scale, std::int64_t head_dim_v, bool causal,
                                bool return_lse, bool check, nb::handle out, nb::handle stream, nb::handle dtype) {
  Call call("attention_mla_decode", stream, dtype);
  const TensorView q_view = call.input("q", q), latent = call.input("latent_pages", latent_pages),
                   table = call.input("block_table", block_table), lengths = call.input("seq_lens", seq_lens);
  GivenScale given;
  given.parse(call, "latent_scale", latent_scale);
  if (head_dim_v < 1) call.fail("head_dim_v=" + std::to_string(head_dim_v) + "; at least 1 is needed");
  Output output = call.output("out", out, q_view.dtype, Shape(q_view).with_last(head_dim_v));
  Output lse;
  if (return_lse) lse = call.output(DType::kFloat32, Shape(q_view).without_last());
  call.run([&](const ExecutionContext& context) {
    flashkernel::attention_mla_decode(q_view, latent, table, lengths, given.view, output.view, lse.view,
                                      static_cast<float>(scale), causal, check, context);
  });
  if (!return_lse) return call.result(output);
  return nb::make_tuple(call.result(output), call.result(lse));
}

nb::object latent_append(nb::handle latent, nb::handle key, nb::handle latent_pages, nb::handle slots,
                         nb::handle latent_scale, nb::handle stream, nb::handle dtype) {
  Call call("latent_append", stream, dtype);
  const TensorView latent_view = call.input("latent", latent), key_view = call.input("key", key),
                   pages = call.input("latent_pages", latent_pages), slot_view = call.input("slots", slots);
  GivenScale given;
  given.parse(call, "latent_scale", latent_scale);
  call.run([&](const ExecutionContext& context) {
    flashkernel::latent_append(latent_view, key_view, pages, slot_view, given.view, context);
  });
  return nb::none();
}

void bind_attention_mla(nb::module_& module) {
  def_op<&attention_mla_decode>(
      module,
      "def attention_mla_decode(q: ArrayT, latent_pages: SupportsDLPack, block_table: SupportsDLPack, seq_lens: "
      "SupportsDLPack, scale: float, *, latent_scale: SupportsDLPack | float | None = None, head_dim_v: int = 512, "
      "causal: bool = False, return_lse: bool = False, check: bool = False, out: ArrayT | None = None, stream: "
      "typing.Any = None, dtype: typing.Any = None) -> ArrayT, ArrayT "
      "if return_lse",
      R"doc(Multi-head latent attention (MLA) over a paged cache: all heads attend to one latent row a token.

softmax(scale * q L^T) L[:, :head_dim_v], where L are the latent rows of a sequence. DeepSeek-V2 and V3 keep 512 columns of
the compressed key and value, and 64 of the rotated key beside them; queries come with the key's up-projection absorbed, and
the result goes through the value's. Row j of sequence b lies in page block_table[b, j // page_size] at offset j % page_size.

q: [batch, heads_q, seq_q, head_dim]; float32, float16 or bfloat16; head_dim 1 to 576.
latent_pages: [num_pages, page_size, head_dim], q's dtype; any page size. Or rows of 8 bits (uint8 or float8_e4m3fn), as
   `latent_append` writes them: [num_pages, page_size, head_dim_v + 4 * groups + 2 * (head_dim - head_dim_v)]: elements, a
   float32 scale for each 128 of them, and the other columns in bfloat16 (656 bytes for DeepSeek: what FlashMLA and vLLM's
   `fp8_ds_mla` keep); or [num_pages, page_size, head_dim], elements with one scale.
block_table: int32 [batch, max_pages]. Entries past a sequence's last page are not used.
seq_lens: int32 or int64 [batch]: rows of each sequence, those of the queries included.
scale: what scores are multiplied with, 1 / sqrt(the head dim before the latent): 1 / sqrt(192) for DeepSeek-V2 and V3.
latent_scale: for pages with one scale: a number, or one float32 number in an array; None: 1.
head_dim_v: how many columns are values; 1 to 512, and at most head_dim.
causal: query i stands at position i + seq_lens[b] - seq_q and sees no row behind it.
return_lse: also return the LSE, float32 [batch, heads_q, seq_q].
check: on a GPU, look at the table first, as `attention_paged` does.
out: written in place and returned; [batch, heads_q, seq_q, head_dim_v].

Returns out, or (out, lse). Rows of 8 bits are element times scale in float32, rounded to q's dtype. A query that sees no row gives 0 and an LSE of -inf. What lies past a sequence's length never reaches
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
  def_op<&latent_append>(
      module,
      "def latent_append(latent: SupportsDLPack, key: SupportsDLPack, latent_pages: SupportsDLPack, slots: "
      "SupportsDLPack, *, latent_scale: SupportsDLPack | float | None = None, stream: typing.Any = None, dtype: "
      "typing.Any = None) -> None",
      R"doc(Rounds latent rows to 8 bits and writes them into the pages of `attention_mla_decode`.

latent: [tokens, rank]; float32, float16 or bfloat16; rank 1 to 512: the compressed keys and values.
key: [tokens, turned], latent's dtype: the rotated part of the key; rank + turned at most 576.
latent_pages: written; uint8 or float8_e4m3fn [num_pages, page_size, rank + 4 * groups + 2 * turned], where groups is
   rank / 128, rounded up, and rank a multiple of 4: a row is float8_e4m3fn elements, a float32 scale for each 128 of them, and
   the key in bfloat16. Or [num_pages, page_size, rank + turned], elements with one scale.
slots: int32 or int64 [tokens]: page * page_size + offset; a negative slot is skipped. A slot past the last page: ValueError on
   the CPU, skipped on a GPU.
latent_scale: for pages with one scale: a number, or one float32 number in an array; None: 1.

Returns None. A group's scale is its largest magnitude over 448, at least 2^-126, and not a power of two. An element is x / scale,
rounded to nearest even and bounded to +-448; NaN stays NaN and leaves the scale alone. Rows in more bits: `kv_append`.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> pages = np.zeros((1, 16, 8 + 4 + 2 * 4), np.uint8)
>>> fk.latent_append(np.full((1, 8), 0.5, np.float32), np.ones((1, 4), np.float32), pages, np.array([3]))
>>> pages[0, 3, :2].tolist(), (pages[0, 3, 8:12].view(np.float32) * 448).tolist()  # 126 is the bits of 448
([126, 126], [0.5])
)doc");
}

const OpFile registration(bind_attention_mla);

}  // namespace
}  // namespace flashkernel::python
