// FlashAttention-2 backward (Dao, 2023; Algorithm 2) on the tensor cores of sm_80 and later, five matrix products a
// pair of tiles. Instantiated by the generated attention_bwd_<dtype>_d<dim>.cu files.
//
//   S^T = K Q^T    P^T = exp(S^T - LSE)    dP^T = V dO^T    dS^T = P^T * (dP^T - D)
//   dV += P^T dO   dK += dS^T Q            dQ += dS K       (K, Q, dO from shared memory)
//
// A block owns 128 keys of one kv head, 16 a warp, and walks the tiles of queries that see any of them, for every query
// head of the group. Working on the transposed scores leaves P^T and dS^T in registers as the operands of dV and dK;
// only dS^T goes through shared memory, for dQ. dK and dV stay in registers; dQ is added to an fp32 sum in global
// memory.
//
// Deterministic mode: a counter a tile of queries lets the blocks add in the order of their keys. Blocks take their
// work by ticket, so the block that one waits for has started before it. The order of heads makes waits rare: as many
// heads side by side as there are multiprocessors, so that neighbours in time are seldom neighbours in keys.
//
// Invariant on NaN (0 * NaN is NaN in the tensor core): keys and queries outside of what is seen are zero-filled. K is
// cleaned when it arrives and the scores of its unclean rows become NaN; Q and dO are cleaned in partly masked tiles
// that hold such values, after the scores are taken, and dO's are added to exactly the rows of dV that see them.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/ptx/atomic.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/sm80/attention_bwd.hpp"
#include "cuda/tile/key_range.cuh"
#include "cuda/tile/not_finite.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/shared_tile.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda::sm80 {

template <int kDim>
struct BackwardShape {
  static constexpr int kWarps = 8, kThreads = kWarps * 32;
  static constexpr int kBlockN = kWarps * 16;
  static constexpr int kBlockM = backward_block_m(kDim);
  static constexpr int kStages = 2;  // of Q, dO, LSE and D
  // dQ: warps over 16-query slices, then over columns.
  static constexpr int kWarpsM = kBlockM / 16, kWarpsD = kWarps / kWarpsM, kColumns = kDim / kWarpsD;
  using Keys = SharedTile<kDim>;
  using Scores = SharedTile<kBlockM>;  // dS^T: rows are keys
  // Byte offsets in shared memory. d64: 16 + 16 + 16 + 16 + 1 + 32 = 97 KB; d128: 32 + 32 + 32 + 32 + 1 + 32 = 161 KB.
  static constexpr int kK = 0, kV = kK + kBlockN * Keys::kPitch, kQ = kV + kBlockN * Keys::kPitch;
  static constexpr int kQBytes = kBlockM * Keys::kPitch;
  static constexpr int kGradOut = kQ + kStages * kQBytes, kLse = kGradOut + kStages * kQBytes;
  static constexpr int kDelta = kLse + kStages * kBlockM * 4, kGradS = kDelta + kStages * kBlockM * 4;
  static constexpr int kGradSBytes = kBlockN * Scores::kPitch, kSharedBytes = kGradS + 2 * kGradSBytes;
};

struct BackwardPlan {
  int k_tiles, q_tiles;  // of the longest sequence
  int heads_at_once;
  bool vectors_q, vectors_k, vectors_v, vectors_out, vectors_grad_out, vectors_grad_k, vectors_grad_v;
  float *delta, *lse;  // -D, and -LSE in base 2
  float* sums;
  int* counters;
  int* ticket;
};

// Before the pass: D = rowsum(dO * O) - dLSE of a tile of queries, its sum of dQ and its counter zeroed.
template <class T, int kDim>
__global__ void __launch_bounds__(256)
    prepare_kernel(const __grid_constant__ AttentionBackwardParams p, const __grid_constant__ BackwardPlan plan) {
  constexpr int kBlockM = BackwardShape<kDim>::kBlockM;
  constexpr int kLanes = kDim == 32 ? 4 : kDim == 64 ? 8 : 16;  // a row; 16 bytes each
  const AttentionParams& f = p.forward;
  const unsigned tile = blockIdx.x % plan.q_tiles, head = blockIdx.x / plan.q_tiles;
  const unsigned b = head / static_cast<unsigned>(f.heads_q), h = head % static_cast<unsigned>(f.heads_q);
  if (threadIdx.x == 0) {
    plan.counters[blockIdx.x] = 0;
    if (blockIdx.x == 0) *plan.ticket = 0;
  }
  const int q_len = static_cast<int>(f.q_length(b)), m = tile * kBlockM;
  if (m >= q_len) return;
  if (p.grad_q) {
    float4* const sums =
        reinterpret_cast<float4*>(plan.sums + static_cast<std::int64_t>(blockIdx.x) * (kBlockM * kDim));
    for (int at = threadIdx.x; at < kBlockM * kDim / 4; at += 256) sums[at] = float4{0.0f, 0.0f, 0.0f, 0.0f};
  }
  const int lane = threadIdx.x % kLanes, column = lane * 8, dim = static_cast<int>(f.head_dim_v);
  const std::int64_t begin = f.is_varlen_q() ? f.q_begin(b) : 0;
  for (int row = threadIdx.x / kLanes; row < kBlockM; row += 256 / kLanes) {  // the same count for every thread
    const int i = min(m + row, q_len - 1);
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
      for (int e = 0; e < 8 && column + e < dim; ++e) sum = fmaf(to_float(out[e]), to_float(grad_out[e]), sum);
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
    if (lane > 0 || m + row >= q_len) continue;
    if (p.grad_lse)
      sum -= p.grad_lse[row_offset(f.is_varlen_q(), begin, b, h, i, p.stride_grad_lse_batch, p.stride_grad_lse_head,
                                   p.stride_grad_lse_token)];
    constexpr float kLog2E = 1.4426950408889634f;
    plan.delta[(b * f.heads_q + h) * f.seq_q + i] = -sum;
    plan.lse[(b * f.heads_q + h) * f.seq_q + i] = -kLog2E * f.lse[f.lse_offset(b, h, i)];
  }
}

template <class T, int kDim>
__global__ void __launch_bounds__(BackwardShape<kDim>::kThreads, 1)
    attention_bwd_kernel(const __grid_constant__ AttentionBackwardParams p, const __grid_constant__ BackwardPlan plan) {
  using Shape = BackwardShape<kDim>;
  using Keys = typename Shape::Keys;
  using Scores = typename Shape::Scores;
  constexpr int kBlockM = Shape::kBlockM, kBlockN = Shape::kBlockN, kThreads = Shape::kThreads;
  constexpr int kPart = 64;  // queries at a time: their scores and dP fill 64 registers
  constexpr float kLog2E = 1.4426950408889634f;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ struct {
    unsigned b, g;
    int n_tile;             // of keys
    int first_tile, tiles;  // of queries
    KeyRange range;
  } block;
  const AttentionParams& f = p.forward;

  // Thread 0 finds the block's work; the loop reads it here, since registers are full.
  if (threadIdx.x == 0) {
    const unsigned ticket = static_cast<unsigned>(atomicAdd(plan.ticket, 1));
    const unsigned heads = static_cast<unsigned>(f.batch * f.heads_kv), at_once = plan.heads_at_once;
    const unsigned head_group = ticket / (at_once * plan.k_tiles), in_group = ticket % (at_once * plan.k_tiles);
    const unsigned group_heads = min(at_once, heads - head_group * at_once);
    const unsigned head = head_group * at_once + in_group % group_heads;
    block.b = head / static_cast<unsigned>(f.heads_kv);
    block.g = head % static_cast<unsigned>(f.heads_kv);
    block.n_tile = static_cast<int>(in_group / group_heads);
    const KeyRange range(f, block.b);
    const int first_key = block.n_tile * kBlockN, last_key = min(range.k_len, first_key + kBlockN) - 1;
    const int first_query = range.first_query(first_key), last_query = range.last_query(last_key);
    block.range = range;
    block.first_tile = first_query / kBlockM;
    block.tiles = last_query > first_query ? (last_query + kBlockM - 1) / kBlockM - block.first_tile : 0;
  }
  __syncthreads();
  const int first_key = block.n_tile * kBlockN;
  if (first_key >= block.range.k_len) return;
  const int group = static_cast<int>(f.heads_q / f.heads_kv), steps = block.tiles * group;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::uint32_t base = ptx::shared_address(shared);
  const std::uint32_t lane_a = Keys::lane_offset(LaneA::row(lane), LaneA::half(lane));
  const std::uint32_t lane_b = Keys::lane_offset(LaneB::row(lane), LaneB::half(lane));

  const auto load_keys = [&](const void* from, std::int64_t stride_batch, std::int64_t stride_head,
                             std::int64_t stride_token, std::int64_t dim, bool vectors, int to) {
    const T* const row0 =
        static_cast<const T*>(from) + row_offset(f.is_varlen_k(), f.is_varlen_k() ? f.k_begin(block.b) : 0, block.b,
                                                 block.g, first_key, stride_batch, stride_head, stride_token);
    // Keys that no query sees are zero-filled, like those past the end.
    const int q_len = block.range.q_len;
    const int first_seen = q_len > 0 ? block.range.first(0) : 0,
              last_seen = q_len > 0 ? block.range.last(q_len - 1) : 0;
    const bool whole = first_key >= first_seen && first_key + kBlockN <= last_seen;
    load_tile<kBlockN, kDim, kThreads>(base + to, static_cast<int>(dim), vectors, vectors && whole ? row0 : nullptr,
                                       stride_token, [&](int row) -> const T* {
                                         const int j = first_key + row;
                                         return j >= first_seen && j < last_seen ? row0 + row * stride_token : nullptr;
                                       });
  };
  // Q, dO, LSE and D of a step: tile tile_of(step) of query head head_of(step).
  const auto head_of = [&](int step) { return group == 1 ? block.g : block.g * group + step / block.tiles; };
  const auto tile_of = [&](int step) { return block.first_tile + (group == 1 ? step : step % block.tiles); };
  const auto start_copy = [&](int step) {
    if (step < steps) {
      const int m = tile_of(step) * kBlockM, stage = step % Shape::kStages;
      const unsigned h = head_of(step);
      const bool whole = m + kBlockM <= block.range.q_len;
      const std::int64_t begin = f.is_varlen_q() ? f.q_begin(block.b) : 0;
      const T* const q = static_cast<const T*>(f.q) + row_offset(f.is_varlen_q(), begin, block.b, h, m,
                                                                 f.stride_q_batch, f.stride_q_head, f.stride_q_token);
      load_tile<kBlockM, kDim, kThreads>(
          base + Shape::kQ + stage * Shape::kQBytes, static_cast<int>(f.head_dim), plan.vectors_q,
          plan.vectors_q && whole ? q : nullptr, f.stride_q_token,
          [&](int row) -> const T* { return m + row < block.range.q_len ? q + row * f.stride_q_token : nullptr; });
      const T* const grad_out =
          static_cast<const T*>(p.grad_out) + row_offset(f.is_varlen_q(), begin, block.b, h, m, p.stride_grad_out_batch,
                                                         p.stride_grad_out_head, p.stride_grad_out_token);
      load_tile<kBlockM, kDim, kThreads>(
          base + Shape::kGradOut + stage * Shape::kQBytes, static_cast<int>(f.head_dim_v), plan.vectors_grad_out,
          plan.vectors_grad_out && whole ? grad_out : nullptr, p.stride_grad_out_token, [&](int row) -> const T* {
            return m + row < block.range.q_len ? grad_out + row * p.stride_grad_out_token : nullptr;
          });
      if (threadIdx.x < 2 * kBlockM) {
        const int row = threadIdx.x % kBlockM, i = m + row;
        const bool of_delta = threadIdx.x >= kBlockM, inside = i < block.range.q_len;
        const float* from = (of_delta ? plan.delta : plan.lse) + (block.b * f.heads_q + h) * f.seq_q + i;
        ptx::cp_async_4(base + (of_delta ? Shape::kDelta : Shape::kLse) + (stage * kBlockM + row) * 4,
                        inside ? from : plan.delta, inside ? 4 : 0);
      }
    }
    ptx::cp_async_commit();
  };

  load_keys(f.k, f.stride_k_batch, f.stride_k_head, f.stride_k_token, f.head_dim, plan.vectors_k, Shape::kK);
  load_keys(f.v, f.stride_v_batch, f.stride_v_head, f.stride_v_token, f.head_dim_v, plan.vectors_v, Shape::kV);
  start_copy(0);

  float grad_k[kDim / 8][4] = {}, grad_v[kDim / 8][4] = {};
  bool unclean[2] = {false, false};  // this lane's keys: rows lane / 4 and lane / 4 + 8 of the warp's 16
  const float scale_log2 = f.scale * kLog2E;
  const int key = first_key + warp * 16 + lane / 4;  // and key + 8
  const bool ordered = p.deterministic && p.grad_q;

  // dQ of a step: computed one step later, so that one barrier a step is enough and the products of two steps overlap.
  const auto tile_index = [&](int step) {
    const unsigned h = head_of(step);
    return static_cast<std::int64_t>(block.b * f.heads_q + h) * plan.q_tiles + tile_of(step);
  };
  const auto turn_of = [&](int step) { return block.n_tile - block.range.first(tile_of(step) * kBlockM) / kBlockN; };
  const auto add_grad_q = [&](int step) {
    const int slice = warp % Shape::kWarpsM, part = warp / Shape::kWarpsM;
    float grad_q[Shape::kColumns / 8][4] = {};
    const std::uint32_t lane_s =
        base + Shape::kGradS + step % 2 * Shape::kGradSBytes + Scores::lane_offset(LaneB::row(lane), LaneB::half(lane));
#pragma unroll
    for (int n = 0; n < kBlockN / 16; ++n) {
      std::uint32_t a[4];
      ptx::ldmatrix_x4_trans(a, Scores::at_slice(lane_s, slice) + n * 16 * Scores::kPitch);
#pragma unroll
      for (int c = 0; c < Shape::kColumns / 16; ++c) {
        std::uint32_t columns[4];
        ptx::ldmatrix_x4_trans(columns, Keys::at_slice(base + Shape::kK + lane_a, part * (Shape::kColumns / 16) + c) +
                                            n * 16 * Keys::kPitch);
        ptx::mma_m16n8k16<T>(grad_q[2 * c], a, columns[0], columns[1]);
        ptx::mma_m16n8k16<T>(grad_q[2 * c + 1], a, columns[2], columns[3]);
      }
    }
    // The sum lies in the order of the fragments: a warp's additions are 512 bytes side by side.
    float* const sum = plan.sums + tile_index(step) * (kBlockM * kDim) + warp * (16 * Shape::kColumns) + lane * 4;
#pragma unroll
    for (int c = 0; c < Shape::kColumns / 8; ++c)
      ptx::reduce_add_4(sum + c * 128, grad_q[c][0], grad_q[c][1], grad_q[c][2], grad_q[c][3]);
  };
  // Before the barrier that precedes add_grad_q(step). `seen`: what the counter said a while ago. The additions cannot
  // be performed before the loop ends: they are stores behind a branch and a barrier, and no sum is ever read here.
  const auto await_turn = [&](int step, int seen) {
    if (seen >= turn_of(step)) return;
    while (ptx::load_acquire(plan.counters + tile_index(step)) < turn_of(step)) {
    }
  };
  // After a barrier that follows add_grad_q(step): a release by one thread covers what the barrier ordered before it.
  const auto pass_turn = [&](int step) { ptx::store_release(plan.counters + tile_index(step), turn_of(step) + 1); };
  int seen = 0;

  // This warp's keys as operands, in registers where they fit.
  constexpr bool kHoldKeys = kDim <= 64;
  [[maybe_unused]] std::uint32_t held_k[kHoldKeys ? kDim / 16 : 1][4], held_v[kHoldKeys ? kDim / 16 : 1][4];
  ptx::cp_async_wait<0>();
  __syncthreads();
  {
    const std::uint32_t row = base + Shape::kK + (warp * 16 + lane / 2) * Keys::kPitch + lane % 2 * (Keys::kPitch / 2);
    const unsigned rows = __ballot_sync(kFullMask, clean<T>(row, Keys::kPitch / 2, 0, 1));
    unclean[0] = rows >> (lane / 4 * 2) & 3;
    unclean[1] = rows >> (lane / 4 * 2 + 16) & 3;
    __syncwarp();
    if constexpr (kHoldKeys) {
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) {
        ptx::ldmatrix_x4(held_k[d], Keys::at_slice(base + Shape::kK + warp * 16 * Keys::kPitch + lane_a, d));
        ptx::ldmatrix_x4(held_v[d], Keys::at_slice(base + Shape::kV + warp * 16 * Keys::kPitch + lane_a, d));
      }
    }
  }

  for (int step = 0; step < steps; ++step) {
    const int m = tile_of(step) * kBlockM, stage = step % Shape::kStages;
    const std::uint32_t tile_q = base + Shape::kQ + stage * Shape::kQBytes;
    const std::uint32_t tile_do = base + Shape::kGradOut + stage * Shape::kQBytes;
    const int last_m = min(block.range.q_len, m + kBlockM) - 1;
    // Rows past q_len are zero in Q and dO, and give nothing, masked or not.
    const bool masked = block.range.first(last_m) > first_key || block.range.last(m) < first_key + kBlockN;

    ptx::cp_async_wait<0>();
    if (ordered && step > 0 && threadIdx.x == 0) await_turn(step - 1, seen);
    __syncthreads();  // this step's tiles are there; the last step's are read and its dS is there
    start_copy(step + 1);
    if (p.grad_q && step > 0) add_grad_q(step - 1);

#pragma unroll 1
    for (int part = 0; part < kBlockM / kPart; ++part) {
      const int first_m = m + part * kPart;
      const std::uint32_t part_q = tile_q + part * kPart * Keys::kPitch,
                          part_do = tile_do + part * kPart * Keys::kPitch;
      float score[kPart / 8][4] = {}, grad_p[kPart / 8][4];
      const auto product = [&](float(&to)[kPart / 8][4], [[maybe_unused]] const auto& held, std::uint32_t rows,
                               std::uint32_t columns) {
#pragma unroll
        for (int d = 0; d < kDim / 16; ++d) {
          std::uint32_t a[4];
          if constexpr (kHoldKeys) {
#pragma unroll
            for (int r = 0; r < 4; ++r) a[r] = held[d][r];
          } else {
            ptx::ldmatrix_x4(a, Keys::at_slice(rows + warp * 16 * Keys::kPitch + lane_a, d));
          }
#pragma unroll
          for (int n = 0; n < kPart / 16; ++n) {
            std::uint32_t queries[4];
            ptx::ldmatrix_x4(queries, Keys::at_slice(columns + lane_b, d) + n * 16 * Keys::kPitch);
            ptx::mma_m16n8k16<T>(to[2 * n], a, queries[0], queries[1]);
            ptx::mma_m16n8k16<T>(to[2 * n + 1], a, queries[2], queries[3]);
          }
        }
      };
      product(score, held_k, base + Shape::kK, part_q);

      const float* const lse =
          reinterpret_cast<const float*>(shared + Shape::kLse) + stage * kBlockM + part * kPart + 2 * (lane % 4);
      const float* const delta =
          reinterpret_cast<const float*>(shared + Shape::kDelta) + stage * kBlockM + part * kPart + 2 * (lane % 4);
#pragma unroll
      for (int n = 0; n < kPart / 8; ++n) {
        const float2 row_lse = *reinterpret_cast<const float2*>(lse + 8 * n);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          score[n][e] = ptx::exp2_approx(fmaf(score[n][e], scale_log2, e % 2 ? row_lse.y : row_lse.x));
      }
      const auto visible = [&](int n, int e) {
        const int i = first_m + 8 * n + 2 * (lane % 4) + e % 2, j = key + e / 2 * 8;
        return j >= block.range.first(i) && j < block.range.last(i) && i < block.range.q_len;
      };
      if (unclean[0] || unclean[1]) {
#pragma unroll
        for (int n = 0; n < kPart / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (unclean[e / 2]) score[n][e] = NAN;
      }
#pragma unroll
      for (int n = 0; n < kPart / 8; ++n) {
        const float2 row_delta = *reinterpret_cast<const float2*>(delta + 8 * n);
#pragma unroll
        for (int e = 0; e < 4; ++e) grad_p[n][e] = e % 2 ? row_delta.y : row_delta.x;
      }
      product(grad_p, held_v, base + Shape::kV, part_do);
#pragma unroll
      for (int n = 0; n < kPart / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) grad_p[n][e] *= score[n][e];
      if (masked) {
#pragma unroll
        for (int n = 0; n < kPart / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (!visible(n, e)) score[n][e] = grad_p[n][e] = 0.0f;
        const bool found = any_not_finite<T>(part_q, kPart * Keys::kPitch, threadIdx.x, kThreads) |
                           any_not_finite<T>(part_do, kPart * Keys::kPitch, threadIdx.x, kThreads);
        if (__syncthreads_or(found)) {
          // Rare. A non-finite dO reaches dV of the keys that its query sees; through dS, all else is in the scores
          // already.
#pragma unroll 1
          for (int n = 0; n < kPart; ++n) {
            const int i = first_m + n;
#pragma unroll
            for (int c = 0; c < kDim / 8; ++c) {
              const std::uint32_t two = *reinterpret_cast<const std::uint32_t*>(
                  __cvta_shared_to_generic(part_do + Keys::element(n, 8 * c + 2 * (lane % 4))));
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                const std::uint32_t bits = two >> 16 * e & 0xffff;
                if (is_finite_bits<T>(bits)) continue;
                if (key >= block.range.first(i) && key < block.range.last(i)) grad_v[c][e] += bits_to_float<T>(bits);
                if (key + 8 >= block.range.first(i) && key + 8 < block.range.last(i))
                  grad_v[c][2 + e] += bits_to_float<T>(bits);
              }
            }
          }
          __syncthreads();
          clean<T>(part_q, kPart * Keys::kPitch, threadIdx.x, kThreads);
          clean<T>(part_do, kPart * Keys::kPitch, threadIdx.x, kThreads);
          __syncthreads();
        }
      }

      // In the middle of a step: the fence of the release and the load's latency pass under the products.
      if (ordered && part == kBlockM / kPart - 1 && threadIdx.x == 0) {
        if (step > 1) pass_turn(step - 2);
        seen = ptx::load_relaxed(plan.counters + tile_index(step));
      }
      // dS^T for dQ: rows are keys.
      if (p.grad_q) {
#pragma unroll
        for (int n = 0; n < kPart / 8; ++n)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            *reinterpret_cast<std::uint32_t*>(__cvta_shared_to_generic(
                base + Shape::kGradS + step % 2 * Shape::kGradSBytes +
                Scores::element(warp * 16 + lane / 4 + 8 * half, part * kPart + 8 * n + 2 * (lane % 4)))) =
                pack<T>(grad_p[n][2 * half], grad_p[n][2 * half + 1]);
      }
      // An accumulator of 16 keys x 16 queries is the operand of a product over the queries.
      const auto accumulate = [&](float(&to)[kDim / 8][4], const float(&weights)[kPart / 8][4], std::uint32_t rows) {
#pragma unroll
        for (int n = 0; n < kPart / 16; ++n) {
          const std::uint32_t a[4] = {pack<T>(weights[2 * n][0], weights[2 * n][1]),
                                      pack<T>(weights[2 * n][2], weights[2 * n][3]),
                                      pack<T>(weights[2 * n + 1][0], weights[2 * n + 1][1]),
                                      pack<T>(weights[2 * n + 1][2], weights[2 * n + 1][3])};
#pragma unroll
          for (int c = 0; c < kDim / 16; ++c) {
            std::uint32_t columns[4];
            ptx::ldmatrix_x4_trans(columns, Keys::at_slice(rows + lane_a, c) + n * 16 * Keys::kPitch);
            ptx::mma_m16n8k16<T>(to[2 * c], a, columns[0], columns[1]);
            ptx::mma_m16n8k16<T>(to[2 * c + 1], a, columns[2], columns[3]);
          }
        }
      };
      accumulate(grad_v, score, part_do);
      accumulate(grad_k, grad_p, part_q);
    }
  }

  ptx::cp_async_wait<0>();
  if (ordered && steps > 0 && threadIdx.x == 0) await_turn(steps - 1, seen);
  __syncthreads();
  if (p.grad_q && steps > 0) add_grad_q(steps - 1);
  __syncthreads();  // all of K is read
  if (ordered && threadIdx.x == 0) {
    if (steps > 1) pass_turn(steps - 2);
    if (steps > 0) pass_turn(steps - 1);
  }

  // Through the warp's rows of K's and V's tiles, so that they leave in vectors.
  const auto store = [&](const float(&from)[kDim / 8][4], float factor, int tile, void* to, std::int64_t stride_batch,
                         std::int64_t stride_head, std::int64_t stride_token, std::int64_t dim, bool vectors) {
    if (!to) return;
    const std::uint32_t rows = base + tile + warp * 16 * Keys::kPitch;
#pragma unroll
    for (int c = 0; c < kDim / 8; ++c)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<std::uint32_t*>(
            __cvta_shared_to_generic(rows + Keys::element(lane / 4 + 8 * half, 8 * c + 2 * (lane % 4)))) =
            pack<T>(from[c][2 * half] * factor, from[c][2 * half + 1] * factor);
    __syncwarp();
    const int warp_first = first_key + warp * 16;
    T* const row0 = static_cast<T*>(to) + row_offset(f.is_varlen_k(), f.is_varlen_k() ? f.k_begin(block.b) : 0, block.b,
                                                     block.g, warp_first, stride_batch, stride_head, stride_token);
#pragma unroll 4
    for (int at = lane; at < 16 * Keys::kChunks; at += 32) {
      const int row = at / Keys::kChunks, column = at % Keys::kChunks * 8;
      if (warp_first + row >= block.range.k_len || column >= dim) continue;
      const uint4 packed =
          *reinterpret_cast<const uint4*>(__cvta_shared_to_generic(rows + Keys::offset(row, column / 8)));
      T* const target = row0 + row * stride_token + column;
      if (vectors && column + 8 <= dim) {
        *reinterpret_cast<uint4*>(target) = packed;
      } else {
        const T* values = reinterpret_cast<const T*>(&packed);
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if (column + e < dim) target[e] = values[e];
      }
    }
  };
  store(grad_k, f.scale, Shape::kK, p.grad_k, p.stride_grad_k_batch, p.stride_grad_k_head, p.stride_grad_k_token,
        f.head_dim, plan.vectors_grad_k);
  store(grad_v, 1.0f, Shape::kV, p.grad_v, p.stride_grad_v_batch, p.stride_grad_v_head, p.stride_grad_v_token,
        f.head_dim_v, plan.vectors_grad_v);
}

// dQ = scale * sum, from the order of the fragments to rows. A thread takes two neighbours of a row.
template <class T, int kDim>
__global__ void __launch_bounds__(256)
    grad_q_kernel(const __grid_constant__ AttentionBackwardParams p, const __grid_constant__ BackwardPlan plan) {
  using Shape = BackwardShape<kDim>;
  constexpr int kBlockM = Shape::kBlockM, kPairs = kDim / 2;
  const AttentionParams& f = p.forward;
  const unsigned tile = blockIdx.x % plan.q_tiles, head = blockIdx.x / plan.q_tiles;
  const unsigned b = head / static_cast<unsigned>(f.heads_q), h = head % static_cast<unsigned>(f.heads_q);
  const int q_len = static_cast<int>(f.q_length(b)), m = tile * kBlockM;
  if (m >= q_len) return;
  const float* const sums = plan.sums + static_cast<std::int64_t>(blockIdx.x) * (kBlockM * kDim);
  T* const to =
      static_cast<T*>(p.grad_q) + row_offset(f.is_varlen_q(), f.is_varlen_q() ? f.q_begin(b) : 0, b, h, m,
                                             p.stride_grad_q_batch, p.stride_grad_q_head, p.stride_grad_q_token);
  for (int at = threadIdx.x; at < kBlockM * kPairs; at += 256) {
    const int row = at / kPairs, column = at % kPairs * 2;
    if (m + row >= q_len) return;
    const int warp = row / 16 + column / Shape::kColumns * Shape::kWarpsM, c = column % Shape::kColumns / 8;
    const int lane = row % 8 * 4 + column % 8 / 2, half = row % 16 / 8;
    const float2 sum =
        *reinterpret_cast<const float2*>(sums + warp * (16 * Shape::kColumns) + c * 128 + lane * 4 + 2 * half);
    T* const target = to + row * p.stride_grad_q_token + column;
    if (column < f.head_dim) target[0] = T(sum.x * f.scale);
    if (column + 1 < f.head_dim) target[1] = T(sum.y * f.scale);
  }
}

/// An entry of the table, but for the gradient of the sinks: cuda/kernels.cpp has the generic kernel compute that
/// first, in the same workspace.
template <class T, int kDim>
void attention_bwd_instance(const AttentionBackwardParams& p, void* workspace, Stream stream) {
  using Shape = BackwardShape<kDim>;
  const AttentionParams& f = p.forward;
  const CudaDeviceGuard guard(f.device.index);
  const cudaStream_t s = native(stream);
  const BackwardWorkspace layout(f, kDim);
  char* const bytes = static_cast<char*>(workspace);
  const auto fits = [](const void* data, std::int64_t a, std::int64_t b, std::int64_t c) {
    return is_aligned(data, 16) && a % 8 == 0 && b % 8 == 0 && c % 8 == 0;
  };
  BackwardPlan plan;
  plan.k_tiles = static_cast<int>(ceil_div(f.seq_k, Shape::kBlockN));
  plan.q_tiles = static_cast<int>(layout.tiles);
  const std::int64_t heads = f.batch * f.heads_kv;
  plan.heads_at_once = static_cast<int>(std::min<std::int64_t>(heads, cuda_device_properties(f.device.index).num_sms));
  plan.vectors_q = fits(f.q, f.is_varlen_q() ? 0 : f.stride_q_batch, f.stride_q_head, f.stride_q_token);
  plan.vectors_k = fits(f.k, f.is_varlen_k() ? 0 : f.stride_k_batch, f.stride_k_head, f.stride_k_token);
  plan.vectors_v = fits(f.v, f.is_varlen_k() ? 0 : f.stride_v_batch, f.stride_v_head, f.stride_v_token);
  plan.vectors_out = fits(f.out, f.is_varlen_q() ? 0 : f.stride_out_batch, f.stride_out_head, f.stride_out_token);
  plan.vectors_grad_out =
      fits(p.grad_out, f.is_varlen_q() ? 0 : p.stride_grad_out_batch, p.stride_grad_out_head, p.stride_grad_out_token);
  plan.vectors_grad_k =
      fits(p.grad_k, f.is_varlen_k() ? 0 : p.stride_grad_k_batch, p.stride_grad_k_head, p.stride_grad_k_token);
  plan.vectors_grad_v =
      fits(p.grad_v, f.is_varlen_k() ? 0 : p.stride_grad_v_batch, p.stride_grad_v_head, p.stride_grad_v_token);
  plan.delta = reinterpret_cast<float*>(bytes);
  plan.lse = reinterpret_cast<float*>(bytes + layout.lse);
  plan.sums = reinterpret_cast<float*>(bytes + layout.sums);
  plan.counters = reinterpret_cast<int*>(bytes + layout.counters);
  plan.ticket = plan.counters + f.batch * f.heads_q * layout.tiles;

  if (p.grad_q || p.grad_k || p.grad_v) {
    const auto q_blocks = static_cast<unsigned>(f.batch * f.heads_q * plan.q_tiles);
    if (q_blocks == 0) {
      // No queries: nothing but zeros for the keys, and the ticket that prepare_kernel would have reset.
      cuda_check(cudaMemsetAsync(plan.ticket, 0, sizeof(int), s), "attention_bwd sm80: ticket");
    } else {
      launch("attention_bwd sm80: prepare", prepare_kernel<T, kDim>, {q_blocks, 256, 0, s}, p, plan);
    }
    if (heads * plan.k_tiles > 0) {
      const auto kernel = attention_bwd_kernel<T, kDim>;
      launch("attention_bwd sm80", kernel,
             {static_cast<unsigned>(heads * plan.k_tiles), Shape::kThreads, Shape::kSharedBytes, s}, p, plan);
    }
    if (p.grad_q && q_blocks > 0) {
      launch("attention_bwd sm80: grad_q", grad_q_kernel<T, kDim>, {q_blocks, 256, 0, s}, p, plan);
    }
  }
}

}  // namespace flashkernel::cuda::sm80
