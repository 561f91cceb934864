// What the blocks of a row share, and sums and orders over a warp. Called by sample.cuh.
#pragma once

#include "cuda/tile/reduce.cuh"
#include "ops/sample_params.hpp"

namespace flashkernel::cuda::sampler {

constexpr int kThreads = 512, kWarps = kThreads / kWarp;
static_assert(kWarps <= kWarp, "a warp has a lane for each warp's sum");
constexpr int kBinBits = 9, kBins = 1 << kBinBits;
constexpr int kFirstShift = 21;  // of distances, to bins of the first round
/// Nearer tokens than this weigh more than 2^-12 of the best one, and are listed.
constexpr std::uint32_t kNear = 12u << sampling::kFractionBits;
constexpr int kNearBins = static_cast<int>(kNear >> kFirstShift), kFarBin = kNearBins;
constexpr int kAllBins = static_cast<int>(sampling::kFar >> kFirstShift);
constexpr int kListed = 128;  // near tokens of a warp; more are not listed
/// The most tokens at a limit that are compared with each other.
constexpr int kFinalists = 128;
static_assert(kFinalists <= kThreads && kFinalists % kWarp == 0, "a thread each");
constexpr int kScanThreads = kBins / 4, kScanWarps = kScanThreads / kWarp;  // four bins each

/// The tokens of one bin, and of those before it.
struct Found {
  unsigned bin;
  unsigned count_before, count_at;
  std::uint64_t mass_before, mass_at;
};

struct Shared {
  alignas(16) std::uint32_t counts[2][kBins];
  alignas(16) std::uint32_t low[2][kBins];  // of the masses
  alignas(16) std::uint32_t high[2][kBins];
  alignas(16) uint4 mail[2];
  alignas(16) uint4 entries[kFinalists];    // of this block: distance, id, weight (low, high)
  alignas(16) uint4 finalists[kFinalists];  // of all blocks
  std::uint32_t list[kWarps][kListed];      // near tokens, by their places in the block's part
  unsigned listed[kWarps], far_count[kWarps];
  std::uint64_t far_mass[kWarps];
  std::uint64_t warps[kWarps];
  std::uint64_t scan[kWarps];
  std::uint64_t scan_mass[kScanWarps];
  unsigned scan_count[kScanWarps];
  Found found;
  sampling::Limit limit;
  std::uint64_t limit_mass;
};

/// Larger for a better logit, of equal ones for a smaller id; the largest for one that is refused. Never 0.
__device__ inline std::uint64_t order_of(float logit, std::int64_t token) {
  std::uint32_t bits = __float_as_uint(logit);
  if (bits == 0x80000000u) bits = 0;
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  if (!(logit < INFINITY)) bits = ~0u;
  return static_cast<std::uint64_t>(bits) << 32 | ~static_cast<std::uint32_t>(token);
}
__device__ inline float logit_of_order(std::uint64_t order) {
  const auto bits = static_cast<std::uint32_t>(order >> 32);
  return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}

__device__ inline std::uint64_t warp_largest(std::uint64_t value) {
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) {
    const std::uint64_t other = __shfl_xor_sync(kFullMask, value, lane);
    value = other > value ? other : value;
  }
  return value;
}
template <class Number>
__device__ inline Number warp_sum(Number value) {
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) value += __shfl_xor_sync(kFullMask, value, lane);
  return value;
}
/// The sum of this lane's and all lower lanes' values.
template <class Number>
__device__ inline Number warp_scan(Number value) {
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const Number other = __shfl_up_sync(kFullMask, value, static_cast<unsigned>(step));
    if (static_cast<int>(threadIdx.x % kWarp) >= step) value += other;
  }
  return value;
}

/// The best of the logits that a thread has seen in the order of their ids: of equal ones the first.
struct Best {
  float value = NAN;
  int at = -1;
  __device__ void take(float logit, int i) {
    const float seen = logit < INFINITY ? logit : INFINITY;  // one that is refused beats all others
    if (!(seen <= value)) value = seen, at = i;
  }
};

}  // namespace flashkernel::cuda::sampler
