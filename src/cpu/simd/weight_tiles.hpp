// Weights whose 16 rows lie side by side in blocks of 32 (QuantizedLinearParams::tiles), read by AVX-512: a register
// holds 4 elements of each of 16 rows. Included by avx512_vnni/ and amx/. Here is what both need: where the parts of a
// tile lie, and the product of one row of x in fp32, for rows that the integers or the bf16 parts cannot carry.
#pragma once

#include <immintrin.h>

#include "cpu/simd/gemm.hpp"
#include "cpu/simd/weight_tiles_plan.hpp"
#include "ops/quantized_linear_params.hpp"

namespace flashkernel::cpu {
namespace {

constexpr std::int64_t kTileRows = quantized::kTileRows;

template <WeightFormat kFormat>
struct WeightTile {
  static constexpr std::int64_t kBytes = kTileRows * quantized::block_bytes(kFormat);
  static constexpr std::int64_t kHead = kTileRows * quantized::head_bytes(kFormat);
  static constexpr bool kBytesEach = kFormat == WeightFormat::kQ8_0;
  static constexpr bool kHasOffset = kFormat == WeightFormat::kQ4_1;

  /// The 16 scales.
  static inline Reg scales(const std::uint8_t* tile) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile)));
  }
  static inline Reg offsets(const std::uint8_t* tile) { return scales(tile + 2 * kTileRows); }

  /// Elements 4 g to 4 g + 3 of each row as bytes: of 8 bits as they are, of 4 bits 0 to 15.
  __attribute__((always_inline)) static inline __m512i bytes(const std::uint8_t* tile, int g) {
    if constexpr (kBytesEach) return _mm512_loadu_si512(tile + kHead + g * 64);
    const __m512i both = _mm512_loadu_si512(tile + kHead + (g & 3) * 64);
    return _mm512_and_si512(g < 4 ? both : _mm512_srli_epi16(both, 4), _mm512_set1_epi8(15));
  }

  /// Element j of the four as integers, the zero taken off.
  __attribute__((always_inline)) static inline __m512i integers(__m512i bytes, int j) {
    const __m512i q = _mm512_srai_epi32(_mm512_slli_epi32(bytes, static_cast<unsigned>(24 - 8 * j)), 24);
    return kFormat == WeightFormat::kQ4_0 ? _mm512_sub_epi32(q, _mm512_set1_epi32(8)) : q;
  }
};

/// f(std::integral_constant<WeightFormat, ...>) of the formats that have tiles
template <class F>
inline void visit_tiled_format(WeightFormat format, F&& f) {
  switch (format) {
    case WeightFormat::kQ4_0: return f(std::integral_constant<WeightFormat, WeightFormat::kQ4_0>{});
    case WeightFormat::kQ4_1: return f(std::integral_constant<WeightFormat, WeightFormat::kQ4_1>{});
    default: return f(std::integral_constant<WeightFormat, WeightFormat::kQ8_0>{});
  }
}

/// sums[0, 16): a row of x with the 16 rows of a group of tiles, in fp32.
template <WeightFormat kFormat, class T>
inline void dots_in_floats(const std::uint8_t* tile, const T* x, std::int64_t in_features, float* sums) {
  using Tile = WeightTile<kFormat>;
  Reg sum = Simd::zero();
  for (std::int64_t i = 0; i < in_features; i += quantized::kBlock, tile += Tile::kBytes) {
    float numbers[quantized::kBlock];
    for (int v = 0; v < quantized::kBlock; v += Simd::kWidth) Simd::save(numbers + v, Simd::load(x + i + v));
    const Reg scale = Tile::scales(tile), offset = Tile::kHasOffset ? Tile::offsets(tile) : Simd::zero();
    for (int g = 0; g < 8; ++g) {
      const __m512i bytes = Tile::bytes(tile, g);
      for (int j = 0; j < 4; ++j) {
        const Reg q = _mm512_cvtepi32_ps(Tile::integers(bytes, j));
        const Reg weight = Tile::kHasOffset ? Simd::fma(q, scale, offset) : Simd::mul(q, scale);
        sum = Simd::fma(weight, Simd::set1(numbers[4 * g + j]), sum);
      }
    }
  }
  Simd::save(sums, sum);
}

}  // namespace
}  // namespace flashkernel::cpu
