// Programmatic dependent launch: a kernel launched with LaunchShape::early starts while the one before it on the stream
// still runs. One function, one instruction. PTX ISA 9.7.13.13 (griddepcontrol). Before 9.0 kernels do not overlap.
#pragma once

namespace flashkernel::cuda::ptx {

/// The next kernel may start once every block of this one has said so, or ended.
__device__ inline void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Returns when the kernels before this one are complete and their writes visible.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace flashkernel::cuda::ptx
