// The step of linear's gradient before its two products, which every backend of them begins with.
#pragma once

#include <cstddef>

#include "flashkernel/stream.hpp"
#include "ops/linear_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda {

/// The bias gradient and, in the workspace, the pre-activation's; what is left to do is two products without
/// activation.
std::size_t linear_gradient_workspace(const LinearBackwardParams&);
LinearBackwardParams linear_gradient(const LinearBackwardParams&, void* workspace, Stream);

/// A tensor-core kernel of the two products of linear's gradient, after the generic step that makes the
/// pre-activation's gradient (which stays in the front of the workspace) and the bias's.
template <std::size_t (*products_workspace)(const LinearBackwardParams&, bool)>
std::size_t with_gradient_workspace(const LinearBackwardParams& p, bool invariant) {
  return linear_gradient_workspace(p) + products_workspace(p, invariant);
}
template <void (*products)(const LinearBackwardParams&, bool, void*, Stream)>
void after_gradient(const LinearBackwardParams& p, bool invariant, void* workspace, Stream stream) {
  const LinearBackwardParams rest = linear_gradient(p, workspace, stream);
  products(rest, invariant, static_cast<char*>(workspace) + linear_gradient_workspace(p), stream);
}

}  // namespace flashkernel::cuda
