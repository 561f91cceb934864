// Runs after the backward pass: dQ = scale * sum, from the order of the fragments to rows. The four lanes that hold 16
// columns of two rows exchange them, so that each lane stores 16 bytes of one row.
#pragma once

#include "cuda/attention/backward/sm80/shape.cuh"
#include "cuda/attention/key_range.cuh"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda::sm80 {

template <class T, int kQkDim, int kVDim, BackwardKind kKind>
__global__ void __launch_bounds__(256)
    grad_q_kernel(const __grid_constant__ AttentionBackwardParams p, const __grid_constant__ BackwardPlan plan) {
  using Shape = BackwardShape<kQkDim, kVDim, kKind>;
  constexpr int kBlockM = Shape::kBlockM, kRowsAWarp = Shape::kQSlices * 16, kColumnPairs = Shape::kColumns / 16;
  const AttentionParams& f = p.forward;
  const unsigned tile = blockIdx.x % plan.q_tiles, head = blockIdx.x / plan.q_tiles;
  const unsigned b = head / static_cast<unsigned>(f.heads_q), h = head % static_cast<unsigned>(f.heads_q);
  const int q_len = static_cast<int>(f.q_length(b)), m = static_cast<int>(tile) * kBlockM;
  if (m >= q_len) return;
  const float* const sums = plan.sums + static_cast<std::int64_t>(blockIdx.x) * (kBlockM * kQkDim);
  T* const to =
      static_cast<T*>(p.grad_q) + row_offset(f.is_varlen_q(), f.is_varlen_q() ? f.q_begin(b) : 0, b, h, m,
                                             p.stride_grad_q_batch, p.stride_grad_q_head, p.stride_grad_q_token);
  // Queries that see no key: nobody has stored or added anything.
  const KeyWindow range(f, b);
  const bool any = range.first(m) < range.last(min(q_len, m + kBlockM) - 1);
  const int lane = threadIdx.x % 32, dim = static_cast<int>(f.head_dim);
  FiniteCheck finite;
#pragma unroll 4
  for (int piece = threadIdx.x / 32; piece < kBlockM / 16 * (kQkDim / 16); piece += 256 / 32) {  // 16 rows x 16 columns
    const int pair = piece % kColumnPairs, slice = piece / kColumnPairs % Shape::kQSlices;
    const int warp = piece / kColumnPairs / Shape::kQSlices;
    const int first_row = warp % Shape::kWarpsM * kRowsAWarp + slice * 16;
    const int first_column = warp / Shape::kWarpsM * Shape::kColumns + pair * 16;
    std::uint32_t words[4];  // of this lane's two columns: row, columns + 8, row + 8, both
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      float4 x{0.0f, 0.0f, 0.0f, 0.0f};
      if (any) x = *reinterpret_cast<const float4*>(sums + Shape::sum_index(warp, slice, 2 * pair + tile, lane));
      const int row = m + first_row + lane / 4;
      if (row < q_len) finite.see(x.x), finite.see(x.y);
      if (row + 8 < q_len) finite.see(x.z), finite.see(x.w);
      words[tile] = pack<T>(x.x * f.scale, x.y * f.scale);
      words[2 + tile] = pack<T>(x.z * f.scale, x.w * f.scale);
    }
    // Lane i of the four gets word i of each: first between neighbours, then between pairs.
    const bool odd = lane % 2 != 0, upper = lane % 4 >= 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t &low = words[2 * half], &high = words[2 * half + 1];
      const std::uint32_t other = __shfl_xor_sync(kFullMask, odd ? low : high, 1);
      (odd ? low : high) = other;
    }
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      std::uint32_t &low = words[w], &high = words[2 + w];
      const std::uint32_t other = __shfl_xor_sync(kFullMask, upper ? low : high, 2);
      (upper ? low : high) = other;
    }
    const int row = first_row + lane / 4 + lane / 2 % 2 * 8, column = first_column + lane % 2 * 8;
    if (m + row >= q_len || column >= dim) continue;
    T* const target = to + row * p.stride_grad_q_token + column;
    const uint4 packed{words[0], words[1], words[2], words[3]};
    if (plan.vectors_grad_q && column + 8 <= dim) {
      *reinterpret_cast<uint4*>(target) = packed;
    } else {
      const T* const values = reinterpret_cast<const T*>(&packed);
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (column + e < dim) target[e] = values[e];
    }
  }
  finite.report(plan.not_finite);
}

}  // namespace flashkernel::cuda::sm80
