// The device's clock, and an end to a kernel that waits in vain: one function, one instruction. PTX ISA 10.
#pragma once

#include <cstdint>

namespace flashkernel::cuda::ptx {

/// Nanoseconds since some moment, the same for all multiprocessors.
__device__ inline std::int64_t global_nanoseconds() {
  std::int64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
  return ns;
}

/// Ends the launch with an error.
__device__ inline void trap() { asm volatile("trap;"); }

}  // namespace flashkernel::cuda::ptx
