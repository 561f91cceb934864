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

/// The same from sm_80 on; the L2 cache shall give them up last, as load_16_kept's (below).
__device__ inline void cp_async_16_kept(std::uint32_t shared_address, const void* global, std::uint32_t bytes) {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared_address), "l"(global),
               "r"(bytes), "l"(policy)
               : "memory");
}

/// What the L2 cache shall do with what cp_async_16_by copies: give it up first if it `leaves`, else as ever.
__device__ inline std::uint64_t l2_policy(bool leaves) {
  std::uint64_t first, ever;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(ever));
  return leaves ? first : ever;
}
__device__ inline void cp_async_16_by(std::uint64_t policy, std::uint32_t shared_address, const void* global,
                                      std::uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared_address), "l"(global),
               "r"(bytes), "l"(policy)
               : "memory");
}

/// The same with 8 bytes, `bytes` of them from `global`.
__device__ inline void cp_async_8(std::uint32_t shared_address, const void* global, std::uint32_t bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address), "l"(global), "r"(bytes)
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

/// Arrives at an mbarrier, which counts every thread, once the copies that this thread has started so far have ended.
/// Nobody waits for them here. PTX ISA 9.7.13.15.
__device__ inline void cp_async_arrive(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
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

/// 16 bytes, if `there`, that the L2 cache shall give up last (createpolicy, PTX ISA 9.7.9.21). For rows that are read
/// once and written elsewhere: what is written leaves the cache first then, and memory changes less often between
/// reading and writing (lab/notebooks/cuda_memory_bound.md). By a predicate, not a branch: loads stay side by side.
__device__ inline void load_16_kept(std::uint32_t (&words)[4], const void* global, bool there) {
#if __CUDA_ARCH__ >= 800
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.u32 p, %5, 0;\n"
      "@p ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %6;\n}"
      : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
      : "l"(global), "r"(static_cast<std::uint32_t>(there)), "l"(policy));
#else
  if (!there) return;
  const uint4 v = *static_cast<const uint4*>(global);
  words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
#endif
}

/// 16 bytes, if `there`, by one instruction: the compiler may take a plain store of a uint4 apart into four.
__device__ inline void store_16(void* global, const uint4& v, bool there) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.u32 p, %5, 0;\n"
      "@p st.global.v4.u32 [%0], {%1, %2, %3, %4};\n}" ::"l"(global),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(static_cast<std::uint32_t>(there))
      : "memory");
}

/// 16 bytes that the L2 cache shall give up first: a result larger than the cache, which its reader does not find there
/// anyway.
__device__ inline void store_16_leaving(void* global, const std::uint32_t (&words)[4]) {
#if __CUDA_ARCH__ >= 800
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(global), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3]), "l"(policy)
               : "memory");
#else
  *static_cast<uint4*>(global) = make_uint4(words[0], words[1], words[2], words[3]);
#endif
}

/// The pointer is computed by here, not where it is used first. No instruction.
template <class T>
__device__ inline void settle(const T*& pointer) {
  asm volatile("" : "+l"(pointer));
}

/// What is made of the word from here on is made after this, not where the word comes from. No instruction.
__device__ inline void settle(std::uint32_t& word) { asm volatile("" : "+r"(word)); }

}  // namespace flashkernel::cuda::ptx
