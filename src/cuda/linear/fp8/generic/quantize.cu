// quantize_fp8_blocks: half a warp holds 128 neighbours, eight a lane, finds the largest and writes them in 8 bits.
// Bound by memory: x is read once.
#include "cuda/linear/fp8/generic/linear_fp8.hpp"

#include "cuda/host/launch.hpp"
#include "cuda/tile/quantized.cuh"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda {
namespace {

constexpr int kThreads = 256, kEach = 8;                       // elements of a lane
constexpr int kLanes = static_cast<int>(fp8::kBlock) / kEach;  // that share a block
constexpr int kBlocksAtOnce = kThreads / kLanes;               // of a CUDA block

/// kVectors: rows of x begin at multiples of 16 bytes and those of out at multiples of 8, and all blocks are whole.
template <class T, bool kVectors>
__global__ void __launch_bounds__(kThreads) quantize_kernel(const QuantizeFp8Params p, std::int64_t blocks) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kBlocksAtOnce + threadIdx.x / kLanes;
  const std::int64_t row = at / blocks, block = at - row * blocks;
  const bool there = row < p.rows;  // lanes stay for the shuffles
  const std::int64_t first = block * fp8::kBlock + threadIdx.x % kLanes * kEach;
  const T* const x = static_cast<const T*>(p.x) + row * p.stride_x_row + first;
  float values[kEach] = {};
  if constexpr (kVectors) {
    if (there) load_wide(values, x);
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (there && first + i < p.features) values[i] = to_float(x[i]);
  }
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) largest = fmaxf(largest, fabsf(values[i]));  // a NaN stays out
#pragma unroll
  for (int lane = kLanes / 2; lane > 0; lane /= 2) largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, lane));
  if (!there) return;
  const float scale = row_scale(largest, largest_element(DType::kFloat8E4M3)), inverse = 1.0f / scale;
  if (threadIdx.x % kLanes == 0) p.scales[row * p.stride_scales_row + block * p.stride_scales_block] = scale;
#pragma unroll
  for (int i = 0; i < kEach; ++i) values[i] *= inverse;
  std::uint8_t* const to = p.out + row * p.stride_out_row + first;
  if constexpr (kVectors) {
    *reinterpret_cast<uint2*>(to) = pack_eight<Float8>(values);
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (first + i < p.features) to[i] = from_float<Float8>(values[i]).bits;
  }
}

std::int64_t cuda_blocks(const QuantizeFp8Params& p) {
  return ceil_div(p.rows * fp8::blocks_of(p.features), kBlocksAtOnce);
}

}  // namespace

Verdict quantize_fp8_supports(const QuantizeFp8Params& p) {
  return cuda_blocks(p) <= 0x7fffffff ? Verdict::ok() : Verdict("more than 2^35 blocks of 128 elements");
}

void quantize_fp8_blocks(const QuantizeFp8Params& p, void*, Stream stream) {
  if (p.rows == 0 || p.features == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool vectors = p.features % fp8::kBlock == 0 && is_aligned(p.x, 16) &&
                         p.stride_x_row % kVectorElements<T> == 0 && is_aligned(p.out, 8) && p.stride_out_row % 8 == 0;
    const auto kernel = vectors ? quantize_kernel<T, true> : quantize_kernel<T, false>;
    launch("quantize_fp8_blocks", kernel, {static_cast<unsigned>(cuda_blocks(p)), kThreads, 0, native(stream)}, p,
           fp8::blocks_of(p.features));
  });
}

}  // namespace flashkernel::cuda
