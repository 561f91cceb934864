// LayerNorm and RMSNorm backward of rows that a block holds in registers: grad_out and h are read once, grad_x is
// written once, and each thread keeps the column sums of its own columns (registers, or shared memory for the longest
// rows) over the block's chunk of rows. Called by norm_bwd.cu. Bound by memory: what stands in its way is latency, so
// kRows rows are reduced by one barrier while the next ones are under way, and arithmetic: about 13 instructions an
// element (RMSNorm bf16), half of what the memory gives time for. Invariant: a chunk's sums are added row by row, so
// they do not depend on kRows or on the device.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/norm/norm_weight.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/row.cuh"
#include "cuda/tile/vector.cuh"
#include "ops/norm_params.hpp"

namespace flashkernel::cuda {
namespace norm_rows {

struct TwoSums {
  float sum, dot;  // of g * w, and of g * w * x_hat
};

/// kThreads threads hold a row, kVectors vectors of N elements each.
template <class T, bool kLayerNorm, int kThreads, int kVectors, int kRows, bool kShared>
struct Shape {
  static constexpr int N = kVectorElements<T>;
  static constexpr int kWarps = kThreads / kWarp;
  static constexpr int kSums = kLayerNorm ? 2 : 1;          // columns of grad_weight, and of grad_bias
  static constexpr bool kHoldWeights = kVectors * N <= 16;  // as floats in registers; else read again for each row
  static constexpr bool kResidualEarly = kRows * kVectors <= 2;
  static constexpr int kColumns = kThreads * kVectors * N;  // at most
  static constexpr int kSharedBytes = kShared ? kSums * kColumns * static_cast<int>(sizeof(float)) : 0;
  static constexpr int kBlocks = kThreads >= 512 ? 1 : 512 / kThreads;  // an SM's, at 128 registers
};

/// A thread's column sums: in registers, or in its own part of shared memory, 16 bytes a lane side by side.
template <class S, int kThreads, int kVectors, bool kShared>
class ColumnSums {
  static constexpr int N = S::N;

 public:
  __device__ explicit ColumnSums(float4* shared) : shared_(shared + threadIdx.x) {
#pragma unroll
    for (int which = 0; which < S::kSums; ++which)
#pragma unroll
      for (int j = 0; j < kVectors; ++j) change(which, j, [](int, float) { return 0.0f; });
  }
  /// Each sum i of vector j becomes f(i, sum).
  template <class F>
  __device__ void change(int which, int j, F f) {
    const int at = which * kVectors + j;
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      if constexpr (kShared) {
        float4& four = shared_[(at * (N / 4) + i / 4) * kThreads];
        const float4 was = four;
        four = make_float4(f(i, was.x), f(i + 1, was.y), f(i + 2, was.z), f(i + 3, was.w));
      } else {
#pragma unroll
        for (int k = i; k < i + 4; ++k) held_[at][k] = f(k, held_[at][k]);
      }
    }
  }

 private:
  float4* shared_;
  float held_[kShared ? 1 : S::kSums * kVectors][N];
};

template <class T, bool kLayerNorm, int kThreads, int kVectors, int kRows, bool kShared>
__global__ void __launch_bounds__(kThreads, (Shape<T, kLayerNorm, kThreads, kVectors, kRows, kShared>::kBlocks))
    kernel(const NormBackwardParams p, std::int64_t rows_per_chunk, float* partial_weight, float* partial_bias) {
  using S = Shape<T, kLayerNorm, kThreads, kVectors, kRows, kShared>;
  constexpr int N = S::N;
  using Vector = Packed<T, N>;
  extern __shared__ float4 shared_sums[];
  __shared__ TwoSums scratch[2][kRows][S::kWarps];

  const std::int64_t first_row = blockIdx.x * rows_per_chunk, last_row = min(p.rows, first_row + rows_per_chunk);
  const int features = static_cast<int>(p.features), thread = static_cast<int>(threadIdx.x);
  // Vector j is at `column + j * kStep`: one address and constants.
  const std::int64_t column = thread * N;
  constexpr int kStep = kThreads * N;
  const auto holds = [&](int j) { return thread * N < features - j * kStep; };
  const float inverse_features = 1.0f / static_cast<float>(features);

  const auto read_weight = [&](int j, float(&weight)[N]) {
    read_norm_weight(holds(j) ? p.weight : TypedPointer{}, p.weight_offset, column + j * kStep, weight);
  };
  float weights[S::kHoldWeights ? kVectors : 1][N];
  if constexpr (S::kHoldWeights) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) read_weight(j, weights[j]);
  }

  // Rows and columns past the end hold zeros of grad_out.
  struct Batch {
    Vector grad[kRows][kVectors], h[kRows][kVectors];
    float mean[kRows], rstd[kRows];
  };
  const auto load = [&](std::int64_t row, Batch& batch) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool inside = row + r < last_row;
      const T* const from_grad = static_cast<const T*>(p.grad_out) + (row + r) * p.stride_grad_out_row;
      const T* const from_h = static_cast<const T*>(p.h) + (row + r) * p.stride_h_row;
      batch.mean[r] = kLayerNorm && inside ? p.mean[row + r] : 0.0f;
      batch.rstd[r] = inside ? p.rstd[row + r] : 0.0f;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        batch.grad[r][j] = inside && holds(j) ? load_vector<N>(from_grad + column + j * kStep) : Vector{};
        batch.h[r][j] = inside && holds(j) ? load_vector<N>(from_h + column + j * kStep) : Vector{};
      }
    }
  };
  // grad, grad * weight and the normalised row of a vector: worked out twice rather than held.
  const auto values = [&](const Batch& batch, int r, int j, float(&g)[N], float(&gw)[N], float(&x_hat)[N]) {
    unpack(g, batch.grad[r][j]);
    unpack(x_hat, batch.h[r][j]);
    float again[N];
    if constexpr (!S::kHoldWeights) read_weight(j, again);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if constexpr (kLayerNorm) x_hat[i] -= batch.mean[r];
      x_hat[i] *= batch.rstd[r];
      gw[i] = g[i] * (S::kHoldWeights ? weights[j][i] : again[i]);
    }
  };

  ColumnSums<S, kThreads, kVectors, kShared> sums(shared_sums);
  Batch now, next;
  load(first_row, now);
  int turn = 0;
  for (std::int64_t row = first_row; row < last_row; row += kRows, turn ^= 1) {
    load(row + kRows, next);
    TwoSums mine[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      mine[r] = {0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        float g[N], gw[N], x_hat[N];
        values(now, r, j, g, gw, x_hat);
        sums.change(0, j, [&](int i, float sum) { return fmaf(g[i], x_hat[i], sum); });
        if constexpr (kLayerNorm) sums.change(1, j, [&](int i, float sum) { return sum + g[i]; });
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if constexpr (kLayerNorm) mine[r].sum += gw[i];
          mine[r].dot = fmaf(gw[i], x_hat[i], mine[r].dot);
        }
      }
    }
    if (!p.grad_x) {
      now = next;
      continue;
    }
    const auto read_residual = [&](int r, int j) {
      const T* const from = static_cast<const T*>(p.grad_residual_out) + (row + r) * p.stride_grad_residual_out_row;
      return p.grad_residual_out && row + r < last_row && holds(j) ? load_vector<N>(from + column + j * kStep)
                                                                   : Vector{};
    };
    Vector residual[S::kResidualEarly ? kRows : 1][S::kResidualEarly ? kVectors : 1];
    if constexpr (S::kResidualEarly) {  // on its way while the block adds
#pragma unroll
      for (int at = 0; at < kRows * kVectors; ++at)
        residual[at / kVectors][at % kVectors] = read_residual(at / kVectors, at % kVectors);
    }
    // Two copies of scratch: the barrier of the next turn stands between a copy's reads and its next writes.
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if constexpr (kLayerNorm) mine[r].sum = warp_reduce(mine[r].sum, Sum{});
      mine[r].dot = warp_reduce(mine[r].dot, Sum{});
      if (thread % kWarp == 0) scratch[turn][r][thread / kWarp] = mine[r];
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      TwoSums row_sums{0.0f, 0.0f};
#pragma unroll
      for (int warp = 0; warp < S::kWarps; ++warp) {
        if constexpr (kLayerNorm) row_sums.sum += scratch[turn][r][warp].sum;
        row_sums.dot += scratch[turn][r][warp].dot;
      }
      if (row + r >= last_row) continue;
      const float shift = row_sums.sum * inverse_features, slope = row_sums.dot * inverse_features;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        if (!holds(j)) continue;
        float g[N], gw[N], x_hat[N], result[N];
        values(now, r, j, g, gw, x_hat);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float centred = kLayerNorm ? gw[i] - shift : gw[i];
          result[i] = now.rstd[r] * fmaf(-x_hat[i], slope, centred);
        }
        if (p.grad_residual_out) {
          float more[N];
          if constexpr (S::kResidualEarly) {
            unpack(more, residual[r][j]);
          } else {
            unpack(more, read_residual(r, j));
          }
#pragma unroll
          for (int i = 0; i < N; ++i) result[i] += more[i];
        }
        store_floats(static_cast<T*>(p.grad_x) + (row + r) * p.stride_grad_x_row + column + j * kStep, result);
      }
    }
    now = next;
  }
  const auto write = [&](int which, float* partial) {
    if (!partial) return;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (!holds(j)) continue;
      float values[N];
      sums.change(which, j, [&](int i, float sum) { return values[i] = sum; });
      store_wide(partial + blockIdx.x * p.features + column + j * kStep, values);
    }
  };
  write(0, partial_weight);
  if constexpr (kLayerNorm) write(1, partial_bias);
}

/// Threads, vectors of a thread, rows of a batch and whether the sums lie in shared memory, for a row of `vectors`
/// vectors: up to 128 registers a thread, which hold two batches, the sums and the weights.
template <class F>
void with_shape(std::int64_t vectors, F f) {
  if (vectors <= 128) return f(Constant<128>{}, Constant<1>{}, Constant<2>{}, Constant<0>{});
  if (vectors <= 256) return f(Constant<128>{}, Constant<2>{}, Constant<1>{}, Constant<0>{});
  if (vectors <= 512) return f(Constant<256>{}, Constant<2>{}, Constant<1>{}, Constant<0>{});
  if (vectors <= 1024) return f(Constant<512>{}, Constant<2>{}, Constant<1>{}, Constant<0>{});
  return f(Constant<512>{}, Constant<4>{}, Constant<1>{}, Constant<1>{});
}
inline constexpr std::int64_t kMaxVectors = 2048, kMaxVectorsInRegisters = 1024;

template <class T, bool kLayerNorm>
void launch_rows(const NormBackwardParams& p, int chunks, float* partial_weight, float* partial_bias, cudaStream_t s) {
  with_shape(p.features / kVectorElements<T>, [&](auto threads, auto vectors, auto rows, auto shared) {
    constexpr bool kShared = shared.value != 0;
    using S = Shape<T, kLayerNorm, threads.value, vectors.value, rows.value, kShared>;
    launch("norm_bwd: rows", kernel<T, kLayerNorm, threads.value, vectors.value, rows.value, kShared>,
           {static_cast<unsigned>(chunks), threads.value, S::kSharedBytes, s}, p, ceil_div(p.rows, chunks),
           partial_weight, partial_bias);
  });
}

/// Whole vectors everywhere.
inline bool are_vectors(const NormBackwardParams& p) {
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(p.dtype));
  const auto aligned = [&](const void* data, std::int64_t stride) {
    return !data || (is_aligned(data, 16) && (p.rows == 1 || stride * bytes % 16 == 0));
  };
  return p.rows > 0 && p.features * bytes % 16 == 0 && is_aligned(p.weight.data, 16) &&
         (p.kind == NormKind::kLayerNorm || !p.grad_bias) && aligned(p.grad_out, p.stride_grad_out_row) &&
         aligned(p.h, p.stride_h_row) && aligned(p.grad_x, p.stride_grad_x_row) &&
         aligned(p.grad_residual_out, p.stride_grad_residual_out_row);
}

/// Whether a block holds a row of p: are_vectors, and not too many.
inline bool fit(const NormBackwardParams& p) {
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(p.dtype));
  const std::int64_t vectors = p.features * bytes / 16;
  // The sums in shared memory, if there.
  const std::int64_t sums_bytes = (p.kind == NormKind::kLayerNorm ? 2 : 1) * kMaxVectors * 16 / bytes * 4;
  const bool shared = vectors <= kMaxVectorsInRegisters ||
                      sums_bytes + 1024 <= cuda_device_properties(p.device.index).max_shared_bytes_per_block;
  return vectors <= kMaxVectors && shared && are_vectors(p);
}

}  // namespace norm_rows
}  // namespace flashkernel::cuda
