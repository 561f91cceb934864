// A boolean mask to bits, in one pass: a lane reads the byte of one key, and a warp's ballot is the word of 32 keys. A
// warp makes kWords words of a row, whose bytes are under way together.
#include "cuda/mask/pack_mask.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kWarps = 8, kWords = 8;

__global__ void __launch_bounds__(kWarp* kWarps) pack_mask_kernel(const PackMaskParams p) {
  const std::int64_t words = p.words(), pieces = (words + kWords - 1) / kWords, count = p.rows() * pieces;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  for (std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp; at < count;
       at += static_cast<std::int64_t>(gridDim.x) * kWarps) {
    const std::int64_t row = at / pieces, first = at % pieces * kWords;
    const std::uint8_t* const from = p.mask + p.offset(row, p.stride_mask);
    bool shown[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const std::int64_t j = (first + w) * 32 + lane;
      shown[w] = j < p.columns && from[j * p.stride_mask_column] != 0;
    }
    std::uint32_t own = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const std::uint32_t bits = __ballot_sync(kFullMask, shown[w]);
      if (lane == w) own = bits;
    }
    if (lane < kWords && first + lane < words) p.out[p.offset(row, p.stride_out) + first + lane] = own;
  }
}

}  // namespace

Verdict pack_mask_supports(const PackMaskParams&) { return Verdict::ok(); }

void pack_mask(const PackMaskParams& p, void*, Stream stream) {
  const std::int64_t count = p.rows() * ceil_div(p.words(), kWords);
  if (count == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  launch("pack_mask", pack_mask_kernel,
         {grid_size(ceil_div(count, kWarps), p.device.index, 32), kWarp * kWarps, 0, native(stream)}, p);
}

}  // namespace flashkernel::cuda
