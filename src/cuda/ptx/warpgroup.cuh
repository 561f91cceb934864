// What warp-specialised kernels need beside wgmma and TMA: register counts, named barriers, proxy fences, stmatrix,
// election, clusters, dependent launches. One function, one instruction; sm_90 and later, set_max_registers sm_90a.
#pragma once

#include <cstdint>

namespace flashkernel::cuda::ptx {

/// Registers per thread of this warpgroup, a multiple of 8 in [24, 256]; every warp of the warpgroup runs it. Takes
/// effect only in kernels with __launch_bounds__(threads, 1). PTX ISA 9.7.19.5 (setmaxnreg).
template <int kRegisters>
__device__ inline void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// Barrier `id` (1..15; 0 is __syncthreads) among `threads` threads, whole warps: waits for all. PTX ISA 9.7.13.1.
__device__ inline void barrier_sync(std::uint32_t id, std::uint32_t threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// Counts this warp in without waiting.
__device__ inline void barrier_arrive(std::uint32_t id, std::uint32_t threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Orders this thread's ordinary accesses to shared memory before what the copy engine and wgmma do after the next
/// barrier. PTX ISA 9.7.13.4.
__device__ inline void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
/// The same for global memory: ordinary stores (even of earlier kernels on this stream) before reads by TMA.
__device__ inline void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

/// True in one lane of a converged warp. PTX ISA 9.7.13.14.
__device__ inline bool elect_one() {
  std::uint32_t elected;
  asm volatile(
      "{\n.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(elected));
  return elected != 0;
}

/// Four 8 x 8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8 and the elements
/// 2 (l % 4) + {0, 1} of row l / 4 of each matrix. PTX ISA 9.7.14.5.16.
__device__ inline void stmatrix_x4(std::uint32_t shared_address, std::uint32_t r0, std::uint32_t r1, std::uint32_t r2,
                                   std::uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}
/// The same, each matrix transposed.
__device__ inline void stmatrix_x4_trans(std::uint32_t shared_address, std::uint32_t r0, std::uint32_t r1,
                                         std::uint32_t r2, std::uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address), "r"(r0),
               "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

/// This block's number in its cluster.
__device__ inline std::uint32_t cluster_rank() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/// The same place of shared memory in another block of the cluster. PTX ISA 9.7.9.24 (mapa).
__device__ inline std::uint32_t map_shared(std::uint32_t shared_address, std::uint32_t rank) {
  std::uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(shared_address), "r"(rank));
  return mapped;
}
/// Four floats of another block of the cluster (an address from map_shared, a multiple of 16). PTX ISA 9.7.9.8.
__device__ inline float4 load_cluster_4(std::uint32_t cluster_address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(cluster_address)
               : "memory");
  return v;
}
/// Stores to a block of the cluster that count their 16, 8 or 4 bytes at a barrier of that block (both addresses from
/// map_shared): no fence, who has waited at the barrier sees them. PTX ISA 9.7.9.12 (st.async).
__device__ inline void store_async_4(std::uint32_t cluster_address, const float4& v, std::uint32_t cluster_barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   cluster_address),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(cluster_barrier)
               : "memory");
}
__device__ inline void store_async(std::uint32_t cluster_address, float v, std::uint32_t cluster_barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(cluster_address),
               "f"(v), "r"(cluster_barrier)
               : "memory");
}
__device__ inline void store_async_2(std::uint32_t cluster_address, const float2& v, std::uint32_t cluster_barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(cluster_address),
      "f"(v.x), "f"(v.y), "r"(cluster_barrier)
      : "memory");
}
/// All threads of the cluster.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
/// Says only that this thread is there (and, after fence_mbarrier_init, its barriers): without release's fence, which
/// is one of the whole GPU.
__device__ inline void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

}  // namespace flashkernel::cuda::ptx
