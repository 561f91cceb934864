// The backward pass proper: FlashAttention-2 backward (Dao, 2023; Algorithm 2), five matrix products a pair of tiles,
// by two teams of warps. Launched by kernel.cuh between prepare_kernel and grad_q_kernel.
//
//   S^T = K Q^T   P^T = exp(S^T - LSE)         dV += P^T dO     team 0
//   dP^T = V dO^T   dS^T = P^T * (dP^T - D)    dK += dS^T Q     team 1        dQ += dS K   both
//
// A block owns kBlockN keys of one kv head. It walks the tiles of queries that see any of them, for every query head of
// the group. Warp w of either team owns the same keys, all queries of a step and all columns. P^T and dS^T stay in
// registers as the operands of dV and dK, and only the four warps of a team fetch a fragment. A warp of team 0 hands
// P^T to its partner in team 1 as registers hold it, in fp16 for both dtypes, since it is at most 1. P^T passes through
// the place where the partner then leaves dS^T for dQ. The dQ of a step is computed in the next step: by team 1 before
// its product and by team 0 after its exponentials, so that the tensor cores always have products of one team.
//
// In most instances both teams run the same code for their products, with different addresses. At d64 (kOwnCode) each
// team has its own code: team 0 starts its exponentials when half of its scores are there, and team 1 multiplies while
// it still computes dS^T.
//
// Deterministic mode: each tile of queries has a counter, by which blocks add to dQ in the order of their tickets. A
// block waits only for blocks that have started before it. Waits are rare if there are as many heads as
// multiprocessors, since the heads then run side by side. With fewer heads, the tiles of keys of a head that run side
// by side (a chunk) start with the last one; under a causal mask each tile then comes to a tile of queries two steps
// after the tile before.
//
// Invariant on NaN: masked pairs are zero before each product. Keys and queries past the end, and those that nobody
// sees, are zero-filled. Any other NaN or infinity makes some gradient not finite, since 0 * NaN is NaN in the tensor
// core. The kernels look for such a gradient, and plan.not_finite then has the generic kernel compute all of them
// again.
#pragma once

#include "cuda/ptx/atomic.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/attention/backward/sm80/shape.cuh"
#include "cuda/attention/backward/sm80/registers.cuh"
#include "cuda/attention/score_fast.cuh"
#include "cuda/attention/key_range.cuh"
#include "cuda/attention/shown_blocks.cuh"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda::sm80 {

template <class T, int kQkDim, int kVDim, BackwardKind kKind>
__global__ void __launch_bounds__(BackwardShape<kQkDim, kVDim, kKind>::kThreads, 1)
    attention_bwd_kernel(const __grid_constant__ AttentionBackwardParams p, const __grid_constant__ BackwardPlan plan) {
  using Shape = BackwardShape<kQkDim, kVDim, kKind>;
  static_assert(kVDim <= kQkDim, "rows of V and dO lie in tiles as wide as those of K and Q");
  using Rows = SharedTile<kQkDim>;
  // Of rows that are one team's or the other's: team 0 multiplies K and Q where team 1, in the same code, has V and dO,
  // and has dV where team 1 has dK. From kVDim on there is nothing to multiply for the one that has values.
  constexpr int kDim = kQkDim;
  using Scores = typename Shape::Scores;
  constexpr int kBlockM = Shape::kBlockM, kBlockN = Shape::kBlockN, kThreads = Shape::kThreads;
  constexpr int kSlices = Shape::kSlices, kPart = Shape::kPart, kParts = kBlockM / kPart;
  constexpr bool kHoldKeys = Shape::kHoldKeys, kOwnCode = Shape::kOwnCode;
  static_assert(!kOwnCode || (kHoldKeys && kPart == 64), "a part of P^T is whole lines of shared memory");
  constexpr float kLog2E = 1.4426950408889634f;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ struct {
    unsigned b, g;
    int n_tile, chunk;         // of keys; the first tile of its chunk
    int first_tile, end_tile;  // of queries
    // Until this block may add the last step's dQ, when last looked at: the last thread's own. volatile, or the
    // compiler has every thread read it (and drop it) beside that thread's write.
    volatile int turns_missing;
    int group, steps;     // query heads of the kv head; tiles of all of them
    int first_head_tile;  // of the sequence, among the tiles of all heads (fewer than 2^31: supports() sees to it)
    KeyWindow range;
  } block;
  const AttentionParams& f = p.forward;

  // Thread 0 finds the block's work; the loop reads it here, since registers are full.
  if (threadIdx.x == 0) {
    const unsigned ticket = static_cast<unsigned>(atomicAdd(plan.ticket, 1));
    const unsigned head_group = plan.group_blocks.divide(ticket);
    const unsigned in_group = ticket - head_group * plan.group_blocks.value;
    const bool last_group = head_group + 1 == plan.groups;
    const unsigned group_heads = last_group ? plan.last_at_once.value : plan.at_once.value;
    const unsigned in_order = last_group ? plan.last_at_once.divide(in_group) : plan.at_once.divide(in_group);
    const unsigned head = head_group * plan.at_once.value + in_group - in_order * group_heads;
    block.b = plan.heads_kv.divide(head);
    block.g = head - block.b * plan.heads_kv.value;
    const int place = static_cast<int>(in_order), chunk = static_cast<int>(plan.chunk.value);
    block.chunk = static_cast<int>(plan.chunk.divide(in_order)) * chunk;
    block.n_tile = min(block.chunk + chunk, plan.k_tiles) - 1 - (place - block.chunk);
    const KeyWindow range(f, block.b);
    const int first_key = block.n_tile * kBlockN, last_key = min(range.k_len, first_key + kBlockN) - 1;
    const int first_query = range.first_query(first_key), last_query = range.last_query(last_key);
    block.range = range;
    block.turns_missing = 0;
    block.first_head_tile = static_cast<int>(block.b * f.heads_q) * plan.q_tiles;
    block.first_tile = first_query / kBlockM;
    const int tiles = last_query > first_query ? (last_query + kBlockM - 1) / kBlockM - block.first_tile : 0;
    block.end_tile = block.first_tile + tiles;
    block.group = plan.group;
    block.steps = tiles * block.group;
  }
  __syncthreads();
  const int first_key = block.n_tile * kBlockN;
  if (first_key >= block.range.k_len) return;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int team = warp / Shape::kTeamWarps, warp_keys = warp % Shape::kTeamWarps * kSlices * 16;
  const std::uint32_t base = ptx::shared_address(shared);
  const std::uint32_t lane_a = Rows::lane_offset(LaneA::row(lane), LaneA::half(lane));
  const std::uint32_t lane_b = Rows::lane_offset(LaneB::row(lane), LaneB::half(lane));
  // The team's own keys, and a stage's tiles: team 0 works on Q, then dO; team 1 on dO, then Q.
  const std::uint32_t keys = base + (team == 0 ? Shape::kK : Shape::kV) + warp_keys * Rows::kPitch + lane_a;
  const std::uint32_t first_rows = base + (team == 0 ? Shape::kQ : Shape::kGradOut);
  const std::uint32_t second_rows = base + (team == 0 ? Shape::kGradOut : Shape::kQ);

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
  // Of a step: query head and tile of queries. All tiles of a head, then the next head.
  struct Place {
    int h, tile;
  };
  const auto after = [&](Place at) {
    return at.tile + 1 < block.end_tile ? Place{at.h, at.tile + 1} : Place{at.h + 1, block.first_tile};
  };
  const auto before = [&](Place at) {
    return at.tile > block.first_tile ? Place{at.h, at.tile - 1} : Place{at.h - 1, block.end_tile - 1};
  };
  // Whether a block mask shows any pair of a step. If not, the step is left out, but for its turn in the order of dQ.
  const auto is_shown = [&](Place at) {
    const AttentionBlocks& blocks = f.mask.blocks;
    if (!Shape::kModified || !blocks.data) return true;
    return cuda::is_shown<kBlockN>(blocks, blocks.row(block.b, at.h, at.tile * kBlockM), first_key, block.range.k_len);
  };
  // Q, dO, LSE and D.
  const auto start_copy = [&](int step, Place at, bool shown) {
    if (step < block.steps && shown) {
      const int m = at.tile * kBlockM, stage = step % Shape::kStages;
      const std::int64_t h = at.h;
      const bool whole = m + kBlockM <= block.range.q_len;
      const std::int64_t begin = f.is_varlen_q() ? f.q_begin(block.b) : 0;
      const T* const q = static_cast<const T*>(f.q) + row_offset(f.is_varlen_q(), begin, block.b, h, m,
                                                                 f.stride_q_batch, f.stride_q_head, f.stride_q_token);
      load_tile<kBlockM, kQkDim, kThreads>(
          base + Shape::kQ + stage * Shape::kQBytes, static_cast<int>(f.head_dim), plan.vectors_q,
          plan.vectors_q && whole ? q : nullptr, f.stride_q_token,
          [&](int row) -> const T* { return m + row < block.range.q_len ? q + row * f.stride_q_token : nullptr; });
      const T* const grad_out =
          static_cast<const T*>(p.grad_out) + row_offset(f.is_varlen_q(), begin, block.b, h, m, p.stride_grad_out_batch,
                                                         p.stride_grad_out_head, p.stride_grad_out_token);
      load_tile<kBlockM, kDim, kThreads>(
          base + Shape::kGradOut + stage * Shape::kGradOutBytes, static_cast<int>(f.head_dim_v), plan.vectors_grad_out,
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
  Place at{static_cast<int>(block.g) * block.group, block.first_tile};
  bool shown = block.steps > 0 && is_shown(at), was_shown = true;
  start_copy(0, at, shown);

  const bool ordered = plan.ordered && p.grad_q;
  const bool keeps_order = ordered && threadIdx.x == kThreads - 1;

  const auto tile_index = [&](Place at) { return block.first_head_tile + at.h * plan.q_tiles + at.tile; };
  const auto turn_of = [&](Place at) {  // how many blocks add to the tile before this one
    const int m = at.tile * kBlockM, last_m = min(block.range.q_len, m + kBlockM) - 1;
    const int first = block.range.first(m) / kBlockN, last = (block.range.last(last_m) - 1) / kBlockN;
    return max(0, block.chunk - first) + min(block.chunk + static_cast<int>(plan.chunk.value) - 1, last) - block.n_tile;
  };
  const auto add_grad_q = [&](int step, Place at, bool shown) {
    if (!p.grad_q || step < 0) return;
    if (Shape::kWarpsM * Shape::kWarpsD < Shape::kWarps && warp >= Shape::kWarpsM * Shape::kWarpsD) return;
    constexpr int kQSlices = Shape::kQSlices, kColumnTiles = Shape::kColumns / 8;
    const int slice = warp % Shape::kWarpsM * kQSlices, column_slice = warp / Shape::kWarpsM * (Shape::kColumns / 16);
    float grad_q[kQSlices][kColumnTiles][4] = {};
    // A warp's slice and columns are not known when the kernel is compiled: swizzle their addresses here, once.
    std::uint32_t lane_s[kQSlices], lane_k[kColumnTiles / 2];
#pragma unroll
    for (int s = 0; s < kQSlices; ++s)
      lane_s[s] = Scores::at_slice(base + Shape::kGradS + step % Shape::kGradSBuffers * Shape::kGradSBytes +
                                       Scores::lane_offset(LaneB::row(lane), LaneB::half(lane)),
                                   slice + s);
#pragma unroll
    for (int c = 0; c < kColumnTiles / 2; ++c) lane_k[c] = Rows::at_slice(base + Shape::kK + lane_a, column_slice + c);
#pragma unroll
    for (int n = 0; n < kBlockN / 16; ++n) {
      if (Shape::kModified && !shown) break;
      std::uint32_t a[kQSlices][4];
#pragma unroll
      for (int s = 0; s < kQSlices; ++s) ptx::ldmatrix_x4_trans(a[s], lane_s[s] + n * 16 * Scores::kPitch);
#pragma unroll
      for (int c = 0; c < kColumnTiles / 2; ++c) {
        std::uint32_t columns[4];
        ptx::ldmatrix_x4_trans(columns, lane_k[c] + n * 16 * Rows::kPitch);
#pragma unroll
        for (int s = 0; s < kQSlices; ++s) {
          ptx::mma_m16n8k16<T>(grad_q[s][2 * c], a[s], columns[0], columns[1]);
          ptx::mma_m16n8k16<T>(grad_q[s][2 * c + 1], a[s], columns[2], columns[3]);
        }
      }
    }
    float* const sums = plan.sums + static_cast<std::int64_t>(tile_index(at)) * (kBlockM * kQkDim);
    const bool first = ordered && turn_of(at) == 0;  // nobody has been here: the sums need not be zeroed before
    if (Shape::kModified && !shown && !first) return;
#pragma unroll
    for (int s = 0; s < kQSlices; ++s)
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c) {
        const float(&x)[4] = grad_q[s][c];
        float* const to = sums + Shape::sum_index(warp, s, c, lane);
        if (first)
          *reinterpret_cast<float4*>(to) = float4{x[0], x[1], x[2], x[3]};
        else
          ptx::reduce_add_4(to, x[0], x[1], x[2], x[3]);
      }
  };
  // The additions cannot be performed before the loop of await_turn ends: they are stores behind a branch and a
  // barrier, and no sum is ever read here.
  const auto await_turn = [&](Place at) {
    const int turn = turn_of(at);
    while (ptx::load_acquire(plan.counters + tile_index(at)) < turn) {
    }
  };
  // After a barrier that follows add_grad_q: a release by one thread covers what the barrier ordered before it.
  const auto pass_turn = [&](bool now, Place at) {
    int* const counter = plan.counters + tile_index(at);
    const int turn = turn_of(at);
    if (now) ptx::store_release(counter, turn + 1);
  };
  Fragments<kSlices, kDim / 8> grad = {};  // dV or dK
  [[maybe_unused]] std::uint32_t held[kHoldKeys ? kSlices : 1][kHoldKeys ? kDim / 16 : 1][4];
  if constexpr (kHoldKeys) {
    ptx::cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int s = 0; s < kSlices; ++s)
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) ptx::ldmatrix_x4(held[s][d], Rows::at_slice(keys, d) + s * 16 * Rows::kPitch);
  }

  for (int step = 0; step < block.steps; ++step, at = after(at)) {
    const int m = at.tile * kBlockM, stage = step % Shape::kStages;
    const int last_m = min(block.range.q_len, m + kBlockM) - 1;
    // Rows past q_len are zero in Q and dO, and give nothing, masked or not.
    const bool masked = block.range.first(last_m) > first_key || block.range.last(m) < first_key + kBlockN;

    ptx::cp_async_wait<0>();
    if (keeps_order && block.turns_missing > 0) await_turn(before(at));
    __syncthreads();  // this step's tiles are there; the last step's are read and its dS is there
    if (ordered) pass_turn(keeps_order && step > 1, before(before(at)));
    const bool next_shown = step + 1 < block.steps && is_shown(after(at));
    if (!kOwnCode) start_copy(step + 1, after(at), next_shown);
    if (Shape::kGradSBuffers == 1 && p.grad_q) {
      add_grad_q(step - 1, before(at), was_shown);
      __syncthreads();
    } else if (team == 1 || (Shape::kModified && !shown)) {
      add_grad_q(step - 1, before(at), was_shown);
    }
    const bool left_out = Shape::kModified && !shown, earlier_shown = was_shown;
    was_shown = shown;
    shown = next_shown;
    if (left_out) {
      if (keeps_order) block.turns_missing = turn_of(at) - ptx::load_relaxed(plan.counters + tile_index(at));
      continue;
    }
    const std::uint32_t step_s = base + Shape::kGradS + step % Shape::kGradSBuffers * Shape::kGradSBytes;

#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      if (kOwnCode && part == kParts - 1)
        start_copy(step + 1, after(at), true);  // before, they delay the first products
      const std::uint32_t part_offset = stage * Shape::kQBytes + part * kPart * Rows::kPitch;
      Fragments<kSlices, kPart / 8> tile;  // S^T, P^T; dP^T, dS^T
      const float* const per_query =
          reinterpret_cast<const float*>(shared + (team == 0 ? Shape::kLse : Shape::kDelta)) + stage * kBlockM +
          part * kPart + 2 * (lane % 4);
      if constexpr (!kOwnCode) {
#pragma unroll
        for (int n = 0; n < kPart / 8; ++n) {
          float2 start{0.0f, 0.0f};
          if (team == 1) start = *reinterpret_cast<const float2*>(per_query + 8 * n);
#pragma unroll
          for (int s = 0; s < kSlices; ++s)
#pragma unroll
            for (int e = 0; e < 4; ++e) tile[s][n][e] = e % 2 ? start.y : start.x;
        }
        const std::uint32_t rows = first_rows + part_offset + lane_b;
#pragma unroll
        for (int d = 0; d < kDim / 16; ++d) {
          if (16 * d >= kVDim && team == 1) break;
          std::uint32_t a[kSlices][4];
#pragma unroll
          for (int s = 0; s < kSlices; ++s) {
            if constexpr (kHoldKeys) {
#pragma unroll
              for (int r = 0; r < 4; ++r) a[s][r] = held[s][d][r];
            } else {
              ptx::ldmatrix_x4(a[s], Rows::at_slice(keys, d) + s * 16 * Rows::kPitch);
            }
          }
#pragma unroll
          for (int n = 0; n < kPart / 16; ++n) {
            std::uint32_t queries[4];
            ptx::ldmatrix_x4(queries, Rows::at_slice(rows, d) + n * 16 * Rows::kPitch);
#pragma unroll
            for (int s = 0; s < kSlices; ++s) {
              ptx::mma_m16n8k16<T>(tile[s][2 * n], a[s], queries[0], queries[1]);
              ptx::mma_m16n8k16<T>(tile[s][2 * n + 1], a[s], queries[2], queries[3]);
            }
          }
        }
      }

      // Where a lane's pair of queries of a key lies, in the tile of dS^T and, before that, of P^T.
      const std::uint32_t lane_word = step_s + Scores::element(warp_keys + lane / 4, part * kPart + 2 * (lane % 4));
      const auto exchange = [&](int s, int n, int half) {
        // All rows of a lane have the same twist.
        if constexpr (kOwnCode)
          return (lane_word ^ static_cast<std::uint32_t>(16 * n)) + (16 * s + 8 * half) * Scores::kPitch;
        return step_s +
               Scores::element(warp_keys + 16 * s + lane / 4 + 8 * half, part * kPart + 8 * n + 2 * (lane % 4));
      };
      // kOwnCode: P^T goes over in any order, 8 values of a lane at a time, through the same bytes of the same 16 rows.
      [[maybe_unused]] const auto hand_over = [&](int s, int n) -> uint4& {
        return shared_vector(step_s + (warp_keys + 16 * s + 2 * n + lane / 8) * Scores::kPitch + part * kPart * 2 +
                             lane % 8 * 16);
      };
      if (team == 0) {
        if constexpr (kOwnCode)
          first_product_by_halves<T, kDim, false>(tile, held, first_rows + part_offset + lane_b, nullptr);
        if constexpr (Shape::kModified) {
          // P^T stays; the partner gets P^T times the softcap's derivative.
          const std::int64_t h = at.h;
          const KeyWindow range = block.range;
          const float slope = f.alibi_slopes ? f.alibi_slopes[block.b * f.stride_alibi_batch + h] : 0.0f;
          const float inverse_softcap = f.softcap > 0.0f ? 1.0f / f.softcap : 0.0f;
          const int bias_bytes = f.bias.dtype == DType::kFloat32 ? 4 : 2;
          const int first_i = m + part * kPart + 2 * (lane % 4), first_j = first_key + warp_keys + lane / 4;
          const char* const bias = static_cast<const char*>(f.bias.data) +
                                   (block.b * f.bias.stride_batch + h * f.bias.stride_head) * bias_bytes;
#pragma unroll
          for (int n = 0; n < kPart / 8; ++n) {
            const float2 lse = *reinterpret_cast<const float2*>(per_query + 8 * n);
            // Keys that the two queries see, and their rows of the bias.
            int first[2], last[2];
            const char* bias_rows[2];
            std::uint64_t shown[2];  // by the packed mask: bit 16 s + 8 half of the lane's keys
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int i = first_i + 8 * n + e;
              first[e] = range.first(i);
              last[e] = i <= last_m ? range.last(i) : 0;
              bias_rows[e] = bias + i * f.bias.stride_q * bias_bytes;
              shown[e] = mask_keys<16 * kSlices>(f, block.b, h, min(i, last_m), first_key + warp_keys) >> lane / 4;
            }
#pragma unroll
            for (int s = 0; s < kSlices; ++s)
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                float weights[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                  const int i = first_i + 8 * n + e, j = first_j + 16 * s + 8 * half;
                  float& x = tile[s][n][2 * half + e];
                  float score = -INFINITY, capped = 0.0f;
                  if (j >= first[e] && j < last[e] && (shown[e] >> (16 * s + 8 * half) & 1) != 0)
                    score = modified_score_fast(f, slope, bias_rows[e], i, j, range.k_len - range.q_len, x, &capped);
                  x = ptx::exp2_approx(fmaf(score, kLog2E, e % 2 ? lse.y : lse.x));
                  const float t = capped * inverse_softcap;
                  weights[e] = x * (1.0f - t * t);
                }
                shared_word(exchange(s, n, half)) = pack<__half>(weights[0], weights[1]);
              }
          }
        } else {
#pragma unroll
          for (int n = 0; n < kPart / 8; ++n) {
            const float2 lse = *reinterpret_cast<const float2*>(per_query + 8 * n);
#pragma unroll
            for (int s = 0; s < kSlices; ++s)
#pragma unroll
              for (int e = 0; e < 4; ++e)
                tile[s][n][e] = ptx::exp2_approx(fmaf(tile[s][n][e], plan.scale_log2, e % 2 ? lse.y : lse.x));
          }
          if (masked) {
#pragma unroll
            for (int s = 0; s < kSlices; ++s)
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                const int j = first_key + warp_keys + lane / 4 + 16 * s + 8 * half;
                // Query i sees key j when i + left <= j < i + right.
                const int offset = j - block.range.left - (m + part * kPart + 2 * (lane % 4));
                const unsigned width = j < block.range.k_len ? block.range.right - block.range.left : 0;
#pragma unroll
                for (int n = 0; n < kPart / 8; ++n)
#pragma unroll
                  for (int e = 0; e < 2; ++e)
                    if (static_cast<unsigned>(offset - 8 * n - e) >= width) tile[s][n][2 * half + e] = 0.0f;
              }
          }
          if constexpr (kOwnCode) {
            // After that, the operands of dV take the place of what they are made of.
#pragma unroll
            for (int n = 0; n < kPart / 8; n += 2)
#pragma unroll
              for (int s = 0; s < kSlices; ++s) {
                const auto pair = [&](int tile_n, int r) {
                  return pack<__half>(tile[s][tile_n][r], tile[s][tile_n][r + 1]);
                };
                hand_over(s, n) = uint4{pair(n, 0), pair(n, 2), pair(n + 1, 0), pair(n + 1, 2)};
              }
#pragma unroll
            for (int s = 0; s < kSlices; ++s)
#pragma unroll
              for (int n = 0; n < kPart / 8; n += 2) {
                std::uint32_t words[4];
#pragma unroll
                for (int r = 0; r < 4; ++r)
                  words[r] = pack<T>(tile[s][n + r / 2][r % 2 * 2], tile[s][n + r / 2][r % 2 * 2 + 1]);
#pragma unroll
                for (int r = 0; r < 4; ++r) tile[s][n][r] = __uint_as_float(words[r]);
              }
          } else {
#pragma unroll
            for (int s = 0; s < kSlices; ++s)
#pragma unroll
              for (int n = 0; n < kPart / 8; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                  shared_word(exchange(s, n, half)) = pack<__half>(tile[s][n][2 * half], tile[s][n][2 * half + 1]);
          }
        }
      }
      if constexpr (kOwnCode)
        if (team != 0) first_product_by_halves<T, kDim, true>(tile, held, first_rows + part_offset + lane_b, per_query);
      __syncwarp();
      // A warp of team 0 has stored its part of P^T, its partner in team 1 may read it. Team 0 need not wait, but does,
      // at the same instruction: see lab/notebooks/attention_sm80.md, Races.
      ptx::barrier_sync(1 + warp % Shape::kTeamWarps * kParts + part, 64);  // each is used once a step
      const auto look_for_turn = [&] {
        if (ordered && part == kParts - 1) {
          const int turn = turn_of(at);
          const int* const counter = plan.counters + tile_index(at);
          if (keeps_order) block.turns_missing = turn - ptx::load_relaxed(counter);
        }
      };
      // dS^T of a lane's two queries of a key, from dP^T - D.
      const auto multiply = [&](float* x, std::uint32_t probabilities) {
        const float2 probability = __half22float2(*reinterpret_cast<const __half2*>(&probabilities));
        x[0] *= probability.x;
        x[1] *= probability.y;
      };
      // An accumulator of 16 keys x 16 queries is the operand of a product over the queries.
      const auto second_product = [&](int n, const std::uint32_t(&a)[kSlices][4]) {
        const std::uint32_t rows = second_rows + part_offset + lane_a;
#pragma unroll
        for (int c = 0; c < kDim / 16; ++c) {
          if (16 * c >= kVDim && team == 0) break;
          std::uint32_t columns[4];
          ptx::ldmatrix_x4_trans(columns, Rows::at_slice(rows, c) + n * 16 * Rows::kPitch);
#pragma unroll
          for (int s = 0; s < kSlices; ++s) {
            ptx::mma_m16n8k16<T>(grad[s][2 * c], a[s], columns[0], columns[1]);
            ptx::mma_m16n8k16<T>(grad[s][2 * c + 1], a[s], columns[2], columns[3]);
          }
        }
      };
      if (team == 0) {
        if (Shape::kGradSBuffers > 1 && part == kParts - 1) add_grad_q(step - 1, before(at), earlier_shown);
        if constexpr (kOwnCode) {
#pragma unroll
          for (int n = 0; n < kPart / 16; ++n) {
            std::uint32_t a[kSlices][4];
#pragma unroll
            for (int s = 0; s < kSlices; ++s)
#pragma unroll
              for (int r = 0; r < 4; ++r) a[s][r] = __float_as_uint(tile[s][2 * n][r]);
            second_product(n, a);
          }
        }
      } else if constexpr (kOwnCode) {
        look_for_turn();
        uint4 words[kSlices][kPart / 16];
#pragma unroll
        for (int n = 0; n < kPart / 16; ++n)
#pragma unroll
          for (int s = 0; s < kSlices; ++s) words[s][n] = hand_over(s, 2 * n);
        __syncwarp();  // read, before other lanes' dS^T takes the place
#pragma unroll
        for (int n = 0; n < kPart / 16; ++n) {
          std::uint32_t a[kSlices][4];
#pragma unroll
          for (int s = 0; s < kSlices; ++s) {
            const std::uint32_t four[4] = {words[s][n].x, words[s][n].y, words[s][n].z, words[s][n].w};
#pragma unroll
            for (int r = 0; r < 4; ++r) {
              float* const x = &tile[s][2 * n + r / 2][r % 2 * 2];
              multiply(x, four[r]);
              a[s][r] = pack<T>(x[0], x[1]);
              shared_word(exchange(s, 2 * n + r / 2, r % 2)) = a[s][r];
            }
          }
          second_product(n, a);
        }
      } else {
#pragma unroll
        for (int s = 0; s < kSlices; ++s) {
          std::uint32_t words[kPart / 8][2];  // all under way before the first is needed
#pragma unroll
          for (int n = 0; n < kPart / 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) words[n][half] = shared_word(exchange(s, n, half));
#pragma unroll
          for (int n = 0; n < kPart / 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              float* const x = &tile[s][n][2 * half];
              multiply(x, words[n][half]);
              shared_word(exchange(s, n, half)) = pack<T>(x[0], x[1]);
            }
        }
      }
      if constexpr (!kOwnCode) {
        look_for_turn();
#pragma unroll
        for (int n = 0; n < kPart / 16; ++n) {
          std::uint32_t a[kSlices][4];
#pragma unroll
          for (int s = 0; s < kSlices; ++s)
#pragma unroll
            for (int r = 0; r < 4; ++r)
              a[s][r] = pack<T>(tile[s][2 * n + r / 2][r % 2 * 2], tile[s][2 * n + r / 2][r % 2 * 2 + 1]);
          second_product(n, a);
        }
      }
    }
  }

  ptx::cp_async_wait<0>();
  if (keeps_order && block.turns_missing > 0) await_turn(before(at));
  __syncthreads();
  add_grad_q(block.steps - 1, before(at), was_shown);
  __syncthreads();  // all of K is read
  pass_turn(keeps_order && block.steps > 1, before(before(at)));
  pass_turn(keeps_order && block.steps > 0, before(at));

  // Through the warp's rows of K's (team 1) or V's (team 0) tile, so that they leave in vectors.
  void* const to = team == 0 ? p.grad_v : p.grad_k;
  if (!to) return;
  const float factor = team == 0 ? 1.0f : f.scale;
  const std::uint32_t rows = base + (team == 0 ? Shape::kV : Shape::kK) + warp_keys * Rows::kPitch;
  FiniteCheck finite;
#pragma unroll
  for (int s = 0; s < kSlices; ++s)
#pragma unroll
    for (int c = 0; c < kDim / 8; ++c)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* const x = &grad[s][c][2 * half];
        finite.see(x[0]);
        finite.see(x[1]);
        shared_word(rows + Rows::element(16 * s + lane / 4 + 8 * half, 8 * c + 2 * (lane % 4))) =
            pack<T>(x[0] * factor, x[1] * factor);
      }
  finite.report(plan.not_finite);
  __syncwarp();
  const std::int64_t stride_token = team == 0 ? p.stride_grad_v_token : p.stride_grad_k_token;
  const int dim = static_cast<int>(team == 0 ? f.head_dim_v : f.head_dim), warp_first = first_key + warp_keys;
  const bool vectors = team == 0 ? plan.vectors_grad_v : plan.vectors_grad_k;
  T* const row0 =
      static_cast<T*>(to) + row_offset(f.is_varlen_k(), f.is_varlen_k() ? f.k_begin(block.b) : 0, block.b, block.g,
                                       warp_first, team == 0 ? p.stride_grad_v_batch : p.stride_grad_k_batch,
                                       team == 0 ? p.stride_grad_v_head : p.stride_grad_k_head, stride_token);
  store_rows<T, Rows, kSlices * 16>(rows, row0, stride_token, block.range.k_len - warp_first, dim, vectors);
}

}  // namespace flashkernel::cuda::sm80
