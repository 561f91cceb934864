// The backward pass for head dims over 256 on mma.sync m16n8k16, where registers and shared memory hold few rows. Two
// kernels, of which none adds to a sum of another block: one owns queries and walks keys, one owns keys and walks
// queries. Both compute the scores again. They share this code; "own" rows are the block's, "other" rows walk by.
//
//   owner of queries: S = Q K^T      dP = dO V^T     dS = P * (dP - D)     dQ += dS K
//   owner of keys:    S^T = K Q^T    dP^T = V dO^T   dS^T = P^T * (..)     dV += P^T dO    dK += dS^T Q
//
// Four warps, team 0, compute S and P, and team 1 computes dP. Team 0 leaves P in shared memory, in fp16 for both
// dtypes, since it is at most 1; team 1 leaves dS in its place. Then all eight warps multiply the sums. Rows of the
// other side come through kStages slots.
//
// Every sum has a fixed order. Invariant on NaN: as in main.cuh, a gradient that is not finite sets a flag, and the
// generic kernel then computes all of them again.
#pragma once

#include <type_traits>

#include "cuda/attention/backward/sm80/shape.cuh"
#include "cuda/attention/key_range.cuh"
#include "cuda/host/launch.hpp"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda::sm80 {

/// Byte offsets in shared memory of a block that owns kOwn rows and sees kOther at a time.
template <int kDim_, int kOwn_, int kOther_, int kStages_, bool kOfKeys_>
struct WideBackwardShape {
  static constexpr int kDim = kDim_, kOwn = kOwn_, kOther = kOther_, kStages = kStages_, kThreads = 256;
  static constexpr bool kOfKeys = kOfKeys_;  // the block owns keys, not queries
  using Rows = SharedTile<kDim>;
  using Scores = SharedTile<kOther>;
  static constexpr int kOwnBytes = kOwn * Rows::kPitch, kOtherBytes = kOther * Rows::kPitch;
  static constexpr int kOthers = 2 * kOwnBytes, kSlotBytes = 2 * kOtherBytes;  // own: K and V, or Q and dO
  static constexpr int kGradS = kOthers + kStages * kSlotBytes, kScoreBytes = kOwn * Scores::kPitch;
  static constexpr int kWeights = kGradS + kScoreBytes;                     // P as dV's operand
  static constexpr int kPerQuery = kWeights + (kOfKeys ? kScoreBytes : 0);  // LSE and D of the queries that walk by
  static constexpr int kSharedBytes = kPerQuery + (kOfKeys ? kStages * 2 * kOther * 4 : 0);
  // Scores: four warps share kOwn x kOther, 16 rows and kColumns columns each.
  static constexpr int kRowGroups = kOwn / 16, kColumns = kOther / (4 / kRowGroups);
  // Sums: all warps share kOwn x kDim, or each team has one of the two such sums.
  static constexpr int kSumWarps = kOfKeys ? 4 : 8, kSumColumns = kDim / (kSumWarps / kRowGroups);
  static_assert(kColumns == 8 || kColumns == 16);
};

/// What both kernels get, besides the call.
struct WideBackwardPlan {
  int tiles;  // of own rows, of the longest sequence
  bool vectors_q, vectors_k, vectors_v, vectors_grad_out;
  bool pairs_q, pairs_k, pairs_v;  // elements of a gradient's rows can be stored by twos
  float scale_log2;
  float *delta, *lse;  // -D, and -LSE in base 2: [batch, heads_q, seq_q]
  int* not_finite;
};

/// Computes -D = dLSE - rowsum(dO * O), and the LSE in base 2, negated: a warp a row.
template <class T>
__global__ void __launch_bounds__(128) wide_prepare_kernel(const __grid_constant__ AttentionBackwardParams p,
                                                           const __grid_constant__ WideBackwardPlan plan) {
  constexpr float kLog2E = 1.4426950408889634f;
  const AttentionParams& f = p.forward;
  if (blockIdx.x == 0 && threadIdx.x == 0) *plan.not_finite = 0;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * 4 + threadIdx.x / 32;
  const std::int64_t i = row % f.seq_q, h = row / f.seq_q % f.heads_q, b = row / f.seq_q / f.heads_q;
  if (b >= f.batch || i >= f.q_length(b)) return;
  const std::int64_t begin = f.is_varlen_q() ? f.q_begin(b) : 0;
  const T* const out = static_cast<const T*>(f.out) + f.out_offset(b, h, i);
  const T* const grad_out =
      static_cast<const T*>(p.grad_out) + row_offset(f.is_varlen_q(), begin, b, h, i, p.stride_grad_out_batch,
                                                     p.stride_grad_out_head, p.stride_grad_out_token);
  float sum = 0.0f;
  for (int d = threadIdx.x % 32; d < f.head_dim_v; d += 32) sum = fmaf(to_float(out[d]), to_float(grad_out[d]), sum);
  sum = warp_reduce(sum, Sum{});
  if (threadIdx.x % 32 != 0) return;
  if (p.grad_lse)
    sum -= p.grad_lse[row_offset(f.is_varlen_q(), begin, b, h, i, p.stride_grad_lse_batch, p.stride_grad_lse_head,
                                 p.stride_grad_lse_token)];
  const float lse = f.lse[f.lse_offset(b, h, i)];
  plan.delta[row] = -sum;
  // A row that sees nothing: its exponentials are 2^-inf, not 2^inf.
  plan.lse[row] = lse == -INFINITY ? -INFINITY : -kLog2E * lse;
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    wide_backward_kernel(const __grid_constant__ AttentionBackwardParams p,
                         const __grid_constant__ WideBackwardPlan plan) {
  using Rows = typename Shape::Rows;
  using Scores = typename Shape::Scores;
  constexpr bool kOfKeys = Shape::kOfKeys;
  constexpr int kDim = Shape::kDim, kOwn = Shape::kOwn, kOther = Shape::kOther, kStages = Shape::kStages;
  constexpr int kThreads = Shape::kThreads, kColumns = Shape::kColumns, kScoreTiles = kColumns / 8;
  constexpr int kSumTiles = Shape::kSumColumns / 8;
  extern __shared__ __align__(128) unsigned char shared[];
  const AttentionParams& f = p.forward;

  // This block's rows: those of a query head, or of a kv head. The ones with the most work first.
  const unsigned heads = static_cast<unsigned>(kOfKeys ? f.heads_kv : f.heads_q), tiles = plan.tiles;
  const unsigned at_head = blockIdx.x / tiles, in_head = blockIdx.x - at_head * tiles;
  const int b = static_cast<int>(at_head / heads), own_head = static_cast<int>(at_head - b * heads);
  const int group = static_cast<int>(f.heads_q / f.heads_kv);
  const KeyWindow range(f, b);
  const int own_length = kOfKeys ? range.k_len : range.q_len;
  const int first_own = static_cast<int>(kOfKeys ? in_head : tiles - 1 - in_head) * kOwn;
  if (first_own >= own_length) return;
  const int last_own = min(own_length, first_own + kOwn) - 1;
  // Rows of the other side that any own row meets, [first_other, end_other), in tiles from a multiple of kOther on.
  const int first_other = kOfKeys ? range.first_query(first_own) : range.first(first_own);
  const int end_other = kOfKeys ? range.last_query(last_own) : range.last(last_own);
  const int first_tile = first_other / kOther;
  const int steps_of_head = end_other > first_other ? (end_other + kOther - 1) / kOther - first_tile : 0;
  const int first_head = kOfKeys ? own_head * group : own_head, num_heads = kOfKeys ? group : 1;  // of queries
  const int steps = steps_of_head * num_heads, kv_head = kOfKeys ? own_head : own_head / group;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, team = warp / 4;
  const std::uint32_t base = ptx::shared_address(shared);

  // Rows [first, first + kCount) of one of the four operands; those past `end` or before `begin` are zero.
  const auto load = [&](auto count, std::uint32_t to, const void* data, bool of_keys, std::int64_t head,
                        std::int64_t dim, bool vectors, std::int64_t stride_batch, std::int64_t stride_head,
                        std::int64_t stride_token, int first, int begin, int end) {
    constexpr int kCount = decltype(count)::value;
    const bool varlen = of_keys ? f.is_varlen_k() : f.is_varlen_q();
    const std::int64_t of_sequence = !varlen ? 0 : of_keys ? f.k_begin(b) : f.q_begin(b);
    const T* const row0 = static_cast<const T*>(data) +
                          row_offset(varlen, of_sequence, b, head, first, stride_batch, stride_head, stride_token);
    const bool whole = vectors && first >= begin && first + kCount <= end;
    load_tile<kCount, kDim, kThreads>(to, static_cast<int>(dim), vectors, whole ? row0 : nullptr, stride_token,
                                      [&](int row) -> const T* {
                                        const int at = first + row;
                                        return at >= begin && at < end ? row0 + row * stride_token : nullptr;
                                      });
  };
  const auto load_keys = [&](auto count, std::uint32_t to, int first, int begin, int end) {  // K, then V
    load(count, to, f.k, true, kv_head, f.head_dim, plan.vectors_k, f.stride_k_batch, f.stride_k_head, f.stride_k_token,
         first, begin, end);
    load(count, to + decltype(count)::value * Rows::kPitch, f.v, true, kv_head, f.head_dim_v, plan.vectors_v,
         f.stride_v_batch, f.stride_v_head, f.stride_v_token, first, begin, end);
  };
  const auto load_queries = [&](auto count, std::uint32_t to, int h, int first, int begin, int end) {  // Q, then dO
    load(count, to, f.q, false, h, f.head_dim, plan.vectors_q, f.stride_q_batch, f.stride_q_head, f.stride_q_token,
         first, begin, end);
    load(count, to + decltype(count)::value * Rows::kPitch, p.grad_out, false, h, f.head_dim_v, plan.vectors_grad_out,
         p.stride_grad_out_batch, p.stride_grad_out_head, p.stride_grad_out_token, first, begin, end);
  };
  const auto start_copy = [&](int step) {
    if (step < steps) {
      const int stage = step % kStages, head = step / steps_of_head;
      const int first = (first_tile + step - head * steps_of_head) * kOther;
      const std::uint32_t slot = base + Shape::kOthers + stage * Shape::kSlotBytes;
      constexpr std::integral_constant<int, kOther> kCount{};
      if constexpr (kOfKeys) {
        const int h = first_head + head;
        load_queries(kCount, slot, h, first, first_other, end_other);
        if (threadIdx.x < 2 * kOther) {
          const int row = threadIdx.x % kOther, i = first + row;
          const bool of_delta = threadIdx.x >= kOther, inside = i >= first_other && i < end_other;
          const float* const from =
              (of_delta ? plan.delta : plan.lse) + (static_cast<std::int64_t>(b) * f.heads_q + h) * f.seq_q + i;
          ptx::cp_async_4(base + Shape::kPerQuery + ((stage * 2 + of_delta) * kOther + row) * 4,
                          inside ? from : plan.delta, inside ? 4 : 0);
        }
      } else {
        load_keys(kCount, slot, first, first_other, end_other);
      }
    }
    ptx::cp_async_commit();
  };

  constexpr std::integral_constant<int, kOwn> kOwnCount{};
  if constexpr (kOfKeys)
    load_keys(kOwnCount, base, first_own, 0, range.k_len);
  else
    load_queries(kOwnCount, base, own_head, first_own, 0, range.q_len);
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) start_copy(stage);

  // Scores of this warp: 16 own rows from score_row on, kColumns others from score_column on.
  const int score_row = warp % 4 % Shape::kRowGroups * 16, score_column = warp % 4 / Shape::kRowGroups * kColumns;
  const std::uint32_t lane_own = base + team * Shape::kOwnBytes + score_row * Rows::kPitch +
                                 Rows::lane_offset(LaneA::row(lane), LaneA::half(lane));
  const std::uint32_t lane_other = base + Shape::kOthers + team * Shape::kOtherBytes + score_column * Rows::kPitch +
                                   (kScoreTiles == 1 ? Rows::lane_offset(lane % 8, lane / 8)
                                                     : Rows::lane_offset(LaneB::row(lane), LaneB::half(lane)));
  // Sums of this warp: 16 own rows from sum_row on, kSumColumns columns from sum_column on.
  const int sum_warp = kOfKeys ? warp % 4 : warp;
  const int sum_row = sum_warp % Shape::kRowGroups * 16, sum_column = sum_warp / Shape::kRowGroups * Shape::kSumColumns;
  const std::uint32_t lane_score = base + (kOfKeys && team == 0 ? Shape::kWeights : Shape::kGradS) +
                                   sum_row * Scores::kPitch + Scores::lane_offset(LaneA::row(lane), LaneA::half(lane));
  // dQ and dK are sums over rows of K and Q, which come first in a slot; dV is one over rows of dO.
  const std::uint32_t lane_rows = base + Shape::kOthers + (kOfKeys && team == 0 ? Shape::kOtherBytes : 0) +
                                  sum_column * 2 + Rows::lane_offset(LaneA::row(lane), LaneA::half(lane));
  const auto score_word = [&](int tile_base, int half, int n) -> std::uint32_t& {
    return *static_cast<std::uint32_t*>(__cvta_shared_to_generic(
        base + tile_base + Scores::element(score_row + lane / 4 + 8 * half, score_column + 8 * n + 2 * (lane % 4))));
  };
  [[maybe_unused]] float own_number[2] = {0.0f, 0.0f};  // of queries: LSE in team 0, D in team 1
  if constexpr (!kOfKeys) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = min(first_own + score_row + lane / 4 + 8 * half, last_own);
      own_number[half] =
          (team == 0 ? plan.lse : plan.delta)[(static_cast<std::int64_t>(b) * f.heads_q + own_head) * f.seq_q + i];
    }
  }
  float sums[kSumTiles][4] = {};

  for (int step = 0; step < steps; ++step) {
    const int stage = step % kStages, head = step / steps_of_head;
    const int first = (first_tile + step - head * steps_of_head) * kOther;
    if constexpr (kStages == 1) {
      __syncthreads();  // the slot is read
      start_copy(step);
    }
    ptx::cp_async_wait<0>();
    __syncthreads();  // this step's rows are there; those of the last step are read
    if constexpr (kStages > 1) start_copy(step + 1);
    static_assert(kStages <= 2);

    float score[kScoreTiles][4] = {};
    const std::uint32_t others = lane_other + stage * Shape::kSlotBytes;
    if constexpr (kScoreTiles == 1) {
#pragma unroll 4
      for (int d = 0; d < kDim / 16; d += 2) {
        std::uint32_t rows[4], a[2][4];
        ptx::ldmatrix_x4(rows, Rows::at_slice(others, d));
        ptx::ldmatrix_x4(a[0], Rows::at_slice(lane_own, d));
        ptx::ldmatrix_x4(a[1], Rows::at_slice(lane_own, d + 1));
        ptx::mma_m16n8k16<T>(score[0], a[0], rows[0], rows[1]);
        ptx::mma_m16n8k16<T>(score[0], a[1], rows[2], rows[3]);
      }
    } else {
#pragma unroll 8
      for (int d = 0; d < kDim / 16; ++d) {
        std::uint32_t rows[4], a[4];
        ptx::ldmatrix_x4(rows, Rows::at_slice(others, d));
        ptx::ldmatrix_x4(a, Rows::at_slice(lane_own, d));
        ptx::mma_m16n8k16<T>(score[0], a, rows[0], rows[1]);
        ptx::mma_m16n8k16<T>(score[1], a, rows[2], rows[3]);
      }
    }
    // Element e of tile n and half: own row score_row + lane / 4 + 8 half, other row score_column + 8 n + 2 (lane % 4)
    // + e.
    const auto number = [&](int half, int n, int e) {
      if constexpr (kOfKeys)
        return reinterpret_cast<const float*>(
            shared + Shape::kPerQuery)[(stage * 2 + team) * kOther + score_column + 8 * n + 2 * (lane % 4) + e];
      else
        return own_number[half];
    };
    if (team == 0) {
      const int first_i = kOfKeys ? first : first_own, last_i = kOfKeys ? min(end_other, first + kOther) - 1 : last_own;
      const int first_j = kOfKeys ? first_own : first, end_j = first_j + (kOfKeys ? kOwn : kOther);
      const bool masked = range.first(last_i) > first_j || range.last(first_i) < end_j || first + kOther > end_other ||
                          first < first_other;
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < kScoreTiles; ++n) {
          float* const x = &score[n][2 * half];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            x[e] = ptx::exp2_approx(fmaf(x[e], plan.scale_log2, number(half, n, e)));
            if (masked) {
              const int own = first_own + score_row + lane / 4 + 8 * half;
              const int other = first + score_column + 8 * n + 2 * (lane % 4) + e;
              const int i = kOfKeys ? other : own, j = kOfKeys ? own : other;
              if (i >= range.q_len || j < range.first(i) || j >= range.last(i)) x[e] = 0.0f;
            }
          }
          score_word(Shape::kGradS, half, n) = pack<__half>(x[0], x[1]);
          if constexpr (kOfKeys) score_word(Shape::kWeights, half, n) = pack<T>(x[0], x[1]);
        }
    }
    __syncthreads();
    if (team == 1) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < kScoreTiles; ++n) {
          std::uint32_t& word = score_word(Shape::kGradS, half, n);
          const float2 probability = __half22float2(*reinterpret_cast<const __half2*>(&word));
          word = pack<T>(probability.x * (score[n][2 * half] + number(half, n, 0)),
                         probability.y * (score[n][2 * half + 1] + number(half, n, 1)));
        }
    }
    __syncthreads();
    const std::uint32_t rows = lane_rows + stage * Shape::kSlotBytes;
#pragma unroll
    for (int n = 0; n < kOther / 16; ++n) {
      std::uint32_t a[4];
      ptx::ldmatrix_x4(a, Scores::at_slice(lane_score, n));
#pragma unroll
      for (int c = 0; c < kSumTiles / 2; ++c) {
        std::uint32_t columns[4];
        ptx::ldmatrix_x4_trans(columns, Rows::at_slice(rows, c) + n * 16 * Rows::kPitch);
        ptx::mma_m16n8k16<T>(sums[2 * c], a, columns[0], columns[1]);
        ptx::mma_m16n8k16<T>(sums[2 * c + 1], a, columns[2], columns[3]);
      }
    }
  }
  ptx::cp_async_wait<0>();

  // Gradients: dQ by all warps; dV by team 0 and dK by team 1.
  const bool of_v = kOfKeys && team == 0;
  T* const to = static_cast<T*>(!kOfKeys ? p.grad_q : of_v ? p.grad_v : p.grad_k);
  if (!to) return;
  const std::int64_t stride_batch = !kOfKeys ? p.stride_grad_q_batch
                                    : of_v   ? p.stride_grad_v_batch
                                             : p.stride_grad_k_batch;
  const std::int64_t stride_head = !kOfKeys ? p.stride_grad_q_head : of_v ? p.stride_grad_v_head : p.stride_grad_k_head;
  const std::int64_t stride_token = !kOfKeys ? p.stride_grad_q_token
                                    : of_v   ? p.stride_grad_v_token
                                             : p.stride_grad_k_token;
  const bool pairs = !kOfKeys ? plan.pairs_q : of_v ? plan.pairs_v : plan.pairs_k;
  const bool varlen = kOfKeys ? f.is_varlen_k() : f.is_varlen_q();
  const std::int64_t begin = !varlen ? 0 : kOfKeys ? f.k_begin(b) : f.q_begin(b);
  const int dim = static_cast<int>(of_v ? f.head_dim_v : f.head_dim);
  const float factor = of_v ? 1.0f : f.scale;
  FiniteCheck finite;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_own + sum_row + lane / 4 + 8 * half;
    if (row > last_own) continue;
    T* const row_to = to + row_offset(varlen, begin, b, own_head, row, stride_batch, stride_head, stride_token);
#pragma unroll
    for (int c = 0; c < kSumTiles; ++c) {
      const int column = sum_column + 8 * c + 2 * (lane % 4);
      const float x = sums[c][2 * half], y = sums[c][2 * half + 1];
      finite.see(x);
      finite.see(y);
      if (pairs && column + 2 <= dim) {
        *reinterpret_cast<std::uint32_t*>(row_to + column) = pack<T>(x * factor, y * factor);
      } else {
        if (column < dim) row_to[column] = from_float<T>(x * factor);
        if (column + 1 < dim) row_to[column + 1] = from_float<T>(y * factor);
      }
    }
  }
  finite.report(plan.not_finite);
}

template <class T, int kDim, int kOwn, int kOther, int kStages, bool kOfKeys>
void launch_wide_backward(const AttentionBackwardParams& p, WideBackwardPlan plan, cudaStream_t s) {
  using Shape = WideBackwardShape<kDim, kOwn, kOther, kStages, kOfKeys>;
  const AttentionParams& f = p.forward;
  plan.tiles = static_cast<int>(ceil_div(kOfKeys ? f.seq_k : f.seq_q, kOwn));
  const std::int64_t blocks = f.batch * (kOfKeys ? f.heads_kv : f.heads_q) * plan.tiles;
  if (blocks == 0) return;
  launch(kOfKeys ? "attention_bwd sm80 wide: keys" : "attention_bwd sm80 wide: queries", wide_backward_kernel<T, Shape>,
         {static_cast<unsigned>(blocks), Shape::kThreads, Shape::kSharedBytes, s}, p, plan);
}

/// An entry of the table.
template <DType kDtype, int kDim>
void attention_bwd_wide(const AttentionBackwardParams& p, void* workspace, Stream stream) {
  using T = Element<kDtype>;
  const AttentionParams& f = p.forward;
  const CudaDeviceGuard guard(f.device.index);
  const cudaStream_t s = native(stream);
  const WideBackwardWorkspace layout(p, HeadDims{kDim, kDim});
  char* const bytes = static_cast<char*>(workspace);
  const auto fits = [](const void* data, std::size_t unit, std::int64_t a, std::int64_t b, std::int64_t c) {
    const auto n = static_cast<std::int64_t>(unit / 2);
    return is_aligned(data, unit) && a % n == 0 && b % n == 0 && c % n == 0;
  };
  const auto of_q = [&](std::int64_t stride) { return f.is_varlen_q() ? 0 : stride; };
  const auto of_k = [&](std::int64_t stride) { return f.is_varlen_k() ? 0 : stride; };
  WideBackwardPlan plan{};
  plan.vectors_q = fits(f.q, 16, of_q(f.stride_q_batch), f.stride_q_head, f.stride_q_token);
  plan.vectors_k = fits(f.k, 16, of_k(f.stride_k_batch), f.stride_k_head, f.stride_k_token);
  plan.vectors_v = fits(f.v, 16, of_k(f.stride_v_batch), f.stride_v_head, f.stride_v_token);
  plan.vectors_grad_out =
      fits(p.grad_out, 16, of_q(p.stride_grad_out_batch), p.stride_grad_out_head, p.stride_grad_out_token);
  plan.pairs_q = fits(p.grad_q, 4, of_q(p.stride_grad_q_batch), p.stride_grad_q_head, p.stride_grad_q_token);
  plan.pairs_k = fits(p.grad_k, 4, of_k(p.stride_grad_k_batch), p.stride_grad_k_head, p.stride_grad_k_token);
  plan.pairs_v = fits(p.grad_v, 4, of_k(p.stride_grad_v_batch), p.stride_grad_v_head, p.stride_grad_v_token);
  plan.scale_log2 = f.scale * 1.4426950408889634f;
  plan.delta = reinterpret_cast<float*>(bytes);
  plan.lse = reinterpret_cast<float*>(bytes + layout.lse);
  plan.not_finite = reinterpret_cast<int*>(bytes + layout.not_finite);
  const std::int64_t rows = f.batch * f.heads_q * f.seq_q;
  if (rows == 0)
    cuda_check(cudaMemsetAsync(plan.not_finite, 0, sizeof(int), s), "attention_bwd sm80 wide: flag");
  else
    launch("attention_bwd sm80 wide: prepare", wide_prepare_kernel<T>,
           {static_cast<unsigned>(ceil_div(rows, std::int64_t{4})), 128, 0, s}, p, plan);
  const int shared = cuda_device_properties(f.device.index).max_shared_bytes_per_block;
  const auto fits_in = [shared](auto shape) { return decltype(shape)::kSharedBytes <= shared; };
  if (p.grad_q) {
    if (fits_in(WideBackwardShape<kDim, 64, 16, 2, false>{}))
      launch_wide_backward<T, kDim, 64, 16, 2, false>(p, plan, s);
    else if (fits_in(WideBackwardShape<kDim, 32, 16, 2, false>{}))
      launch_wide_backward<T, kDim, 32, 16, 2, false>(p, plan, s);
    else
      launch_wide_backward<T, kDim, 32, 16, 1, false>(p, plan, s);
  }
  if (p.grad_k || p.grad_v) {
    if (fits_in(WideBackwardShape<kDim, 32, 32, 2, true>{}))
      launch_wide_backward<T, kDim, 32, 32, 2, true>(p, plan, s);
    else if (fits_in(WideBackwardShape<kDim, 32, 16, 2, true>{}))
      launch_wide_backward<T, kDim, 32, 16, 2, true>(p, plan, s);
    else
      launch_wide_backward<T, kDim, 32, 16, 1, true>(p, plan, s);
  }
}

}  // namespace flashkernel::cuda::sm80
