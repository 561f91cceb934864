// Barriers in shared memory that count arrivals and bytes: one function, one instruction. PTX ISA 9.7.13.15. A barrier
// is 8 bytes at a multiple of 8; it is named by its shared-memory address. Used with ptx/tma.cuh.
//
// A phase ends when all arrivals (and all announced bytes) are in; the barrier then counts the next one. A waiter names
// the phase by its parity: 0 for the first, 1 for the second, and so on. A wait for parity 1 on a fresh barrier returns
// at once, which lets a producer start on empty slots.
#pragma once

#include <cstdint>

namespace flashkernel::cuda::ptx {

__device__ inline void mbarrier_init(std::uint32_t barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/// After the inits, before the barrier's first use by the copy engine or another block of the cluster.
__device__ inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

/// The barrier's memory may hold other data afterwards.
__device__ inline void mbarrier_invalidate(std::uint32_t barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void mbarrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Arrives, and announces bytes that copies will bring in this phase.
__device__ inline void mbarrier_arrive_expect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

/// Announces bytes without arriving.
__device__ inline void mbarrier_expect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/// Arrives at a barrier of another block of the cluster (an address from map_shared). It orders nothing: enough to say
/// that a slot has been read. (With release at cluster scope the compiler emits a fence of the whole GPU.)
__device__ inline void mbarrier_arrive_cluster(std::uint32_t cluster_barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(cluster_barrier) : "memory");
}

/// True once the phase of this parity has ended; may sleep for a while before it says false.
__device__ inline bool mbarrier_try_wait(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

/// Returns once the phase of this parity has ended.
__device__ inline void mbarrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

}  // namespace flashkernel::cuda::ptx
