// Emulates src/cuda/ptx/matrix.cuh: warp-level matrix instructions with the fragment layouts of PTX ISA 9.7.14.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simt/race.hpp"
#include "simt/warp.hpp"

namespace flashkernel::cuda::ptx {
namespace emulated {

inline constexpr unsigned kWholeWarp = 0xffffffffu;

template <class T>
inline float half_of(std::uint32_t two, int which) {
  const auto bits = static_cast<std::uint16_t>(two >> 16 * which);
  if constexpr (std::is_same_v<T, __half>)
    return simt::fp16_to_float(bits);
  else
    return simt::bf16_to_float(bits);
}

struct MmaLane {
  float* d;
  const std::uint32_t* a;
  const std::uint32_t* b;
};

// To fp32, towards zero.
inline float truncated(double x) {
  const float nearest = static_cast<float>(x);
  return std::abs(nearest) > std::abs(x) ? std::nextafter(nearest, 0.0f) : nearest;
}

// Products are exact, summed with the accumulator, and the sum is truncated, as tensor cores do (Fasi et al., 2021).
// D (16 x 8) += A (16 x 8 per slice) B (8 x 8 per slice): register pairs a[2 s], a[2 s + 1] and b[s] hold slice s of k.
template <class T, int kSlices>
inline void mma(void* const* data, std::uint32_t lanes) {
  if (lanes != kWholeWarp) simt::fault("mma: some lanes of the warp are missing");
  constexpr int kDepth = 8 * kSlices;
  float a[16][kDepth], b[kDepth][8], d[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& registers = *static_cast<const MmaLane*>(data[lane]);
    const int row = lane / 4, pair = 2 * (lane % 4);
    for (int slice = 0; slice < kSlices; ++slice)
      for (int e = 0; e < 2; ++e) {
        a[row][8 * slice + pair + e] = half_of<T>(registers.a[2 * slice], e);
        a[row + 8][8 * slice + pair + e] = half_of<T>(registers.a[2 * slice + 1], e);
        b[8 * slice + pair + e][row] = half_of<T>(registers.b[slice], e);
      }
    for (int e = 0; e < 2; ++e) {
      d[row][pair + e] = registers.d[e];
      d[row + 8][pair + e] = registers.d[2 + e];
    }
  }
  for (int m = 0; m < 16; ++m) {
    double sums[8];
    for (int n = 0; n < 8; ++n) sums[n] = d[m][n];
    for (int k = 0; k < kDepth; ++k)
      for (int n = 0; n < 8; ++n) sums[n] += static_cast<double>(a[m][k]) * b[k][n];
    for (int n = 0; n < 8; ++n) d[m][n] = truncated(sums[n]);
  }
  for (int lane = 0; lane < 32; ++lane) {
    float* const to = static_cast<const MmaLane*>(data[lane])->d;
    const int row = lane / 4, pair = 2 * (lane % 4);
    for (int e = 0; e < 2; ++e) {
      to[e] = d[row][pair + e];
      to[2 + e] = d[row + 8][pair + e];
    }
  }
}

// Lane l of A (16 x 8): rows l / 4 and + 8 of column l % 4 (a[0], a[1]), and of column l % 4 + 4 (a[2], a[3]); of B (8
// x 8): rows l % 4 and + 4 of column l / 4. The low 13 bits of a value are not read.
inline void mma_tf32(void* const* data, std::uint32_t lanes) {
  if (lanes != kWholeWarp) simt::fault("mma: some lanes of the warp are missing");
  const auto tf32 = [](std::uint32_t bits) { return simt::float_from_bits(bits & 0xffffe000u); };
  float a[16][8], b[8][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& registers = *static_cast<const MmaLane*>(data[lane]);
    const int group = lane / 4, in_group = lane % 4;
    for (int r = 0; r < 4; ++r) a[group + 8 * (r % 2)][in_group + 4 * (r / 2)] = tf32(registers.a[r]);
    for (int r = 0; r < 2; ++r) b[in_group + 4 * r][group] = tf32(registers.b[r]);
  }
  for (int lane = 0; lane < 32; ++lane) {
    float* const d = static_cast<const MmaLane*>(data[lane])->d;
    for (int e = 0; e < 4; ++e)
      for (int k = 0; k < 8; ++k) d[e] += a[lane / 4 + 8 * (e / 2)][k] * b[k][2 * (lane % 4) + e % 2];
  }
}

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
  emulated::MmaLane mine{d, a, b};
  simt::collective("mma.m16n8k16", emulated::kWholeWarp, where, &mine, emulated::mma<T, 2>);
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
  emulated::MmaLane mine{d, a, &b};
  simt::collective("mma.m16n8k8", emulated::kWholeWarp, where, &mine, emulated::mma<__half, 1>);
}

inline void mma_m16n8k8_tf32(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                             simt::Where where = simt::Where::here()) {
  const std::uint32_t b[] = {b0, b1};
  emulated::MmaLane mine{d, a, b};
  simt::collective("mma.m16n8k8.tf32", emulated::kWholeWarp, where, &mine, emulated::mma_tf32);
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
