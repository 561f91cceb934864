// quantized_linear over tiles of 16 rows on AMX, for many rows of x: row `quantized_linear/cpu/amx`. The integers of
// the weight are exact in bf16; x is the sum of bf16 parts, 1 of a bf16, 2 of an fp16, 3 of an fp32 (Henry, Tang,
// Heinecke 2019), so a product rounds nothing. A tile has k of one block: its 32 products are summed in fp32, and the
// sum meets the block's scale in a vector register. q4_1's offset is multiplied by the block's sum of x. An output
// that is NaN (an infinity in x, an fp32 near its limit) is computed again in fp32. Invariant: a task owns its outputs.
#include "cpu/amx/gemm_amx.hpp"
#include "cpu/fast_ops.hpp"
#include "cpu/simd/weight_tiles.hpp"

namespace flashkernel::cpu::amx {
namespace {

template <class T>
struct FormatOf;
template <>
struct FormatOf<float> {
  using Type = AmxSplitFp32;
};
template <>
struct FormatOf<Half> {
  using Type = AmxSplitFp16;
};
template <>
struct FormatOf<BFloat> {
  using Type = AmxBf16;
};

using Word = std::uint16_t;

/// 16 rows of x as tiles [block][part]; sums [block][16] of a block's x.
template <class T>
inline void split_rows(const QuantizedLinearParams& p, std::int64_t r0, Word* to, float* sums) {
  using Micro = AmxMicro<typename FormatOf<T>::Type>;
  const std::int64_t blocks = p.in_features / quantized::kBlock;
  for (std::int64_t r = 0; r < kTileRows; ++r) {
    const bool some = r0 + r < p.rows;
    const T* const row = static_cast<const T*>(p.x) + (some ? r0 + r : 0) * p.stride_x_row;
    for (std::int64_t b = 0; b < blocks; ++b) {
      __m512i parts[Micro::kParts];
      Micro::load32(row + b * quantized::kBlock, some ? quantized::kBlock : 0, parts);
      for (int i = 0; i < Micro::kParts; ++i)
        _mm512_storeu_si512(to + (b * Micro::kParts + i) * kTile + r * 32, parts[i]);
      if (p.format != WeightFormat::kQ4_1) continue;
      const T* const from = row + b * quantized::kBlock;
      sums[b * kTileRows + r] = some ? Simd::sum(Simd::add(Simd::load(from), Simd::load(from + 16))) : 0.0f;
    }
  }
}

/// 16 rows of the weight as tiles of pairs of k [block][2 halves]; scales and offsets [block][2 halves][16].
template <WeightFormat kFormat>
inline void widen_tiles(const std::uint8_t* from, std::int64_t blocks, Word* to, float* scales, float* offsets) {
  using Tile = WeightTile<kFormat>;
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  for (std::int64_t b = 0; b < blocks; ++b, from += Tile::kBytes, to += 2 * kTile) {
    Simd::save(scales + b * 2 * kTileRows, Tile::scales(from));
    if constexpr (Tile::kHasOffset) Simd::save(offsets + b * 2 * kTileRows, Tile::offsets(from));
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
      const __m512i bytes = Tile::bytes(from, g);
      for (int pair = 0; pair < 2; ++pair) {
        const __m512i even = _mm512_castps_si512(_mm512_cvtepi32_ps(Tile::integers(bytes, 2 * pair)));
        const __m512i odd = _mm512_castps_si512(_mm512_cvtepi32_ps(Tile::integers(bytes, 2 * pair + 1)));
        _mm512_storeu_si512(to + (2 * g + pair) * 32,
                            _mm512_or_si512(_mm512_srli_epi32(even, 16), _mm512_and_si512(odd, high)));
      }
    }
  }
}

/// totals += scales * sums (+ offsets * sum of x) of 16 kHalves rows and 32 outputs.
template <bool kHasOffset>
inline void add_block(const float* sums, const float* scales, const float* offsets, const float* of_x,
                      std::int64_t pitch_x, int halves, bool first, float* totals) {
  const Reg scale[2] = {Simd::load(scales), Simd::load(scales + kTileRows)};
  const Reg offset[2] = {kHasOffset ? Simd::load(offsets) : Simd::zero(),
                         kHasOffset ? Simd::load(offsets + kTileRows) : Simd::zero()};
  for (int half = 0; half < halves; ++half) {
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      for (int c = 0; c < 2; ++c) {
        const std::int64_t at = (half * kTileRows + r) * 32 + c * 16;
        Reg total = first ? Simd::mul(Simd::load(sums + at), scale[c])
                          : Simd::fma(Simd::load(sums + at), scale[c], Simd::load(totals + at));
        if constexpr (kHasOffset) total = Simd::fma(offset[c], Simd::set1(of_x[half * pitch_x + r]), total);
        Simd::save(totals + at, total);
      }
    }
  }
}

template <WeightFormat kFormat, class T>
inline void run_format(const QuantizedLinearParams& p, const Epilogue<T>& epilogue, void* workspace) {
  using Micro = AmxMicro<typename FormatOf<T>::Type>;
  using Tile = WeightTile<kFormat>;
  constexpr int kParts = Micro::kParts;
  static_assert(kParts == x_parts(sizeof(T), std::is_same_v<T, BFloat>), "fast_support.hpp plans with it");
  const std::int64_t blocks = p.in_features / quantized::kBlock, row_tile = blocks * kParts * kTile;
  char* const base = static_cast<char*>(workspace);
  const std::int64_t padded = round_up(imin(p.rows, kTiledRows), 32);
  Word* const x = reinterpret_cast<Word*>(base);
  float* const of_x = reinterpret_cast<float*>(base + padded * blocks * 64 * kParts);
  char* const scratch = base + round_up(tiled_x_bytes(p.rows, blocks, kParts), 64);

  for (std::int64_t m0 = 0; m0 < p.rows; m0 += kTiledRows) {
    const std::int64_t rows = imin(kTiledRows, p.rows - m0), tiles = ceil_div(rows, kTileRows);
    auto split = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t t = begin; t < end; ++t)
        split_rows<T>(p, m0 + t * kTileRows, x + t * row_tile, of_x + t * blocks * kTileRows);
    };
    parallel_for(tiles, 1, split);

    auto multiply = [&](std::int64_t begin, std::int64_t end, int worker) {
      const typename Micro::Session session;
      char* const own = scratch + worker * round_up(tiled_worker_bytes(blocks), 64);
      float* const totals = reinterpret_cast<float*>(own);
      float* const sums = totals + 1024;
      Word* const weight = reinterpret_cast<Word*>(own + 8192);
      float* const scales = reinterpret_cast<float*>(own + 8192 + blocks * 2048);
      float* const offsets = scales + blocks * 32;
      for (std::int64_t strip = begin; strip < end; ++strip) {
        const std::int64_t n0 = strip * 32, outs = imin<std::int64_t>(32, p.out_features - n0);
        const std::uint8_t* const from = p.weight + n0 / kTileRows * p.stride_weight_row;
        widen_tiles<kFormat>(from, blocks, weight, scales, offsets);
        // A last strip of 16 outputs takes them twice.
        widen_tiles<kFormat>(from + (outs > 16 ? p.stride_weight_row : 0), blocks, weight + kTile, scales + 16,
                             offsets + 16);
        for (std::int64_t t = 0; t < tiles; t += 2) {
          const int halves = t + 1 < tiles ? 2 : 1;
          const Word* const a = x + t * row_tile;
          for (std::int64_t i = 0; i < (blocks == 0 ? 1024 : 0); ++i) totals[i] = 0.0f;
          fence();
          for (std::int64_t b = 0; b < blocks; ++b) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_loadd(6, weight + b * 2 * kTile, 64);
            _tile_loadd(7, weight + (b * 2 + 1) * kTile, 64);
            if (halves == 2) {
              _tile_zero(2);
              _tile_zero(3);
            }
            for (int i = 0; i < kParts; ++i) {
              const Word* const part = a + (b * kParts + i) * kTile;
              _tile_loadd(4, part, 64);
              Micro::template multiply<0>();
              Micro::template multiply<1>();
              if (halves == 2) {
                _tile_loadd(5, part + row_tile, 64);
                Micro::template multiply<2>();
                Micro::template multiply<3>();
              }
            }
            _tile_stored(0, sums, 128);
            _tile_stored(1, sums + 16, 128);
            if (halves == 2) {
              _tile_stored(2, sums + 16 * 32, 128);
              _tile_stored(3, sums + 16 * 32 + 16, 128);
            }
            fence();
            add_block<Tile::kHasOffset>(sums, scales + b * 32, offsets + b * 32, of_x + (t * blocks + b) * kTileRows,
                                        blocks * kTileRows, halves, b == 0, totals);
          }
          const std::int64_t m = m0 + t * kTileRows, some = imin<std::int64_t>(halves * kTileRows, m0 + rows - m);
          for (std::int64_t r = 0; r < some; ++r)
            for (std::int64_t c = 0; c < outs; c += kTileRows)
              if (Simd::bits(Simd::is_nan(Simd::load(totals + r * 32 + c))))
                dots_in_floats<kFormat>(from + c / kTileRows * p.stride_weight_row,
                                        static_cast<const T*>(p.x) + (m + r) * p.stride_x_row, p.in_features,
                                        totals + r * 32 + c);
          epilogue.tile(totals, 32, m, some, n0, outs);
        }
      }
    };
    parallel_for(ceil_div(p.out_features, std::int64_t{32}), 1, multiply);
  }
}

}  // namespace

void quantized_linear_tiles(const QuantizedLinearParams& p, void* workspace, Stream) {
  visit_type(p.dtype, [&](auto type) {
    using T = decltype(type);
    const Epilogue<T> epilogue{static_cast<T*>(p.out), nullptr,     p.stride_out_row, 0, p.bias.data,
                               p.bias.dtype,           p.activation};
    visit_tiled_format(p.format, [&](auto format) { run_format<decltype(format)::value>(p, epilogue, workspace); });
  });
}

}  // namespace flashkernel::cpu::amx
