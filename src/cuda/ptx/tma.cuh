// The bulk copy engine of sm_90 (TMA): one function, one instruction. PTX ISA 9.7.9.25.4 and 9.7.9.27. Shared memory
// is named by 32-bit addresses, a global tensor by its map (host/tensor_map.hpp), a kernel parameter that is `const
// __grid_constant__ CUtensorMap`. Coordinates count elements, the innermost dimension first; what lies outside of the
// tensor reads as zero and is never written. One thread issues a copy for the whole block.
//
// Loads announce their bytes to an mbarrier (ptx/mbarrier.cuh), the whole box even where it hangs out of the tensor.
// Stores and reductions are counted in groups of the issuing thread.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flashkernel::cuda::ptx {

/// What a load wants from the L2 cache. PTX ISA 9.7.9.21 (createpolicy).
__device__ inline std::uint64_t l2_evict_first() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline std::uint64_t l2_evict_last() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// What these two make, and what is asked for without a policy, as numbers: no registers held.
inline constexpr std::uint64_t kL2EvictFirst = 0x12f0000000000000, kL2EvictLast = 0x14f0000000000000,
                               kL2EvictNormal = 0x1000000000000000;

/// Fetches the map itself.
__device__ inline void tma_prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<std::uint64_t>(map)) : "memory");
}

/// Box of the map's size at coordinates (c0, c1, ...) -> L2. A hint: memory's contents and order are as without it.
__device__ inline void tma_prefetch(const CUtensorMap* map, std::uint64_t policy, int c0, int c1) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.L2::cache_hint [%0, {%2, %3}], %1;" ::"l"(
                   reinterpret_cast<std::uint64_t>(map)),
               "l"(policy), "r"(c0), "r"(c1)
               : "memory");
}
__device__ inline void tma_prefetch(const CUtensorMap* map, std::uint64_t policy, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.L2::cache_hint [%0, {%2, %3, %4}], %1;" ::"l"(
                   reinterpret_cast<std::uint64_t>(map)),
               "l"(policy), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}

/// Box of the map's size at coordinates (c0, c1, ...) -> `shared`, bytes counted at `barrier`.
__device__ inline void tma_load(std::uint32_t shared, const CUtensorMap* map, std::uint32_t barrier,
                                std::uint64_t policy, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(shared),
      "l"(reinterpret_cast<std::uint64_t>(map)), "r"(barrier), "l"(policy), "r"(c0), "r"(c1)
      : "memory");
}
__device__ inline void tma_load(std::uint32_t shared, const CUtensorMap* map, std::uint32_t barrier,
                                std::uint64_t policy, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(shared),
      "l"(reinterpret_cast<std::uint64_t>(map)), "r"(barrier), "l"(policy), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
__device__ inline void tma_load(std::uint32_t shared, const CUtensorMap* map, std::uint32_t barrier,
                                std::uint64_t policy, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(shared),
      "l"(reinterpret_cast<std::uint64_t>(map)), "r"(barrier), "l"(policy), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
__device__ inline void tma_load(std::uint32_t shared, const CUtensorMap* map, std::uint32_t barrier,
                                std::uint64_t policy, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(shared),
      "l"(reinterpret_cast<std::uint64_t>(map)), "r"(barrier), "l"(policy), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

/// The same box for every block of the cluster whose bit is set in `blocks`: to the same place of each one's shared
/// memory, counted at the same place's barrier.
__device__ inline void tma_load_multicast(std::uint32_t shared, const CUtensorMap* map, std::uint32_t barrier,
                                          std::uint16_t blocks, std::uint64_t policy, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%5, %6}], [%2], %3, %4;" ::"r"(shared),
      "l"(reinterpret_cast<std::uint64_t>(map)), "r"(barrier), "h"(blocks), "l"(policy), "r"(c0), "r"(c1)
      : "memory");
}
__device__ inline void tma_load_multicast(std::uint32_t shared, const CUtensorMap* map, std::uint32_t barrier,
                                          std::uint16_t blocks, std::uint64_t policy, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%5, %6, %7, %8}], [%2], %3, %4;" ::"r"(shared),
      "l"(reinterpret_cast<std::uint64_t>(map)), "r"(barrier), "h"(blocks), "l"(policy), "r"(c0), "r"(c1), "r"(c2),
      "r"(c3)
      : "memory");
}
__device__ inline void tma_load_multicast(std::uint32_t shared, const CUtensorMap* map, std::uint32_t barrier,
                                          std::uint16_t blocks, std::uint64_t policy, int c0, int c1, int c2, int c3,
                                          int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%5, %6, %7, %8, %9}], [%2], %3, %4;" ::"r"(shared),
      "l"(reinterpret_cast<std::uint64_t>(map)), "r"(barrier), "h"(blocks), "l"(policy), "r"(c0), "r"(c1), "r"(c2),
      "r"(c3), "r"(c4)
      : "memory");
}

/// `shared` -> box of the map's size at (c0, c1, ...); in the thread's open group.
__device__ inline void tma_store(const CUtensorMap* map, std::uint32_t shared, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
                   reinterpret_cast<std::uint64_t>(map)),
               "r"(shared), "r"(c0), "r"(c1)
               : "memory");
}
__device__ inline void tma_store(const CUtensorMap* map, std::uint32_t shared, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
                   reinterpret_cast<std::uint64_t>(map)),
               "r"(shared), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}
__device__ inline void tma_store(const CUtensorMap* map, std::uint32_t shared, std::uint64_t policy, int c0, int c1,
                                 int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%3, %4, %5, %6}], [%1], %2;" ::"l"(
          reinterpret_cast<std::uint64_t>(map)),
      "r"(shared), "l"(policy), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

/// Adds a box of floats to the tensor.
__device__ inline void tma_reduce_add(const CUtensorMap* map, std::uint32_t shared, int c0, int c1, int c2, int c3) {
  asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
                   reinterpret_cast<std::uint64_t>(map)),
               "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

/// Asks for `bytes` neighbouring bytes in L2, both multiples of 16. A hint.
__device__ inline void bulk_prefetch(const void* global, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

/// `bytes` neighbouring bytes, all three multiples of 16; counted at `barrier`.
__device__ inline void bulk_load(std::uint32_t shared, const void* global, std::uint32_t bytes, std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ inline void bulk_load(std::uint32_t shared, const void* global, std::uint32_t bytes, std::uint32_t barrier,
                                 std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
/// The same the other way; in the thread's open group.
__device__ inline void bulk_store(void* global, std::uint32_t shared, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
}
/// Adds neighbouring floats to global memory, each one atomically.
__device__ inline void bulk_reduce_add(float* global, std::uint32_t shared, std::uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}

/// Closes this thread's group of stores and reductions.
__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// At most kPending groups of this thread have yet to be read from shared memory (which may be written again).
template <int kPending>
__device__ inline void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
/// At most kPending groups of this thread are under way: the others' writes have been made.
template <int kPending>
__device__ inline void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flashkernel::cuda::ptx
