// How much of the logits linear_cross_entropy holds at once.
// Invariant: where segments of columns begin depends on the number of classes alone, so the order in which a row's
// exponentials are added does, too.
#pragma once

#include <algorithm>
#include <cstdint>

#include "flashkernel/device.hpp"
#include "flashkernel/dtype.hpp"

namespace flashkernel {

/// Columns that a block sums at once: 16 a thread of 256.
inline constexpr std::int64_t kCudaLossSegment = 4096;
/// The most bytes of logits at once. So many stay in the L2 of a Hopper GPU (50 MB) between the product that writes
/// them and the kernel that reads them, and 4096 rows of 4096 columns in half precision are four rounds of its
/// multiprocessors.
inline constexpr std::int64_t kCudaLogitBytes = std::int64_t{32} << 20;
/// The most bytes of a part of the weight's gradient that is summed apart before it is added to the gradient.
inline constexpr std::int64_t kCudaPartBytes = std::int64_t{64} << 20;
/// On the CPU 512 rows of 1024 columns are 2 MiB of fp32, which a core's or its neighbours' cache holds.
inline constexpr std::int64_t kCpuLossSegment = 1024, kCpuLossRows = 512;
/// Fewer rows than this would take another kernel of linear, with another order of sums (GEMV up to 8, AMX from 48 on):
/// the logits of fewer are made among rows of zeros.
inline constexpr std::int64_t kCpuLeastRows = 64;

struct LossChunks {
  std::int64_t rows, columns, segment;
  std::int64_t pitch;  // elements from a row of logits to the next: rows begin at multiples of 16 bytes
};

/// `part_bytes`: what one column needs beside its logits, 0 where nothing. `invariant`: columns are cut alike for any
/// number of tokens, since the kernel of a chunk's logits, and the order in which grad_x is added, follow from its
/// width.
inline LossChunks loss_chunks(Device device, DType dtype, std::int64_t tokens, std::int64_t classes, bool invariant,
                              std::int64_t part_bytes = 0) {
  const auto divided = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(dtype));
  LossChunks chunks{};
  chunks.segment = std::min(classes, device.is_cpu() ? kCpuLossSegment : kCudaLossSegment);
  const std::int64_t most_rows = device.is_cpu() ? kCpuLossRows : kCudaLogitBytes / (kCudaLossSegment * bytes);
  // Chunks of about the same size: a last one of a few rows would take almost as long as a whole one.
  const std::int64_t many = std::max<std::int64_t>(1, divided(tokens, most_rows));
  chunks.rows = std::clamp<std::int64_t>(divided(divided(tokens, many), 64) * 64, 1, std::max<std::int64_t>(1, tokens));
  chunks.columns = chunks.segment;
  if (!device.is_cpu() && !invariant) {
    std::int64_t most = kCudaLogitBytes / (chunks.rows * bytes);
    if (part_bytes > 0) most = std::min(most, kCudaPartBytes / part_bytes);
    chunks.columns = std::min(classes, std::max<std::int64_t>(1, most / chunks.segment) * chunks.segment);
  }
  chunks.pitch = divided(chunks.columns, 8) * 8;
  return chunks;
}

}  // namespace flashkernel
