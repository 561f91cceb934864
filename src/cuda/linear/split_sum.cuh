// Adds the partial products of a linear whose k was cut into parts, in the order of k, and applies the epilogue. The
// kernels of linear/tiles/sm80/gemm.cuh and linear/tiles/sm90a/gemm.cuh write the parts to the workspace and launch
// this kernel after them.
#pragma once

#include <cstdint>

#include "cuda/linear/epilogue.cuh"

namespace flashkernel::cuda::split_sum {

inline constexpr int kThreads = 256;

inline unsigned grid(std::int64_t m, std::int64_t stride) {
  return static_cast<unsigned>((m * (stride / 4) + kThreads - 1) / kThreads);
}

/// A thread has four columns of a row. partial: [parts, m, stride], stride a multiple of 4 columns and not below n.
template <class T>
__global__ void __launch_bounds__(kThreads)
    kernel(const LinearEpilogue e, const float* partial, int parts, int m, int n, std::int64_t stride) {
  const std::int64_t groups = stride / 4;
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= m * groups) return;
  const std::int64_t row = at / groups;
  const int column = static_cast<int>(at - row * groups) * 4;
  float x[4] = {};
#pragma unroll 4
  for (int s = 0; s < parts; ++s) {
    const float4 part =
        *reinterpret_cast<const float4*>(partial + (s * static_cast<std::int64_t>(m) + row) * stride + column);
    x[0] += part.x, x[1] += part.y, x[2] += part.z, x[3] += part.w;
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) x[c] += bias_of(e.bias, column + c, n);
  finish_4<T>(e, row, column, n, x);
}

}  // namespace flashkernel::cuda::split_sum
