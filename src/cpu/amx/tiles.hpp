// AMX tiles: eight registers of 16 rows x 64 bytes. Used by amx/attention_fwd.cpp and, for setting up, by
// amx/gemm_amx.hpp: 0..3 accumulate a 32 x 32 block of fp32, 4 and 5 hold the left operand's two row tiles, 6 and 7 the
// right operand's two column tiles. Left tiles are [16 rows][32 bf16]; right tiles are [16 pairs][16 columns][2 bf16],
// the two values of a pair being neighbours along the summed dimension. Invariant: the compiler does not know that tile
// instructions touch memory, so every group of them stands between two `fence()`s. Source: Intel 64 and IA-32 SDM,
// volume 1, chapter 18, and TDPBF16PS (inputs and results flush denormals, rounds to nearest).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/amx/tdpfp16ps.hpp"

namespace flashkernel::cpu {
namespace {

constexpr int kTileBytes = 1024;
constexpr int kTileValues = 512;  // bf16 values a tile

// Keeps the compiler (not the processor, which needs nothing) from moving stores across.
inline void fence() { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

struct alignas(64) TileConfig {
  std::uint8_t palette, start_row, reserved[14];
  std::uint16_t bytes_per_row[16];
  std::uint8_t rows[16];
};

// Constant data, because GCC 12 believes that LDTILECFG reads eight bytes only and would drop stores to the rest.
inline void configure_tiles() {
  static constexpr TileConfig kAllFull = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
  _tile_loadconfig(&kAllFull);
}

inline void release_tiles() { _tile_release(); }

inline void zero_accumulators() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// c: 32 x 32 fp32, `stride` bytes from row to row.
inline void load_accumulators(const float* c, std::int64_t stride) {
  const float* lower = c + 16 * (stride / 4);
  _tile_loadd(0, c, stride);
  _tile_loadd(1, c + 16, stride);
  _tile_loadd(2, lower, stride);
  _tile_loadd(3, lower + 16, stride);
}
inline void store_accumulators(float* c, std::int64_t stride) {
  float* lower = c + 16 * (stride / 4);
  _tile_stored(0, c, stride);
  _tile_stored(1, c + 16, stride);
  _tile_stored(2, lower, stride);
  _tile_stored(3, lower + 16, stride);
}

// Accumulator kC += tile kA times tile kB, of bf16 or of fp16.
template <bool kHalf, int kC, int kA, int kB>
inline void multiply_tile() {
  if constexpr (kHalf) {
    tdpfp16ps<kC, kA, kB>();
  } else if constexpr (kC == 0) {  // the intrinsic takes literals only
    _tile_dpbf16ps(0, 4, 6);
  } else if constexpr (kC == 1) {
    _tile_dpbf16ps(1, 4, 7);
  } else if constexpr (kC == 2) {
    _tile_dpbf16ps(2, 5, 6);
  } else {
    _tile_dpbf16ps(3, 5, 7);
  }
}

// Accumulators += A B over kParts x kParts parts of each, leaving out the products too small to matter (i + j >=
// kParts). Tile t of part i of A for row tile r lies at a + (i * a_part + r * a_row) values, and so on.
template <int kParts, bool kHalf>
inline void multiply_tiles(const std::uint16_t* a, std::int64_t a_part, std::int64_t a_row, const std::uint16_t* b,
                           std::int64_t b_part, std::int64_t b_column) {
#pragma GCC unroll 3
  for (int i = 0; i < kParts; ++i) {
    _tile_loadd(4, a + i * a_part, 64);
    _tile_loadd(5, a + i * a_part + a_row, 64);
#pragma GCC unroll 3
    for (int j = 0; j < kParts - i; ++j) {
      _tile_loadd(6, b + j * b_part, 64);
      _tile_loadd(7, b + j * b_part + b_column, 64);
      multiply_tile<kHalf, 0, 4, 6>();
      multiply_tile<kHalf, 1, 4, 7>();
      multiply_tile<kHalf, 2, 5, 6>();
      multiply_tile<kHalf, 3, 5, 7>();
    }
  }
}

}  // namespace
}  // namespace flashkernel::cpu
