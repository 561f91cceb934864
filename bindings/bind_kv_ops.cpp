// Binds kv_ops.hpp: kv_append, kv_read, kv_copy_pages, check_block_table.
#include "flashkernel/kv_ops.hpp"

#include <cstring>
#include <memory>

#include "array_type.hpp"
#include "op.hpp"
#include "kv_rope.hpp"
#include "kv_scales.hpp"

namespace flashkernel::python {
namespace {

nb::object kv_append(nb::handle k, nb::handle v, nb::handle k_pages, nb::handle v_pages, nb::handle slots,
                     nb::handle rope, nb::handle kv_scales, nb::handle kv_dtype, nb::handle stream, nb::handle dtype) {
  Call call("kv_append", stream, dtype);
  const TensorView k_view = call.input("k", k), v_view = call.input("v", v);
  TensorView k_page_view = call.inout("k_pages", k_pages), v_page_view = call.inout("v_pages", v_pages);
  const TensorView slot_view = call.input("slots", slots);
  apply_kv_dtype(call, kv_dtype, k_page_view, v_page_view);
  const KvScales scales = parse_kv_scales(call, kv_scales, true);
  RopeArgument parsed = parse_rope(call, rope);
  call.run([&](const ExecutionContext& context) {
    flashkernel::kv_append(k_view, v_view, k_page_view, v_page_view, scales, slot_view, parsed.rope, context);
  });
  return parsed.has_q ? call.result(parsed.q_out) : nb::none();
}

// Tokens [batch, seq, heads, head_dim], or [tokens, heads, head_dim], as the latter; an absent view where that needs a
// copy.
TensorView as_tokens(const TensorView& given) {
  TensorView view = given;
  if (view.ndim == 4) {
    if (view.shape[0] > 1 && view.shape[1] > 1 && view.strides[0] != view.shape[1] * view.strides[1]) return {};
    if (view.shape[1] == 1) view.strides[1] = view.strides[0];
    view.shape[0] *= view.shape[1];
    for (int d = 1; d < 3; ++d) {
      view.strides[d - 1] = view.strides[d];
      if (d > 1) view.shape[d - 1] = view.shape[d];
    }
    view.shape[2] = view.shape[3];
    view.strides[2] = view.strides[3];
    view.ndim = 3;
  }
  if (view.ndim != 3 || (view.strides[2] != 1 && view.shape[2] > 1)) return {};
  return view;
}

// kv_append for flashkernel.flash_attn: tokens go behind those of their sequences. Returns (lengths then, q rotated or
// None), or None where an array needs a copy.
nb::object kv_append_places(nb::handle k, nb::handle v, nb::handle k_pages, nb::handle v_pages, nb::handle block_table,
                            nb::handle seq_lens, nb::handle cu_seqlens, nb::handle cos, nb::handle sin,
                            nb::handle positions, bool interleaved, nb::handle q) {
  Call call("kv_append", nb::none(), nb::none());
  const TensorView k_view = as_tokens(call.input("k", k)), v_view = as_tokens(call.input("v", v));
  const TensorView k_page_view = call.inout("k_pages", k_pages), v_page_view = call.inout("v_pages", v_pages);
  KvAppendPlaces places;
  places.block_table = call.input("block_table", block_table);
  places.seq_lens = call.input("seq_lens", seq_lens);
  places.cu_seqlens = call.optional_input("cu_seqlens", cu_seqlens);
  places.positions = call.optional_input("positions", positions);
  if (!k_view.defined() || !v_view.defined()) return nb::none();
  std::optional<KvAppendRope> rope;
  Output turned;
  if (!cos.is_none()) {
    rope.emplace();
    rope->cos = call.input("rotary_cos", cos);
    rope->sin = call.input("rotary_sin", sin);
    rope->options.interleaved = interleaved;
    if (!q.is_none()) {
      const TensorView given = call.input("q", q);
      rope->q = as_tokens(given);
      if (!rope->q.defined()) return nb::none();
      turned = call.output("q", nb::none(), given.dtype, Shape(given));
      rope->q_out = as_tokens(turned.view);
    }
  }
  Output after = call.output(DType::kInt32, Shape{extent(places.block_table, 0)});
  places.seq_lens_after = after.view;
  call.run([&](const ExecutionContext& context) {
    flashkernel::kv_append_to_sequences(k_view, v_view, k_page_view, v_page_view, KvScales{}, places, rope, context);
  });
  if (q.is_none() || cos.is_none()) return nb::make_tuple(call.result(after), nb::none());
  return nb::make_tuple(call.result(after), call.result(turned));
}

// The largest of some lengths on the host; -1 when they are not such an array.
std::int64_t largest_length(const TensorView& lengths) {
  if (lengths.ndim != 1 || !is_index(lengths.dtype) || !lengths.device.is_cpu()) return -1;
  std::int64_t largest = 0;
  for (std::int64_t i = 0; i < lengths.shape[0]; ++i) {
    const std::int64_t offset = i * lengths.strides[0];
    const std::int64_t length = lengths.dtype == DType::kInt32 ? static_cast<const std::int32_t*>(lengths.data)[offset]
                                                               : static_cast<const std::int64_t*>(lengths.data)[offset];
    if (length > largest) largest = length;
  }
  return largest;
}

// Makes `lengths` a view of a copy, so that an output is sized by the very numbers that the op checks and uses,
// whatever another thread writes meanwhile. What is not on the host, and what the op refuses, stays as it is.
std::unique_ptr<std::int64_t[]> copy_lengths(TensorView& lengths) {
  if (lengths.ndim != 1 || !is_index(lengths.dtype) || !lengths.device.is_cpu() || lengths.shape[0] < 1 ||
      !lengths.is_contiguous() || reinterpret_cast<std::uintptr_t>(lengths.data) % dtype_bytes(lengths.dtype) != 0)
    return nullptr;
  const std::size_t bytes = static_cast<std::size_t>(lengths.shape[0]) * dtype_bytes(lengths.dtype);
  std::unique_ptr<std::int64_t[]> copy(new std::int64_t[(bytes + 7) / 8]);
  std::memcpy(copy.get(), lengths.data, bytes);
  lengths.data = copy.get();
  return copy;
}

nb::tuple kv_read(nb::handle k_pages, nb::handle v_pages, nb::handle block_table, nb::handle seq_lens,
                  std::optional<std::int64_t> max_seq, nb::handle out, nb::handle kv_scales, nb::handle kv_dtype,
                  nb::handle out_dtype, nb::handle stream, nb::handle dtype) {
  Call call("kv_read", stream, dtype);
  TensorView k_page_view = call.input("k_pages", k_pages), v_page_view = call.input("v_pages", v_pages);
  const TensorView table = call.input("block_table", block_table);
  TensorView lengths = call.input("seq_lens", seq_lens);
  apply_kv_dtype(call, kv_dtype, k_page_view, v_page_view);
  const KvScales scales = parse_kv_scales(call, kv_scales, false);
  const bool quantized = is_quantized(k_page_view.dtype) || is_packed(k_page_view.dtype);
  if (!quantized && !out_dtype.is_none()) call.fail("out_dtype is given; it is for pages of 8 or 4 bits");
  const DType result = !quantized            ? k_page_view.dtype
                       : out_dtype.is_none() ? DType::kFloat32
                                             : parse_dtype(call.op(), out_dtype);
  nb::object k_given = nb::none(), v_given = nb::none();
  if (!out.is_none()) std::tie(k_given, v_given) = parse_pair(call, "out", out, "a pair (k_out, v_out)");
  // With `out` nothing is sized, and the op sees whether it shares memory with seq_lens.
  const auto copied = !max_seq && out.is_none() ? copy_lengths(lengths) : nullptr;
  // A length that the block table can't hold must not become the size of an allocation. One of seq_lens the op refuses.
  const std::int64_t capacity = extent(table, 1) * extent(k_page_view, 1);
  std::int64_t longest = max_seq ? *max_seq : largest_length(lengths);
  if (longest < 0 && max_seq) call.fail("max_seq=" + std::to_string(*max_seq) + "; must not be negative");
  if (max_seq && longest > capacity && out.is_none())
    call.fail("max_seq=" + std::to_string(*max_seq) + "; needs " + std::to_string(capacity) +
              " or less, the tokens that block_table can hold (block_table.shape[1] * page_size)");
  if (longest < 0 && lengths.device.is_cuda() && out.is_none())
    call.fail("max_seq is missing; it is needed with seq_lens on a GPU");
  if (!max_seq && (longest < 0 || longest > capacity)) longest = capacity;
  const auto shape = [&](const TensorView& pages) {
    return Shape{extent(table, 0), longest, extent(pages, 2), kv_columns(pages)};
  };
  Output k_out = call.output("k_out", k_given, result, shape(k_page_view));
  Output v_out = call.output("v_out", v_given, result, shape(v_page_view));
  call.run([&](const ExecutionContext& context) {
    flashkernel::kv_read(k_page_view, v_page_view, scales, table, lengths, k_out.view, v_out.view, context);
  });
  return nb::make_tuple(call.result(k_out), call.result(v_out));
}

void kv_copy_pages(nb::handle k_pages, nb::handle v_pages, nb::handle src, nb::handle dst, nb::handle kv_scales,
                   nb::handle kv_dtype, nb::handle stream, nb::handle dtype) {
  Call call("kv_copy_pages", stream, dtype);
  TensorView k_page_view = call.inout("k_pages", k_pages), v_page_view = call.inout("v_pages", v_pages);
  const TensorView src_view = call.input("src", src), dst_view = call.input("dst", dst);
  apply_kv_dtype(call, kv_dtype, k_page_view, v_page_view);
  const KvScales scales = parse_kv_scales(call, kv_scales, true);
  call.run([&](const ExecutionContext& context) {
    flashkernel::kv_copy_pages(k_page_view, v_page_view, scales, src_view, dst_view, context);
  });
}

void check_block_table(nb::handle block_table, nb::handle seq_lens, std::int64_t num_pages, std::int64_t page_size,
                       nb::handle stream) {
  Call call("check_block_table", stream, nb::none());
  const TensorView table = call.input("block_table", block_table), lengths = call.input("seq_lens", seq_lens);
  call.run([&](const ExecutionContext& context) {
    flashkernel::check_block_table(table, lengths, num_pages, page_size, context);
  });
}

void bind_kv_ops(nb::module_& module) {
  def_op<&kv_append>(
      module,
      "def kv_append(k: ArrayT, v: SupportsDLPack, k_pages: SupportsDLPack, v_pages: SupportsDLPack, slots: "
      "SupportsDLPack, *, rope: KvAppendRopeWithQ | KvAppendRope | None = None, kv_scales: "
      "KvScales = None, kv_dtype: typing.Any = None, stream: typing.Any = "
      "None, dtype: typing.Any = None, backend: str | None = None) -> ArrayT if rope else None",
      R"doc(pages[slots[t] // page_size, slots[t] % page_size] = token t, for keys and values.

k: [tokens, heads_kv, head_dim]; v: [tokens, heads_kv, head_dim_v]; float32, float16 or bfloat16; contiguous last dim.
k_pages, v_pages: [num_pages, page_size, heads_kv, head_dim or head_dim_v], the same dtype, or with kv_scales float8_e4m3fn,
   int8 or int4; written in place.
slots: int32 or int64 [tokens], as `KvCache.append` gives them; a negative slot is skipped.
rope: rotates k on the way: a dict with "positions" (int32 or int64 [tokens]) and, as in `rope`, "theta", "rotary_dim",
   "interleaved", "inv_freq", or as in `rope_table` "cos" and "sin" [max_positions, rotary_dim / 2]; with "q" [tokens, heads_q, head_dim] also q, into "q_out" or a new array.
   "q_norm" and "k_norm" [head_dim]: weights of RMSNorm with "norm_eps" (1e-6) of each head of q and of k before it is rotated, as `rms_norm`
   with its result in k's dtype; not for pages of 8 or 4 bits, nor on a GPU for heads of more than 512 elements.
kv_scales: for pages of 8 and 4 bits, a pair (k_scales, v_scales). Of float8_e4m3fn and int8: float32 [heads_kv], or [num_pages,
   heads_kv, page_size]; number = element * scale. Of int4: float16 [num_pages, heads_kv, page_size, groups, 2], a scale and a
   zero for 32 neighbours; number = element * scale + zero. Of float4_e2m1fn_x2 (NVFP4): float8_e4m3fn [num_pages, heads_kv,
   page_size, groups] for 16 neighbours, and behind the pair two numbers, the scales of the whole tensors, unless both are 1.
   Scales [heads_kv] are read, others written: the largest magnitude of the token's head / 448 or 127; of int4 the least of a
   group as zero, and a fifteenth of its range. float4_e2m1fn_x2 is refused.
kv_dtype: "float8_e4m3fn", "int8", "int4" or "float4_e2m1fn_x2": what the bytes of uint8 pages are. Of the last two a byte holds two
   elements, the first in the low bits, so that pages are [num_pages, page_size, heads_kv, head_dim / 2].

Returns the rotated q if rope has one, else None. Copies are exact; rotation is float32. 8-bit elements are x / scale rounded
to nearest even, saturated to +-448 or +-127 (infinities too); float8_e4m3fn keeps NaN, int8 stores 0 for it, and a scale of
its own becomes NaN instead. int4 bounds numbers to +-65024, and a group with a NaN becomes NaN. Two tokens with the same slot leave
one of them there. A slot past the last page is refused where slots are on the host, skipped on a GPU.

Source: Kwon et al., PagedAttention (2023).
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> k_pages, v_pages = np.zeros((2, 16, 1, 4), np.float32), np.zeros((2, 16, 1, 4), np.float32)
>>> k = v = np.ones((2, 1, 4), np.float32)
>>> fk.kv_append(k, v, k_pages, v_pages, np.array([17, -1]))
>>> float(k_pages.sum()), k_pages[1, 1, 0].tolist()
(4.0, [1.0, 1.0, 1.0, 1.0])
)doc");

  def_op<&kv_append_places>(
      module,
      "def _kv_append_places(k: ArrayT, v: SupportsDLPack, k_pages: SupportsDLPack, v_pages: SupportsDLPack, "
      "block_table: SupportsDLPack, seq_lens: SupportsDLPack, cu_seqlens: SupportsDLPack | None = None, cos: "
      "SupportsDLPack | None = None, sin: SupportsDLPack | None = None, positions: SupportsDLPack | None = None, "
      "interleaved: bool = False, q: SupportsDLPack | None = None) -> tuple[ArrayT, ArrayT | None] | None",
      "kv_append behind what is there, for flashkernel.flash_attn; None where an array needs a copy.");

  def_op<&kv_read>(
      module,
      "def kv_read(k_pages: ArrayT, v_pages: SupportsDLPack, block_table: SupportsDLPack, seq_lens: "
      "SupportsDLPack, *, max_seq: int | None = None, out: tuple[ArrayT, ArrayT] | None = None, kv_scales: "
      "KvScales = None, kv_dtype: typing.Any = None, out_dtype: typing.Any "
      "= None, stream: typing.Any = None, dtype: typing.Any = None, backend: str | None = None) -> "
      "tuple[ArrayT, ArrayT]",
      R"doc(out[b, j] = pages[block_table[b, j // page_size], j % page_size]: gathers sequences back.

k_pages, v_pages: [num_pages, page_size, heads_kv, head_dim or head_dim_v]; float32, float16 or bfloat16.
block_table: int32 [batch, max_pages]; entries past a sequence's last page are not used: any value is allowed there.
seq_lens: int32 or int64 [batch], in tokens.
max_seq: the output's second dim, at most max_pages * page_size unless `out` is given; default: the largest length (needed
   when seq_lens is on a GPU).
out: pair (k_out, v_out) to write to, [batch, max_seq, heads_kv, head_dim or head_dim_v].
kv_scales: for pages of 8 and 4 bits, a pair (k_scales, v_scales). Of float8_e4m3fn and int8: float32 [heads_kv], or [num_pages,
   heads_kv, page_size]; number = element * scale. Of int4: float16 [num_pages, heads_kv, page_size, groups, 2], a scale and a
   zero for 32 neighbours; number = element * scale + zero. Of float4_e2m1fn_x2 (NVFP4): float8_e4m3fn [num_pages, heads_kv,
   page_size, groups] for 16 neighbours, and behind the pair two numbers, the scales of the whole tensors, unless both are 1.
kv_dtype: "float8_e4m3fn", "int8", "int4" or "float4_e2m1fn_x2": what the bytes of uint8 pages are. Of the last two a byte holds two
   elements, the first in the low bits, so that pages are [num_pages, page_size, heads_kv, head_dim / 2].
out_dtype: of the numbers that pages of 8 and 4 bits become where out is None; default: float32.

Returns (k_out, v_out). Tokens past a sequence's length are 0. Copies are exact.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> pages = np.arange(2 * 16, dtype=np.float32).reshape(2, 16, 1, 1)
>>> k, v = fk.kv_read(pages, pages, np.array([[1, 0]], np.int32), np.array([18]))
>>> k[0, 14:, 0, 0].tolist()
[30.0, 31.0, 0.0, 1.0]
)doc");

  def_op<&check_block_table>(
      module,
      "def check_block_table(block_table: SupportsDLPack, seq_lens: SupportsDLPack, num_pages: int, page_size: "
      "int, *, stream: typing.Any = None) -> None",
      R"doc(Raises BlockTableError if 0 <= block_table[b, i] < num_pages fails for a page that sequence b's length needs.

block_table: int32 [batch, max_pages]. seq_lens: int32 or int64 [batch], in tokens: each 0 to max_pages * page_size.
num_pages: pages of the pool; page_size: tokens of a page.

The error names the first bad entry and has it as attributes: sequence, slot, page; slot -1: the length itself is bad (its
value is in page). Entries past a sequence's last page may be anything. On a GPU the call waits for the stream (not possible
while it is captured); kernels themselves stay in bounds whatever the table holds.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> table = np.array([[0, 1], [2, 9]], np.int32)
>>> fk.check_block_table(table, np.array([20, 16]), num_pages=4, page_size=16)
>>> try:
...     fk.check_block_table(table, np.array([20, 17]), num_pages=4, page_size=16)
... except fk.BlockTableError as error:
...     print(error.sequence, error.slot, error.page)
1 1 9
)doc");

  def_op<&kv_copy_pages>(
      module,
      "def kv_copy_pages(k_pages: SupportsDLPack, v_pages: SupportsDLPack, src: SupportsDLPack, dst: "
      "SupportsDLPack, *, kv_scales: KvScales = None, kv_dtype: typing.Any "
      "= None, stream: typing.Any = None, dtype: typing.Any = None, backend: str | None = None) -> None",
      R"doc(pages[dst[i]] = pages[src[i]] in k_pages and v_pages, written in place.

k_pages, v_pages: [num_pages, page_size, heads_kv, head_dim or head_dim_v]; float32, float16 or bfloat16.
src, dst: int32 or int64 [n]; no page may be in both, none twice in dst.
kv_scales: for pages of 8 and 4 bits, a pair (k_scales, v_scales). Of float8_e4m3fn and int8: float32 [heads_kv], or [num_pages,
   heads_kv, page_size]; number = element * scale. Of int4: float16 [num_pages, heads_kv, page_size, groups, 2], a scale and a
   zero for 32 neighbours; number = element * scale + zero. Of float4_e2m1fn_x2 (NVFP4): float8_e4m3fn [num_pages, heads_kv,
   page_size, groups] for 16 neighbours, and behind the pair two numbers, the scales of the whole tensors, unless both are 1.
   Scales of tokens and of groups go along.
kv_dtype: "float8_e4m3fn", "int8", "int4" or "float4_e2m1fn_x2": what the bytes of uint8 pages are. Of the last two a byte holds two
   elements, the first in the low bits, so that pages are [num_pages, page_size, heads_kv, head_dim / 2].

Copies are exact.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> k_pages, v_pages = np.zeros((2, 16, 1, 1), np.float32), np.zeros((2, 16, 1, 1), np.float32)
>>> k_pages[0] = 7
>>> fk.kv_copy_pages(k_pages, v_pages, np.array([0]), np.array([1]))
>>> float(k_pages[1].min())
7.0
)doc");
}

const OpFile registration(bind_kv_ops);

}  // namespace
}  // namespace flashkernel::python
