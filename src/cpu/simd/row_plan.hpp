// How the norms' backward pass and the reductions are cut into pieces: read by the kernels and by the workspace sums.
// The pieces depend on the shape only, so results do not depend on the number of threads.
#pragma once

#include <cstdint>

namespace flashkernel::cpu {
namespace {

/// Rows per chunk: at most 64 chunks, none shorter than 16 rows.
constexpr std::int64_t norm_chunk_rows(std::int64_t rows) { return rows <= 16 * 64 ? 16 : (rows + 63) / 64; }
constexpr std::int64_t norm_chunks(std::int64_t rows) {
  return (rows + norm_chunk_rows(rows) - 1) / norm_chunk_rows(rows);
}
/// Floats from one chunk's sums to the next.
constexpr std::int64_t norm_sum_pitch(std::int64_t features) { return (features + 15) / 16 * 16; }

/// A contiguous reduction adds pieces of this many elements (16 KiB of fp32), a strided one pieces of this many rows.
constexpr std::int64_t kReducePiece = 4096;
constexpr std::int64_t kReduceRows = 256;

}  // namespace
}  // namespace flashkernel::cpu
