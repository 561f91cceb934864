// C[m, n] = sum over k of A(m, k) * B(k, n) in plain FFMA: 64 x 64 tiles in shared memory, 4 x 4 results a thread, any
// strides. The generic linear kernels are this loop with different operands. Operands are functors so that an
// activation's gradient can be applied as an element is loaded.
#pragma once

#include <cstdint>

namespace flashkernel::cuda {

inline constexpr int kTileM = 64, kTileN = 64, kTileK = 16;
inline constexpr int kGemmThreads = 256;
inline constexpr int kResults = 4;  // per thread and direction: 16 x 16 threads cover 64 x 64

/// A(m, k) and B(k, n) return fp32; kKFastA: neighbours along k are neighbours in memory (kNFastB: along n). `store(m,
/// n, value)`.
template <bool kKFastA, bool kNFastB, class A, class B, class Store>
__device__ inline void gemm_tile(std::int64_t rows, std::int64_t columns, std::int64_t depth, A a, B b, Store store) {
  __shared__ float tile_a[kTileK][kTileM + 1];
  __shared__ float tile_b[kTileK][kTileN + 1];
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.y) * kTileM;
  const std::int64_t first_column = static_cast<std::int64_t>(blockIdx.x) * kTileN;
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  float sums[kResults][kResults] = {};

  for (std::int64_t first_k = 0; first_k < depth; first_k += kTileK) {
#pragma unroll
    for (int i = threadIdx.x; i < kTileM * kTileK; i += kGemmThreads) {
      const int m = kKFastA ? i / kTileK : i % kTileM, k = kKFastA ? i % kTileK : i / kTileM;
      const bool inside = first_row + m < rows && first_k + k < depth;
      tile_a[k][m] = inside ? a(first_row + m, first_k + k) : 0.0f;
    }
#pragma unroll
    for (int i = threadIdx.x; i < kTileN * kTileK; i += kGemmThreads) {
      const int n = kNFastB ? i % kTileN : i / kTileK, k = kNFastB ? i / kTileN : i % kTileK;
      const bool inside = first_column + n < columns && first_k + k < depth;
      tile_b[k][n] = inside ? b(first_k + k, first_column + n) : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kTileK; ++k) {
      float x[kResults], y[kResults];
#pragma unroll
      for (int i = 0; i < kResults; ++i) x[i] = tile_a[k][ty + 16 * i];
#pragma unroll
      for (int j = 0; j < kResults; ++j) y[j] = tile_b[k][tx + 16 * j];
#pragma unroll
      for (int i = 0; i < kResults; ++i)
#pragma unroll
        for (int j = 0; j < kResults; ++j) sums[i][j] = fmaf(x[i], y[j], sums[i][j]);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kResults; ++i) {
    const std::int64_t m = first_row + ty + 16 * i;
#pragma unroll
    for (int j = 0; j < kResults; ++j) {
      const std::int64_t n = first_column + tx + 16 * j;
      if (m < rows && n < columns) store(m, n, sums[i][j]);
    }
  }
}

}  // namespace flashkernel::cuda
