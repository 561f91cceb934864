// After the backward pass: dQ = scale * sum, from the order of the fragments to rows. A thread takes two
// neighbours of a row.
#pragma once

#include "cuda/sm80/attention_bwd_plan.cuh"
#include "cuda/tile/key_range.cuh"

namespace flashkernel::cuda::sm80 {

template <class T, int kDim, BackwardKind kKind>
__global__ void __launch_bounds__(256)
    grad_q_kernel(const __grid_constant__ AttentionBackwardParams p, const __grid_constant__ BackwardPlan plan) {
  using Shape = BackwardShape<kDim, kKind>;
  constexpr int kBlockM = Shape::kBlockM, kPairs = kDim / 2, kRowsAWarp = Shape::kQSlices * 16;
  const AttentionParams& f = p.forward;
  const unsigned tile = blockIdx.x % plan.q_tiles, head = blockIdx.x / plan.q_tiles;
  const unsigned b = head / static_cast<unsigned>(f.heads_q), h = head % static_cast<unsigned>(f.heads_q);
  const int q_len = static_cast<int>(f.q_length(b)), m = static_cast<int>(tile) * kBlockM;
  if (m >= q_len) return;
  const float* const sums = plan.sums + static_cast<std::int64_t>(blockIdx.x) * (kBlockM * kDim);
  T* const to =
      static_cast<T*>(p.grad_q) + row_offset(f.is_varlen_q(), f.is_varlen_q() ? f.q_begin(b) : 0, b, h, m,
                                             p.stride_grad_q_batch, p.stride_grad_q_head, p.stride_grad_q_token);
  // Queries that see no key: nobody has stored or added anything.
  const KeyRange range(f, b);
  const bool any = range.first(m) < range.last(min(q_len, m + kBlockM) - 1);
  FiniteCheck finite;
  for (int at = threadIdx.x; at < kBlockM * kPairs; at += 256) {
    const int row = at / kPairs, column = at % kPairs * 2;
    if (m + row >= q_len) break;
    const int warp = row / kRowsAWarp + column / Shape::kColumns * Shape::kWarpsM, slice = row % kRowsAWarp / 16;
    const int lane = row % 8 * 4 + column % 8 / 2, half = row % 16 / 8;
    float2 sum{0.0f, 0.0f};
    if (any)
      sum = *reinterpret_cast<const float2*>(sums + Shape::sum_index(warp, slice, column % Shape::kColumns / 8, lane) +
                                             2 * half);
    finite.see(sum.x);
    finite.see(sum.y);
    T* const target = to + row * p.stride_grad_q_token + column;
    if (column < f.head_dim) target[0] = T(sum.x * f.scale);
    if (column + 1 < f.head_dim) target[1] = T(sum.y * f.scale);
  }
  finite.report(plan.not_finite);
}

}  // namespace flashkernel::cuda::sm80
