// The AMX micro-kernel of simd/gemm.hpp: 32 x 32 outputs in four tile registers, bf16 products, fp32 sums.
// fp16 and fp32 operands are split exactly into bf16 parts when they are packed (x = hi + mid + lo, 8 bits each), and the
// products that matter are summed: fp16 has 2 parts and 3 products (what is dropped is below 2^-17 of a product), fp32 3 parts and
// 6 products (below 2^-26: less than fp32 itself rounds). Henry, Tang and Heinecke, "Leveraging the bfloat16 artificial intelligence
// datatype for higher-precision computations", 2019. Subnormal bf16 parts count as zero (the tile unit does so).
// Packed A: per part, rows of a chunk `gemm_row_pitch` apart. Packed B: slivers of 32 columns, per part [k / 2][32][2].
#pragma once

#include "cpu/simd/gemm.hpp"

namespace flashkernel::cpu {
namespace {

template <class T>
struct AmxParts;  // how many bf16 parts a T has, its block sizes, and the products (part of A, part of B) that are summed
template <>
struct AmxParts<BFloat> {
  static constexpr GemmBlocks kBlocks = kAmxBf16Blocks;
};
template <>
struct AmxParts<Half> {
  static constexpr GemmBlocks kBlocks = kAmxFp16Blocks;
};
template <>
struct AmxParts<float> {
  static constexpr GemmBlocks kBlocks = kAmxFp32Blocks;
};

// 16 fp32 -> the bf16 parts of each; nearest even, so a remainder has at most as many bits as fp32 can hold exactly.
template <int kParts>
inline void split(Reg x, __m256i (&parts)[kParts]) {
  for (int p = 0; p < kParts; ++p) {
    parts[p] = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));
    if (p + 1 < kParts)
      x = Simd::sub(x, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(parts[p]), 16)));
  }
}

template <class T>
struct AmxMicro {
  static constexpr GemmBlocks kBlocks = AmxParts<T>::kBlocks;
  static constexpr int kParts = static_cast<int>(kBlocks.planes);
  static constexpr std::int64_t kPitch = gemm_row_pitch(kBlocks);            // bf16 elements
  static constexpr std::int64_t kPartA = gemm_round_up(kBlocks.mc, kBlocks.mr) * kPitch;
  static constexpr bool kSplits = kParts > 1;

  // Palette 1, all eight tiles 16 rows x 64 bytes.
  struct Session {
    Session() {
      struct alignas(64) Config {
        std::uint8_t palette, start_row, reserved[14];
        std::uint16_t row_bytes[16];
        std::uint8_t rows[16];
      } config = {};
      config.palette = 1;
      for (int t = 0; t < 8; ++t) {
        config.row_bytes[t] = 64;
        config.rows[t] = 16;
      }
      _tile_loadconfig(&config);
    }
    ~Session() { _tile_release(); }
  };

  static inline void save_parts(std::uint16_t* to, std::int64_t part_pitch, Reg x) {
    __m256i parts[kParts];
    split<kParts>(x, parts);
    for (int p = 0; p < kParts; ++p) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + p * part_pitch), parts[p]);
  }

  static inline void pack_a(const Operand<T>& a, std::int64_t m0, std::int64_t rows, std::int64_t k0, std::int64_t length,
                            void* packed) {
    std::uint16_t* const to = static_cast<std::uint16_t*>(packed);
    const std::int64_t padded_rows = round_up(rows, 16), padded_k = round_up(length, 32);
    if (a.stride_k == 1) {
      for (std::int64_t r = 0; r < rows; ++r) {
        const T* const from = a.at(m0 + r, k0);
        for (std::int64_t i = 0; i < padded_k; i += 16)
          save_parts(to + r * kPitch + i, kPartA, i < length ? load_columns(from, i, length) : Simd::zero());
      }
    } else {
      for (std::int64_t r = 0; r < rows; r += 16) {
        const std::int64_t lanes = imin<std::int64_t>(16, rows - r);
        for (std::int64_t i = 0; i < padded_k; i += 16) {
          Reg block[16];
          for (int j = 0; j < 16; ++j)
            block[j] = i + j < length ? load_columns(a.at(m0 + r, k0 + i + j), 0, lanes) : Simd::zero();
          Simd::transpose(block);
          for (int j = 0; j < lanes; ++j) save_parts(to + (r + j) * kPitch + i, kPartA, block[j]);
        }
      }
    }
    for (std::int64_t r = rows; r < padded_rows; ++r)
      for (std::int64_t i = 0; i < padded_k; i += 16) save_parts(to + r * kPitch + i, kPartA, Simd::zero());
  }

  static inline void pack_b(const Operand<T>& b, std::int64_t n0, std::int64_t columns, std::int64_t k0, std::int64_t length,
                            void* packed) {
    const std::int64_t padded_k = round_up(length, 32);
    const std::int64_t part = padded_k * 32, sliver = part * kParts;  // bf16 elements
    for (std::int64_t c = 0; c < round_up(columns, 32); c += 16) {
      std::uint16_t* const to = static_cast<std::uint16_t*>(packed) + c / 32 * sliver + c % 32 * 2;
      const std::int64_t lanes = imax<std::int64_t>(0, imin<std::int64_t>(16, columns - c));
      if (b.stride_outer == 1) {
        for (std::int64_t i = 0; i < padded_k; i += 2) {
          __m256i even[kParts], odd[kParts];
          const bool some = lanes > 0;
          split<kParts>(some && i < length ? load_columns(b.at(n0 + c, k0 + i), 0, lanes) : Simd::zero(), even);
          split<kParts>(some && i + 1 < length ? load_columns(b.at(n0 + c, k0 + i + 1), 0, lanes) : Simd::zero(), odd);
          for (int p = 0; p < kParts; ++p) {
            const __m512i pairs =
                _mm512_or_si512(_mm512_cvtepu16_epi32(even[p]), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd[p]), 16));
            _mm512_storeu_si512(to + p * part + i * 32, pairs);
          }
        }
      } else {
        // 16 columns x 32 k: a column's k pairs are 16 dwords, so one 16 x 16 dword transpose makes 16 rows of pairs.
        for (std::int64_t i = 0; i < padded_k; i += 32) {
          Reg block[kParts][16];
          for (int j = 0; j < 16; ++j) {
            const bool some = j < lanes;
            const T* const from = some ? b.at(n0 + c + j, k0) : nullptr;
            __m256i low[kParts], high[kParts];
            split<kParts>(some && i < length ? load_columns(from, i, length) : Simd::zero(), low);
            split<kParts>(some && i + 16 < length ? load_columns(from, i + 16, length) : Simd::zero(), high);
            for (int p = 0; p < kParts; ++p)
              block[p][j] = _mm512_castsi512_ps(_mm512_inserti64x4(_mm512_castsi256_si512(low[p]), high[p], 1));
          }
          for (int p = 0; p < kParts; ++p) {
            Simd::transpose(block[p]);
            for (int j = 0; j < 16; ++j) _mm512_storeu_ps(to + p * part + (i / 2 + j) * 64, block[p][j]);
          }
        }
      }
    }
  }

  // Tiles 0..3: sums [row half][column half]; 4, 5: A's halves; 6, 7: B's halves.
  template <bool kBothHalves>
  static inline void tile_rows(std::int64_t k, const std::uint16_t* a, const std::uint16_t* b, float* c, bool first) {
    constexpr int kPitchC = 32 * 4;
    if (first) {
      _tile_zero(0);
      _tile_zero(1);
      if (kBothHalves) {
        _tile_zero(2);
        _tile_zero(3);
      }
    } else {
      _tile_loadd(0, c, kPitchC);
      _tile_loadd(1, c + 16, kPitchC);
      if (kBothHalves) {
        _tile_loadd(2, c + 16 * 32, kPitchC);
        _tile_loadd(3, c + 16 * 32 + 16, kPitchC);
      }
    }
    const std::int64_t part_b = k * 32;
    for (std::int64_t i = 0; i < k; i += 32) {
      for (int pa = 0; pa < kParts; ++pa) {
        const std::uint16_t* const from_a = a + pa * kPartA + i;
        _tile_loadd(4, from_a, kPitch * 2);
        if (kBothHalves) _tile_loadd(5, from_a + 16 * kPitch, kPitch * 2);
        for (int pb = 0; pb + pa < kParts; ++pb) {
          const std::uint16_t* const from_b = b + pb * part_b + i * 32;
          _tile_loadd(6, from_b, 128);
          _tile_dpbf16ps(0, 4, 6);
          _tile_loadd(7, from_b + 32, 128);
          _tile_dpbf16ps(1, 4, 7);
          if (kBothHalves) {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
          }
        }
      }
    }
    _tile_stored(0, c, kPitchC);
    _tile_stored(1, c + 16, kPitchC);
    if (kBothHalves) {
      _tile_stored(2, c + 16 * 32, kPitchC);
      _tile_stored(3, c + 16 * 32 + 16, kPitchC);
    }
  }

  static inline void tile(std::int64_t rows, std::int64_t k, const void* a, std::int64_t i, const void* b, std::int64_t j,
                          float* c, bool first) {
    const std::uint16_t* const from_a = static_cast<const std::uint16_t*>(a) + i * 32 * kPitch;
    const std::uint16_t* const from_b = static_cast<const std::uint16_t*>(b) + j * 32 * k * kParts;
    if (rows > 16) {
      tile_rows<true>(k, from_a, from_b, c, first);
    } else {
      tile_rows<false>(k, from_a, from_b, c, first);
    }
  }

  // An infinite operand has an infinite high part and a NaN remainder; an fp32 near its limit rounds to infinity in bf16. Either way
  // the sum is NaN where the truth may not be: such outputs are computed again without splitting.
  static inline void repair(const Operand<T>& a, const Operand<T>& b, std::int64_t m, std::int64_t n, std::int64_t rows,
                            std::int64_t columns, std::int64_t k, float* c) {
    for (std::int64_t r = 0; r < rows; ++r) {
      float* const row = c + r * 32;
      const unsigned bad = Simd::bits(Simd::is_nan(Simd::load(row))) | Simd::bits(Simd::is_nan(Simd::load(row + 16))) << 16;
      if (bad == 0) continue;
      for (std::int64_t j = 0; j < columns; ++j) {
        if (!(bad >> j & 1u)) continue;
        float sum = 0.0f;
        for (std::int64_t i = 0; i < k; ++i) sum += scalar_value(*a.at(m + r, i)) * scalar_value(*b.at(n + j, i));
        row[j] = sum;
      }
    }
  }
};

}  // namespace
}  // namespace flashkernel::cpu
