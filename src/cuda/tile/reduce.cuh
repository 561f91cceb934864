// Sums and maxima over a warp (shuffles) and over a block (one value per warp in shared memory, then a warp).
// Every thread of the warp or block must take part; the result reaches all of them. The order is fixed.
#pragma once

#include <cuda_runtime.h>

namespace flashkernel::cuda {

inline constexpr int kWarp = 32;
inline constexpr unsigned kFullMask = 0xffffffffu;

struct Sum {
  static constexpr float kIdentity = 0.0f;
  __device__ float operator()(float a, float b) const { return a + b; }
};

/// NaN wins over any number.
struct Max {
  static constexpr float kIdentity = -INFINITY;
  __device__ float operator()(float a, float b) const { return a != a ? a : (b != b ? b : fmaxf(a, b)); }
};

/// One instruction; a NaN loses.
struct Largest {
  static constexpr float kIdentity = -INFINITY;
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

/// A number that all lanes have, so that the compiler knows that they do. Of loops and branches that read it from
/// memory it must think that lanes may part there, and makes whatever shuffles under them a second time, for lanes that
/// did.
__device__ inline int warp_uniform(int value) { return __shfl_sync(kFullMask, value, 0); }

template <class Op>
__device__ inline float warp_reduce(float value, Op op) {
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) value = op(value, __shfl_xor_sync(kFullMask, value, lane));
  return value;
}

/// The sum over the lanes up to this one.
__device__ inline unsigned sum_through_lane(unsigned value, int lane) {
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const unsigned other = __shfl_up_sync(kFullMask, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

/// kThreads is the block's size; `scratch` holds kThreads / 32 floats and may be used again after the next
/// __syncthreads.
template <int kThreads, class Op>
__device__ inline float block_reduce(float value, float* scratch, Op op) {
  static_assert(kThreads % kWarp == 0 && kThreads <= 1024, "whole warps");
  value = warp_reduce(value, op);
  if constexpr (kThreads == kWarp) {
    return value;
  } else {
    constexpr int kWarps = kThreads / kWarp;
    __syncthreads();  // an earlier reduction may still be reading scratch
    if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = value;
    __syncthreads();
    value = threadIdx.x % kWarp < kWarps ? scratch[threadIdx.x % kWarp] : Op::kIdentity;
    return warp_reduce(value, op);
  }
}

/// The same with one barrier: `scratch` is used by no other reduction of the block.
template <int kThreads, class Op>
__device__ inline float block_reduce_once(float value, float* scratch, Op op) {
  value = warp_reduce(value, op);
  if constexpr (kThreads > kWarp) {
    if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = value;
    __syncthreads();
    value = scratch[0];
#pragma unroll
    for (int warp = 1; warp < kThreads / kWarp; ++warp) value = op(value, scratch[warp]);
  }
  return value;
}

}  // namespace flashkernel::cuda
