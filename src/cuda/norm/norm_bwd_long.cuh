// LayerNorm and RMSNorm backward of rows of any length, as of those too long for a block to hold, in two passes of
// 16-byte loads. Called by norm_bwd.cu. First the two sums of every row; then grad_x and the column sums together: a
// block takes kThreads * N columns of a chunk of rows, so that it needs no barrier, and a thread keeps the sums of its
// own columns. Bound by memory: grad_out and h are read twice, grad_x is written once. Invariant: chunks depend on the
// shape alone, and a chunk's sums are added row by row.
#pragma once

#include "cuda/norm/norm_bwd_rows.cuh"

namespace flashkernel::cuda {
namespace norm_long {

constexpr int kRowThreads = 512;  // of the first pass
constexpr int kThreads = 256;     // of the second
constexpr int kRows = 4;          // whose loads are under way together
constexpr int kBlocks = 2048;     // of the second pass: some four times what an H200 runs at a time

/// What the second pass needs of a row: mean, rstd, and the means of g * w and of g * w * x_hat in z and w.
using Stats = float4;

/// A block a row.
template <class T>
__global__ void __launch_bounds__(kRowThreads) stats_kernel(const NormBackwardParams p, Stats* stats) {
  constexpr int N = kVectorElements<T>, kBatch = 2, kStep = kRowThreads * N;
  __shared__ float scratch[kRowThreads / kWarp];
  const std::int64_t row = blockIdx.x;
  const T* const grad_out = static_cast<const T*>(p.grad_out) + row * p.stride_grad_out_row;
  const T* const h = static_cast<const T*>(p.h) + row * p.stride_h_row;
  const float mean = p.mean ? p.mean[row] : 0.0f, rstd = p.rstd[row];
  float sum = 0.0f, dot = 0.0f;
  for (std::int64_t at = threadIdx.x * N; p.grad_x && at < p.features; at += kBatch * kStep) {
    Packed<T, N> grads[kBatch], values[kBatch];
    const bool two = at + kStep < p.features;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {  // a second vector that is not there is the first again
      grads[j] = load_vector<N>(grad_out + at + (two ? j * kStep : 0));
      values[j] = load_vector<N>(h + at + (two ? j * kStep : 0));
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (j > 0 && !two) break;
      float weight[N];
      read_norm_weight(p.weight, p.weight_offset, at + j * kStep, weight);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float gw = to_float(grads[j].values[i]) * weight[i];
        sum += gw;
        dot = fmaf(gw, (to_float(values[j].values[i]) - mean) * rstd, dot);
      }
    }
  }
  const float inverse_features = 1.0f / static_cast<float>(p.features);
  sum = block_reduce<kRowThreads>(sum, scratch, Sum{}) * inverse_features;
  dot = block_reduce<kRowThreads>(dot, scratch, Sum{}) * inverse_features;
  if (threadIdx.x == 0) stats[row] = make_float4(mean, rstd, p.kind == NormKind::kRmsNorm ? 0.0f : sum, dot);
}

/// Grid: (runs of kThreads * N columns, chunks of rows).
template <class T, bool kLayerNorm>
__global__ void __launch_bounds__(kThreads)
    columns_kernel(const NormBackwardParams p, std::int64_t rows_per_chunk, const Stats* __restrict__ stats,
                   float* partial_weight, float* partial_bias) {
  constexpr int N = kVectorElements<T>;
  using Vector = Packed<T, N>;
  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * N;
  if (column >= p.features) return;
  const std::int64_t first = blockIdx.y * rows_per_chunk, last = min(p.rows, first + rows_per_chunk);
  const T* const grad_out = static_cast<const T*>(p.grad_out) + column;
  const T* const h = static_cast<const T*>(p.h) + column;
  const T* const residual = p.grad_residual_out ? static_cast<const T*>(p.grad_residual_out) + column : nullptr;
  T* const grad_x = p.grad_x ? static_cast<T*>(p.grad_x) + column : nullptr;
  float weight[N], sums[N] = {}, bias_sums[kLayerNorm ? N : 1] = {};
  read_norm_weight(p.weight, p.weight_offset, column, weight);

  for (std::int64_t base = first; base < last; base += kRows) {
    Vector grads[kRows], values[kRows], more[kRows];
    Stats of[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {  // rows past the last are the last again
      const std::int64_t row = min(base + r, last - 1);
      grads[r] = load_vector<N>(grad_out + row * p.stride_grad_out_row);
      values[r] = load_vector<N>(h + row * p.stride_h_row);
      of[r] = stats[row];
    }
    if (residual) {
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        more[r] = load_vector<N>(residual + min(base + r, last - 1) * p.stride_grad_residual_out_row);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (base + r >= last) break;
      float result[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float g = to_float(grads[r].values[i]), centre = kLayerNorm ? of[r].x : 0.0f;
        const float x_hat = (to_float(values[r].values[i]) - centre) * of[r].y;
        sums[i] = fmaf(g, x_hat, sums[i]);
        if constexpr (kLayerNorm) bias_sums[i] += g;
        const float gw = kLayerNorm ? g * weight[i] - of[r].z : g * weight[i];
        result[i] = of[r].y * fmaf(-x_hat, of[r].w, gw);
        if (residual) result[i] += to_float(more[r].values[i]);
      }
      if (grad_x) store_floats(grad_x + (base + r) * p.stride_grad_x_row, result);
    }
  }
  if (partial_weight) store_wide(partial_weight + blockIdx.y * p.features + column, sums);
  if constexpr (kLayerNorm)
    if (partial_bias) store_wide(partial_bias + blockIdx.y * p.features + column, bias_sums);
}

inline std::int64_t column_blocks(const NormBackwardParams& p) {
  return ceil_div(p.features * static_cast<std::int64_t>(dtype_bytes(p.dtype)), kThreads * 16);
}

/// In how many chunks of rows the columns are summed. It follows from the shape alone.
inline int num_chunks(const NormBackwardParams& p) {
  const std::int64_t wanted = std::max<std::int64_t>(1, kBlocks / column_blocks(p));
  return static_cast<int>(std::max<std::int64_t>(1, std::min(wanted, ceil_div(p.rows, kRows))));
}

inline std::size_t stats_bytes(const NormBackwardParams& p) { return sizeof(Stats) * static_cast<std::size_t>(p.rows); }

template <class T>
void launch_long(const NormBackwardParams& p, int chunks, Stats* stats, float* partial_weight, float* partial_bias,
                 cudaStream_t s) {
  launch("norm_bwd: row sums", stats_kernel<T>, {static_cast<unsigned>(p.rows), kRowThreads, 0, s}, p, stats);
  const dim3 grid(static_cast<unsigned>(column_blocks(p)), static_cast<unsigned>(chunks));
  launch("norm_bwd: columns", p.kind == NormKind::kLayerNorm ? columns_kernel<T, true> : columns_kernel<T, false>,
         {grid, kThreads, 0, s}, p, ceil_div(p.rows, chunks), stats, partial_weight, partial_bias);
}

}  // namespace norm_long
}  // namespace flashkernel::cuda
