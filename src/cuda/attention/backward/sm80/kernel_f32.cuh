// FlashAttention backward (Dao et al., 2022; Algorithm 4) in fp32 on the fp16 tensor cores of sm_80 and later: operands
// are sums of two halves (tile/split_halves.cuh). instances/ has the files that instantiate it.
//
//   S = Q K^T    P = exp(S - LSE)    dP = dO V^T    dS = P * (dP - D)    dQ = dS K    dK = dS^T Q    dV = P^T dO
//
// One kernel runs twice, so that no sum is shared by two blocks and every sum has a fixed order. A block owns 64 rows
// of one side, 16 for each warp, and walks the rows of the other side. As owner of queries it sums dQ. As owner of keys
// it sums dK and dV over the query heads of its group, with S and dP transposed. Either way, the products of the
// block's own two tiles with two walking tiles leave P and dS in the registers that the last products take as operands.
//
// dS is scaled by a power of two that brings the largest number of a warp's tile to 2^14. Therefore its halves lose
// nothing, whatever the loss is scaled by.
//
// Invariant on NaN and infinity: a block computes as if all were finite; when its sums are not, its rows are computed
// anew, plainly.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/ptx/math.cuh"
#include "cuda/attention/backward/sm80/variant_f32.hpp"
#include "cuda/attention/plain.cuh"
#include "cuda/attention/score.cuh"
#include "cuda/attention/key_range.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/split_products.cuh"

namespace flashkernel::cuda::sm80 {

// Registers: the sums (half a head dim a thread, for keys of both), S and dP (kWalk each), the waiting tile (kWalk /
// 128 times its head dim). Shared memory: two halves of four tiles, 96 KB at d128.
template <int kQkDim_, int kVDim_>
struct BackwardShapeF32 {
  static constexpr int kQkDim = kQkDim_, kVDim = kVDim_, kWidest = HeadDims{kQkDim, kVDim}.widest();
  static constexpr int kWarps = 4, kThreads = kWarps * 32, kMinBlocks = 2;
  static constexpr int kOwn = kWarps * 16, kWalk = kWidest <= 64 ? 64 : 32;
  static constexpr int kGroup = kWalk / kWarps;  // walking rows that share a scale; of the own ones it is eight
  static constexpr int kSharedBytes = (kOwn + kWalk) * (kQkDim + kVDim) * 4;
  static_assert(kSharedBytes + 1024 <= kLeastSharedBytes, "and what the kernel declares itself");
};

/// A [batch, heads, seq, dim] or variable-length tensor; `vectors`: rows are whole float4s at multiples of 16 bytes (of
/// gradients: pairs at multiples of 8).
struct RowsF32 {
  float* data;
  std::int64_t stride_batch, stride_head, stride_token;
  int dim;
  bool vectors;
};

struct BackwardPlanF32 {
  RowsF32 q, k, v, grad_out, grad_q, grad_k, grad_v;
  float* delta;  // -D, [batch, heads_q, seq_q]
};

__device__ inline float* first_row(const RowsF32& rows, bool varlen, std::int64_t begin, unsigned b, unsigned h) {
  return rows.data + (varlen ? begin * rows.stride_token : b * rows.stride_batch) + h * rows.stride_head;
}

// -D = dLSE - rowsum(dO * O) of eight queries, one a warp.
template <int kVDim>  // for a copy in each instance's file
__global__ void __launch_bounds__(256) prepare_f32_kernel(const __grid_constant__ AttentionBackwardParams p,
                                                          const __grid_constant__ BackwardPlanF32 plan) {
  const AttentionParams& f = p.forward;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * 8 + threadIdx.x / kWarp;
  const std::int64_t i = row % f.seq_q, h = row / f.seq_q % f.heads_q, b = row / f.seq_q / f.heads_q;
  if (b >= f.batch || i >= f.q_length(b)) return;
  const float* const out = static_cast<const float*>(f.out) + f.out_offset(b, h, i);
  const float* const grad_out =
      first_row(plan.grad_out, f.is_varlen_q(), f.q_begin(b), static_cast<unsigned>(b), static_cast<unsigned>(h)) +
      i * p.stride_grad_out_token;
  float sum = 0.0f;
  for (int d = threadIdx.x % kWarp; d < f.head_dim_v; d += kWarp) sum = fmaf(out[d], grad_out[d], sum);
  sum = warp_reduce(sum, Sum{});
  if (p.grad_lse)
    sum -= p.grad_lse[h * p.stride_grad_lse_head + (f.is_varlen_q()
                                                        ? (f.q_begin(b) + i) * p.stride_grad_lse_token
                                                        : b * p.stride_grad_lse_batch + i * p.stride_grad_lse_token)];
  if (threadIdx.x % kWarp == 0) plan.delta[row] = -sum;
}

__device__ inline bool sees(const KeyWindow& range, int i, int j) {
  return j >= range.first(i) && j < range.last(i) && i < range.q_len;
}

// From the two dot products of a pair, <q, k> and <dO, v>, to P and to dS, the gradient of the scaled product.
__device__ inline void pair_gradient_f32(const AttentionParams& p, const ScoreContext& at, const KeyWindow& range,
                                         int i, int j, float dot, float grad_p, float lse, float delta,
                                         float& probability, float& grad_s) {
  probability = grad_s = 0.0f;
  if (lse == INFINITY || !sees(range, i, j)) return;
  float capped;
  const float score = modified_score(p, at, i, j, dot, &capped);
  if (score == -INFINITY) return;  // a bias that masks
  probability = ptx::exp2_approx((score - lse) * 1.4426950408889634f);
  if (probability == 0.0f) return;
  grad_s = probability * (grad_p + delta);
  if (p.softcap > 0.0f) grad_s *= 1.0f - capped / p.softcap * (capped / p.softcap);
}

template <int kQkDim, int kVDim, bool kOfKeys, bool kModified>
__global__ void __launch_bounds__(BackwardShapeF32<kQkDim, kVDim>::kThreads,
                                  BackwardShapeF32<kQkDim, kVDim>::kMinBlocks)
    attention_bwd_f32_kernel(const __grid_constant__ AttentionBackwardParams p,
                             const __grid_constant__ BackwardPlanF32 plan) {
  using Shape = BackwardShapeF32<kQkDim, kVDim>;
  static_assert(kQkDim == kVDim, "one loop splits Q or K and then dO or V, and both wait in the same registers");
  constexpr int kDim = kQkDim;  // of a tile of either
  using Tile = SharedTile<kDim>;
  constexpr int kOwn = Shape::kOwn, kWalk = Shape::kWalk, kGroup = Shape::kGroup;
  constexpr std::uint32_t kLowOwn = kOwn * Tile::kPitch, kLowWalk = kWalk * Tile::kPitch;  // from high to low halves
  constexpr float kLog2E = 1.4426950408889634f;
  extern __shared__ __align__(128) unsigned char shared[];
  const AttentionParams& f = p.forward;
  const bool own_varlen = kOfKeys ? f.is_varlen_k() : f.is_varlen_q();
  const bool walk_varlen = kOfKeys ? f.is_varlen_q() : f.is_varlen_k();
  const RowsF32 &own_0 = kOfKeys ? plan.k : plan.q, &own_1 = kOfKeys ? plan.v : plan.grad_out;
  const RowsF32 &walk_0 = kOfKeys ? plan.q : plan.k, &walk_1 = kOfKeys ? plan.grad_out : plan.v;

  // The tile that has the most to do first: the last queries, the first keys.
  const unsigned tiles = static_cast<unsigned>(((kOfKeys ? f.seq_k : f.seq_q) + kOwn - 1) / kOwn);
  const unsigned heads = static_cast<unsigned>(kOfKeys ? f.heads_kv : f.heads_q), head = blockIdx.x / tiles;
  const unsigned b = head / heads, h = head % heads;
  const int first_own = static_cast<int>(kOfKeys ? blockIdx.x % tiles : tiles - 1 - blockIdx.x % tiles) * kOwn;
  const unsigned group = static_cast<unsigned>(f.heads_q / f.heads_kv);

  __shared__ struct {
    KeyWindow range;
    int first_walk, end_walk;  // rows of the other side that matter
    float multiplier_own[2][kOwn / 8], multiplier_walk[2][Shape::kWarps];
    float lse[kWalk], delta[kWalk];  // of the walking queries: LSE, -D
  } block;
  if (threadIdx.x == 0) {
    const KeyWindow range(f, b);
    const int end_own = min(kOfKeys ? range.k_len : range.q_len, first_own + kOwn);
    block.range = range;
    block.first_walk = kOfKeys ? range.first_query(first_own) : range.first(first_own);
    block.end_walk = kOfKeys ? range.last_query(end_own - 1) : range.last(end_own - 1);
  }
  __syncthreads();
  const int own_len = kOfKeys ? block.range.k_len : block.range.q_len;
  if (first_own >= own_len) return;
  const int first_tile = block.first_walk / kWalk;
  const int tiles_a_head = block.end_walk > block.first_walk ? (block.end_walk + kWalk - 1) / kWalk - first_tile : 0;
  const int steps = tiles_a_head * (kOfKeys ? static_cast<int>(group) : 1);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Tiles in shared memory, high halves and then low ones: two of the block's own rows, two of the walking ones.
  const std::uint32_t shared_own = ptx::shared_address(shared), shared_walk = shared_own + 4 * kLowOwn;
  const std::uint32_t lane_own =
      shared_own + warp * 16 * Tile::kPitch + Tile::lane_offset(LaneA::row(lane), LaneA::half(lane));
  const std::uint32_t lane_scores = shared_walk + Tile::lane_offset(LaneB::row(lane), LaneB::half(lane));
  const std::uint32_t lane_sums = shared_walk + Tile::lane_offset(LaneA::row(lane), LaneA::half(lane));

#pragma unroll 1
  for (int of = 0; of < 2; ++of) {
    const RowsF32& rows = of == 0 ? own_0 : own_1;
    const std::int64_t begin = own_varlen ? (kOfKeys ? f.k_begin(b) : f.q_begin(b)) : 0;
    const float* const base = first_row(rows, own_varlen, begin, b, h);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      SplitGroup<8, kDim> eight;
      const int row = first_own + warp * 16 + half * 8;
      eight.load(rows.vectors && row + 8 <= own_len ? base + row * rows.stride_token : nullptr, rows.stride_token,
                 rows.dim, rows.vectors,
                 [&](int r) { return row + r < own_len ? base + (row + r) * rows.stride_token : nullptr; });
      const std::uint32_t to = shared_own + of * 2 * kLowOwn;
      const float multiplier = eight.store(to, to + kLowOwn, warp * 16 + half * 8);
      if (lane == 0) block.multiplier_own[of][warp * 2 + half] = multiplier;
    }
  }

  SplitGroup<kGroup, kDim> waiting;  // this warp's rows of the walking tile that comes next
  const auto head_of = [&](int step) {
    return kOfKeys ? h * group + static_cast<unsigned>(step / tiles_a_head) : h / group;
  };
  const auto row_of_step = [&](int step) { return (first_tile + (kOfKeys ? step % tiles_a_head : step)) * kWalk; };
  const auto load_walking = [&](const RowsF32& rows, int step) {
    const std::int64_t begin = walk_varlen ? (kOfKeys ? f.q_begin(b) : f.k_begin(b)) : 0;
    const int row = row_of_step(step) + warp * kGroup;
    const float* const from = first_row(rows, walk_varlen, begin, b, head_of(step)) + row * rows.stride_token;
    const int first = block.first_walk - row, end = block.end_walk - row;
    waiting.load(rows.vectors && first <= 0 && kGroup <= end ? from : nullptr, rows.stride_token, rows.dim,
                 rows.vectors, [&](int r) { return r >= first && r < end ? from + r * rows.stride_token : nullptr; });
  };
  const auto store_walking = [&](int of) {
    const std::uint32_t to = shared_walk + of * 2 * kLowWalk;
    const float multiplier = waiting.store(to, to + kLowWalk, warp * kGroup);
    if (lane == 0) block.multiplier_walk[of][warp] = multiplier;
  };
  // LSE and -D of a query; where it is not there or sees nothing, such that its probabilities are 0.
  const auto statistics = [&](unsigned head, int i, float& lse, float& delta) {
    lse = INFINITY;
    delta = 0.0f;
    if (i >= block.range.q_len) return;
    const float own = f.lse[f.lse_offset(b, head, i)];
    if (own == -INFINITY) return;
    lse = own;
    delta = plan.delta[(b * f.heads_q + head) * f.seq_q + i];
  };

  const int row = first_own + warp * 16 + lane / 4;  // this thread's first one; the other lies 8 further
  [[maybe_unused]] float row_lse[2], row_delta[2];
  if constexpr (!kOfKeys)
    for (int half = 0; half < 2; ++half) statistics(h, row + 8 * half, row_lse[half], row_delta[half]);
  float sum_0[1][kQkDim / 8][4] = {};                                // dQ or dK
  [[maybe_unused]] float sum_1[1][kOfKeys ? kVDim / 8 : 1][4] = {};  // dV

  if (steps > 0) load_walking(walk_0, 0);
  for (int step = 0; step < steps; ++step) {
    const int first_column = row_of_step(step);
    __syncthreads();  // the last step's tiles are read
    store_walking(0);
    if constexpr (kOfKeys)
      if (threadIdx.x < kWalk)
        statistics(head_of(step), first_column + threadIdx.x, block.lse[threadIdx.x], block.delta[threadIdx.x]);
    load_walking(walk_1, step);
    __syncthreads();  // the first tile is there

    float p_tile[1][kWalk / 8][4], ds_tile[1][kWalk / 8][4];
    split_scores<kQkDim, 1, kWalk>(p_tile, lane_own, kLowOwn, lane_scores, kLowWalk);
    store_walking(1);
    if (step + 1 < steps) load_walking(walk_0, step + 1);
    __syncthreads();  // the second one, too
    split_scores<kVDim, 1, kWalk>(ds_tile, lane_own + 2 * kLowOwn, kLowOwn, lane_scores + 2 * kLowWalk, kLowWalk);

    // P and dS
    const auto group_of = [&](int n) { return (8 * n + 2 * (lane % 4)) / kGroup; };
    [[maybe_unused]] const KeyWindow range = block.range;
    [[maybe_unused]] const ScoreContext at(f, b, kOfKeys ? head_of(step) : h);
#pragma unroll
    for (int n = 0; n < kWalk / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int column = 8 * n + 2 * (lane % 4) + e % 2;
        const float dot =
            p_tile[0][n][e] * (block.multiplier_own[0][warp * 2 + e / 2] * block.multiplier_walk[0][group_of(n)]);
        const float grad_p =
            ds_tile[0][n][e] * (block.multiplier_own[1][warp * 2 + e / 2] * block.multiplier_walk[1][group_of(n)]);
        const float lse = kOfKeys ? block.lse[column] : row_lse[e / 2];
        const float delta = kOfKeys ? block.delta[column] : row_delta[e / 2];
        if constexpr (kModified) {
          const int own = row + e / 2 * 8, walk = first_column + column, i = kOfKeys ? walk : own;
          pair_gradient_f32(f, at, range, i, kOfKeys ? own : walk, dot, grad_p, lse, delta, p_tile[0][n][e],
                            ds_tile[0][n][e]);
        } else {
          p_tile[0][n][e] = ptx::exp2_approx(fmaf(dot, f.scale, -lse) * kLog2E);  // the difference is rounded once
          ds_tile[0][n][e] = p_tile[0][n][e] * (grad_p + delta);
        }
      }
    const int first_q = kOfKeys ? first_column : first_own, first_k = kOfKeys ? first_own : first_column;
    const int last_q = min(block.range.q_len, first_q + (kOfKeys ? kWalk : kOwn)) - 1;
    const int last_k = first_k + (kOfKeys ? kOwn : kWalk) - 1;
    if (!kModified && (block.range.first(last_q) > first_k || block.range.last(first_q) <= last_k)) {
#pragma unroll
      for (int n = 0; n < kWalk / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int walk = first_column + 8 * n + 2 * (lane % 4) + e % 2, own = row + e / 2 * 8;
          if (!sees(block.range, kOfKeys ? walk : own, kOfKeys ? own : walk)) p_tile[0][n][e] = ds_tile[0][n][e] = 0.0f;
        }
    }

    if constexpr (kOfKeys) {  // dV += P^T dO; P is at most 1 and a rounding more
      const SplitScale<Shape::kWarps> scale(block.multiplier_walk[1], 13);
      const SplitOperand<1, kWalk> operand(p_tile,
                                           [&](int n) { return block.multiplier_walk[1][group_of(n)] * scale.to; });
      split_accumulate<kVDim, 1, kWalk>(sum_1, operand, lane_sums + 2 * kLowWalk, kLowWalk, scale.back);
    }
    // dQ += dS K or dK += dS^T Q
    float largest = 0.0f;
#pragma unroll
    for (int n = 0; n < kWalk / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) largest = fmaxf(largest, fabsf(ds_tile[0][n][e]));
    largest = warp_reduce(largest, [](float x, float y) { return fmaxf(x, y); });
    const PowerOfTwo power(largest);  // of the warp's tile: a product mixes its lanes
    const SplitScale<Shape::kWarps> scale(block.multiplier_walk[0], 0);
    const SplitOperand<1, kWalk> operand(
        ds_tile, [&](int n) { return block.multiplier_walk[0][group_of(n)] * scale.to * power.to; });
    split_accumulate<kQkDim, 1, kWalk>(sum_0, operand, lane_sums, kLowWalk, scale.back * power.back);
  }

  const auto own_row = [&](const RowsF32& rows, int i) {
    const std::int64_t begin = own_varlen ? (kOfKeys ? f.k_begin(b) : f.q_begin(b)) : 0;
    return first_row(rows, own_varlen, begin, b, h) + i * rows.stride_token;
  };
  const RowsF32 &to_0 = kOfKeys ? plan.grad_k : plan.grad_q, &to_1 = plan.grad_v;
  float zero = 0.0f;  // NaN once any result is not finite
#pragma unroll
  for (int c = 0; c < kDim / 8; ++c)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      zero = fmaf(sum_0[0][c][e], 0.0f, zero);
      if constexpr (kOfKeys) zero = fmaf(sum_1[0][c][e], 0.0f, zero);
    }
  if (__syncthreads_or(zero != zero)) {
    // Rare: row by row, a warp each, and nothing but pairs that give something is multiplied.
#pragma unroll 1
    for (int own = first_own + warp; own < min(own_len, first_own + kOwn); own += Shape::kWarps) {
      const float *const x_0 = own_row(own_0, own), *const x_1 = own_row(own_1, own);
      float plain_0[kDim / kWarp] = {}, plain_1[kDim / kWarp] = {};
#pragma unroll 1
      for (unsigned head = kOfKeys ? h * group : h; head < (kOfKeys ? (h + 1) * group : h + 1); ++head) {
        const unsigned walk_head = kOfKeys ? head : head / group;
        const std::int64_t begin = walk_varlen ? (kOfKeys ? f.q_begin(b) : f.k_begin(b)) : 0;
        const int end = kOfKeys ? block.range.last_query(own) : block.range.last(own);
#pragma unroll 1
        for (int w = kOfKeys ? block.range.first_query(own) : block.range.first(own); w < end; ++w) {
          const float* const y_0 = first_row(walk_0, walk_varlen, begin, b, walk_head) + w * walk_0.stride_token;
          const float* const y_1 = first_row(walk_1, walk_varlen, begin, b, walk_head) + w * walk_1.stride_token;
          float lse, delta;
          statistics(head, kOfKeys ? w : own, lse, delta);
          if (lse == INFINITY) continue;
          float probability, score;
          pair_gradient_f32(f, ScoreContext(f, b, head), block.range, kOfKeys ? w : own, kOfKeys ? own : w,
                            warp_dot(x_0, y_0, own_0.dim), warp_dot(x_1, y_1, own_1.dim), lse, delta, probability,
                            score);
#pragma unroll
          for (int c = 0; c < kDim / kWarp; ++c) {
            const int column = lane + c * kWarp;
            if (score != 0.0f && column < own_0.dim) plain_0[c] += score * y_0[column];
            if (kOfKeys && probability != 0.0f && column < own_1.dim) plain_1[c] += probability * y_1[column];
          }
        }
      }
#pragma unroll
      for (int c = 0; c < kDim / kWarp; ++c) {
        const int column = lane + c * kWarp;
        if (to_0.data && column < to_0.dim) own_row(to_0, own)[column] = plain_0[c] * f.scale;
        if (kOfKeys && to_1.data && column < to_1.dim) own_row(to_1, own)[column] = plain_1[c];
      }
    }
    return;
  }

  const auto store = [&](const auto& sum, const RowsF32& rows, float factor) {
    if (!rows.data) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + 8 * half, column = 2 * (lane % 4);
      if (i >= own_len) continue;
      float* const to = own_row(rows, i) + column;
#pragma unroll
      for (int c = 0; c < kDim / 8; ++c) {
        const float x = sum[0][c][2 * half] * factor, y = sum[0][c][2 * half + 1] * factor;
        if (rows.vectors && column + 8 * c + 1 < rows.dim) {
          *reinterpret_cast<float2*>(to + 8 * c) = float2{x, y};
        } else {
          if (column + 8 * c < rows.dim) to[8 * c] = x;
          if (column + 8 * c + 1 < rows.dim) to[8 * c + 1] = y;
        }
      }
    }
  };
  store(sum_0, to_0, f.scale);
  if constexpr (kOfKeys) store(sum_1, to_1, 1.0f);
}

template <int kQkDim, int kVDim, bool kModified>
void launch_attention_bwd_f32(const AttentionBackwardParams& p, void* workspace, Stream stream) {
  using Shape = BackwardShapeF32<kQkDim, kVDim>;
  const AttentionParams& f = p.forward;
  const CudaDeviceGuard guard(f.device.index);
  const cudaStream_t s = native(stream);
  const auto rows = [](const void* data, bool varlen, std::int64_t batch, std::int64_t head, std::int64_t token,
                       std::int64_t dim, int alignment) {
    const bool vectors = dim % alignment == 0 && is_aligned(data, 4 * alignment) && head % alignment == 0 &&
                         token % alignment == 0 && (varlen || batch % alignment == 0);
    return RowsF32{static_cast<float*>(const_cast<void*>(data)), batch, head, token, static_cast<int>(dim), vectors};
  };
  const bool varlen_q = f.is_varlen_q(), varlen_k = f.is_varlen_k();
  BackwardPlanF32 plan;
  plan.q = rows(f.q, varlen_q, f.stride_q_batch, f.stride_q_head, f.stride_q_token, f.head_dim, 4);
  plan.k = rows(f.k, varlen_k, f.stride_k_batch, f.stride_k_head, f.stride_k_token, f.head_dim, 4);
  plan.v = rows(f.v, varlen_k, f.stride_v_batch, f.stride_v_head, f.stride_v_token, f.head_dim_v, 4);
  plan.grad_out = rows(p.grad_out, varlen_q, p.stride_grad_out_batch, p.stride_grad_out_head, p.stride_grad_out_token,
                       f.head_dim_v, 4);
  plan.grad_q =
      rows(p.grad_q, varlen_q, p.stride_grad_q_batch, p.stride_grad_q_head, p.stride_grad_q_token, f.head_dim, 2);
  plan.grad_k =
      rows(p.grad_k, varlen_k, p.stride_grad_k_batch, p.stride_grad_k_head, p.stride_grad_k_token, f.head_dim, 2);
  plan.grad_v =
      rows(p.grad_v, varlen_k, p.stride_grad_v_batch, p.stride_grad_v_head, p.stride_grad_v_token, f.head_dim_v, 2);
  plan.delta = static_cast<float*>(workspace);

  const std::int64_t queries = f.batch * f.heads_q * f.seq_q;
  if (!p.grad_q && !p.grad_k && !p.grad_v) return;
  if (queries > 0) {
    launch("attention_bwd sm80 f32: prepare", prepare_f32_kernel<kVDim>,
           {static_cast<unsigned>(ceil_div(queries, 8)), 256, 0, s}, p, plan);
  }
  if (p.grad_q && queries > 0) {
    const auto kernel = attention_bwd_f32_kernel<kQkDim, kVDim, false, kModified>;
    launch("attention_bwd sm80 f32: dQ", kernel,
           {static_cast<unsigned>(f.batch * f.heads_q * ceil_div(f.seq_q, Shape::kOwn)), Shape::kThreads,
            Shape::kSharedBytes, s},
           p, plan);
  }
  if ((p.grad_k || p.grad_v) && f.batch * f.heads_kv * f.seq_k > 0) {
    const auto kernel = attention_bwd_f32_kernel<kQkDim, kVDim, true, kModified>;
    launch("attention_bwd sm80 f32: dK, dV", kernel,
           {static_cast<unsigned>(f.batch * f.heads_kv * ceil_div(f.seq_k, Shape::kOwn)), Shape::kThreads,
            Shape::kSharedBytes, s},
           p, plan);
  }
}

/// An entry of the table, but for the gradients of sinks and bias: cuda/kernels.cpp has the generic kernel compute
/// those first, in the same workspace.
template <int kQkDim, int kVDim>
void attention_bwd_f32(const AttentionBackwardParams& p, void* workspace, Stream stream) {
  if (p.forward.has_score_modifier())
    launch_attention_bwd_f32<kQkDim, kVDim, true>(p, workspace, stream);
  else
    launch_attention_bwd_f32<kQkDim, kVDim, false>(p, workspace, stream);
}

}  // namespace flashkernel::cuda::sm80
