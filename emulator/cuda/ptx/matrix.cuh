// Emulates src/cuda/ptx/matrix.cuh: warp-level matrix instructions with the fragment layouts of PTX ISA 9.7.14.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simt/mma.hpp"
#include "simt/race.hpp"
#include "simt/warp.hpp"

namespace flashkernel::cuda::ptx {
namespace emulated {

inline constexpr unsigned kWholeWarp = 0xffffffffu;

inline void movmatrix(void* const* data, std::uint32_t lanes) {
  if (lanes != kWholeWarp) simt::fault("movmatrix: some lanes of the warp are missing");
  std::uint16_t elements[8][8];
  for (int lane = 0; lane < 32; ++lane) std::memcpy(&elements[lane / 4][2 * (lane % 4)], data[lane], 4);
  for (int lane = 0; lane < 32; ++lane) {
    const int row = lane / 4, column = 2 * (lane % 4);
    static_cast<std::uint32_t*>(data[lane])[1] =
        static_cast<std::uint32_t>(elements[column + 1][row]) << 16 | elements[column][row];
  }
}

struct LdmatrixLane {
  std::uint32_t* registers;
  std::uint32_t address;
};

template <int kMatrices, bool kTransposed>
inline void ldmatrix(void* const* data, std::uint32_t lanes) {
  if (lanes != kWholeWarp) simt::fault("ldmatrix: some lanes of the warp are missing");
  for (int matrix = 0; matrix < kMatrices; ++matrix) {
    std::uint16_t elements[8][8];
    for (int row = 0; row < 8; ++row) {
      const std::uint32_t address = static_cast<const LdmatrixLane*>(data[8 * matrix + row])->address;
      if (address % 16 != 0) simt::fault("ldmatrix: the address of a row is not a multiple of 16");
      const void* const from = simt::shared_pointer(address);
      simt::race::access(simt::lane(8 * matrix + row), from, 16, false);
      std::memcpy(elements[row], from, 16);
    }
    for (int lane = 0; lane < 32; ++lane) {
      const int row = lane / 4, column = 2 * (lane % 4);
      const std::uint32_t low = kTransposed ? elements[column][row] : elements[row][column];
      const std::uint32_t high = kTransposed ? elements[column + 1][row] : elements[row][column + 1];
      static_cast<const LdmatrixLane*>(data[lane])->registers[matrix] = high << 16 | low;
    }
  }
}

}  // namespace emulated

template <class T>
inline void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                         simt::Where where = simt::Where::here()) {
  const std::uint32_t b[] = {b0, b1};
  simt::MmaLane mine{d, a, b};
  simt::collective("mma.m16n8k16", emulated::kWholeWarp, where, &mine,
                   std::is_same_v<T, __half> ? simt::mma_f16_k16 : simt::mma_bf16_k16);
}

template <class T>
inline void mma_m16n8k16_from(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1, float c0,
                              float c1, simt::Where where = simt::Where::here()) {
  d[0] = d[2] = c0;
  d[1] = d[3] = c1;
  mma_m16n8k16<T>(d, a, b0, b1, where);
}

inline void mma_m16n8k8(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t b,
                        simt::Where where = simt::Where::here()) {
  const std::uint32_t a[] = {a0, a1};
  simt::MmaLane mine{d, a, &b};
  simt::collective("mma.m16n8k8", emulated::kWholeWarp, where, &mine, simt::mma_f16_k8);
}

inline void mma_m16n8k8_tf32(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                             simt::Where where = simt::Where::here()) {
  const std::uint32_t b[] = {b0, b1};
  simt::MmaLane mine{d, a, b};
  simt::collective("mma.m16n8k8.tf32", emulated::kWholeWarp, where, &mine, simt::mma_tf32_k8);
}

inline std::uint32_t movmatrix_trans(std::uint32_t a, simt::Where where = simt::Where::here()) {
  std::uint32_t both[] = {a, 0};  // given, got
  simt::collective("movmatrix", emulated::kWholeWarp, where, both, emulated::movmatrix);
  return both[1];
}

SIMT_INLINE void ldmatrix_x4(std::uint32_t (&r)[4], std::uint32_t shared_address,
                             simt::Where where = simt::Where::here()) {
  emulated::LdmatrixLane mine{r, shared_address};
  simt::collective("ldmatrix.x4", emulated::kWholeWarp, where, &mine, emulated::ldmatrix<4, false>);
}

SIMT_INLINE void ldmatrix_x4_trans(std::uint32_t (&r)[4], std::uint32_t shared_address,
                                   simt::Where where = simt::Where::here()) {
  emulated::LdmatrixLane mine{r, shared_address};
  simt::collective("ldmatrix.x4.trans", emulated::kWholeWarp, where, &mine, emulated::ldmatrix<4, true>);
}

}  // namespace flashkernel::cuda::ptx
