// How kernels of a chain overlap their launches. Used by kernels of a decode step (norm, KV append, elementwise): they
// are launched early (LaunchShape::early), and begin by taking their turn. The linear of few rows and decode attention
// on 9.0 do the same in two steps of their own.
#pragma once

#include "cuda/ptx/grid.cuh"

namespace flashkernel::cuda {

/// Returns when the kernels before this one are complete and their writes visible, then lets the next one come: its
/// blocks take the places that are free and wait here in their turn. Before this, a kernel reads and writes no global
/// memory; every thread calls it. Since the next one comes only now, at most two kernels are on the GPU.
__device__ inline void take_turn() {
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();
}

}  // namespace flashkernel::cuda
