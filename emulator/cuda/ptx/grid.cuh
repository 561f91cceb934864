// Emulates src/cuda/ptx/grid.cuh: a kernel starts when the one before has ended.
#pragma once

namespace flashkernel::cuda::ptx {

inline void allow_next_kernel() {}
inline void wait_for_previous_kernel() {}

}  // namespace flashkernel::cuda::ptx
