// Reductions and ordered accesses in global memory: one function, one instruction. PTX ISA 9.7.13.
#pragma once

namespace flashkernel::cuda::ptx {

__device__ inline void reduce_add(float* address, float value) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");
}

#if __CUDA_ARCH__ >= 900
/// Four neighbours at a multiple of 16 bytes; each one is added atomically.
__device__ inline void reduce_add_4(float* address, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
}
#else
__device__ inline void reduce_add_4(float* address, float a, float b, float c, float d) {
  reduce_add(address, a);
  reduce_add(address + 1, b);
  reduce_add(address + 2, c);
  reduce_add(address + 3, d);
}
#endif

__device__ inline int load_relaxed(const int* address) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline int load_acquire(const int* address) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline void store_release(int* address, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

/// Returns what was there. What this thread knows of before it is seen by whoever adds after it, and the other way
/// round.
__device__ inline int fetch_add_acq_rel(int* address, int value) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}

/// Returns what was there, and orders nothing.
__device__ inline int fetch_add_relaxed(int* address, int value) {
  int before;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}

/// Returns what was there. Whoever acquires what it leaves sees what this thread knows of before it.
__device__ inline int fetch_add_release(int* address, int value) {
  int before;
  asm volatile("atom.release.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}

}  // namespace flashkernel::cuda::ptx
