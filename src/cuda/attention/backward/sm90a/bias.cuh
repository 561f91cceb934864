// The gradient of an additive bias on Hopper: dS = P * (dP - D), summed over the sequences and heads that share the
// bias. Launched by kernel.cuh, after prepare_kernel.
//
// A warpgroup owns 64 queries x 128 keys of the result, in registers. It walks the sequences and heads that add to
// them, in order, and computes both products again: no two blocks add to the same sum, so results are the same bits in
// every run. Two blocks share a multiprocessor; one loads and multiplies while the other works on its scores.
#pragma once

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/attention/backward/sm90a/keys.cuh"
#include "cuda/attention/backward/sm90a/producer.cuh"

namespace flashkernel::cuda::sm90a {

template <int kQkDim, int kVDim>
struct GradBiasShape {
  static constexpr int kQueries = 64, kKeys = 128, kThreads = 128;
  static constexpr int kQkBlocks = (kQkDim + 63) / 64, kVBlocks = (kVDim + 63) / 64;  // of 64 columns
  static constexpr int kQBlockBytes = kQueries * 128, kKvBlockBytes = kKeys * 128;
  static constexpr int kQBytes = kQkBlocks * kQBlockBytes, kKBytes = kQkBlocks * kKvBlockBytes;
  static constexpr int kGradOutBytes = kVBlocks * kQBlockBytes, kVBytes = kVBlocks * kKvBlockBytes;
  static constexpr int kWords = kKeys / 4;  // of bias, of a thread
  static constexpr int kQ = 0, kK = kQ + kQBytes, kGradOut = kK + kKBytes, kV = kGradOut + kGradOutBytes;
  static constexpr int kBias = kV + kVBytes, kBarriers = kBias + kWords * kThreads * 4;
  static constexpr int kBytes = kBarriers + 2 * 8;
};

/// Grid: tiles of the result, keys fastest.
template <class T, int kQkDim, int kVDim>
__global__ void __launch_bounds__(GradBiasShape<kQkDim, kVDim>::kThreads, 2)
    grad_bias_kernel(const __grid_constant__ AttentionBackwardParams p, const __grid_constant__ BackwardPlan plan,
                     const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                     const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_grad_out) {
  using Shape = GradBiasShape<kQkDim, kVDim>;
  constexpr int kBlockM = backward_block_m(HeadDims{kQkDim, kVDim}.widest());  // of plan.rows
  constexpr float kLog2E = 1.4426950408889634f;
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  const std::uint32_t base = ptx::shared_address(dynamic_shared);
  const std::uint32_t scores_full = base + Shape::kBarriers, gradients_full = scores_full + 8;
  const AttentionParams& f = p.forward;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;

  const unsigned k_tiles = static_cast<unsigned>((f.seq_k + Shape::kKeys - 1) / Shape::kKeys);
  const unsigned q_tiles = static_cast<unsigned>((f.seq_q + Shape::kQueries - 1) / Shape::kQueries);
  const unsigned heads = static_cast<unsigned>(p.grad_bias_shape[1]);
  const int first_key = static_cast<int>(blockIdx.x % k_tiles) * Shape::kKeys;
  const int first_query = static_cast<int>(blockIdx.x / k_tiles % q_tiles) * Shape::kQueries;
  const int own_h = static_cast<int>(blockIdx.x / k_tiles / q_tiles % heads);
  const int own_b = static_cast<int>(blockIdx.x / k_tiles / q_tiles / heads);
  const int all_heads = heads == 1 ? static_cast<int>(f.heads_q) : 1;
  const int all_batches = p.grad_bias_shape[0] == 1 ? static_cast<int>(f.batch) : 1;
  const KeyWindow range(f, own_b);  // of every sequence: a bias is for dense calls
  const int last_query = min(range.q_len, first_query + Shape::kQueries) - 1;
  const bool seen =
      range.first(first_query) < min(range.k_len, first_key + Shape::kKeys) && range.last(last_query) > first_key;
  const int steps = seen ? all_heads * all_batches : 0;

  if (thread == 0) {
    ptx::mbarrier_init(scores_full, 1);
    ptx::mbarrier_init(gradients_full, 1);
    ptx::fence_mbarrier_init();
  }
  const auto head_of = [&](int step) { return own_h + step % all_heads; };
  const auto batch_of = [&](int step) { return own_b + step / all_heads; };
  const int group = static_cast<int>(f.heads_q / f.heads_kv);
  const auto load = [&](int step) {  // by one thread
    const int h = head_of(step), b = batch_of(step);
    ptx::mbarrier_arrive_expect(scores_full, Shape::kQBytes + Shape::kKBytes);
    load_tile<Shape::kQkBlocks>(base + Shape::kQ, Shape::kQBlockBytes, &map_q, scores_full, ptx::kL2EvictNormal,
                                first_query, h, b);
    load_tile<Shape::kQkBlocks>(base + Shape::kK, Shape::kKvBlockBytes, &map_k, scores_full, ptx::kL2EvictNormal,
                                first_key, h / group, b);
    ptx::mbarrier_arrive_expect(gradients_full, Shape::kGradOutBytes + Shape::kVBytes);
    load_tile<Shape::kVBlocks>(base + Shape::kGradOut, Shape::kQBlockBytes, &map_grad_out, gradients_full,
                               ptx::kL2EvictNormal, first_query, h, b);
    load_tile<Shape::kVBlocks>(base + Shape::kV, Shape::kKvBlockBytes, &map_v, gradients_full, ptx::kL2EvictNormal,
                               first_key, h / group, b);
  };
  __syncthreads();
  if (steps > 0 && thread == 0) load(0);

  // The thread's elements, 4 c + 2 half + e: rows of its two queries, keys 8 c + e from `key` on.
  const int query = first_query + thread / 32 * 16 + lane / 4, key = first_key + 2 * (lane % 4);
  std::uint32_t* const bias =
      static_cast<std::uint32_t*>(__cvta_shared_to_generic(base + Shape::kBias)) + thread;  // its words, 128 apart
  if (steps > 0) {
    const T* const from = static_cast<const T*>(f.bias.data) + own_b * f.bias.stride_batch + own_h * f.bias.stride_head;
#pragma unroll 4
    for (int w = 0; w < Shape::kWords; ++w) {
      const int c = w / 2, half = w % 2;
      const T* const row = from + static_cast<std::int64_t>(min(query + 8 * half, range.q_len - 1)) * f.bias.stride_q;
      const int j = key + 8 * c;
      bias[w * Shape::kThreads] =
          pack<T>(to_float(row[min(j, range.k_len - 1)]), to_float(row[min(j + 1, range.k_len - 1)]));
    }
  }
  // Whether some pair of the tile is hidden.
  const bool masked = range.first(last_query) > first_key || range.last(first_query) < first_key + Shape::kKeys;
  int first[2], last[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    first[half] = range.first(query + 8 * half) - key;
    last[half] = range.last(query + 8 * half) - key;
  }

  float sum[Shape::kKeys / 2] = {}, score[Shape::kKeys / 2], grad_p[Shape::kKeys / 2];
  const auto multiply = [&](auto columns, float(&to)[Shape::kKeys / 2], int rows_at, int columns_at) {
    const std::uint64_t a = ptx::matrix_descriptor(base + rows_at, 16, 1024);
    const std::uint64_t b = ptx::matrix_descriptor(base + columns_at, 16, 1024);
    ptx::hold(to);
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < decltype(columns)::value / 16; ++d)
      ptx::wgmma_ss<T>(to, a + (d / 4 * Shape::kQBlockBytes + d % 4 * 32) / 16,
                       b + (d / 4 * Shape::kKvBlockBytes + d % 4 * 32) / 16, d > 0);
    ptx::wgmma_commit();
  };
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int h = head_of(step), b = batch_of(step);
    const float* const rows = plan.rows + static_cast<std::int64_t>(plan.tile_index(static_cast<int>(f.heads_q), b, h,
                                                                                    first_query / kBlockM)) *
                                              (2 * kBlockM);
    const int row = query % kBlockM;
    const float lse[2] = {rows[row], rows[row + 8]}, delta[2] = {rows[kBlockM + row], rows[kBlockM + row + 8]};
    ptx::mbarrier_wait(scores_full, step & 1);
    multiply(std::integral_constant<int, kQkDim>{}, score, Shape::kQ, Shape::kK);
    ptx::mbarrier_wait(gradients_full, step & 1);
    multiply(std::integral_constant<int, kVDim>{}, grad_p, Shape::kGradOut, Shape::kV);
    ptx::wgmma_wait<0>();
    ptx::hold(score);
    ptx::hold(grad_p);
    __syncthreads();  // all warps have read the tiles
    if (step + 1 < steps && thread == 0) load(step + 1);
#pragma unroll
    for (int c = 0; c < Shape::kKeys / 8; ++c)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t word = bias[(2 * c + half) * Shape::kThreads];
        const float2 two = unpack_pair<T>(word);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = 4 * c + 2 * half + e;
          const float shift = fmaf(e == 0 ? two.x : two.y, kLog2E, lse[half]);
          float x = ptx::exp2_approx(fmaf(score[i], plan.scale_log2, shift));
          if (masked && (8 * c + e < first[half] || 8 * c + e >= last[half])) x = 0.0f;
          sum[i] = fmaf(x, grad_p[i] + delta[half], sum[i]);
        }
      }
  }

  FiniteCheck<> finite;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = query + 8 * half;
    if (i >= range.q_len) continue;
    const std::int64_t to = own_b * p.stride_grad_bias[0] + own_h * p.stride_grad_bias[1] + i * p.stride_grad_bias[2];
#pragma unroll
    for (int c = 0; c < Shape::kKeys / 8; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int j = key + 8 * c + e;
        if (j >= range.k_len) continue;
        const float x = sum[4 * c + 2 * half + e];
        finite.see(x, 2 * half + e);
        store_typed(p.grad_bias, p.grad_bias_dtype, to + j * p.stride_grad_bias[3], x);
      }
  }
  finite.report(plan.not_finite);
}

}  // namespace flashkernel::cuda::sm90a
