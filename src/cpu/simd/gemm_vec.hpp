// The fp32 micro-kernel of simd/gemm.hpp: kMr rows x two vectors of columns kept in registers; fp16 and bf16 operands
// become fp32 when they are packed. Packed A: rows of a chunk, `gemm_row_pitch` apart (read by broadcast); packed B:
// slivers [k][2 vectors].
#pragma once

#include "cpu/simd/gemm.hpp"

namespace flashkernel::cpu {
namespace {

template <int kRows>
inline void vec_tile(std::int64_t k, const float* a, std::int64_t pitch, const float* b, float* c, bool first) {
  constexpr int kW = Simd::kWidth;
  Reg sum[kRows][2];
  for (int r = 0; r < kRows; ++r) {
    sum[r][0] = Simd::zero();
    sum[r][1] = Simd::zero();
  }
  for (std::int64_t i = 0; i < k; ++i) {
    const Reg b0 = Simd::load(b + i * 2 * kW), b1 = Simd::load(b + i * 2 * kW + kW);
#if defined(__GNUC__)
#pragma GCC unroll 14
#endif
    for (int r = 0; r < kRows; ++r) {
      const Reg x = Simd::set1(a[r * pitch + i]);
      sum[r][0] = Simd::fma(x, b0, sum[r][0]);
      sum[r][1] = Simd::fma(x, b1, sum[r][1]);
    }
  }
  // A pass starts from zero and is added as a whole: sums of sums round less than one long sum.
  for (int r = 0; r < kRows; ++r) {
    float* const row = c + r * 2 * kW;
    Simd::save(row, first ? sum[r][0] : Simd::add(Simd::load(row), sum[r][0]));
    Simd::save(row + kW, first ? sum[r][1] : Simd::add(Simd::load(row + kW), sum[r][1]));
  }
}

struct VecMicro {
  static constexpr GemmBlocks kBlocks = Simd::kWidth == 16 ? kAvx512Blocks : kAvx2Blocks;
  static constexpr std::int64_t kPitch = gemm_row_pitch(kBlocks);
  static constexpr bool kSplits = false;
  struct Session {
    Session() {}  // nothing to set up; AMX has tiles to configure
  };

  template <class A, class B>
  static inline void repair(const A&, const B&, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                            float*) {}

  template <class T>
  static inline void pack_a(const Operand<T>& a, std::int64_t m0, std::int64_t rows, std::int64_t k0,
                            std::int64_t length, void* packed) {
    constexpr int kW = Simd::kWidth;
    float* const to = static_cast<float*>(packed);
    const std::int64_t padded_rows = round_up(rows, kBlocks.mr);
    if (a.stride_k == 1) {
      for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t i = 0; i < length; i += kW)
          Simd::save(to + r * kPitch + i,
                     load_columns(a.at(m0 + r, k0), i, length));  // past `length`: zeros, inside the pitch
    } else {
      // k outside: a row of memory is read to its end while its lines and page are at hand.
      for (std::int64_t i = 0; i < length; i += kW) {
        for (std::int64_t r = 0; r < rows; r += kW) {
          const std::int64_t lanes = imin<std::int64_t>(kW, rows - r);
          Reg block[kW];
          for (int j = 0; j < kW; ++j)
            block[j] = i + j < length ? load_columns(a.at(m0 + r, k0 + i + j), 0, lanes) : Simd::zero();
          Simd::transpose(block);
          for (int j = 0; j < lanes; ++j) Simd::save(to + (r + j) * kPitch + i, block[j]);
        }
      }
    }
    for (std::int64_t r = rows; r < padded_rows; ++r)
      for (std::int64_t i = 0; i < length; i += kW) Simd::save(to + r * kPitch + i, Simd::zero());
  }

  template <class T>
  static inline void pack_b(const Operand<T>& b, std::int64_t n0, std::int64_t columns, std::int64_t k0,
                            std::int64_t length, void* packed) {
    constexpr int kW = Simd::kWidth;
    float* const to = static_cast<float*>(packed);
    if (b.stride_outer == 1) {
      for (std::int64_t i = 0; i < length; ++i) {
        const T* const row = b.at(n0, k0 + i);
        for (std::int64_t c = 0; c < round_up(columns, 2 * kW); c += kW)
          Simd::save(to + c / (2 * kW) * (2 * kW) * length + i * 2 * kW + c % (2 * kW),
                     c < columns ? load_columns(row, c, columns) : Simd::zero());
      }
      return;
    }
    for (std::int64_t c = 0; c < round_up(columns, 2 * kW); c += kW) {
      float* const sliver = to + c / (2 * kW) * (2 * kW) * length + c % (2 * kW);
      const std::int64_t lanes = imax<std::int64_t>(0, imin<std::int64_t>(kW, columns - c));
      for (std::int64_t i = 0; i < length; i += kW) {
        Reg block[kW];
        for (int j = 0; j < kW; ++j)
          block[j] = j < lanes ? load_columns(b.at(n0 + c + j, k0), i, length) : Simd::zero();
        Simd::transpose(block);
        const std::int64_t count = imin<std::int64_t>(kW, length - i);
        for (std::int64_t j = 0; j < count; ++j) Simd::save(sliver + (i + j) * 2 * kW, block[j]);
      }
    }
  }

  static inline void tile(std::int64_t rows, std::int64_t padded_k, std::int64_t from, std::int64_t to, const void* a,
                          std::int64_t i, const void* b, std::int64_t j, float* c, bool first) {
    const float* const from_a = static_cast<const float*>(a) + i * kBlocks.mr * kPitch + from;
    const float* const from_b = static_cast<const float*>(b) + j * kBlocks.nr * padded_k + from * kBlocks.nr;
    const std::int64_t k = to - from;
    // Few rows take a narrower kernel; odd counts compute one packed row of zeros.
    switch ((rows + 1) / 2) {
      case 1: return vec_tile<2>(k, from_a, kPitch, from_b, c, first);
      case 2: return vec_tile<4>(k, from_a, kPitch, from_b, c, first);
      case 3: return vec_tile<6>(k, from_a, kPitch, from_b, c, first);
      default: break;
    }
    if constexpr (kBlocks.mr == 14) {
      switch ((rows + 1) / 2) {
        case 4: return vec_tile<8>(k, from_a, kPitch, from_b, c, first);
        case 5: return vec_tile<10>(k, from_a, kPitch, from_b, c, first);
        case 6: return vec_tile<12>(k, from_a, kPitch, from_b, c, first);
        default: return vec_tile<14>(k, from_a, kPitch, from_b, c, first);
      }
    }
  }
};

}  // namespace
}  // namespace flashkernel::cpu
