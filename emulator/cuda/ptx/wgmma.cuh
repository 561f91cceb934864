// Emulates src/cuda/ptx/wgmma.cuh; the work is in simt/wgmma.cpp.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simt/warp.hpp"

namespace flashkernel::cuda::ptx {

using simt::Where;

enum class Swizzle : std::uint64_t { kNone = 0, k128 = 1, k64 = 2, k32 = 3 };

inline std::uint64_t matrix_descriptor(std::uint32_t shared_address, std::uint32_t leading_bytes,
                                       std::uint32_t stride_bytes, Swizzle swizzle = Swizzle::k128) {
  if (shared_address > 0x3ffff) simt::fault("a matrix descriptor needs an address in dynamic shared memory");
  return static_cast<std::uint64_t>(shared_address >> 4) | static_cast<std::uint64_t>(leading_bytes >> 4) << 16 |
         static_cast<std::uint64_t>(stride_bytes >> 4) << 32 | static_cast<std::uint64_t>(swizzle) << 62;
}

SIMT_INLINE void wgmma_fence(Where where = Where::here()) { simt::wgmma_fence(where); }
SIMT_INLINE void wgmma_commit(Where where = Where::here()) { simt::wgmma_commit(where); }
template <int kPending>
SIMT_INLINE void wgmma_wait(Where where = Where::here()) {
  simt::wgmma_wait(kPending, where);
}

template <class V>
inline void hold(V&) {}
template <class V, int kCount>
inline void hold(V (&)[kCount]) {}

struct E4m3;
struct E5m2;

namespace emulated {

template <class T>
constexpr simt::WgmmaElement wgmma_element() {
  if (std::is_same_v<T, E4m3>) return simt::WgmmaElement::kE4m3;
  if (std::is_same_v<T, E5m2>) return simt::WgmmaElement::kE5m2;
  return std::is_same_v<T, __nv_bfloat16> ? simt::WgmmaElement::kBf16 : simt::WgmmaElement::kF16;
}

struct WgmmaLane {
  float* d;
  const std::uint32_t* a_registers;  // null: by descriptor
  std::uint64_t a, b;
  bool accumulate;
  Where where;
};

template <class A, class B, bool kTransA, bool kTransB, int kCount>
inline void issue_wgmma(void* const* data, std::uint32_t lanes) {
  static_assert(kCount % 4 == 0 && kCount >= 4 && kCount <= 128, "64 x 8 to 64 x 256 in steps of 8 columns");
  if (lanes != 0xffffffffu) simt::fault("wgmma: some lanes of the warp are missing");
  const auto& first = *static_cast<const WgmmaLane*>(data[0]);
  simt::Wgmma op{};
  op.a_element = wgmma_element<A>();
  op.b_element = wgmma_element<B>();
  op.a_in_registers = first.a_registers != nullptr;
  op.transposed_a = kTransA;
  op.transposed_b = kTransB;
  op.accumulate = first.accumulate;
  op.columns = 2 * kCount;
  op.a = first.a;
  op.b = first.b;
  op.where = first.where;
  op.warp_in_group = simt::current->linear / 32 % 4;
  for (int lane = 0; lane < 32; ++lane) {
    const auto& mine = *static_cast<const WgmmaLane*>(data[lane]);
    if (mine.a != op.a || mine.b != op.b || mine.accumulate != op.accumulate)
      simt::fault("wgmma in " + simt::text(op.where) + ": the lanes' descriptors or scales differ");
    op.d[lane] = mine.d;
    if (op.a_in_registers) std::memcpy(op.a_registers[lane], mine.a_registers, sizeof(op.a_registers[lane]));
  }
  simt::wgmma_issue(*simt::current->warp, std::move(op));
}

}  // namespace emulated

template <class T, bool kTransA = false, bool kTransB = false, int kCount>
SIMT_INLINE void wgmma_ss(float (&d)[kCount], std::uint64_t a, std::uint64_t b, bool accumulate,
                          Where where = Where::here()) {
  emulated::WgmmaLane mine{d, nullptr, a, b, accumulate, where};
  simt::collective("wgmma", 0xffffffffu, where, &mine, emulated::issue_wgmma<T, T, kTransA, kTransB, kCount>);
}

template <class T, bool kTransB = false, int kCount>
SIMT_INLINE void wgmma_rs(float (&d)[kCount], const std::uint32_t (&a)[4], std::uint64_t b, bool accumulate,
                          Where where = Where::here()) {
  emulated::WgmmaLane mine{d, a, 0, b, accumulate, where};
  simt::collective("wgmma", 0xffffffffu, where, &mine, emulated::issue_wgmma<T, T, false, kTransB, kCount>);
}

template <class A, class B = A, int kCount>
SIMT_INLINE void wgmma_fp8_ss(float (&d)[kCount], std::uint64_t a, std::uint64_t b, bool accumulate,
                              Where where = Where::here()) {
  emulated::WgmmaLane mine{d, nullptr, a, b, accumulate, where};
  simt::collective("wgmma", 0xffffffffu, where, &mine, emulated::issue_wgmma<A, B, false, false, kCount>);
}

template <class A, class B = A, int kCount>
SIMT_INLINE void wgmma_fp8_rs(float (&d)[kCount], const std::uint32_t (&a)[4], std::uint64_t b, bool accumulate,
                              Where where = Where::here()) {
  emulated::WgmmaLane mine{d, a, 0, b, accumulate, where};
  simt::collective("wgmma", 0xffffffffu, where, &mine, emulated::issue_wgmma<A, B, false, false, kCount>);
}

}  // namespace flashkernel::cuda::ptx
