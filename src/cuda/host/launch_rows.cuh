// Launches what a BlockRows says.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/host/row_plan.hpp"

namespace flashkernel::cuda {

/// `name` is for errors. The device is current.
template <class Params>
void launch_block_rows(const char* name, const BlockRows<Params>& how, const Params& p, Stream stream) {
  const dim3 block(static_cast<unsigned>(how.threads), static_cast<unsigned>(how.rows));
  launch(name, how.kernel, {static_cast<unsigned>(ceil_div(p.rows, how.rows)), block, 0, native(stream), true}, p);
}

}  // namespace flashkernel::cuda
