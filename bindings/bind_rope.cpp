// Binds rope.hpp: rope, rope_table.
#include "op.hpp"
#include "flashkernel/rope.hpp"

namespace flashkernel::python {
namespace {

struct Rotated {
  Output q, k;
  bool has_k = false;
};

Rotated make_outputs(Call& call, const TensorView& q, const TensorView& k, nb::handle out) {
  Rotated rotated;
  rotated.has_k = k.defined();
  nb::object q_out = nb::borrow(out), k_out = nb::none();
  if (rotated.has_k && !out.is_none()) std::tie(q_out, k_out) = parse_pair(call, "out", out, "a pair (q_out, k_out)");
  rotated.q = call.output("q_out", q_out, q.dtype, Shape(q));
  if (rotated.has_k) rotated.k = call.output("k_out", k_out, k.dtype, Shape(k));
  return rotated;
}

nb::object finish(Call& call, Rotated& rotated) {
  if (!rotated.has_k) return call.result(rotated.q);
  return nb::make_tuple(call.result(rotated.q), call.result(rotated.k));
}

nb::object rope(nb::handle q, nb::handle k, nb::handle positions, double theta, std::optional<std::int64_t> rotary_dim,
                bool interleaved, bool inverse, nb::handle inv_freq, nb::handle out, nb::handle stream,
                nb::handle dtype) {
  Call call("rope", stream, dtype);
  const TensorView q_view = call.input("q", q), k_view = call.optional_input("k", k),
                   position_view = call.optional_input("positions", positions);
  RopeOptions options;
  options.theta = theta;
  options.rotary_dim = rotary_dim.value_or(-1);
  options.interleaved = interleaved;
  options.inverse = inverse;
  options.inv_freq = call.optional_input("inv_freq", inv_freq);
  Rotated rotated = make_outputs(call, q_view, k_view, out);
  call.run([&](const ExecutionContext& context) {
    flashkernel::rope(q_view, k_view, position_view, rotated.q.view, rotated.k.view, options, context);
  });
  return finish(call, rotated);
}

nb::object rope_table(nb::handle q, nb::handle k, nb::handle cos, nb::handle sin, nb::handle positions,
                      bool interleaved, bool inverse, nb::handle out, nb::handle stream, nb::handle dtype) {
  Call call("rope_table", stream, dtype);
  const TensorView q_view = call.input("q", q), k_view = call.optional_input("k", k), cos_view = call.input("cos", cos),
                   sin_view = call.input("sin", sin), position_view = call.optional_input("positions", positions);
  RopeOptions options;
  options.interleaved = interleaved;
  options.inverse = inverse;
  Rotated rotated = make_outputs(call, q_view, k_view, out);
  call.run([&](const ExecutionContext& context) {
    flashkernel::rope_table(q_view, k_view, cos_view, sin_view, position_view, rotated.q.view, rotated.k.view, options,
                            context);
  });
  return finish(call, rotated);
}

void bind_rope(nb::module_& module) {
  def_op<&rope>(
      module,
      "def rope(q: ArrayT, k: SupportsDLPack | None = None, positions: SupportsDLPack | None = None, *, theta: "
      "float = 10000.0, rotary_dim: int | None = None, interleaved: bool = False, inverse: bool = False, "
      "inv_freq: SupportsDLPack | None = None, out: ArrayT | tuple[ArrayT, ArrayT] | None = None, stream: "
      "typing.Any = None, dtype: typing.Any = None, backend: str | None = None) -> ArrayT, ArrayT if k",
      R"doc(Rotary position embedding of q and k, with sin and cos computed in the kernel.

(a, b) -> (a cos x - b sin x, b cos x + a sin x) for each pair p of a head's first rotary_dim elements, where
x = position * theta^(-2p / rotary_dim).

q: [batch, heads_q, seq, head_dim]; float32, float16 or bfloat16; any strides with a contiguous last dim.
k: [batch, heads_kv, seq, head_dim], q's dtype, or None.
positions: int32 or int64 [seq] or [batch, seq], in tokens; None: 0, 1, 2, ...
theta: base of the frequencies.
rotary_dim: even, at most head_dim (the default); elements past it are copied.
interleaved: pairs (2p, 2p + 1) as in GPT-J, instead of (p, p + rotary_dim / 2) as in NeoX and Llama.
inverse: rotate back, which is also the gradient.
inv_freq: float32 [rotary_dim / 2], replaces theta's frequencies (scaled RoPE).
out: (q_out, k_out) to write to, or q_out when k is None; may be q and k themselves.

Returns (q_out, k_out), or q_out when k is None. Angles are exact to 1e-6 at every position
that int32 holds; others are refused where positions are on the host and give NaN where they are on a GPU. The rotation is
computed in float32.

Source: Su et al., RoFormer (2021).
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> q = np.ones((1, 2, 3, 8), np.float32)
>>> rotated = fk.rope(q)
>>> bool(np.allclose(rotated[:, :, 0], 1)), bool(np.allclose(fk.rope(rotated, inverse=True), q, atol=1e-6))
(True, True)
)doc");

  def_op<&rope_table>(
      module,
      "def rope_table(q: ArrayT, k: SupportsDLPack | None, cos: SupportsDLPack, sin: SupportsDLPack, "
      "positions: SupportsDLPack | None = None, *, interleaved: bool = False, inverse: bool = False, out: "
      "ArrayT | tuple[ArrayT, ArrayT] | None = None, stream: typing.Any = None, dtype: typing.Any = None, "
      "backend: str | None = None) -> ArrayT, ArrayT if k",
      R"doc(Rotary position embedding of q and k, with sin and cos read from tables.

The formula of `rope` with cos x and sin x from the tables.

q: [batch, heads_q, seq, head_dim]; k: [batch, heads_kv, seq, head_dim], q's dtype, or None.
cos, sin: float32, float16 or bfloat16, both the same; [max_positions, rotary_dim / 2] looked up by position, or [batch or 1, seq, rotary_dim / 2]
   used as they are.
positions: int32 or int64 [seq] or [batch, seq]; None: 0, 1, 2, ...; must be None with 3-D tables.
interleaved, inverse, out: as in `rope`.

Returns (q_out, k_out), or q_out when k is None. Computed in float32. A position outside the table is refused where positions
are on the host.

Source: Su et al., RoFormer (2021).
)doc" FK_DOC_COMMON R"doc(
Example:

>>> import numpy as np, flashkernel as fk
>>> angles = np.arange(3)[:, None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)
>>> cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
>>> q = np.ones((1, 2, 3, 8), np.float32)
>>> bool(np.allclose(fk.rope_table(q, None, cos, sin), fk.rope(q), atol=1e-6))
True
)doc");
}

const OpFile registration(bind_rope);

}  // namespace
}  // namespace flashkernel::python
