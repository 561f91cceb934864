// Runs before the backward pass, with one block for each tile of queries. It computes D = rowsum(dO * O) - dLSE and the
// LSE in base 2, both negated. It zeroes the tile's counter, the ticket and the flag, and the tile's sum of dQ where no
// order says which block is the first to add.
#pragma once

#include "cuda/attention/backward/sm80/shape.cuh"
#include "cuda/attention/key_range.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda::sm80 {

template <class T, int kQkDim, int kVDim>
__global__ void __launch_bounds__(256) prepare_kernel(const __grid_constant__ AttentionBackwardParams p,
                                                      const __grid_constant__ BackwardPlan plan, int block_m) {
  constexpr int kLanes = kVDim == 32 ? 4 : kVDim == 64 ? 8 : kVDim <= 128 ? 16 : 32;  // a row; 16 bytes each
  static_assert(kVDim <= 8 * kLanes, "the lanes of a row hold all of its columns");
  const AttentionParams& f = p.forward;
  const unsigned tile = blockIdx.x % plan.q_tiles, head = blockIdx.x / plan.q_tiles;
  const unsigned b = head / static_cast<unsigned>(f.heads_q), h = head % static_cast<unsigned>(f.heads_q);
  if (threadIdx.x == 0) {
    plan.counters[blockIdx.x] = 0;
    if (blockIdx.x == 0) *plan.ticket = *plan.not_finite = 0;
  }
  const int q_len = static_cast<int>(f.q_length(b)), m = static_cast<int>(tile) * block_m;
  if (m >= q_len) return;
  const std::int64_t begin = f.is_varlen_q() ? f.q_begin(b) : 0;
  if (p.grad_q && !plan.ordered) {
    float4* const sums =
        reinterpret_cast<float4*>(plan.sums + static_cast<std::int64_t>(blockIdx.x) * (block_m * kQkDim));
    for (int at = threadIdx.x; at < block_m * kQkDim / 4; at += 256) sums[at] = float4{0.0f, 0.0f, 0.0f, 0.0f};
  }
  const int lane = threadIdx.x % kLanes, column = lane * 8, dim = static_cast<int>(f.head_dim_v);
  for (int first = 0; first < block_m; first += 256 / kLanes) {  // the same count for every thread
    const int row = first + static_cast<int>(threadIdx.x) / kLanes, i = min(m + row, q_len - 1);
    const T* const out = static_cast<const T*>(f.out) + f.out_offset(b, h, i) + column;
    const T* const grad_out = static_cast<const T*>(p.grad_out) +
                              row_offset(f.is_varlen_q(), begin, b, h, i, p.stride_grad_out_batch,
                                         p.stride_grad_out_head, p.stride_grad_out_token) +
                              column;
    float sum = 0.0f;
    if (plan.vectors_out && plan.vectors_grad_out && column + 8 <= dim) {
      float x[8], y[8];
      load_floats(x, out);
      load_floats(y, grad_out);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum = fmaf(x[e], y[e], sum);
    } else {
#pragma unroll 1
      for (int e = 0; e < 8 && column + e < dim; ++e) sum = fmaf(to_float(out[e]), to_float(grad_out[e]), sum);
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
    if (lane > 0 || row >= block_m || m + row >= q_len) continue;
    if (p.grad_lse)
      sum -= p.grad_lse[row_offset(f.is_varlen_q(), begin, b, h, i, p.stride_grad_lse_batch, p.stride_grad_lse_head,
                                   p.stride_grad_lse_token)];
    constexpr float kLog2E = 1.4426950408889634f;
    const float lse = f.lse[f.lse_offset(b, h, i)];
    plan.delta[(b * f.heads_q + h) * f.seq_q + i] = -sum;
    // A row that sees nothing: its exponentials are 2^-inf, not 2^inf.
    plan.lse[(b * f.heads_q + h) * f.seq_q + i] = lse == -INFINITY ? -INFINITY : -kLog2E * lse;
  }
}

}  // namespace flashkernel::cuda::sm80
