// quantized_linear over tiles of 16 rows with AVX512-VNNI, for any number of rows: row
// `quantized_linear/cpu/avx512_vnni`. x becomes integers with one scale for 32 neighbours: X = round(x c / max|x|),
// of 24 bits for fp32 (c = 8355583) and of 16 bits for fp16 and bf16 (c = 32638), cut into signed bytes. Products of
// bytes and their sums within a block are exact; a block's sum meets its scale in fp32. So the error of an element of
// x is at most 2^-24 (2^-16) of the largest of its 32. A row with a NaN, an infinity or a block below 2^-70 goes
// through fp32 instead. Invariant: what a row gives depends on that row alone.
#include "cpu/fast_ops.hpp"
#include "cpu/simd/weight_tiles.hpp"

namespace flashkernel::cpu::avx512_vnni {
namespace {

constexpr std::int64_t kStrip = 32;  // outputs of a task
constexpr int kRowsAtOnce = 4;

template <int kPlanes>
constexpr float kLargest = kPlanes == 3 ? 8355583.0f : 32638.0f;

/// A block of x: `planes` from the highest bytes on.
template <int kPlanes>
struct XBlock {
  std::int8_t planes[kPlanes][quantized::kBlock];
  std::int32_t start[kPlanes];  // - zero * sum of the plane, where the weight's bytes are q + zero
  float scale, sum;             // x = scale * X; the sum of the block's x
};

/// The weight's bytes are taken as q + zero, from 0 on.
template <WeightFormat kFormat>
constexpr int kZero = kFormat == WeightFormat::kQ8_0 ? 128 : (kFormat == WeightFormat::kQ4_0 ? 8 : 0);

/// Whether the row can be integers.
template <WeightFormat kFormat, int kPlanes, class T>
inline bool to_integers(const T* x, std::int64_t blocks, XBlock<kPlanes>* to) {
  for (std::int64_t b = 0; b < blocks; ++b, x += quantized::kBlock, ++to) {
    const Reg part[2] = {Simd::load(x), Simd::load(x + 16)};
    const __m512i sizes =
        _mm512_max_epu32(_mm512_castps_si512(Simd::abs(part[0])), _mm512_castps_si512(Simd::abs(part[1])));
    const std::uint32_t bits = _mm512_reduce_max_epu32(sizes);
    float largest;
    __builtin_memcpy(&largest, &bits, sizeof largest);
    if (bits >= 0x7f800000u || (bits != 0 && largest < 0x1p-70f)) return false;
    const float inverse = bits == 0 ? 0.0f : kLargest<kPlanes> / largest;
    __m512i sums[kPlanes];
    for (int p = 0; p < kPlanes; ++p) sums[p] = _mm512_setzero_si512();
    for (int v = 0; v < 2; ++v) {
      __m512i rest = _mm512_cvtps_epi32(Simd::mul(part[v], Simd::set1(inverse)));
      for (int p = kPlanes - 1; p >= 0; --p) {
        const __m128i bytes = _mm512_cvtepi32_epi8(rest);
        const __m512i wide = _mm512_cvtepi8_epi32(bytes);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to->planes[p] + 16 * v), bytes);
        sums[p] = _mm512_add_epi32(sums[p], wide);
        rest = _mm512_srai_epi32(_mm512_sub_epi32(rest, wide), 8);
      }
    }
    to->scale = largest / kLargest<kPlanes>;
    std::int64_t whole = 0;
    for (int p = 0; p < kPlanes; ++p) {
      const std::int32_t sum = _mm512_reduce_add_epi32(sums[p]);
      to->start[p] = -kZero<kFormat> * sum;
      whole = whole * 256 + sum;
    }
    to->sum = static_cast<float>(whole) * to->scale;
  }
  return true;
}

/// sums[r][0, 16): rows of x, `blocks` blocks each, with the 16 rows of a group of tiles.
template <WeightFormat kFormat, int kPlanes, int kRows>
inline void dots(const std::uint8_t* tile, const XBlock<kPlanes>* x, std::int64_t blocks, float* sums) {
  using Tile = WeightTile<kFormat>;
  Reg total[kRows];
  for (int r = 0; r < kRows; ++r) total[r] = Simd::zero();
  for (std::int64_t b = 0; b < blocks; ++b, tile += Tile::kBytes) {
    __m512i sum[kRows][kPlanes];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 3
      for (int p = 0; p < kPlanes; ++p) sum[r][p] = _mm512_set1_epi32(x[r * blocks + b].start[p]);
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
      __m512i bytes = Tile::bytes(tile, g);
      if constexpr (Tile::kBytesEach) bytes = _mm512_xor_si512(bytes, _mm512_set1_epi8(-128));
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 3
        for (int p = 0; p < kPlanes; ++p) {
          int four;
          __builtin_memcpy(&four, x[r * blocks + b].planes[p] + 4 * g, sizeof four);
          sum[r][p] = _mm512_dpbusd_epi32(sum[r][p], bytes, _mm512_set1_epi32(four));
        }
    }
    const Reg scales = Tile::scales(tile);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const XBlock<kPlanes>& own = x[r * blocks + b];
      // 2^20 at most in each, so that two of them fit 32 bits.
      Reg whole = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(sum[r][0], 8), sum[r][1]));
      if constexpr (kPlanes == 3) whole = Simd::fma(whole, Simd::set1(256.0f), _mm512_cvtepi32_ps(sum[r][2]));
      total[r] = Simd::fma(whole, Simd::mul(scales, Simd::set1(own.scale)), total[r]);
      if constexpr (Tile::kHasOffset) total[r] = Simd::fma(Tile::offsets(tile), Simd::set1(own.sum), total[r]);
    }
  }
  for (int r = 0; r < kRows; ++r) Simd::save(sums + r * kStrip, total[r]);
}

template <WeightFormat kFormat, class T>
inline void run_format(const QuantizedLinearParams& p, const Epilogue<T>& epilogue, void* workspace) {
  constexpr int kPlanes = static_cast<int>(x_planes(sizeof(T)));
  using Block = XBlock<kPlanes>;
  static_assert(sizeof(Block) == x_block_bytes(kPlanes), "fast_support.hpp plans with it");
  const std::int64_t blocks = p.in_features / quantized::kBlock;
  Block* const x = static_cast<Block*>(workspace);
  bool* const safe =
      reinterpret_cast<bool*>(static_cast<char*>(workspace) + round_up(p.rows * blocks * x_block_bytes(kPlanes), 64));
  const auto row_of = [&](std::int64_t r) { return static_cast<const T*>(p.x) + r * p.stride_x_row; };
  auto convert = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t r = begin; r < end; ++r)
      safe[r] = to_integers<kFormat, kPlanes>(row_of(r), blocks, x + r * blocks);
  };
  parallel_for(p.rows, imax<std::int64_t>(1, (std::int64_t{1} << 16) / imax<std::int64_t>(1, p.in_features)), convert);

  auto multiply = [&](std::int64_t begin, std::int64_t end, int) {
    alignas(64) float sums[kRowsAtOnce * kStrip];
    for (std::int64_t strip = begin; strip < end; ++strip) {
      const std::int64_t n0 = strip * kStrip, outs = imin(kStrip, p.out_features - n0);
      for (std::int64_t r = 0; r < p.rows; r += kRowsAtOnce) {
        const std::int64_t rows = imin<std::int64_t>(kRowsAtOnce, p.rows - r);
        for (std::int64_t n = 0; n < outs; n += kTileRows) {
          const std::uint8_t* const tile = p.weight + (n0 + n) / kTileRows * p.stride_weight_row;
          const Block* const own = x + r * blocks;
          switch (rows) {
            case 1: dots<kFormat, kPlanes, 1>(tile, own, blocks, sums + n); break;
            case 2: dots<kFormat, kPlanes, 2>(tile, own, blocks, sums + n); break;
            case 3: dots<kFormat, kPlanes, 3>(tile, own, blocks, sums + n); break;
            default: dots<kFormat, kPlanes, 4>(tile, own, blocks, sums + n); break;
          }
          for (std::int64_t i = 0; i < rows; ++i)
            if (!safe[r + i]) dots_in_floats<kFormat>(tile, row_of(r + i), p.in_features, sums + i * kStrip + n);
        }
        epilogue.tile(sums, kStrip, r, rows, n0, outs);
      }
    }
  };
  parallel_for(ceil_div(p.out_features, kStrip), 1, multiply);
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

}  // namespace flashkernel::cpu::avx512_vnni
