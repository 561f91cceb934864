// Block sizes of the CPU matrix products, the one place that both the kernels (per instruction set) and the workspace
// sums (portable code) read. Constants only. Goto and van de Geijn, "Anatomy of high-performance matrix
// multiplication", 2008.
#pragma once

#include <cstdint>

namespace flashkernel::cpu {
namespace {

/// C[m, n] = sum_k A[m, k] B[n, k], computed in tasks of kMc x kNc outputs over chunks of kKc along k. A chunk's length
/// depends on the total k only, so the order of additions does not depend on the number of threads.
struct GemmBlocks {
  std::int64_t mr, nr;                 // the micro-kernel's tile
  std::int64_t mc, nc, kc;             // outputs of a task and the chunk of k that is packed at once
  std::int64_t sub;                    // k of one pass over the task's tiles
  std::int64_t element_bytes, planes;  // of packed operands; `planes` copies (splits of one number) beside each other
  std::int64_t k_unit;                 // k is padded to a multiple of this
};

// Packed A (mc x kc) and B (nc x kc) together fill 1 to 1.5 MB of a 2 MB L2 cache; the part of B's sliver that is
// walked at once (nr x sub) stays in L1: 32 x 256 fp32 = 32 KiB, 32 x 256 bf16 = 16 KiB. bf16 has the tallest tasks:
// its tiles are so fast that rearranging the weight once for every mc rows shows (measured with mc 256, 384, 512 and nc
// 128, 192, 256).
constexpr GemmBlocks kAvx2Blocks{6, 16, 192, 256, 768, 256, 4, 1, 1};
constexpr GemmBlocks kAvx512Blocks{14, 32, 224, 256, 768, 256, 4, 1, 1};
constexpr GemmBlocks kAmxBf16Blocks{32, 32, 512, 192, 768, 256, 2, 1, 32};
constexpr GemmBlocks kAmxSplitFp16Blocks{32, 32, 256, 256, 768, 256, 2, 2, 32};
constexpr GemmBlocks kAmxSplitFp32Blocks{32, 32, 256, 256, 512, 256, 2, 3, 32};

constexpr std::int64_t gemm_round_up(std::int64_t x, std::int64_t to) { return (x + to - 1) / to * to; }

/// Elements from one packed row of A to the next: 64 bytes more than a chunk, so that rows do not meet in one cache
/// set.
constexpr std::int64_t gemm_row_pitch(const GemmBlocks& b) { return gemm_round_up(b.kc, 32) + 64 / b.element_bytes; }

/// Bytes of one worker's scratch: what its blocks hold (64), packed A, packed B, and the fp32 sums of its task.
constexpr std::int64_t gemm_scratch_a(const GemmBlocks& b) {
  return gemm_round_up(gemm_round_up(b.mc, b.mr) * gemm_row_pitch(b) * b.element_bytes * b.planes, 4096);
}
constexpr std::int64_t gemm_scratch_b(const GemmBlocks& b) {
  return gemm_round_up(gemm_round_up(b.nc, b.nr) * gemm_round_up(b.kc, 32) * b.element_bytes * b.planes, 4096);
}
constexpr std::int64_t gemm_scratch_c(const GemmBlocks& b) {
  return gemm_round_up(gemm_round_up(b.mc, b.mr) * gemm_round_up(b.nc, b.nr) * 4, 4096);
}
constexpr std::int64_t gemm_worker_bytes(const GemmBlocks& b) {
  return 64 + gemm_scratch_a(b) + gemm_scratch_b(b) + gemm_scratch_c(b);
}

/// Rows up to which a product streams the weight through vector registers; AMX tiles take over earlier, fp32 by splits
/// later.
constexpr std::int64_t kGemvRows = 8;
constexpr std::int64_t kAmxMinRows = 5, kAmxSplitMinRows = 49;
/// Elements from one fp32 row of x to the next in that case.
constexpr std::int64_t gemv_pitch(std::int64_t in_features) { return gemm_round_up(in_features, 16) + 16; }

/// Rows of x that share a tile where the weight is streamed through AMX, and the rows up to which one stream serves
/// all.
constexpr std::int64_t kStreamPanel = 16, kStreamRows = 2 * kStreamPanel;
/// x in bf16, its rows made up to whole tiles where they need more than one.
constexpr std::int64_t stream_x_bytes(std::int64_t rows, std::int64_t in_features) {
  return (rows < kStreamPanel ? rows : gemm_round_up(rows, kStreamPanel)) * gemm_round_up(in_features, 32) * 2;
}

/// How many units of a streamed weight a thread takes at once: as many runs for each thread, of half a megabyte at most
/// (the first lines of a run are waited for).
constexpr std::int64_t stream_grain(std::int64_t units, std::int64_t unit_bytes, std::int64_t workers) {
  constexpr std::int64_t kRunBytes = std::int64_t{512} << 10;
  const std::int64_t most = unit_bytes >= kRunBytes ? 1 : (unit_bytes < 1 ? units : kRunBytes / unit_bytes);
  if (units <= 1 || most < 1) return 1;
  const std::int64_t runs = gemm_round_up((units + most - 1) / most, workers);
  return (units + runs - 1) / runs;
}

}  // namespace
}  // namespace flashkernel::cpu
