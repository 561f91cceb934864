// FlashAttention-2 forward (Dao, 2023; Algorithm 1) in fp32 on the fp16 tensor cores of sm_80 and later: every operand
// is the sum of two halves (tile/split_halves.cuh), every product three matrix instructions. instances/ has the files
// that instantiate it.
//
// A block owns kBlockM queries of one head and walks the tiles of keys that any of them sees, the last one first. The
// next K waits in registers while P V runs, and the next V during the softmax, since they are split on their way to
// shared memory. Scores stay in registers.
//
// The tensor core truncates its sums. Therefore P V of each tile starts from zero and is added to the output in plain
// fp32, where the scale of V is undone as well.
//
// Invariant on NaN and infinity: a block computes as if all numbers were finite. One that is not shows in the result,
// since 0 * NaN is NaN in the tensor core and an infinity splits into NaN. Then plain.cuh computes the block's rows
// again.
#pragma once

#include <algorithm>

#include "cuda/host/launch.hpp"
#include "cuda/ptx/math.cuh"
#include "cuda/attention/forward/sm80/variant.hpp"
#include "cuda/attention/plain.cuh"
#include "cuda/attention/score.cuh"
#include "cuda/attention/key_range.cuh"
#include "cuda/tile/in_turn.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/split_products.cuh"

namespace flashkernel::cuda::sm80 {

// 32 rows a warp where registers allow: each fragment of K and V serves six matrix instructions. Registers hold scores
// (kSlices * kBlockN / 2), output (kSlices * kVDim / 2) and the waiting tile (kBlockN / 128 times its head dim). Shared
// memory holds two halves of Q, K and V: 96 KB at d128, d192 and d256, which fits the 99 KB of 8.6 and 8.9, and twice
// on 9.0.
template <int kQkDim_, int kVDim_, bool kModified>
struct ForwardShapeF32 {
  static constexpr int kQkDim = kQkDim_, kVDim = kVDim_, kWidest = std::max(kQkDim, kVDim);
  static constexpr int kWarps = 4, kThreads = kWarps * 32, kMinBlocks = 2;
  static constexpr int kSlices = !kModified && kWidest <= 128 ? 2 : 1;  // of 16 rows a warp
  static constexpr int kBlockM = kWarps * kSlices * 16;
  static constexpr int kBlockN = kWidest <= 64 ? 64 : kWidest <= 192 ? 32 : 16;
  static constexpr int kGroup = kBlockN / kWarps;  // keys that share a scale
  static constexpr int kSharedBytes = ((kBlockM + kBlockN) * kQkDim + kBlockN * kVDim) * 4;
  static_assert(kSharedBytes + 1024 <= kLeastSharedBytes, "and what the kernel declares itself");
};

struct ForwardPlanF32 {
  int q_tiles;                           // of the longest sequence
  int heads_at_once;                     // heads whose blocks alternate: as many as keep K and V in the L2 cache
  bool page_holds_groups;                // pages are whole groups of keys
  bool vectors_q, vectors_k, vectors_v;  // rows are whole float4s at multiples of 16 bytes
  bool pairs_out;                        // rows start at multiples of 8 bytes
};

/// Applies scale, softcap, bias and ALiBi, in the order of docs/numerics.md. Like modified_score, with 32-bit
/// positions.
__device__ inline float modified_score_f32(const AttentionParams& p, float slope, const char* bias_row, int i, int j,
                                           int shift, float dot) {
  float s = dot * p.scale;
  if (p.softcap > 0.0f) s = p.softcap * tanhf(s / p.softcap);
  if (p.bias.data) s += load_typed(bias_row, p.bias.dtype, j * p.bias.stride_k);
  if (p.alibi_slopes) s += p.alibi_term(slope, static_cast<float>(i + shift - j));
  return s;
}

template <int kQkDim, int kVDim, bool kModified>
__global__ void __launch_bounds__(ForwardShapeF32<kQkDim, kVDim, kModified>::kThreads,
                                  ForwardShapeF32<kQkDim, kVDim, kModified>::kMinBlocks)
    attention_fwd_f32_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ ForwardPlanF32 plan) {
  using Shape = ForwardShapeF32<kQkDim, kVDim, kModified>;
  using QkTile = SharedTile<kQkDim>;
  using VTile = SharedTile<kVDim>;
  constexpr int kBlockM = Shape::kBlockM, kBlockN = Shape::kBlockN, kSlices = Shape::kSlices, kGroup = Shape::kGroup;
  constexpr std::uint32_t kHalfQ = kBlockM * QkTile::kPitch, kHalfK = kBlockN * QkTile::kPitch,
                          kHalfV = kBlockN * VTile::kPitch;  // bytes of one half
  constexpr float kLog2E = 1.4426950408889634f;
  extern __shared__ __align__(128) unsigned char shared[];

  // Heavy tiles (the last ones, when causal) of a group of heads first.
  const unsigned heads = static_cast<unsigned>(p.batch * p.heads_q), at_once = plan.heads_at_once;
  const unsigned head_group = blockIdx.x / (at_once * plan.q_tiles), in_group = blockIdx.x % (at_once * plan.q_tiles);
  const unsigned group_heads = min(at_once, heads - head_group * at_once);
  const unsigned head = head_group * at_once + in_group % group_heads;
  const unsigned b = head / static_cast<unsigned>(p.heads_q), h = head % static_cast<unsigned>(p.heads_q);
  const unsigned g = h / static_cast<unsigned>(p.heads_q / p.heads_kv);
  const KeyRange whole_range(p, b);
  const int first_query = (plan.q_tiles - 1 - static_cast<int>(in_group / group_heads)) * kBlockM;
  if (first_query >= whole_range.q_len) return;
  const int last_query = min(whole_range.q_len, first_query + kBlockM) - 1;
  const int first_key = whole_range.first(first_query), last_key = whole_range.last(last_query);
  // Tiles of keys [first_tile, end_tile); those outside of block.[first_full, end_full) are masked for some query.
  const int first_tile = first_key / kBlockN, end_tile = (last_key + kBlockN - 1) / kBlockN;
  const int num_tiles = last_key > first_key ? end_tile - first_tile : 0;
  // What the loop needs now and then waits in shared memory: registers are full.
  __shared__ struct {
    const float *k, *v;
    int first_key, last_key, first_full, end_full;
    KeyRange range;
    float multiplier_q[kBlockM / 8], multiplier_k[Shape::kWarps], multiplier_v[Shape::kWarps];  // of groups of rows
  } block;
  if (threadIdx.x == 0) {
    const auto base = [&](const void* data, std::int64_t stride_batch, std::int64_t stride_head,
                          std::int64_t stride_token) {
      return static_cast<const float*>(data) + g * stride_head +
             (p.is_paged()      ? 0
              : p.is_varlen_k() ? p.k_begin(b) * stride_token
                                : b * stride_batch);
    };
    block.k = base(p.k, p.stride_k_batch, p.stride_k_head, p.stride_k_token);
    block.v = base(p.v, p.stride_v_batch, p.stride_v_head, p.stride_v_token);
    block.range = whole_range;
    block.first_key = first_key;
    block.last_key = last_key;
    block.first_full = (whole_range.first(last_query) + kBlockN - 1) / kBlockN;
    block.end_full = whole_range.last(first_query) / kBlockN;
  }
  __syncthreads();

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::uint32_t shared_q = ptx::shared_address(shared), shared_k = shared_q + 2 * kHalfQ,
                      shared_v = shared_k + 2 * kHalfK;
  const std::uint32_t warp_q = shared_q + warp * kSlices * 16 * QkTile::kPitch;
  const std::uint32_t lane_q = warp_q + QkTile::lane_offset(LaneA::row(lane), LaneA::half(lane));
  const std::uint32_t lane_k = shared_k + QkTile::lane_offset(LaneB::row(lane), LaneB::half(lane));
  const std::uint32_t lane_v = shared_v + VTile::lane_offset(LaneA::row(lane), LaneA::half(lane));

  // The row of key j, or null where there is none: outside of what the block sees, or in a page that does not exist.
  const auto key_row = [&](const float* base, std::int64_t stride_page, std::int64_t stride_token,
                           int j) -> const float* {
    if (j < block.first_key || j >= block.last_key) return nullptr;
    if (!p.is_paged()) return base + j * stride_token;
    const unsigned page_size = static_cast<unsigned>(p.page_size), column = static_cast<unsigned>(j) / page_size;
    const std::int32_t page = p.block_table[b * p.stride_block_table + column];
    if (page < 0 || page >= p.num_pages) return nullptr;
    return base + page * stride_page + (static_cast<unsigned>(j) - column * page_size) * stride_token;
  };
  const auto row_of_k = [&](int j) { return key_row(block.k, p.stride_k_batch, p.stride_k_token, j); };
  const auto row_of_v = [&](int j) { return key_row(block.v, p.stride_v_batch, p.stride_v_token, j); };

  InTurn<SplitGroup<kGroup, kQkDim>, SplitGroup<kGroup, kVDim>> waiting;  // the warp's rows of the next tile of K or V
  const auto load_keys = [&](auto& rows, const auto& row_of, std::int64_t stride_token, std::int64_t dim, bool vectors,
                             int tile) {
    const int j = tile * kBlockN + warp * kGroup;
    const bool whole =
        vectors && j >= block.first_key && j + kGroup <= block.last_key && (!p.is_paged() || plan.page_holds_groups);
    rows.load(whole ? row_of(j) : nullptr, stride_token, static_cast<int>(dim), vectors,
              [&](int row) { return row_of(j + row); });
  };

  // Q: eight rows, one half of a slice, share a scale.
#pragma unroll
  for (int eight = 0; eight < 2 * kSlices; ++eight) {
    SplitGroup<8, kQkDim> rows;
    const int i = first_query + (warp * kSlices * 2 + eight) * 8;
    const float* const q = static_cast<const float*>(p.q) + p.q_offset(b, h, i);
    rows.load(plan.vectors_q && i + 8 <= block.range.q_len ? q : nullptr, p.stride_q_token,
              static_cast<int>(p.head_dim), plan.vectors_q,
              [&](int row) { return i + row <= last_query ? q + row * p.stride_q_token : nullptr; });
    const float multiplier = rows.store(shared_q, shared_q + kHalfQ, (warp * kSlices * 2 + eight) * 8);
    if (lane == 0) block.multiplier_q[warp * kSlices * 2 + eight] = multiplier;
  }
  __syncwarp();

  const float scale_log2 = kModified ? kLog2E : p.scale * kLog2E;  // modified scores are scaled already
  [[maybe_unused]] const float slope =
      kModified && p.alibi_slopes ? p.alibi_slopes[b * p.stride_alibi_batch + h] : 0.0f;
  const int row_in_block = warp * kSlices * 16 + lane / 4;  // of slice 0, upper half; +16 a slice, +8 the lower half
  float out[kSlices][kVDim / 8][4];
  float maximum[kSlices][2], sum[kSlices][2];

#pragma unroll
  for (int s = 0; s < kSlices; ++s) {
#pragma unroll
    for (int c = 0; c < kVDim / 8; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[s][c][e] = 0.0f;
    maximum[s][0] = maximum[s][1] = -INFINITY;
    sum[s][0] = sum[s][1] = 0.0f;
  }
  if (num_tiles > 0) load_keys(waiting.first(), row_of_k, p.stride_k_token, p.head_dim, plan.vectors_k, end_tile - 1);

  for (int t = 0; t < num_tiles; ++t) {
    const int tile = end_tile - 1 - t, first_j = tile * kBlockN;
    {
      const float multiplier = waiting.first().store(shared_k, shared_k + kHalfK, warp * kGroup);
      if (lane == 0) block.multiplier_k[warp] = multiplier;
    }
    __syncthreads();  // K is there for all, and V's tile is read by nobody

    // S = Q K^T
    float score[kSlices][kBlockN / 8][4];
    split_scores<kQkDim, kSlices, kBlockN>(score, lane_q, kHalfQ, lane_k, kHalfK);
    load_keys(waiting.second(), row_of_v, p.stride_v_token, p.head_dim_v, plan.vectors_v, tile);

    const bool masked = tile < block.first_full || tile >= block.end_full;
#pragma unroll
    for (int n = 0; n < kBlockN / 8; ++n) {
      const float multiplier = block.multiplier_k[(8 * n + 2 * (lane % 4)) / kGroup];
#pragma unroll
      for (int s = 0; s < kSlices; ++s)
#pragma unroll
        for (int e = 0; e < 4; ++e) score[s][n][e] *= block.multiplier_q[(warp * kSlices + s) * 2 + e / 2] * multiplier;
    }
    if constexpr (kModified) {
#pragma unroll
      for (int s = 0; s < kSlices; ++s)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = first_query + row_in_block + 16 * s + 8 * half, row = min(i, last_query);
          const int begin = block.range.first(row), end = i <= last_query ? block.range.last(row) : 0;
          const std::uint64_t shown =
              mask_keys<kBlockN>(p, b, h, row, first_j, block.range.k_len - block.range.q_len) >>
              2 * (lane % 4);  // bit 8 n + e: of this lane's key
          const char* bias_row = static_cast<const char*>(p.bias.data) +
                                 (b * p.bias.stride_batch + h * p.bias.stride_head + row * p.bias.stride_q) *
                                     (p.bias.dtype == DType::kFloat32 ? 4 : 2);
#pragma unroll
          for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int j = first_j + 8 * n + 2 * (lane % 4) + e;
              float& x = score[s][n][2 * half + e];
              x = j >= begin && j < end && (shown >> (8 * n + e) & 1) != 0
                      ? modified_score_f32(p, slope, bias_row, row, j, block.range.k_len - block.range.q_len, x)
                      : -INFINITY;
            }
        }
    } else if (masked) {
#pragma unroll
      for (int s = 0; s < kSlices; ++s)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = first_query + row_in_block + 16 * s + 8 * half;
          const int begin = block.range.first(i) - first_j - 2 * (lane % 4);
          const unsigned count = static_cast<unsigned>(max(0, block.range.last(i) - block.range.first(i)));
#pragma unroll
          for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
              if (static_cast<unsigned>(8 * n + e - begin) >= count) score[s][n][2 * half + e] = -INFINITY;
        }
    }

    // The shift of the exponentials: the row's maximum, but an older one serves while no exponential passes 2^4.
    float highest[kSlices][2];
    bool rescale = false;
#pragma unroll
    for (int s = 0; s < kSlices; ++s)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float m = maximum[s][half];
#pragma unroll
        for (int n = 0; n < kBlockN / 8; ++n) m = fmaxf(m, fmaxf(score[s][n][2 * half], score[s][n][2 * half + 1]));
        m = fmaxf(m, __shfl_xor_sync(kFullMask, m, 1));
        m = fmaxf(m, __shfl_xor_sync(kFullMask, m, 2));
        highest[s][half] = m;
        rescale |= (m - maximum[s][half]) * scale_log2 > 4.0f;  // -inf - -inf is NaN: no
      }
    // What an exponent subtracts; rounded, so that a later factor must be the ratio of two of them.
    const auto shift_of = [&](float m) {
      return kModified ? SoftmaxState::shift(m) : SoftmaxState::shift(m) * scale_log2;
    };
    if (__any_sync(kFullMask, rescale)) {
#pragma unroll
      for (int s = 0; s < kSlices; ++s)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float old = kModified ? maximum[s][half] : maximum[s][half] * scale_log2;
          const float factor = ptx::exp2_approx((old - shift_of(highest[s][half])) * (kModified ? kLog2E : 1.0f));
          maximum[s][half] = highest[s][half];
          sum[s][half] *= factor;
#pragma unroll
          for (int c = 0; c < kVDim / 8; ++c) {
            out[s][c][2 * half] *= factor;
            out[s][c][2 * half + 1] *= factor;
          }
        }
    }
#pragma unroll
    for (int s = 0; s < kSlices; ++s)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float shift = shift_of(maximum[s][half]);
        float tile_sum = 0.0f;
#pragma unroll
        for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = score[s][n][2 * half + e];
            x = ptx::exp2_approx(kModified ? (x - shift) * kLog2E : fmaf(x, scale_log2, -shift));
            tile_sum += x;
          }
        sum[s][half] += tile_sum;
      }

    {
      const float multiplier = waiting.second().store(shared_v, shared_v + kHalfV, warp * kGroup);
      if (lane == 0) block.multiplier_v[warp] = multiplier;
    }
    __syncthreads();  // V is there for all, and K's tile is read by nobody
    if (t + 1 < num_tiles) load_keys(waiting.first(), row_of_k, p.stride_k_token, p.head_dim, plan.vectors_k, tile - 1);

    // O += P V; P is at most 2^4
    const SplitScale<Shape::kWarps> scale(block.multiplier_v, 10);
    const SplitOperand<kSlices, kBlockN> probabilities(
        score, [&](int n) { return block.multiplier_v[(8 * n + 2 * (lane % 4)) / kGroup] * scale.to; });
    split_accumulate<kVDim, kSlices, kBlockN>(out, probabilities, lane_v, kHalfV, scale.back);
  }

  float zero = 0.0f;  // NaN once any result is not finite
#pragma unroll
  for (int s = 0; s < kSlices; ++s) {
    zero = fmaf(sum[s][0], 0.0f, fmaf(sum[s][1], 0.0f, zero));
#pragma unroll
    for (int c = 0; c < kVDim / 8; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) zero = fmaf(out[s][c][e], 0.0f, zero);
  }
  if (__syncthreads_or(zero != zero)) {
    const ScoreContext at(p, b, h);
#pragma unroll 1
    for (int i = first_query + warp; i <= last_query; i += Shape::kWarps)
      plain_forward_row<kVDim>(p, at, block.range, i, row_of_k, row_of_v);
    return;
  }

#pragma unroll
  for (int s = 0; s < kSlices; ++s)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum[s][half];
      total += __shfl_xor_sync(kFullMask, total, 1);
      total += __shfl_xor_sync(kFullMask, total, 2);
      SoftmaxState state;
      state.maximum = kModified                       ? maximum[s][half]
                      : maximum[s][half] == -INFINITY ? -INFINITY
                                                      : maximum[s][half] * p.scale;
      state.sum = total;
      float lse;
      const float factor = state.finish(p.sinks, h, &lse);
      const int i = first_query + row_in_block + 16 * s + 8 * half;
      if (i > last_query) continue;
      if (p.lse && lane % 4 == 0) p.lse[p.lse_offset(b, h, i)] = lse;
      const int column = 2 * (lane % 4), dim = static_cast<int>(p.head_dim_v);
      float* const to = static_cast<float*>(p.out) + p.out_offset(b, h, i) + column;
#pragma unroll
      for (int c = 0; c < kVDim / 8; ++c) {
        const bool empty = factor == 0.0f;
        const float x = empty ? 0.0f : out[s][c][2 * half] * factor;
        const float y = empty ? 0.0f : out[s][c][2 * half + 1] * factor;
        if (plan.pairs_out && column + 8 * c + 1 < dim) {
          *reinterpret_cast<float2*>(to + 8 * c) = float2{x, y};
        } else {
          if (column + 8 * c < dim) to[8 * c] = x;
          if (column + 8 * c + 1 < dim) to[8 * c + 1] = y;
        }
      }
    }
}

template <int kQkDim, int kVDim, bool kModified>
void launch_attention_fwd_f32(const AttentionParams& p, cudaStream_t stream) {
  using Shape = ForwardShapeF32<kQkDim, kVDim, kModified>;
  const auto kernel = attention_fwd_f32_kernel<kQkDim, kVDim, kModified>;
  const auto fits = [](int n, const void* data, std::int64_t a, std::int64_t b, std::int64_t c) {
    return is_aligned(data, 4 * n) && a % n == 0 && b % n == 0 && c % n == 0;
  };
  ForwardPlanF32 plan;
  plan.q_tiles = static_cast<int>(ceil_div(p.seq_q, Shape::kBlockM));
  plan.page_holds_groups = p.is_paged() && p.page_size % Shape::kGroup == 0;
  plan.vectors_q =
      p.head_dim % 4 == 0 && fits(4, p.q, p.is_varlen_q() ? 0 : p.stride_q_batch, p.stride_q_head, p.stride_q_token);
  plan.vectors_k =
      p.head_dim % 4 == 0 && fits(4, p.k, p.is_varlen_k() ? 0 : p.stride_k_batch, p.stride_k_head, p.stride_k_token);
  plan.vectors_v =
      p.head_dim_v % 4 == 0 && fits(4, p.v, p.is_varlen_k() ? 0 : p.stride_v_batch, p.stride_v_head, p.stride_v_token);
  plan.pairs_out = fits(2, p.out, p.is_varlen_q() ? 0 : p.stride_out_batch, p.stride_out_head, p.stride_out_token);
  // Half of the L2 cache for K and V of the heads under way.
  const std::int64_t group = p.heads_q / p.heads_kv;
  const std::int64_t bytes_per_head = std::max<std::int64_t>(1, (p.head_dim + p.head_dim_v) * 4 * p.seq_k / group);
  const std::int64_t heads = p.batch * p.heads_q;
  plan.heads_at_once = static_cast<int>(
      std::max<std::int64_t>(1, std::min(heads, cuda_device_properties(p.device.index).l2_bytes / 2 / bytes_per_head)));
  launch("attention_fwd sm80 f32", kernel,
         {static_cast<unsigned>(heads * plan.q_tiles), Shape::kThreads, Shape::kSharedBytes, stream}, p, plan);
}

/// An entry of the table. Scores that only scale (by a positive number, so that the largest product is the largest
/// score) take the plain kernel.
template <int kQkDim, int kVDim>
void attention_fwd_f32(const AttentionParams& p, void*, Stream stream) {
  if (p.batch * p.heads_q * p.seq_q == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  if (p.has_score_modifier() || !(p.scale > 0.0f))
    launch_attention_fwd_f32<kQkDim, kVDim, true>(p, native(stream));
  else
    launch_attention_fwd_f32<kQkDim, kVDim, false>(p, native(stream));
}

}  // namespace flashkernel::cuda::sm80
