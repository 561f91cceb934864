// How linear_fp8 cuts a call on 9.0: the width of a tile, and for few rows how many blocks share k. Host code, tested
// by tests_cpp/linear_fp8_plan_test.cpp.
#pragma once

#include <algorithm>
#include <cstdint>

namespace flashkernel::cuda::sm90a::fp8_plan {

inline constexpr int kTileK = 128;            // elements, which have one scale
inline constexpr int kTileM = 128;            // rows of x in large tiles, rows of the weight where x has few
inline constexpr int kWidths[] = {128, 192};  // of large tiles
inline constexpr int kFewRows[] = {8, 16, 32, 64, 128};
inline constexpr int kMostParts = 8;  // of k: the blocks of a cluster
inline constexpr double kNever = 1e30;

// A model of an H200, in microseconds, by what was measured there (lab/notebooks/linear_fp8.md): products of a
// multiprocessor in one, bytes that the device brings from memory in one, a launch, and a tile's results.
inline constexpr double kProductsPerUs = 3.8e6, kMemoryBytesPerUs = 4.5e6, kLaunchUs = 3, kTileEndUs = 1.5;

struct Extent {
  std::int64_t rows, in_features, out_features;
};

struct Plan {
  int width = 0;  // of a large tile, or rows of x of a tile of few
  int parts = 1;
  double us = kNever;
};

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

inline double memory_us(const Extent& e) {
  const double bytes = static_cast<double>(e.in_features) * static_cast<double>(e.rows + e.out_features) +
                       2.0 * static_cast<double>(e.rows) * static_cast<double>(e.out_features);
  return bytes / kMemoryBytesPerUs;
}

/// A block's time for a k-tile of a large tile.
inline double k_tile_us(int width) { return static_cast<double>(kTileM) * width * kTileK / kProductsPerUs; }

inline Plan plan_tiles(const Extent& e, int num_sms) {
  Plan best;
  for (const int width : kWidths) {
    if (e.out_features < width) continue;
    const std::int64_t tiles = ceil_div(e.rows, kTileM) * ceil_div(e.out_features, width);
    const double tile = static_cast<double>(ceil_div(e.in_features, kTileK)) * k_tile_us(width) + kTileEndUs;
    const double us = kLaunchUs + std::max(static_cast<double>(ceil_div(tiles, num_sms)) * tile, memory_us(e));
    if (us < best.us) best = {width, 1, us};
  }
  return best;
}

/// Bytes of shared memory that a tile of `width` rows of x takes a stage and, for their scales, a k-tile.
constexpr int stage_bytes(int width) { return (kTileM + width) * kTileK; }
/// Blocks that a multiprocessor runs at once.
constexpr int blocks_at_once(int width) { return width <= 64 ? 2 : 1; }
/// A block's time for a k-tile of few rows: how soon bytes come, and with many rows the products.
inline double few_rows_k_tile_us(int width) {
  return width <= 16 ? 0.19 : width == 32 ? 0.27 : width == 64 ? 0.42 : 0.75;
}
/// What it takes to launch clusters of `parts` blocks, and for their sums to meet.
inline double meeting_us(int parts) { return parts == 1 ? 0.0 : parts == 2 ? 1.5 : parts == 4 ? 3.0 : 8.0; }

/// k-tiles of a part whose scales of x a block has room for.
inline constexpr std::int64_t kMostKTiles = 64;
inline constexpr std::int64_t kMostRowsOfFew = 1024;

inline Plan plan_few_rows(const Extent& e, int num_sms) {
  Plan best;
  const std::int64_t k_tiles = ceil_div(e.in_features, kTileK);
  for (const int width : kFewRows) {
    if (width < kFewRows[4] && e.rows > width) continue;  // several tiles of x: of the widest alone
    const std::int64_t tiles = ceil_div(e.out_features, kTileM) * ceil_div(e.rows, width);
    for (int parts = 1; parts <= kMostParts; parts *= 2) {
      const std::int64_t each = ceil_div(k_tiles, parts);
      if (each > kMostKTiles || (parts > 1 && k_tiles < parts)) continue;
      const int at_once = blocks_at_once(width);
      const double rounds = static_cast<double>(ceil_div(tiles * parts, num_sms * at_once));
      const double us = kLaunchUs + meeting_us(parts) +
                        std::max(rounds * static_cast<double>(each) * few_rows_k_tile_us(width), memory_us(e));
      if (us < best.us) best = {width, parts, us};
    }
    if (best.width) break;
  }
  return best;
}

}  // namespace flashkernel::cuda::sm90a::fp8_plan
