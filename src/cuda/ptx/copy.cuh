// Asynchronous copies from global to shared memory: one function, one instruction. PTX ISA 9.7.9.25 (cp.async).
#pragma once

#include <cstdint>

namespace flashkernel::cuda::ptx {

__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// 16 bytes past L1; those from `bytes` on are written as zeros. With bytes 0 nothing is read.
__device__ inline void cp_async_16(std::uint32_t shared_address, const void* global, std::uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address), "l"(global), "r"(bytes)
               : "memory");
}

/// 4 bytes; with bytes 0 nothing is read and zero is written.
__device__ inline void cp_async_4(std::uint32_t shared_address, const void* global, std::uint32_t bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address), "l"(global), "r"(bytes)
               : "memory");
}

__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Returns when at most kPending of this thread's groups are under way.
template <int kPending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Brings the line of an address into L2; a hint.
__device__ inline void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global) : "memory");
}

/// 16 bytes that no other thread of the multiprocessor wants: they take no place in L1.
__device__ inline uint4 load_16_once(const void* global) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(global)
               : "memory");
  return v;
}

/// The pointer is computed by here, not where it is used first. No instruction.
template <class T>
__device__ inline void settle(const T*& pointer) {
  asm volatile("" : "+l"(pointer));
}

/// What is made of the word from here on is made after this, not where the word comes from. No instruction.
__device__ inline void settle(std::uint32_t& word) { asm volatile("" : "+r"(word)); }

}  // namespace flashkernel::cuda::ptx
