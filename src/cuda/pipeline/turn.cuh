// How kernels of a chain overlap their launches. The kernels of a decode step use it (norm, KV append, elementwise):
// they are launched early (LaunchShape::early), and take their turn before anything else. Linear for few rows and
// decode attention on 9.0 do the same in two separate steps.
#pragma once

#include "cuda/ptx/grid.cuh"

namespace flashkernel::cuda {

/// Waits until the kernels before this one are complete and their writes visible. Then it lets the next kernel start,
/// whose blocks take the places that are free and wait here. Every thread calls it, and no thread reads or writes
/// global memory before. The next kernel starts only now, so at most two kernels are on the GPU.
__device__ inline void take_turn() {
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();
}

}  // namespace flashkernel::cuda
