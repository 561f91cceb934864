// The gradient of an additive bias: dS = P * (dP - D), summed over the dims that the bias broadcasts. Launched by
// kernel.cuh, after prepare_kernel.
//
// A block owns a tile of 64 x 64 elements of the result, or fewer where a dim is 1. It walks the tiles of all
// sequences, heads, queries and keys that add to its tile, in a fixed order. No two blocks add to the same sum. Where
// the result is too small to fill the device, the walk is cut into parts. These leave their sums in the workspace, and
// a second kernel adds the sums in order.
#pragma once

#include <type_traits>

#include "cuda/ptx/math.cuh"
#include "cuda/attention/backward/sm80/shape.cuh"
#include "cuda/attention/score_fast.cuh"
#include "cuda/attention/key_range.cuh"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda::sm80 {

template <int kQkDim, int kVDim>
struct BiasShape {
  static constexpr int kBlock = kBiasBlock, kThreads = 128;  // a warp: 16 queries
  static constexpr int kPlaceBytes = kBlock * HeadDims{kQkDim, kVDim}.widest() * 2;
  static constexpr int kQ = 0, kK = kPlaceBytes;  // then dO and V in their places
  // d256: 2 x 64 x 512 B = 64 KB. The sums, 64 x 64 in fp32, take their place at the end.
  static constexpr int kSharedBytes = std::max(kBlock * kBlock * 4, 2 * kPlaceBytes);
  static_assert(kSharedBytes <= kLeastSharedBytes);
};

template <class T, int kQkDim, int kVDim>
__global__ void __launch_bounds__(BiasShape<kQkDim, kVDim>::kThreads)
    grad_bias_kernel(const __grid_constant__ AttentionBackwardParams p, const __grid_constant__ BackwardPlan plan,
                     const __grid_constant__ BiasWalk walk, float* partial_sums) {
  using Shape = BiasShape<kQkDim, kVDim>;
  // The functions below take one of these: the columns of a tile of Q or K, or of dO or V.
  using OfQk = std::integral_constant<int, kQkDim>;
  using OfV = std::integral_constant<int, kVDim>;
  constexpr int kBlock = Shape::kBlock, kThreads = Shape::kThreads;
  constexpr float kLog2E = 1.4426950408889634f;
  extern __shared__ __align__(128) unsigned char shared[];
  const AttentionParams& f = p.forward;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::uint32_t base = ptx::shared_address(shared);

  // This block's tile of the result, and its part of the walk.
  std::int64_t rest = blockIdx.x;
  const std::int64_t part = rest % walk.parts;
  rest /= walk.parts;
  std::int64_t own[4];
#pragma unroll
  for (int d = 3; d >= 0; --d) {
    own[d] = rest % walk.own[d];
    rest /= walk.own[d];
  }
  const std::int64_t steps = walk.all[0] * walk.all[1] * walk.all[2] * walk.all[3];
  const std::int64_t begin = steps * part / walk.parts, end = steps * (part + 1) / walk.parts;

  float sum[kBlock / 8][4] = {};
  FiniteCheck finite;
  for (std::int64_t step = begin; step < end; ++step) {
    std::int64_t at = step;
    std::int64_t index[4];
#pragma unroll
    for (int d = 3; d >= 0; --d) {
      index[d] = own[d] + at % walk.all[d];
      at /= walk.all[d];
    }
    const std::int64_t b = index[0], h = index[1], g = h / (f.heads_q / f.heads_kv);
    const KeyWindow range(f, b);
    const int first_query = static_cast<int>(index[2]) * kBlock, first_key = static_cast<int>(index[3]) * kBlock;
    const int last_query = min(range.q_len, first_query + kBlock) - 1;
    if (first_query > last_query || range.last(last_query) <= first_key ||
        range.first(first_query) >= min(range.k_len, first_key + kBlock))
      continue;  // the same for every thread

    const auto load_queries = [&](auto columns, const void* from, std::int64_t stride_batch, std::int64_t stride_head,
                                  std::int64_t stride_token, std::int64_t dim, bool vectors) {
      const T* const row0 =
          static_cast<const T*>(from) + row_offset(f.is_varlen_q(), f.is_varlen_q() ? f.q_begin(b) : 0, b, h,
                                                   first_query, stride_batch, stride_head, stride_token);
      load_tile<kBlock, decltype(columns)::value, kThreads>(
          base + Shape::kQ, static_cast<int>(dim), vectors, static_cast<const T*>(nullptr), stride_token,
          [&](int row) -> const T* { return first_query + row <= last_query ? row0 + row * stride_token : nullptr; });
    };
    const auto load_keys = [&](auto columns, const void* from, std::int64_t stride_batch, std::int64_t stride_head,
                               std::int64_t stride_token, std::int64_t dim, bool vectors) {
      const T* const row0 =
          static_cast<const T*>(from) + row_offset(f.is_varlen_k(), f.is_varlen_k() ? f.k_begin(b) : 0, b, g, first_key,
                                                   stride_batch, stride_head, stride_token);
      load_tile<kBlock, decltype(columns)::value, kThreads>(
          base + Shape::kK, static_cast<int>(dim), vectors, static_cast<const T*>(nullptr), stride_token,
          [&](int row) -> const T* { return first_key + row < range.k_len ? row0 + row * stride_token : nullptr; });
    };
    const auto product = [&](auto head_dim, auto& to) {
      using Rows = SharedTile<decltype(head_dim)::value>;
      ptx::cp_async_commit();  // only what is committed can be waited for
      ptx::cp_async_wait<0>();
      __syncthreads();
      const std::uint32_t rows =
          base + Shape::kQ + warp * 16 * Rows::kPitch + Rows::lane_offset(LaneA::row(lane), LaneA::half(lane));
      const std::uint32_t columns = base + Shape::kK + Rows::lane_offset(LaneB::row(lane), LaneB::half(lane));
#pragma unroll
      for (int d = 0; d < Rows::kChunks / 2; ++d) {
        std::uint32_t a[4];
        ptx::ldmatrix_x4(a, Rows::at_slice(rows, d));
#pragma unroll
        for (int n = 0; n < kBlock / 16; ++n) {
          std::uint32_t keys[4];
          ptx::ldmatrix_x4(keys, Rows::at_slice(columns, d) + n * 16 * Rows::kPitch);
          ptx::mma_m16n8k16<T>(to[2 * n], a, keys[0], keys[1]);
          ptx::mma_m16n8k16<T>(to[2 * n + 1], a, keys[2], keys[3]);
        }
      }
      __syncthreads();  // the tiles are read
    };
    float score[kBlock / 8][4] = {}, grad_p[kBlock / 8][4] = {};
    load_queries(OfQk{}, f.q, f.stride_q_batch, f.stride_q_head, f.stride_q_token, f.head_dim, plan.vectors_q);
    load_keys(OfQk{}, f.k, f.stride_k_batch, f.stride_k_head, f.stride_k_token, f.head_dim, plan.vectors_k);
    product(OfQk{}, score);
    load_queries(OfV{}, p.grad_out, p.stride_grad_out_batch, p.stride_grad_out_head, p.stride_grad_out_token,
                 f.head_dim_v, plan.vectors_grad_out);
    load_keys(OfV{}, f.v, f.stride_v_batch, f.stride_v_head, f.stride_v_token, f.head_dim_v, plan.vectors_v);
    product(OfV{}, grad_p);

    const float slope = f.alibi_slopes ? f.alibi_slopes[b * f.stride_alibi_batch + h] : 0.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = first_query + warp * 16 + lane / 4 + 8 * half, row = min(i, last_query);
      const int first = range.first(row), last = i <= last_query ? range.last(row) : 0;
      const float lse = plan.lse[(b * f.heads_q + h) * f.seq_q + row];
      const float delta = plan.delta[(b * f.heads_q + h) * f.seq_q + row];
      const std::uint64_t shown = mask_keys<kBlock>(f, b, h, row, first_key) >> 2 * (lane % 4);
      const char* const bias_row = static_cast<const char*>(f.bias.data) +
                                   (b * f.bias.stride_batch + h * f.bias.stride_head + row * f.bias.stride_q) *
                                       (f.bias.dtype == DType::kFloat32 ? 4 : 2);
#pragma unroll
      for (int n = 0; n < kBlock / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int j = first_key + 8 * n + 2 * (lane % 4) + e;
          if (j < first || j >= last || (shown >> (8 * n + e) & 1) == 0) continue;
          const float s =
              modified_score_fast(f, slope, bias_row, row, j, range.k_len - range.q_len, score[n][2 * half + e]);
          const float probability = ptx::exp2_approx(fmaf(s, kLog2E, lse));
          sum[n][2 * half + e] += probability * (grad_p[n][2 * half + e] + delta);
        }
    }
  }

  // Through shared memory: rows of queries, sums over the dims that are 1.
  float* const tile = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int n = 0; n < kBlock / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      finite.see(sum[n][e]);
      tile[(warp * 16 + lane / 4 + e / 2 * 8) * kBlock + 8 * n + 2 * (lane % 4) + e % 2] = sum[n][e];
    }
  finite.report(plan.not_finite);
  __syncthreads();
  const bool sum_queries = p.grad_bias_shape[2] == 1, sum_keys = p.grad_bias_shape[3] == 1;
  if (sum_queries) {
    if (threadIdx.x < kBlock)
#pragma unroll 4
      for (int row = 1; row < kBlock; ++row) tile[threadIdx.x] += tile[row * kBlock + threadIdx.x];
    __syncthreads();
  }
  const int rows = sum_queries ? 1 : kBlock;
  if (sum_keys) {
    if (static_cast<int>(threadIdx.x) < rows)
#pragma unroll 4
      for (int column = 1; column < kBlock; ++column) tile[threadIdx.x * kBlock] += tile[threadIdx.x * kBlock + column];
    __syncthreads();
  }
  const int columns = sum_keys ? 1 : kBlock;
  for (int at = threadIdx.x; at < rows * columns; at += kThreads) {
    const int row = at / columns, column = at % columns;
    const std::int64_t i = own[2] * kBlock + row, j = own[3] * kBlock + column;
    if (i >= p.grad_bias_shape[2] || j >= p.grad_bias_shape[3]) continue;
    const float value = tile[row * kBlock + column];
    if (walk.parts == 1) {
      store_typed(p.grad_bias, p.grad_bias_dtype,
                  own[0] * p.stride_grad_bias[0] + own[1] * p.stride_grad_bias[1] + i * p.stride_grad_bias[2] +
                      j * p.stride_grad_bias[3],
                  value);
    } else {
      const std::int64_t element =
          ((own[0] * p.grad_bias_shape[1] + own[1]) * p.grad_bias_shape[2] + i) * p.grad_bias_shape[3] + j;
      partial_sums[part * walk.elements + element] = value;
    }
  }
}

/// Adds up the parts of every element, in order.
static __global__ void __launch_bounds__(256)
    sum_bias_parts_kernel(const __grid_constant__ AttentionBackwardParams p, const __grid_constant__ BiasWalk walk,
                          const float* partial_sums) {
  const std::int64_t e = static_cast<std::int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (e >= walk.elements) return;
  float sum = 0.0f;
  for (std::int64_t part = 0; part < walk.parts; ++part) sum += partial_sums[part * walk.elements + e];
  std::int64_t rest = e, to = 0;
  for (int d = 3; d >= 0; --d) {
    to += rest % p.grad_bias_shape[d] * p.stride_grad_bias[d];
    rest /= p.grad_bias_shape[d];
  }
  store_typed(p.grad_bias, p.grad_bias_dtype, to, sum);
}

}  // namespace flashkernel::cuda::sm80
