// kernel.cuh for head dims over 256, where one warp's registers cannot hold 16 rows of the output. A block owns 64
// queries of one head. Two warps share 16 of them: each computes the scores of half of a tile's keys and multiplies the
// probabilities of all keys with half of the columns of V. They hand each other row maxima and probabilities through
// shared memory. The maxima need no barrier of their own, since the block waits for V between scores and exponentials.
//
// Tiles of K and V take turns in two slots. Masks, the shift of the exponentials and the invariant on NaN are those of
// kernel.cuh. instances/ has the files that instantiate it.
#pragma once

#include <algorithm>

#include "cuda/attention/forward/sm80/plan.cuh"
#include "cuda/attention/forward/sm80/variant.hpp"
#include "cuda/attention/key_range.cuh"
#include "cuda/attention/not_finite.cuh"
#include "cuda/attention/score_fast.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace flashkernel::cuda::sm80 {

/// kBlockN: 16 keys for the 99 KB of 8.6 and 8.9 and for modified scores, whose registers do not suffice for more; else
/// 32.
template <int kDim_, int kBlockN_>
struct WideShape {
  static constexpr int kDim = kDim_, kBlockN = kBlockN_, kBlockM = 64;
  static constexpr int kWarps = 8, kThreads = kWarps * 32;
  static constexpr int kHalfKeys = kBlockN / 2, kHalfColumns = kDim / 2;  // of a warp
  using Rows = SharedTile<kDim>;
  using Probabilities = SharedTile<kBlockN>;
  static constexpr int kSlotBytes = kBlockN * Rows::kPitch;
  // Byte offsets in shared memory: Q, a slot for K and one for V, P, and a number a row of either warp.
  static constexpr int kK = kBlockM * Rows::kPitch, kV = kK + kSlotBytes, kP = kV + kSlotBytes;
  static constexpr int kRow = kP + kBlockM * Probabilities::kPitch, kSharedBytes = kRow + 2 * kBlockM * 4;
  static constexpr int kLimit = (kBlockN == 16 ? 99 : 163) * 1024;
  static_assert(kSharedBytes + 128 <= kLimit, "and what the kernel declares itself");
};

template <class T, int kDim, int kBlockN, bool kModified>
__global__ void __launch_bounds__(WideShape<kDim, kBlockN>::kThreads, 1)
    attention_fwd_wide_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ ForwardPlan plan) {
  using Shape = WideShape<kDim, kBlockN>;
  using Rows = typename Shape::Rows;
  using Probabilities = typename Shape::Probabilities;
  constexpr int kBlockM = Shape::kBlockM, kThreads = Shape::kThreads, kHalfKeys = Shape::kHalfKeys;
  constexpr int kKeyTiles = kHalfKeys / 8, kColumnTiles = Shape::kHalfColumns / 8;  // of 8, of a warp
  constexpr float kLog2E = 1.4426950408889634f;
  extern __shared__ __align__(128) unsigned char shared[];

  // Heavy tiles (the last ones, when causal) of a group of heads first.
  const unsigned head_group = plan.group_blocks.divide(blockIdx.x);
  const unsigned in_group = blockIdx.x - head_group * plan.group_blocks.value;
  const bool last_group = head_group + 1 == plan.groups;
  const unsigned group_heads = last_group ? plan.last_at_once.value : plan.at_once.value;
  const unsigned tile_in_group = last_group ? plan.last_at_once.divide(in_group) : plan.at_once.divide(in_group);
  const unsigned head = head_group * plan.at_once.value + in_group - tile_in_group * group_heads;
  const unsigned b = plan.heads_q.divide(head), h = head - b * plan.heads_q.value, g = plan.group.divide(h);
  const KeyRange own_range(p, b);
  const int first_query = (plan.q_tiles - 1 - static_cast<int>(tile_in_group)) * kBlockM;
  if (first_query >= own_range.q_len) return;
  const int last_query = min(own_range.q_len, first_query + kBlockM) - 1;
  const int first_key = own_range.first(first_query), last_key = own_range.last(last_query);
  // Tiles of keys [first_tile, end_tile); those outside of [first_full, end_full) are masked for some query.
  const int first_tile = first_key / kBlockN, end_tile = (last_key + kBlockN - 1) / kBlockN;
  const int num_tiles = last_key > first_key ? end_tile - first_tile : 0;
  const auto rows_of = [&](const void* data, std::int64_t stride_batch, std::int64_t stride_head,
                           std::int64_t stride_token) {
    const std::int64_t of_sequence = p.is_paged()      ? 0
                                     : p.is_varlen_k() ? p.k_begin(b) * stride_token
                                                       : b * stride_batch;
    return static_cast<const T*>(data) + g * stride_head + of_sequence;
  };
  // What the loop needs once a phase waits in shared memory: registers are full.
  __shared__ struct {
    const T *k, *v;
    int first_key, last_key, first_full, end_full;
    float slope;
    KeyRange range;
  } block;
  const KeyRange& range = block.range;
  if (threadIdx.x == 0) {
    block.k = rows_of(p.k, p.stride_k_batch, p.stride_k_head, p.stride_k_token);
    block.v = rows_of(p.v, p.stride_v_batch, p.stride_v_head, p.stride_v_token);
    block.first_key = first_key;
    block.last_key = last_key;
    block.first_full = (own_range.first(last_query) + kBlockN - 1) / kBlockN;
    block.end_full = own_range.last(first_query) / kBlockN;
    block.slope = p.alibi_slopes ? p.alibi_slopes[b * p.stride_alibi_batch + h] : 0.0f;
    block.range = own_range;
  }

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pair = warp % 4, side = warp / 4;
  const std::uint32_t base = ptx::shared_address(shared), slot_k = base + Shape::kK, slot_v = base + Shape::kV;
  {
    const T* const q = static_cast<const T*>(p.q) + p.q_offset(b, h, first_query);
    load_tile<kBlockM, kDim, kThreads>(
        base, static_cast<int>(p.head_dim), plan.vectors_q,
        plan.vectors_q && first_query + kBlockM <= own_range.q_len ? q : nullptr, p.stride_q_token,
        [&](int row) -> const T* { return first_query + row <= last_query ? q + row * p.stride_q_token : nullptr; });
  }

  __syncthreads();

  const std::uint32_t pair_q = base + pair * 16 * Rows::kPitch;
  const std::uint32_t lane_q = pair_q + Rows::lane_offset(LaneA::row(lane), LaneA::half(lane));
  // Keys of this warp's side: 16 of them by 16 dims at a time, or 8 by 32.
  const std::uint32_t lane_k =
      slot_k + side * kHalfKeys * Rows::kPitch +
      (kKeyTiles == 1 ? Rows::lane_offset(lane % 8, lane / 8) : Rows::lane_offset(LaneB::row(lane), LaneB::half(lane)));
  const std::uint32_t lane_v =
      slot_v + side * Shape::kHalfColumns * 2 + Rows::lane_offset(LaneA::row(lane), LaneA::half(lane));
  const std::uint32_t pair_p = base + Shape::kP + pair * 16 * Probabilities::kPitch;
  const std::uint32_t lane_p = pair_p + Probabilities::lane_offset(LaneA::row(lane), LaneA::half(lane));
  // A number a row that the warps of a pair show each other: row lane / 4 + 8 half of either side.
  const auto number = [&](int of_side, int half) {
    return reinterpret_cast<float*>(shared + Shape::kRow) + of_side * kBlockM + pair * 16 + lane / 4 + 8 * half;
  };
  const auto wait_for_pair = [&] { ptx::barrier_sync(1 + pair, 64); };

  const auto page_row = [&](const T* rows, std::int64_t stride_page, std::int64_t stride_token, int j) -> const T* {
    const unsigned page_size = static_cast<unsigned>(p.page_size), column = static_cast<unsigned>(j) / page_size;
    const std::int32_t page = p.block_table[b * p.stride_block_table + column];
    if (page < 0 || page >= p.num_pages) return nullptr;  // a bad table reads nothing
    return rows + page * stride_page + (static_cast<unsigned>(j) - column * page_size) * stride_token;
  };
  // The copy of K (or V) of the t-th tile, the last one first; no tile left: an empty group.
  const auto start_copy = [&](bool of_v, int t) {
    if (t < num_tiles) {
      const T* const rows = of_v ? block.v : block.k;
      const int first_key = block.first_key, last_key = block.last_key;
      const std::int64_t stride_page = of_v ? p.stride_v_batch : p.stride_k_batch;
      const std::int64_t stride_token = of_v ? p.stride_v_token : p.stride_k_token;
      const bool vectors = of_v ? plan.vectors_v : plan.vectors_k;
      const int first_j = (end_tile - 1 - t) * kBlockN;
      const T* first_row = nullptr;
      if (vectors && first_j >= first_key && first_j + kBlockN <= last_key) {
        if (!p.is_paged())
          first_row = rows + first_j * stride_token;
        else if (plan.page_holds_tiles)
          first_row = page_row(rows, stride_page, stride_token, first_j);
      }
      load_tile<kBlockN, kDim, kThreads>(of_v ? slot_v : slot_k, static_cast<int>(of_v ? p.head_dim_v : p.head_dim),
                                         vectors, first_row, stride_token, [&](int row) -> const T* {
                                           const int j = first_j + row;
                                           if (j < first_key || j >= last_key) return nullptr;
                                           return p.is_paged() ? page_row(rows, stride_page, stride_token, j)
                                                               : rows + j * stride_token;
                                         });
    }
    ptx::cp_async_commit();
  };

  const float scale_log2 = kModified ? kLog2E : p.scale * kLog2E;  // modified scores are scaled already
  const int lane_query = first_query + pair * 16 + lane / 4;       // and 8 further
  float out[kColumnTiles][4], maximum[2], sum[2];                  // sums of this side's keys
  for (bool careful = false;; careful = true) {
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[c][e] = 0.0f;
    maximum[0] = maximum[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
    start_copy(false, 0);

    for (int t = 0; t < num_tiles; ++t) {
      const int tile = end_tile - 1 - t, first_j = tile * kBlockN, own_j = first_j + side * kHalfKeys;
      const bool masked = tile < block.first_full || tile >= block.end_full;

      // S = Q K^T
      ptx::cp_async_wait<0>();
      __syncthreads();  // K is there for all, and V of the tile before is read
      start_copy(true, t);
      float score[kKeyTiles][4] = {};
      if constexpr (kKeyTiles == 1) {
#pragma unroll(kModified ? 4 : 8)
        for (int d = 0; d < kDim / 16; d += 2) {
          std::uint32_t keys[4], a[2][4];
          ptx::ldmatrix_x4(keys, Rows::at_slice(lane_k, d));
          ptx::ldmatrix_x4(a[0], Rows::at_slice(lane_q, d));
          ptx::ldmatrix_x4(a[1], Rows::at_slice(lane_q, d + 1));
          ptx::mma_m16n8k16<T>(score[0], a[0], keys[0], keys[1]);
          ptx::mma_m16n8k16<T>(score[0], a[1], keys[2], keys[3]);
        }
      } else {
#pragma unroll(kModified ? 4 : 8)
        for (int d = 0; d < kDim / 16; ++d) {
          std::uint32_t a[4];
          ptx::ldmatrix_x4(a, Rows::at_slice(lane_q, d));
#pragma unroll
          for (int n = 0; n < kKeyTiles / 2; ++n) {
            std::uint32_t keys[4];
            ptx::ldmatrix_x4(keys, Rows::at_slice(lane_k, d) + n * 16 * Rows::kPitch);
            ptx::mma_m16n8k16<T>(score[2 * n], a, keys[0], keys[1]);
            ptx::mma_m16n8k16<T>(score[2 * n + 1], a, keys[2], keys[3]);
          }
        }
      }
      if (kModified || masked) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = lane_query + 8 * half, row = min(i, last_query);
          const int begin = range.first(row), end = i <= last_query ? range.last(row) : 0;
          [[maybe_unused]] const char* bias_row = nullptr;
          [[maybe_unused]] std::uint32_t shown = 0;
          if constexpr (kModified) {
            bias_row = static_cast<const char*>(p.bias.data) +
                       (b * p.bias.stride_batch + h * p.bias.stride_head + row * p.bias.stride_q) *
                           (p.bias.dtype == DType::kFloat32 ? 4 : 2);
            shown = static_cast<std::uint32_t>(mask_keys<kBlockN>(p, b, h, row, first_j, range.k_len - range.q_len)) >>
                    (side * kHalfKeys + 2 * (lane % 4));
          }
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int j = own_j + 8 * n + 2 * (lane % 4) + e;
              float& x = score[n][2 * half + e];
              if constexpr (kModified)
                x = j >= begin && j < end && (shown >> (8 * n + e) & 1) != 0
                        ? modified_score_fast(p, block.slope, bias_row, row, j, range.k_len - range.q_len, x)
                        : -INFINITY;
              else if (j < begin || j >= end)
                x = -INFINITY;
            }
        }
      }
      float highest[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float m = -INFINITY;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) m = fmaxf(m, fmaxf(score[n][2 * half], score[n][2 * half + 1]));
        m = fmaxf(m, __shfl_xor_sync(kFullMask, m, 1));
        highest[half] = fmaxf(m, __shfl_xor_sync(kFullMask, m, 2));
        if (lane % 4 == 0) *number(side, half) = highest[half];
      }

      // V is there, every warp has read K, and the maxima of both sides are there.
      ptx::cp_async_wait<0>();
      __syncthreads();
      start_copy(false, t + 1);

      // The shift of the exponentials: the row's maximum, but an older one serves while no exponential of the row
      // passes 2^8. Both warps of a pair come to the same.
      bool rescale = false;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        highest[half] = fmaxf(maximum[half], fmaxf(highest[half], *number(side ^ 1, half)));
        rescale |= (highest[half] - maximum[half]) * scale_log2 > 8.0f;  // -inf - -inf is NaN: no
      }
      if (__any_sync(kFullMask, rescale)) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const bool moves = (highest[half] - maximum[half]) * scale_log2 > 8.0f;
          const float next = moves ? highest[half] : maximum[half];
          const float factor = ptx::exp2_approx((maximum[half] - SoftmaxState::shift(next)) * scale_log2);
          maximum[half] = next;
          sum[half] *= factor;
#pragma unroll
          for (int c = 0; c < kColumnTiles; ++c) {
            out[c][2 * half] *= factor;
            out[c][2 * half + 1] *= factor;
          }
        }
      }
      [[maybe_unused]] std::uint32_t seen[2] = {};  // of this side's keys
      if (kModified && careful) {
#pragma unroll
        for (int half = 0; half < 2; ++half) seen[half] = static_cast<std::uint32_t>(visible_keys(score, half));
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float shift = SoftmaxState::shift(maximum[half]);
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          float* const x = &score[n][2 * half];
#pragma unroll
          for (int e = 0; e < 2; ++e)
            x[e] = ptx::exp2_approx(kModified ? (x[e] - shift) * kLog2E : fmaf(x[e], scale_log2, -shift * scale_log2));
          sum[half] += x[0] + x[1];
          *static_cast<std::uint32_t*>(__cvta_shared_to_generic(
              pair_p + Probabilities::element(lane / 4 + 8 * half, side * kHalfKeys + 8 * n + 2 * (lane % 4)))) =
              pack<T>(x[0], x[1]);
        }
      }
      wait_for_pair();

      if (careful && (masked || kModified)) {
        // Rare: give each row the non-finite values that it sees, then take them out of the tile. What a bias of -inf
        // hides only the scores know, of which each warp has half.
        if constexpr (kModified) {
#pragma unroll
          for (int half = 0; half < 2; ++half)
            if (lane % 4 == 0) *number(side, half) = __uint_as_float(seen[half]);
          wait_for_pair();
#pragma unroll
          for (int half = 0; half < 2; ++half)
            seen[half] = __float_as_uint(*number(0, half)) | __float_as_uint(*number(1, half)) << kHalfKeys;
        }
#pragma unroll 1
        for (int n = 0; n < kBlockN; ++n) {
#pragma unroll
          for (int c = 0; c < kColumnTiles; ++c) {
            const std::uint32_t two = *static_cast<const std::uint32_t*>(__cvta_shared_to_generic(
                slot_v + Rows::element(n, side * Shape::kHalfColumns + 8 * c + 2 * (lane % 4))));
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const std::uint32_t bits = two >> 16 * e & 0xffff;
              if (is_finite_bits<T>(bits)) continue;
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                const int i = lane_query + 8 * half, j = first_j + n;
                const bool sees = kModified ? (seen[half] >> n & 1) != 0 : j >= range.first(i) && j < range.last(i);
                if (sees) out[c][2 * half + e] += bits_to_float<T>(bits);
              }
            }
          }
        }
        __syncthreads();
        clean<T>(slot_v, Shape::kSlotBytes, threadIdx.x, kThreads);
        __syncthreads();
      }

      // O += P V
#pragma unroll
      for (int n = 0; n < kBlockN / 16; ++n) {
        std::uint32_t a[4];
        ptx::ldmatrix_x4(a, Probabilities::at_slice(lane_p, n));
#pragma unroll
        for (int c = 0; c < kColumnTiles / 2; ++c) {
          std::uint32_t columns[4];
          ptx::ldmatrix_x4_trans(columns, Rows::at_slice(lane_v, c) + n * 16 * Rows::kPitch);
          ptx::mma_m16n8k16<T>(out[2 * c], a, columns[0], columns[1]);
          ptx::mma_m16n8k16<T>(out[2 * c + 1], a, columns[2], columns[3]);
        }
      }
    }

    ptx::cp_async_wait<0>();
    if (careful) break;
    if (!(kModified && p.hides_by_score()) && first_tile >= block.first_full && end_tile <= block.end_full)
      break;            // nothing partly masked
    float zero = 0.0f;  // NaN once any result is not finite
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) zero = fmaf(out[c][e], 0.0f, zero);
    if (!__syncthreads_or(zero != zero)) break;
  }

  // Sums of both sides; the block has also read Q, whose place is reused now.
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] += __shfl_xor_sync(kFullMask, sum[half], 1);
    sum[half] += __shfl_xor_sync(kFullMask, sum[half], 2);
    if (lane % 4 == 0) *number(side, half) = sum[half];
  }
  wait_for_pair();
  const std::uint32_t own_rows = pair_q + side * Shape::kHalfColumns * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    SoftmaxState state;
    state.maximum = kModified ? maximum[half] : maximum[half] * p.scale;  // -inf stays
    state.sum = *number(0, half) + *number(1, half);
    float lse;
    const float factor = state.finish(p.sinks, h, &lse);
    const int i = lane_query + 8 * half;
    if (p.lse && side == 0 && lane % 4 == 0 && i <= last_query) p.lse[p.lse_offset(b, h, i)] = lse;
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) {
      // Rows that see nothing are zero, whatever the products say.
      const float x = factor == 0.0f ? 0.0f : out[c][2 * half] * factor;
      const float y = factor == 0.0f ? 0.0f : out[c][2 * half + 1] * factor;
      *static_cast<std::uint32_t*>(__cvta_shared_to_generic(
          own_rows + Rows::element(lane / 4 + 8 * half, 8 * c + 2 * (lane % 4)))) = pack<T>(x, y);
    }
  }
  __syncwarp();
  const int first_row = first_query + pair * 16, dim_v = static_cast<int>(p.head_dim_v);
  T* const to = static_cast<T*>(p.out) + p.out_offset(b, h, first_row);
  constexpr int kChunks = Shape::kHalfColumns / 8;
#pragma unroll 4
  for (int at = lane; at < 16 * kChunks; at += 32) {
    const int row = at / kChunks, column = side * Shape::kHalfColumns + at % kChunks * 8;
    if (first_row + row > last_query || column >= dim_v) continue;
    const uint4 packed = *static_cast<const uint4*>(__cvta_shared_to_generic(pair_q + Rows::offset(row, column / 8)));
    T* const row_to = to + row * p.stride_out_token + column;
    if (plan.vectors_out && column + 8 <= dim_v) {
      *reinterpret_cast<uint4*>(row_to) = packed;
    } else {
      const T* const values = reinterpret_cast<const T*>(&packed);
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (column + e < dim_v) row_to[e] = values[e];
    }
  }
}

template <class T, int kDim, int kBlockN, bool kModified>
void launch_attention_fwd_wide(const AttentionParams& p, cudaStream_t stream) {
  using Shape = WideShape<kDim, kBlockN>;
  const ForwardPlan plan = forward_plan(p, Shape::kBlockM, Shape::kBlockN);
  launch("attention_fwd sm80 wide", attention_fwd_wide_kernel<T, kDim, kBlockN, kModified>,
         {static_cast<unsigned>(p.batch * p.heads_q * plan.q_tiles), Shape::kThreads, Shape::kSharedBytes, stream}, p,
         plan);
}

/// An entry of the table.
template <DType kDtype, int kDim>
void attention_fwd_wide(const AttentionParams& p, void*, Stream stream) {
  using T = Element<kDtype>;
  if (p.batch * p.heads_q * p.seq_q == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  if (p.has_score_modifier() || !(p.scale > 0.0f))
    launch_attention_fwd_wide<T, kDim, 16, true>(p, native(stream));
  else if (cuda_device_properties(p.device.index).max_shared_bytes_per_block < WideShape<kDim, 32>::kLimit)
    launch_attention_fwd_wide<T, kDim, 16, false>(p, native(stream));
  else
    launch_attention_fwd_wide<T, kDim, 32, false>(p, native(stream));
}

}  // namespace flashkernel::cuda::sm80
