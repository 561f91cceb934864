// An op's `activation`, by the name that Python gives it.
#pragma once

#include <optional>
#include <string>

#include "flashkernel/linear.hpp"
#include "op.hpp"

namespace flashkernel::python {

/// more_names: what an op takes beyond these, for the message.
inline Activation parse_activation(const Call& call, const std::optional<std::string>& name,
                                   const std::string& more_names = " or 'silu'") {
  if (!name) return Activation::kNone;
  if (*name == "gelu_tanh") return Activation::kGeluTanh;
  if (*name == "gelu") return Activation::kGelu;
  if (*name == "silu") return Activation::kSilu;
  call.fail("activation='" + *name + "'; None, 'gelu_tanh', 'gelu'" + more_names + " is needed");
}

}  // namespace flashkernel::python
