// The mapping that says how keys and queries are turned on their way into pages. Used by bind_kv_ops.cpp and
// bind_qkv_append.cpp.
#pragma once

#include "flashkernel/kv_ops.hpp"

#include "array_type.hpp"
#include "op.hpp"

namespace flashkernel::python {

// The mapping given as kv_append's `rope`: flashkernel.typing.KvAppendRope. Unknown keys are refused.
struct RopeArgument {
  std::optional<KvAppendRope> rope;
  Output q_out;
  bool has_q = false;
};

inline RopeArgument parse_rope(Call& call, nb::handle argument) {
  RopeArgument parsed;
  if (argument.is_none()) return parsed;
  if (!nb::isinstance<nb::dict>(argument))
    call.fail("rope=" + short_repr(argument) + "; None or a dict with 'positions' is needed");
  KvAppendRope rope;
  nb::object q_out = nb::none();
  for (const auto [key, value] : nb::borrow<nb::dict>(argument)) {
    const std::string name = text_of(key);
    bool ok = true;
    if (name == "positions")
      rope.positions = call.input("rope['positions']", value);
    else if (name == "theta")
      ok = nb::try_cast(value, rope.options.theta);
    else if (name == "rotary_dim")
      ok = value.is_none() || nb::try_cast(value, rope.options.rotary_dim);
    else if (name == "interleaved")
      ok = nb::try_cast(value, rope.options.interleaved);
    else if (name == "inv_freq")
      rope.options.inv_freq = call.optional_input("rope['inv_freq']", value);
    else if (name == "cos")
      rope.cos = call.optional_input("rope['cos']", value);
    else if (name == "sin")
      rope.sin = call.optional_input("rope['sin']", value);
    else if (name == "q")
      rope.q = call.optional_input("rope['q']", value);
    else if (name == "q_out")
      q_out = nb::borrow(value);
    else if (name == "q_norm")
      rope.q_norm = call.optional_input("rope['q_norm']", value);
    else if (name == "k_norm")
      rope.k_norm = call.optional_input("rope['k_norm']", value);
    else if (name == "norm_eps")
      ok = nb::try_cast(value, rope.norm_eps);
    else
      call.fail("rope has the key '" + name +
                "'; positions, theta, rotary_dim, interleaved, inv_freq, cos, sin, q, q_out, q_norm, k_norm and "
                "norm_eps are known");
    if (!ok) call.fail("rope['" + name + "']=" + short_repr(value) + "; a value of another type is needed");
  }
  if (!rope.positions.defined()) call.fail("rope has no 'positions'; int32 or int64 [tokens] is needed");
  parsed.has_q = rope.q.defined();
  if (parsed.has_q) {
    parsed.q_out = call.output("rope['q_out']", q_out, rope.q.dtype, Shape(rope.q));
    rope.q_out = parsed.q_out.view;
  } else if (!q_out.is_none()) {
    call.fail("rope has 'q_out' without 'q'");
  }
  parsed.rope = rope;
  return parsed;
}

}  // namespace flashkernel::python
