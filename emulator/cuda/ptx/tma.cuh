// Emulates src/cuda/ptx/tma.cuh: loads are made when no thread can go on, their destination being poison until then;
// stores and reductions when their group is waited for.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cstring>

#include "simt/mbarrier.hpp"
#include "simt/tensor_map.hpp"

namespace flashkernel::cuda::ptx {

using simt::Where;

inline constexpr std::uint64_t kL2EvictFirst = 1, kL2EvictLast = 2, kL2EvictNormal = 3;
inline std::uint64_t l2_evict_first() { return 1; }
inline std::uint64_t l2_evict_last() { return 2; }
SIMT_INLINE void tma_prefetch_map(const CUtensorMap* map) { simt::decode(map); }
SIMT_INLINE void tma_prefetch(const CUtensorMap* map, std::uint64_t, int, int) { simt::decode(map); }
SIMT_INLINE void tma_prefetch(const CUtensorMap* map, std::uint64_t, int, int, int) { simt::decode(map); }

namespace emulated {

template <class... C>
SIMT_INLINE void load(std::uint32_t shared, const CUtensorMap* map, std::uint32_t barrier, std::uint32_t blocks,
                      Where where, C... c) {
  simt::issue_load(shared, *map, barrier, blocks, {c...}, where);
}
template <class... C>
SIMT_INLINE void store(const CUtensorMap* map, std::uint32_t shared, simt::Move move, C... c) {
  simt::issue_store(*map, shared, move, {c...});
}
/// This block alone.
inline std::uint32_t here() { return 1u << simt::current->rank; }

}  // namespace emulated

SIMT_INLINE void tma_load(std::uint32_t shared, const CUtensorMap* map, std::uint32_t barrier, std::uint64_t, int c0,
                          int c1, Where where = Where::here()) {
  emulated::load(shared, map, barrier, emulated::here(), where, c0, c1);
}
SIMT_INLINE void tma_load(std::uint32_t shared, const CUtensorMap* map, std::uint32_t barrier, std::uint64_t, int c0,
                          int c1, int c2, Where where = Where::here()) {
  emulated::load(shared, map, barrier, emulated::here(), where, c0, c1, c2);
}
SIMT_INLINE void tma_load(std::uint32_t shared, const CUtensorMap* map, std::uint32_t barrier, std::uint64_t, int c0,
                          int c1, int c2, int c3, Where where = Where::here()) {
  emulated::load(shared, map, barrier, emulated::here(), where, c0, c1, c2, c3);
}
SIMT_INLINE void tma_load(std::uint32_t shared, const CUtensorMap* map, std::uint32_t barrier, std::uint64_t, int c0,
                          int c1, int c2, int c3, int c4, Where where = Where::here()) {
  emulated::load(shared, map, barrier, emulated::here(), where, c0, c1, c2, c3, c4);
}
SIMT_INLINE void tma_load_multicast(std::uint32_t shared, const CUtensorMap* map, std::uint32_t barrier,
                                    std::uint16_t blocks, std::uint64_t, int c0, int c1, Where where = Where::here()) {
  emulated::load(shared, map, barrier, simt::bits_of_cluster(blocks), where, c0, c1);
}
SIMT_INLINE void tma_load_multicast(std::uint32_t shared, const CUtensorMap* map, std::uint32_t barrier,
                                    std::uint16_t blocks, std::uint64_t, int c0, int c1, int c2, int c3,
                                    Where where = Where::here()) {
  emulated::load(shared, map, barrier, simt::bits_of_cluster(blocks), where, c0, c1, c2, c3);
}
SIMT_INLINE void tma_load_multicast(std::uint32_t shared, const CUtensorMap* map, std::uint32_t barrier,
                                    std::uint16_t blocks, std::uint64_t, int c0, int c1, int c2, int c3, int c4,
                                    Where where = Where::here()) {
  emulated::load(shared, map, barrier, simt::bits_of_cluster(blocks), where, c0, c1, c2, c3, c4);
}

SIMT_INLINE void tma_store(const CUtensorMap* map, std::uint32_t shared, int c0, int c1) {
  emulated::store(map, shared, simt::Move::kStore, c0, c1);
}
SIMT_INLINE void tma_store(const CUtensorMap* map, std::uint32_t shared, int c0, int c1, int c2) {
  emulated::store(map, shared, simt::Move::kStore, c0, c1, c2);
}
SIMT_INLINE void tma_store(const CUtensorMap* map, std::uint32_t shared, std::uint64_t, int c0, int c1, int c2,
                           int c3) {
  emulated::store(map, shared, simt::Move::kStore, c0, c1, c2, c3);
}
SIMT_INLINE void tma_reduce_add(const CUtensorMap* map, std::uint32_t shared, int c0, int c1, int c2, int c3) {
  emulated::store(map, shared, simt::Move::kReduceAdd, c0, c1, c2, c3);
}

inline void bulk_prefetch(const void*, std::uint32_t) {}
SIMT_INLINE void bulk_load(std::uint32_t shared, const void* global, std::uint32_t bytes, std::uint32_t barrier,
                           Where where = Where::here()) {
  simt::issue_bulk_load(shared, global, bytes, barrier, where);
}
SIMT_INLINE void bulk_load(std::uint32_t shared, const void* global, std::uint32_t bytes, std::uint32_t barrier,
                           std::uint64_t, Where where = Where::here()) {
  simt::issue_bulk_load(shared, global, bytes, barrier, where);
}
SIMT_INLINE void bulk_store(void* global, std::uint32_t shared, std::uint32_t bytes) {
  simt::issue_bulk_store(global, shared, bytes, simt::Move::kStore);
}
SIMT_INLINE void bulk_reduce_add(float* global, std::uint32_t shared, std::uint32_t bytes) {
  simt::issue_bulk_store(global, shared, bytes, simt::Move::kReduceAdd);
}

SIMT_INLINE void bulk_commit() { simt::bulk_commit(); }
template <int kPending>
SIMT_INLINE void bulk_wait_read() {
  simt::bulk_wait(kPending);
}
template <int kPending>
SIMT_INLINE void bulk_wait() {
  simt::bulk_wait(kPending);
}

}  // namespace flashkernel::cuda::ptx
