// A loss's `reduction`, by the name that Python gives it.
#pragma once

#include <string>

#include "flashkernel/loss.hpp"
#include "op.hpp"

namespace flashkernel::python {

inline Reduction parse_reduction(const Call& call, const std::string& name) {
  if (name == "none") return Reduction::kNone;
  if (name == "sum") return Reduction::kSum;
  if (name != "mean") call.fail("reduction='" + name + "'; 'none', 'sum' or 'mean' is needed");
  return Reduction::kMean;
}

}  // namespace flashkernel::python
