// Binds attention_fp8.hpp: attention_fp8.
#include "flashkernel/attention_fp8.hpp"

#include "array_type.hpp"
#include "attention_options.hpp"
#include "given_scale.hpp"
#include "op.hpp"

namespace flashkernel::python {
namespace {

/// Arrays of bytes are elements: for frameworks without float8.
TensorView elements(Call& call, const char* name, nb::handle array) {
  TensorView view = call.input(name, array);
  if (view.dtype == DType::kUInt8) view.dtype = DType::kFloat8E4M3;
  return view;
}

nb::object attention_fp8(nb::handle q, nb::handle k, nb::handle v, nb::handle q_scale, nb::handle k_scale,
                         nb::handle v_scale, nb::handle cu_seqlens_q, nb::handle cu_seqlens_k,
                         std::optional<std::int64_t> max_seqlen_q, std::optional<std::int64_t> max_seqlen_k,
                         const SequenceOptions& given, nb::handle seqused_q, nb::handle seqused_k, bool return_lse,
                         nb::handle out_dtype, nb::handle out, nb::handle stream, nb::handle dtype) {
  Call call("attention_fp8", stream, dtype);
  const TensorView q_view = elements(call, "q", q), k_view = elements(call, "k", k), v_view = elements(call, "v", v);
  GivenScale scales[3];
  scales[0].parse(call, "q_scale", q_scale);
  scales[1].parse(call, "k_scale", k_scale);
  scales[2].parse(call, "v_scale", v_scale);
  const TensorView cu_q = call.optional_input("cu_seqlens_q", cu_seqlens_q),
                   cu_k = call.optional_input("cu_seqlens_k", cu_seqlens_k);
  AttentionOptions options = given.parse(call);
  options.seqused_q = call.optional_input("seqused_q", seqused_q);
  options.seqused_k = call.optional_input("seqused_k", seqused_k);
  const auto longest = [&](const TensorView& cu, const TensorView& of, std::optional<std::int64_t> most) {
    if (most || !cu.defined()) return most.value_or(0);
    const std::int64_t found = largest_step(cu);
    return found < 0 ? extent(of, 0) : found;
  };
  const DType result = out_dtype.is_none() ? DType::kBFloat16 : parse_dtype(call.op(), out_dtype);
  if (result != DType::kBFloat16 && result != DType::kFloat16)
    call.fail(std::string("out_dtype is ") + dtype_name(result) + "; needs float16 or bfloat16");
  Output output = call.output("out", out, result, Shape(q_view).with_last(extent(v_view, -1)));
  if (!out_dtype.is_none() && output.view.dtype != result)
    call.fail(std::string("out_dtype is ") + dtype_name(result) + " but out is " + dtype_name(output.view.dtype) +
              "; they must be one");
  Output lse;
  if (return_lse)
    lse = call.output(DType::kFloat32, cu_q.defined() ? varlen_lse_shape(q_view) : Shape(q_view).without_last());
  call.run([&](const ExecutionContext& context) {
    flashkernel::attention_fp8(q_view, k_view, v_view, scales[0].view, scales[1].view, scales[2].view, cu_q, cu_k,
                               longest(cu_q, q_view, max_seqlen_q), longest(cu_k, k_view, max_seqlen_k), output.view,
                               lse.view, options, context);
  });
  if (!return_lse) return call.result(output);
  return nb::make_tuple(call.result(output), call.result(lse));
}

void bind_attention_fp8(nb::module_& module) {
  def_op<&attention_fp8>(
      module,
      "def attention_fp8(q: ArrayT, k: SupportsDLPack, v: SupportsDLPack, q_scale: SupportsDLPack | float | None = "
      "None, k_scale: SupportsDLPack | float | None = None, v_scale: SupportsDLPack | float | None = None, *, "
      "cu_seqlens_q: SupportsDLPack | None = None, cu_seqlens_k: SupportsDLPack | None = None, max_seqlen_q: int | "
      "None "
      "= None, max_seqlen_k: int | None = None, causal: bool = False, window: Window = None, softcap: float = 0.0, "
      "scale: float | None = None, alibi_slopes: SupportsDLPack | None = None, alibi: str = 'distance', sinks: "
      "SupportsDLPack | None = None, seqused_q: SupportsDLPack | None = None, seqused_k: SupportsDLPack | None = None, "
      "return_lse: bool = False, out_dtype: typing.Any = None, out: ArrayT | None = None, stream: typing.Any = None, "
      "dtype: typing.Any = None) -> ArrayT, ArrayT if return_lse",
      R"doc(Attention of float8_e4m3fn queries, keys and values, in half the memory of 16 bits.

number = element * scale. The softmax is that of scale * q_scale * k_scale * (q k^T), and the result is multiplied by v_scale.

q: [batch, heads_q, seq_q, head_dim]; float8_e4m3fn, or uint8 that holds its bytes. Any strides with a contiguous last dim.
k: [batch, heads_kv, seq_k, head_dim]; v: [batch, heads_kv, seq_k, head_dim_v]; as q. Head dims are 1..512.
   With cu_seqlens_q and cu_seqlens_k, sequences lie side by side: [total_q, heads_q, head_dim] and [total_k, heads_kv, *].
q_scale, k_scale, v_scale: a number, or float32 that broadcasts to [batch, heads_kv]; a query head has the scale of its kv head.
   None: 1.
cu_seqlens_q, cu_seqlens_k: int32 or int64 [batch + 1], as in `attention_varlen`.
max_seqlen_q, max_seqlen_k: bounds of the lengths. By default found from cu_seqlens on the CPU, and the totals on a GPU, where
   tighter ones are faster.
causal, window, softcap, scale, alibi_slopes, alibi, sinks: as in `attention`.
seqused_q, seqused_k: int32 or int64 [batch], with cu_seqlens: how many tokens at the start of each sequence count. Rows of out
   and LSE past them are not written.
return_lse: also return the LSE, float32 [batch, heads_q, seq_q] or [heads_q, total_q].
out_dtype: "bfloat16", which is the default, or "float16".
out: written in place and returned; q's shape with head_dim_v.

Returns out, or (out, lse). There is no gradient. Every call goes to a kernel that widens elements first: its error is that of
attention in out's dtype. Compute capability 9.0 also has a kernel on tensor cores of 8 bits, for head dims up to 256 without softcap
and ALiBi. It runs only where it is forced (`force_kernels`), since it rounds the weights of keys to e4m3 and its sums are short:
docs/low_precision.md has its errors.

Source: Shah et al., FlashAttention-3 (2024), section 3.3.
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> ones = np.full((1, 2, 4, 16), 0x38, np.uint8)  # the bits of 1.0
>>> fk.attention_fp8(ones, ones, ones, v_scale=0.5, out_dtype="float16")[0, 0, 0, :2].tolist()
[0.5, 0.5]
)doc");
}

const OpFile registration(bind_attention_fp8);

}  // namespace
}  // namespace flashkernel::python
