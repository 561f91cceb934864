// The AMX micro-kernel of simd/gemm.hpp: 32 x 32 outputs in four tile registers, fp32 sums.
// bf16 operands are multiplied as they are, fp16 too where the processor has AMX-FP16. Otherwise fp16 and fp32 operands
// are split exactly into bf16 parts when they are packed (x = hi + mid + lo, 8 bits each) and the products that matter
// are summed: fp16 has 2 parts and 3 products (what is dropped is below 2^-17 of a product), fp32 3 parts and 6
// products (below 2^-25, less than fp32 itself rounds). Henry, Tang and Heinecke, "Leveraging the bfloat16 artificial
// intelligence datatype for higher-precision computations", 2019. The tile unit takes subnormal bf16 parts and sums as
// zero. Packed blocks are made of 1 KiB tiles that lie in the order in which they are read. A: [16 rows][part][k / 32]
// tiles of 16 rows x 32 k. B: [32 columns][part][k / 32][2 halves] tiles of 16 pairs of k x 16 columns.
#pragma once

#include "cpu/amx/tdpfp16ps.hpp"
#include "cpu/amx/tiles.hpp"
#include "cpu/simd/gemm.hpp"

namespace flashkernel::cpu {
namespace {

constexpr std::int64_t kTile = 512;  // 16-bit elements of a tile

/// How a dtype meets the tile unit: block sizes, parts, and whether the parts are the dtype's own bits.
struct AmxBf16 {
  using Element = BFloat;
  static constexpr bool kMultipliesHalf = false;
  static constexpr GemmBlocks kBlocks = kAmxBf16Blocks;
};
struct AmxFp16 {  // AMX-FP16
  using Element = Half;
  static constexpr bool kMultipliesHalf = true;
  static constexpr GemmBlocks kBlocks = kAmxBf16Blocks;
};
struct AmxSplitFp16 {
  using Element = Half;
  static constexpr bool kMultipliesHalf = false;
  static constexpr GemmBlocks kBlocks = kAmxSplitFp16Blocks;
};
struct AmxSplitFp32 {
  using Element = float;
  static constexpr bool kMultipliesHalf = false;
  static constexpr GemmBlocks kBlocks = kAmxSplitFp32Blocks;
};

template <class Format>
struct AmxMicro {
  using T = typename Format::Element;
  static constexpr GemmBlocks kBlocks = Format::kBlocks;
  static constexpr int kParts = static_cast<int>(kBlocks.planes);
  static constexpr bool kSplits = kParts > 1;
  static constexpr bool kIsHalf = Format::kMultipliesHalf;

  // Palette 1, all eight tiles 16 rows x 64 bytes.
  struct Session {
    Session() { configure_tiles(); }
    ~Session() { release_tiles(); }
  };

  // 16 fp32 -> the bf16 parts of each. Nearest even, so that a remainder has at most as many bits as fp32 holds
  // exactly.
  static inline void split(Reg x, __m256i (&parts)[kParts]) {
    for (int p = 0; p < kParts; ++p) {
      parts[p] = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));
      if (p + 1 < kParts) x = Simd::sub(x, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(parts[p]), 16)));
    }
  }

  /// Parts of 16 elements, the first `count` of them from memory and the rest zero.
  static inline void load16(const T* from, std::int64_t count, __m256i (&parts)[kParts]) {
    if constexpr (kSplits) {
      split(count > 0 ? load_columns(from, 0, count) : Simd::zero(), parts);
    } else {
      if (count >= 16) {
        parts[0] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      } else {
        parts[0] = _mm256_maskz_loadu_epi16(count > 0 ? static_cast<__mmask16>((1u << count) - 1u) : 0, from);
      }
    }
  }

  /// Parts of 32 elements along k.
  static inline void load32(const T* from, std::int64_t count, __m512i (&parts)[kParts]) {
    if constexpr (kSplits) {
      __m256i low[kParts], high[kParts];
      load16(from, count, low);
      load16(from + 16, count - 16, high);
      for (int p = 0; p < kParts; ++p) parts[p] = _mm512_inserti64x4(_mm512_castsi256_si512(low[p]), high[p], 1);
    } else {
      if (count >= 32) {
        parts[0] = _mm512_loadu_si512(from);
      } else {
        parts[0] = _mm512_maskz_loadu_epi16(count > 0 ? (1u << count) - 1u : 0, from);
      }
    }
  }

  /// Parts of 16 outer elements at k and k + 1 as 16 pairs; `k_left` counts the k that exist.
  static inline void load_pairs(const Operand<T>& from, std::int64_t outer, std::int64_t lanes, std::int64_t k,
                                std::int64_t k_left, __m512i (&parts)[kParts]) {
    __m256i even[kParts], odd[kParts];
    load16(from.at(outer, k), k_left > 0 ? lanes : 0, even);
    load16(from.at(outer, k + 1), k_left > 1 ? lanes : 0, odd);
    for (int p = 0; p < kParts; ++p)
      parts[p] = _mm512_or_si512(_mm512_cvtepu16_epi32(even[p]), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd[p]), 16));
  }

  /// 16 registers of 16 dwords, transposed.
  static inline void transpose(__m512i (&rows)[16]) {
    Reg r[16];
    for (int i = 0; i < 16; ++i) r[i] = _mm512_castsi512_ps(rows[i]);
    Simd::transpose(r);
    for (int i = 0; i < 16; ++i) rows[i] = _mm512_castps_si512(r[i]);
  }

  static inline void pack_a(const Operand<T>& a, std::int64_t m0, std::int64_t rows, std::int64_t k0,
                            std::int64_t length, void* packed) {
    const std::int64_t padded_k = round_up(length, 32), part = padded_k * 16;
    if (a.stride_k == 1) {
      for (std::int64_t r = 0; r < round_up(rows, 16); ++r) {
        std::uint16_t* const to = static_cast<std::uint16_t*>(packed) + r / 16 * kParts * part + r % 16 * 32;
        const T* const from = r < rows ? a.at(m0 + r, k0) : a.data;
        for (std::int64_t i = 0; i < padded_k; i += 32) {
          __m512i parts[kParts];
          load32(r < rows ? from + i : from, r < rows ? length - i : 0, parts);
          for (int p = 0; p < kParts; ++p) _mm512_storeu_si512(to + p * part + i * 16, parts[p]);
        }
      }
      return;
    }
    // k outside: a row of memory is read to its end while its lines and page are at hand.
    for (std::int64_t i = 0; i < padded_k; i += 32) {
      for (std::int64_t r = 0; r < rows; r += 16) {
        std::uint16_t* const tile = static_cast<std::uint16_t*>(packed) + r / 16 * kParts * part + i * 16;
        const std::int64_t lanes = imin<std::int64_t>(16, rows - r);
        __m512i block[kParts][16];
        for (int j = 0; j < 16; ++j) {
          __m512i parts[kParts];
          load_pairs(a, m0 + r, lanes, k0 + i + 2 * j, length - i - 2 * j, parts);
          for (int p = 0; p < kParts; ++p) block[p][j] = parts[p];
        }
        for (int p = 0; p < kParts; ++p) {
          transpose(block[p]);
          for (int j = 0; j < 16; ++j) _mm512_storeu_si512(tile + p * part + j * 32, block[p][j]);
        }
      }
    }
  }

  static inline void pack_b(const Operand<T>& b, std::int64_t n0, std::int64_t columns, std::int64_t k0,
                            std::int64_t length, void* packed) {
    const std::int64_t padded_k = round_up(length, 32), part = padded_k * 32;
    const auto half_at = [&](std::int64_t c) {
      return static_cast<std::uint16_t*>(packed) + c / 32 * kParts * part + c % 32 / 16 * kTile;
    };
    if (b.stride_outer == 1) {
      for (std::int64_t i = 0; i < padded_k; i += 2) {
        for (std::int64_t c = 0; c < round_up(columns, 32); c += 16) {
          __m512i parts[kParts];
          load_pairs(b, n0 + c, imin<std::int64_t>(16, columns - c), k0 + i, length - i, parts);
          for (int p = 0; p < kParts; ++p)
            _mm512_storeu_si512(half_at(c) + p * part + i / 32 * 2 * kTile + i % 32 * 16, parts[p]);
        }
      }
      return;
    }
    // A column's 16 pairs of k; the transpose turns 16 columns into 16 rows of pairs.
    for (std::int64_t c = 0; c < round_up(columns, 32); c += 16) {
      for (std::int64_t i = 0; i < padded_k; i += 32) {
        __m512i block[kParts][16];
        for (int j = 0; j < 16; ++j) {
          __m512i parts[kParts];
          const bool some = c + j < columns;
          load32(some ? b.at(n0 + c + j, k0 + i) : b.data, some ? length - i : 0, parts);
          for (int p = 0; p < kParts; ++p) block[p][j] = parts[p];
        }
        for (int p = 0; p < kParts; ++p) {
          transpose(block[p]);
          for (int j = 0; j < 16; ++j) _mm512_storeu_si512(half_at(c) + p * part + i * 32 + j * 32, block[p][j]);
        }
      }
    }
  }

  // Sum tile kDst += A tile * B tile. The bf16 intrinsic takes literals only.
  template <int kDst>
  static inline void multiply() {
    constexpr int kA = kDst < 2 ? 4 : 5, kB = kDst % 2 ? 7 : 6;
    if constexpr (kIsHalf) {
      tdpfp16ps<kDst, kA, kB>();
    } else if constexpr (kDst == 0) {
      _tile_dpbf16ps(0, 4, 6);
    } else if constexpr (kDst == 1) {
      _tile_dpbf16ps(1, 4, 7);
    } else if constexpr (kDst == 2) {
      _tile_dpbf16ps(2, 5, 6);
    } else {
      _tile_dpbf16ps(3, 5, 7);
    }
  }

  // Tiles 0..3: sums [row half][column half]; 4, 5: A's halves; 6, 7: B's halves.
  template <bool kBothHalves>
  static inline void tile_rows(std::int64_t padded_k, std::int64_t from, std::int64_t to, const std::uint16_t* a,
                               const std::uint16_t* b, float* c, bool first) {
    constexpr int kPitchC = 32 * 4;
    fence();  // what was packed must lie in memory: the compiler does not know that tile instructions read it
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
    const std::int64_t part_a = padded_k * 16, part_b = padded_k * 32;
    for (std::int64_t i = from; i < to; i += 32) {
      for (int pa = 0; pa < kParts; ++pa) {
        const std::uint16_t* const from_a = a + pa * part_a + i * 16;
        _tile_loadd(4, from_a, 64);
        if (kBothHalves) _tile_loadd(5, from_a + kParts * part_a, 64);
        for (int pb = 0; pb + pa < kParts; ++pb) {
          const std::uint16_t* const from_b = b + pb * part_b + i * 32;
          _tile_loadd(6, from_b, 64);
          multiply<0>();
          _tile_loadd(7, from_b + kTile, 64);
          multiply<1>();
          if (kBothHalves) {
            multiply<2>();
            multiply<3>();
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
    fence();
  }

  static inline void tile(std::int64_t rows, std::int64_t padded_k, std::int64_t from, std::int64_t to, const void* a,
                          std::int64_t i, const void* b, std::int64_t j, float* c, bool first) {
    const std::uint16_t* const from_a = static_cast<const std::uint16_t*>(a) + i * 2 * kParts * padded_k * 16;
    const std::uint16_t* const from_b = static_cast<const std::uint16_t*>(b) + j * kParts * padded_k * 32;
    // For fp32 results a pass starts from zero and is added as a whole, as in gemm_vec.hpp: sums of sums round less
    // than one long sum.
    constexpr bool kRestarts = sizeof(T) == 4;
    alignas(64) float pass[kRestarts ? 32 * 32 : 1];
    const bool restart = kRestarts && !first;
    float* const sums = restart ? pass : c;
    if (rows > 16) {
      tile_rows<true>(padded_k, from, to, from_a, from_b, sums, first || restart);
    } else {
      tile_rows<false>(padded_k, from, to, from_a, from_b, sums, first || restart);
    }
    if (!restart) return;
    for (std::int64_t e = 0; e < (rows > 16 ? 32 : 16) * 32; e += 16)
      Simd::save(c + e, Simd::add(Simd::load(c + e), Simd::load(pass + e)));
  }

  // An infinite operand has an infinite high part and a NaN remainder; an fp32 near its limit rounds to infinity in
  // bf16. Either way the sum is NaN where the truth may not be: such outputs are computed again without splitting.
  static inline void repair(const Operand<T>& a, const Operand<T>& b, std::int64_t m, std::int64_t n, std::int64_t rows,
                            std::int64_t columns, std::int64_t k, float* c) {
    for (std::int64_t r = 0; r < rows; ++r) {
      float* const row = c + r * 32;
      const unsigned bad = Simd::bits(Simd::is_nan(Simd::load(row))) | Simd::bits(Simd::is_nan(Simd::load(row + 16)))
                                                                           << 16;
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
