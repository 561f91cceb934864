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

}  // namespace flashkernel::cuda
