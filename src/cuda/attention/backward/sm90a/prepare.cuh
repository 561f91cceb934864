// Runs before the Hopper backward pass, with one block for each tile of queries. It computes D = rowsum(dO * O) - dLSE
// and the LSE in base 2, both negated. It zeroes the tile's counter, the ticket and the flag, and grad_q of tiles to
// which no block will add.
#pragma once

#include "cuda/ptx/grid.cuh"
#include "cuda/attention/backward/sm90a/epilogue.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda::sm90a {

/// The lane's part of rowsum(x * y) for kCount rows, which begin at x(i) and y(i): the eight columns from `column` on,
/// or fewer at the end of a row of `dim`. All loads are under way before the first sum, and no branch lies between
/// them.
template <int kCount, class X, class Y>
__device__ inline void multiply_rows(float (&sum)[kCount], const X& x, const Y& y, int column, int dim) {
  if (dim % 8 == 0) {
    const int at = min(column, dim - 8);
    decltype(load_vector<8>(x(0))) a[kCount], b[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      a[i] = load_vector<8>(x(i) + at);
      b[i] = load_vector<8>(y(i) + at);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sum[i] = 0.0f;
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[i] = fmaf(to_float(a[i].values[e]), to_float(b[i].values[e]), sum[i]);
      if (column >= dim) sum[i] = 0.0f;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sum[i] = 0.0f;
#pragma unroll 1
      for (int c = column; c < min(column + 8, dim); ++c) sum[i] = fmaf(to_float(x(i)[c]), to_float(y(i)[c]), sum[i]);
    }
  }
}

template <class T, int kQkDim, int kVDim>
__global__ void __launch_bounds__(256)
    prepare_kernel(const __grid_constant__ AttentionBackwardParams p, const __grid_constant__ BackwardPlan plan) {
  constexpr int kLanes = kVDim <= 64 ? 8 : kVDim <= 128 ? 16 : 32;  // a row; 16 bytes each
  static_assert(kVDim <= 8 * kLanes, "the lanes of a row hold all of its columns");
  constexpr int kBlockM = BackwardShape<kQkDim, kVDim>::kBlockM;
  constexpr int kRows = 256 / kLanes;  // at a time
  __shared__ float products[kBlockM];
  ptx::allow_next_kernel();
  ptx::wait_for_previous_kernel();
  const AttentionParams& f = p.forward;
  const TileOfBlock at(f, plan);
  const int tile = at.tile, b = at.b, h = at.h;
  if (threadIdx.x == 0) {
    plan.counters[at.index] = 0;
    if (at.index == 0) *plan.ticket = *plan.not_finite = 0;
  }
  if (at.index == 0)
    for (int i = threadIdx.x; i < plan.tickets - plan.whole_items; i += 256) plan.given[i] = 0;
  const KeyWindow range(f, b);
  const int q_len = range.q_len, m = tile * kBlockM;
  if (m >= q_len) return;
  const std::int64_t begin = f.is_varlen_q() ? f.q_begin(b) : 0;

  // Rows past the end are the last one again.
  const int my_row = static_cast<int>(threadIdx.x), my_query = min(m + my_row, q_len - 1);
  float lse = 0.0f, grad_lse = 0.0f;
  if (my_row < kBlockM) {
    lse = f.lse[f.lse_offset(b, h, my_query)];
    if (p.grad_lse)
      grad_lse = p.grad_lse[row_offset(f.is_varlen_q(), begin, b, h, my_query, p.stride_grad_lse_batch,
                                       p.stride_grad_lse_head, p.stride_grad_lse_token)];
  }
  float sum[kBlockM / kRows];
  const int first_row = static_cast<int>(threadIdx.x) / kLanes, lane = threadIdx.x % kLanes;
  const auto query = [&](int i) { return min(m + i * kRows + first_row, q_len - 1); };
  const auto out_row = [&](int i) { return static_cast<const T*>(f.out) + f.out_offset(b, h, query(i)); };
  const auto grad_out_row = [&](int i) {
    return static_cast<const T*>(p.grad_out) + row_offset(f.is_varlen_q(), begin, b, h, query(i),
                                                          p.stride_grad_out_batch, p.stride_grad_out_head,
                                                          p.stride_grad_out_token);
  };
  multiply_rows(sum, out_row, grad_out_row, lane * 8, static_cast<int>(f.head_dim_v));
  const bool sees_nothing = range.first(m) >= range.last(min(q_len, m + kBlockM) - 1);
  if (p.grad_q && (sees_nothing || (plan.adders && plan.adders[plan.query_list(b, h, tile)] == 0))) {
    store_zero_rows(grad_q_row<T>(p, b, h, m), p.stride_grad_q_token, min(kBlockM, q_len - m),
                    static_cast<int>(f.head_dim), threadIdx.x, 256);
  }
  if (plan.zeroed && p.grad_q) {
    float4* const sums =
        reinterpret_cast<float4*>(plan.sums + static_cast<std::int64_t>(at.index) * (kBlockM * kQkDim));
    for (int i = threadIdx.x; i < kBlockM * kQkDim / 4; i += 256) sums[i] = float4{0.0f, 0.0f, 0.0f, 0.0f};
  }
#pragma unroll
  for (int i = 0; i < kBlockM / kRows; ++i) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) sum[i] += __shfl_xor_sync(kFullMask, sum[i], step);
    if (lane == 0) products[i * kRows + first_row] = sum[i];
  }
  __syncthreads();
  if (my_row >= kBlockM) return;
  float* const rows = plan.rows + static_cast<std::int64_t>(at.index) * (2 * kBlockM);
  const bool is_there = m + my_row < q_len;
  const float delta = is_there ? grad_lse - products[my_row] : 0.0f;
  constexpr float kLog2E = 1.4426950408889634f;
  // Rows that see nothing, and rows past the end, get exponentials of 2^-inf, not 2^inf.
  rows[my_row] = !is_there || lse == -INFINITY ? -INFINITY : -kLog2E * lse;
  rows[kBlockM + my_row] = delta;
  if (is_there) plan.delta[(static_cast<std::int64_t>(b) * f.heads_q + h) * f.seq_q + my_query] = delta;
}

}  // namespace flashkernel::cuda::sm90a
