// Sizes of the workspace of quantized_linear over tiles of 16 rows: what both the kernels and the portable code that
// plans read. Constants only.
#pragma once

#include <cstdint>

#include "cpu/simd/gemm_plan.hpp"

namespace flashkernel::cpu {
namespace {

/// Signed bytes that an element of x becomes beside 31 neighbours with one scale: 24 bits for fp32, 16 for 16-bit
/// types.
constexpr std::int64_t x_planes(std::int64_t element_bytes) { return element_bytes == 4 ? 3 : 2; }

/// Of a block of 32 x: its planes, a start of the sum for each, the scale and the sum of the block. 16 bytes in all
/// for the last three.
constexpr std::int64_t x_block_bytes(std::int64_t planes) { return planes * 32 + planes * 4 + 8; }

/// x in planes, then a byte a row that tells whether it may be used.
constexpr std::int64_t x_planes_bytes(std::int64_t rows, std::int64_t blocks, std::int64_t planes) {
  return gemm_round_up(rows * blocks * x_block_bytes(planes), 64) + gemm_round_up(rows, 64);
}

/// Rows of x that meet a weight which has become bf16 once.
constexpr std::int64_t kTiledRows = 256;
/// Rows from which on the tile unit pays.
constexpr std::int64_t kTiledMinRows = 12;

/// bf16 parts that an element of x is the sum of.
constexpr std::int64_t x_parts(std::int64_t element_bytes, bool bfloat) {
  return element_bytes == 4 ? 3 : (bfloat ? 1 : 2);
}
constexpr std::int64_t tiled_x_bytes(std::int64_t rows, std::int64_t blocks, std::int64_t parts) {
  const std::int64_t padded = gemm_round_up(rows < kTiledRows ? rows : kTiledRows, 32);
  return padded * blocks * (64 * parts + 4) + 64;
}
/// Of a thread: 32 rows of the weight as bf16, their scales and offsets, and the sums of 32 x 32 outputs twice.
constexpr std::int64_t tiled_worker_bytes(std::int64_t blocks) { return blocks * (2048 + 256) + 2 * 4096 + 64; }

}  // namespace
}  // namespace flashkernel::cpu
