// Emulates src/cuda/ptx/mbarrier.cuh.
#pragma once

#include <cstdint>

#include "simt/mbarrier.hpp"
#include "simt/race.hpp"

namespace flashkernel::cuda::ptx {

using simt::Where;

SIMT_INLINE void mbarrier_init(std::uint32_t barrier, std::uint32_t arrivals, Where where = Where::here()) {
  simt::mbarrier_init(barrier, arrivals, where);
}
inline void fence_mbarrier_init() { simt::race::proxy_fence(); }
SIMT_INLINE void mbarrier_invalidate(std::uint32_t barrier, Where where = Where::here()) {
  simt::mbarrier_invalidate(barrier, where);
}
SIMT_INLINE void mbarrier_arrive(std::uint32_t barrier, Where where = Where::here()) {
  simt::mbarrier_arrive(barrier, 1, 0, where);
}
SIMT_INLINE void mbarrier_arrive_expect(std::uint32_t barrier, std::uint32_t bytes, Where where = Where::here()) {
  simt::mbarrier_arrive(barrier, 1, bytes, where);
}
SIMT_INLINE void mbarrier_expect(std::uint32_t barrier, std::uint32_t bytes, Where where = Where::here()) {
  simt::mbarrier_arrive(barrier, 0, bytes, where);
}
SIMT_INLINE void mbarrier_arrive_cluster(std::uint32_t cluster_barrier, Where where = Where::here()) {
  simt::mbarrier_arrive(cluster_barrier, 1, 0, where);
}
/// Says false once when the phase has not ended, after the others have run.
SIMT_INLINE bool mbarrier_try_wait(std::uint32_t barrier, std::uint32_t parity, Where where = Where::here()) {
  if (!simt::mbarrier_test(barrier, parity, where)) simt::spin("mbarrier.try_wait", where);
  return simt::mbarrier_test(barrier, parity, where);
}
SIMT_INLINE void mbarrier_wait(std::uint32_t barrier, std::uint32_t parity, Where where = Where::here()) {
  simt::mbarrier_wait(barrier, parity, where);
}

}  // namespace flashkernel::cuda::ptx
