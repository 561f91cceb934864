// linear in bf16 for few rows on AMX, the weight as it lies: row `linear/cpu/amx_stream`. A tile of the weight,
// 16 outputs x 32 k, is the *left* operand, loaded from where it is; x, which is small, is the right one, as pairs
// [k / 2][rows]. So a step of 1 KiB takes 16 cycles for up to 16 rows, a fraction of what memory takes, and leaves its
// sums without an addition across lanes. Weight [out, in] with in contiguous; more rows than 32 read it several times.
// Invariant: an output is one chain of sums in steps of 32 along k, that of amx/gemm_amx.hpp with its operands
// exchanged, so rows `linear/cpu/amx` and this one give the same bits.
#include "cpu/amx/gemm_amx.hpp"
#include "cpu/fast_ops.hpp"

namespace flashkernel::cpu::amx {
namespace {

using Micro = AmxMicro<AmxBf16>;

constexpr std::int64_t kPanel = kStreamPanel;                // rows of x in a right tile
constexpr std::int64_t kStep = 32;                           // k of a tile
constexpr std::int64_t kUnit = 16;                           // outputs of a tile
constexpr std::int64_t kUnits = 4, kStrip = kUnits * kUnit;  // that meet the epilogue together

/// Tiles 0, 1: sums of 16 outputs x a panel; 2, 3: x, 4: the weight. One of `columns`: as wide as a single panel is.
struct Configs {
  TileConfig of[kPanel];
};
constexpr Configs configs_of_columns() {
  Configs configs{};
  for (int c = 0; c < kPanel; ++c) {
    TileConfig& config = configs.of[c];
    config.palette = 1;
    for (int t = 0; t < 8; ++t) {
      config.bytes_per_row[t] = static_cast<std::uint16_t>(t < 4 ? 4 * (c + 1) : 64);
      config.rows[t] = 16;
    }
  }
  return configs;
}

struct Session {
  // Constant data: see configure_tiles.
  explicit Session(std::int64_t columns) {
    static constexpr Configs kConfigs = configs_of_columns();
    _tile_loadconfig(&kConfigs.of[columns - 1]);
  }
  ~Session() { release_tiles(); }
};

/// x as panels of `columns` rows, each [k / 2][columns] pairs; zeros behind the last row and the last k.
inline void pack_x(const LinearParams& p, std::int64_t columns, std::uint32_t* to) {
  const std::int64_t steps = ceil_div(p.in_features, kStep);
  const __mmask16 lanes = Simd::lanes(static_cast<int>(columns));
  for (std::int64_t r0 = 0; r0 < p.rows; r0 += kPanel) {
    for (std::int64_t i = 0; i < steps; ++i, to += 16 * columns) {
      __m512i block[16];
      for (int r = 0; r < 16; ++r) {
        const bool some = r0 + r < p.rows;
        const BFloat* const row = static_cast<const BFloat*>(p.x) + (some ? (r0 + r) * p.stride_x_row + i * kStep : 0);
        __m512i parts[1];
        Micro::load32(row, some ? p.in_features - i * kStep : 0, parts);
        block[r] = parts[0];
      }
      if (columns == 1) {  // a column of pairs is the row
        _mm512_storeu_si512(to, block[0]);
        continue;
      }
      Micro::transpose(block);
      for (int pair = 0; pair < 16; ++pair) _mm512_mask_storeu_epi32(to + pair * columns, lanes, block[pair]);
    }
  }
}

/// 16 rows of the weight from `outs` of them and `left` k, the rest zero.
inline void copy_tile(const BFloat* weight, std::int64_t stride, std::int64_t outs, std::int64_t left, BFloat* to) {
  for (std::int64_t o = 0; o < kUnit; ++o) {
    __m512i parts[1];
    Micro::load32(o < outs ? weight + o * stride : weight, o < outs ? left : 0, parts);
    _mm512_storeu_si512(to + o * kStep, parts[0]);
  }
}

template <int kPanels>
inline void multiply_step(const BFloat* weight, std::int64_t pitch_bytes, const std::uint32_t* x, std::int64_t panel,
                          std::int64_t columns) {
  _tile_loadd(4, weight, pitch_bytes);
  _tile_loadd(2, x, columns * 4);
  _tile_dpbf16ps(0, 4, 2);
  if constexpr (kPanels == 2) {
    _tile_loadd(3, x + panel, columns * 4);
    _tile_dpbf16ps(1, 4, 3);
  }
}

/// sums[r][o] of up to 16 outputs with kPanels panels of x, which lie `panel` pairs apart.
template <int kPanels>
inline void multiply_unit(const BFloat* weight, std::int64_t stride, std::int64_t outs, std::int64_t k,
                          const std::uint32_t* x, std::int64_t panel, std::int64_t columns, float* sums) {
  // Lines asked for so many steps before they are needed, then those of the next 16 outputs: 8 KiB on the way hide the
  // memory's latency at the rate of one core.
  constexpr std::int64_t kAhead = 8;
  const std::int64_t steps = ceil_div(k, kStep), whole = outs == kUnit ? k / kStep : 0, ahead = imin(kAhead, steps);
  const std::int64_t pitch_bytes = stride * 2;
  fence();
  _tile_zero(0);
  if constexpr (kPanels == 2) _tile_zero(1);
  for (std::int64_t i = 0; i < whole; ++i) {
    const std::int64_t next = i + ahead;
    const char* const from = reinterpret_cast<const char*>(weight) +
                             (next < steps ? next * kStep * 2 : kUnit * pitch_bytes + (next - steps) * kStep * 2);
#pragma GCC unroll 16
    for (int o = 0; o < 16; ++o) __builtin_prefetch(from + o * pitch_bytes);
    multiply_step<kPanels>(weight + i * kStep, pitch_bytes, x + i * 16 * columns, panel, columns);
  }
  for (std::int64_t i = whole; i < steps; ++i) {
    alignas(64) BFloat tile[kUnit * kStep];
    copy_tile(weight + i * kStep, stride, outs, k - i * kStep, tile);
    fence();
    multiply_step<kPanels>(tile, kStep * 2, x + i * 16 * columns, panel, columns);
  }
  alignas(64) float c[kPanels][16 * 16];
  _tile_stored(0, c[0], columns * 4);
  if constexpr (kPanels == 2) _tile_stored(1, c[1], columns * 4);
  fence();
  for (int q = 0; q < kPanels; ++q) {
    if (columns == 1) {
      Simd::save(sums, Simd::load(c[q]));
      continue;
    }
    Reg block[16];
    for (int o = 0; o < 16; ++o) block[o] = Simd::load_first(c[q] + o * columns, static_cast<int>(columns));
    Simd::transpose(block);
    for (int r = 0; r < columns; ++r) Simd::save(sums + (q * kPanel + r) * kStrip, block[r]);
  }
}

}  // namespace

void linear_stream(const LinearParams& p, void* workspace, Stream) {
  const Epilogue<BFloat> epilogue = epilogue_of<BFloat>(p);
  const std::int64_t k = p.in_features, columns = imin(p.rows, kPanel);
  const std::int64_t panel = ceil_div(k, kStep) * 16 * columns;
  std::uint32_t* const x = static_cast<std::uint32_t*>(workspace);
  pack_x(p, columns, x);
  auto run = [&](std::int64_t begin, std::int64_t end, int) {
    const Session session(columns);
    alignas(64) float sums[2 * kPanel * kStrip];
    for (std::int64_t strip = begin; strip < end; strip += kUnits) {
      const std::int64_t n0 = strip * kUnit, n1 = imin(imin(strip + kUnits, end) * kUnit, p.out_features);
      for (std::int64_t r0 = 0; r0 < p.rows; r0 += 2 * kPanel) {
        const std::uint32_t* const own = x + r0 / kPanel * panel;
        for (std::int64_t n = n0; n < n1; n += kUnit) {
          const BFloat* const weight = static_cast<const BFloat*>(p.weight) + n * p.stride_weight_out;
          const std::int64_t outs = imin(kUnit, n1 - n);
          if (p.rows - r0 > kPanel) {
            multiply_unit<2>(weight, p.stride_weight_out, outs, k, own, panel, columns, sums + n - n0);
          } else {
            multiply_unit<1>(weight, p.stride_weight_out, outs, k, own, panel, columns, sums + n - n0);
          }
        }
        epilogue.tile(sums, kStrip, r0, imin(2 * kPanel, p.rows - r0), n0, n1 - n0);
      }
    }
  };
  const std::int64_t units = ceil_div(p.out_features, kUnit);
  parallel_for(units, stream_grain(units, kUnit * k * 2, num_workers()), run);
}

}  // namespace flashkernel::cpu::amx
