// Emulates src/cuda/ptx/copy.cuh: the copies happen when they are waited for.
#pragma once

#include <cstdint>
#include <cstring>

#include "simt/mbarrier.hpp"
#include "simt/simt.hpp"

namespace flashkernel::cuda::ptx {

inline std::uint32_t shared_address(const void* pointer) { return simt::shared_address(pointer); }

SIMT_INLINE void cp_async_16(std::uint32_t shared_address, const void* global, std::uint32_t bytes) {
  simt::async_copy(shared_address, global, 16, bytes);
}
SIMT_INLINE void cp_async_16_kept(std::uint32_t shared_address, const void* global, std::uint32_t bytes) {
  simt::async_copy(shared_address, global, 16, bytes);
}
inline std::uint64_t l2_policy(bool) { return 0; }
SIMT_INLINE void cp_async_16_by(std::uint64_t, std::uint32_t shared_address, const void* global, std::uint32_t bytes) {
  simt::async_copy(shared_address, global, 16, bytes);
}
SIMT_INLINE void cp_async_8(std::uint32_t shared_address, const void* global, std::uint32_t bytes) {
  simt::async_copy(shared_address, global, 8, bytes);
}
SIMT_INLINE void cp_async_4(std::uint32_t shared_address, const void* global, std::uint32_t bytes) {
  simt::async_copy(shared_address, global, 4, bytes);
}
inline void prefetch_l2(const void*) {}
inline uint4 load_16_once(const void* global) { return *static_cast<const uint4*>(global); }

inline void load_16_kept(std::uint32_t (&words)[4], const void* global, bool there) {
  if (there) std::memcpy(words, global, 16);
}
inline void store_16(void* global, const uint4& v, bool there) {
  if (there) std::memcpy(global, &v, 16);
}
inline void store_16_leaving(void* global, const std::uint32_t (&words)[4]) { std::memcpy(global, words, 16); }
template <class T>
inline void settle(const T*&) {}
inline void settle(std::uint32_t&) {}
SIMT_INLINE void cp_async_commit() { simt::async_commit(); }

template <int kPending>
SIMT_INLINE void cp_async_wait() {
  simt::async_wait(kPending);
}
/// The copies happen at once.
SIMT_INLINE void cp_async_arrive(std::uint32_t barrier, simt::Where where = simt::Where::here()) {
  simt::async_commit();
  simt::async_wait(0);
  simt::mbarrier_arrive(barrier, 1, 0, where);
}

}  // namespace flashkernel::cuda::ptx
