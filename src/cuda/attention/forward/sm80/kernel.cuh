// FlashAttention-2 forward (Dao, 2023; Algorithm 1) on the tensor cores of sm_80 and later: mma.sync m16n8k16,
// ldmatrix, cp.async. instances/ has the files that instantiate it; a row of cuda/kernels.cpp launches it.
//
// A block owns kBlockM queries of one head and walks the tiles of keys that any of them sees, the last one first. Tiles
// of K and V pass through one ring of kStages slots: K of a tile, its V, K of the next tile, and so on. Each phase
// waits for its slot, starts the copy kStages - 1 phases ahead, and computes. Scores stay in registers, where an
// accumulator of Q K^T has the layout of P as an operand of P V.
//
// Invariant on NaN: a masked pair has the weight 0, but the tensor core computes 0 * NaN = NaN. Rows of K and V that no
// query of the block sees are zero-filled. Rows that some of its queries see may hold NaN or infinity. The block first
// computes as if they did not. If a result is not finite, it starts again with `careful` set: non-finite values of V
// that a mask or a score of -inf hides from some queries are then added to exactly the rows that see them, and zeroed
// before the matrix product.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/host/launch.hpp"
#include "cuda/attention/forward/sm80/plan.cuh"
#include "cuda/attention/forward/sm80/variant.hpp"
#include "cuda/attention/lane_biases.cuh"
#include "cuda/attention/score_fast.cuh"
#include "cuda/attention/key_range.cuh"
#include "cuda/attention/not_finite.cuh"
#include "cuda/attention/shown_blocks.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace flashkernel::cuda::sm80 {

// Plain scores: scale only. 32 rows a warp: each fragment of K and V serves two matrix instructions. Registers hold the
// scores (kBlockN / 8 * 4 a 16-row slice) and the output (kVDim / 8 * 4), 192 of the 255 at d64, d128. From a kVDim of
// 192 on, a warp takes 16 rows. K and V share the slots of the ring, so a slot has room for the wider of the two.
//
// kShort: a tile of 64 queries and 64 keys, with 16 rows a warp. Two to four blocks share a multiprocessor. What a
// short sequence takes is the latency of its loads, one after the other: the other blocks compute meanwhile.
template <int kQkDim_, int kVDim_, bool kModified, bool kShort>
struct ForwardShape {
  static constexpr int kQkDim = kQkDim_, kVDim = kVDim_, kWidest = std::max(kQkDim, kVDim);
  using QkTile = SharedTile<kQkDim>;
  using VTile = SharedTile<kVDim>;
  static constexpr int kWarps = 4;
  static constexpr int kSlices = !kModified && !kShort && kWidest <= 128 ? 2 : 1;  // of 16 rows a warp
  static constexpr int kBlockM = kWarps * kSlices * 16;
  static constexpr int kBlockN = !kModified && !kShort && kWidest <= 64 ? 128 : 64;
  static constexpr bool kReadsBiases = kModified && kWidest <= 128;  // a tile's at once: registers are left
  static constexpr int kStages = kWidest <= 128 ? 3 : 2;  // 64 and 80 KB at d64, d128: two blocks fit every 8.0 and 9.0
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kShortBlocks = (kWidest <= 64 ? 4 : 3) - (kModified && kWidest > 32);
  static constexpr int kMinBlocks = kShort ? kShortBlocks : 2;  // with two, 255
  static constexpr int kSlotBytes = kBlockN * kWidest * 2;
  static constexpr int kSharedBytes = kBlockM * QkTile::kPitch + kStages * kSlotBytes;
  static_assert(kVDim <= kQkDim, "a warp's rows of the output leave through the place of its rows of Q");
  static_assert(kSharedBytes + 1024 <= kLeastSharedBytes, "and what the kernel declares itself");
};

template <class T, int kQkDim, int kVDim, bool kModified, bool kShort>
__global__ void __launch_bounds__(ForwardShape<kQkDim, kVDim, kModified, kShort>::kThreads,
                                  ForwardShape<kQkDim, kVDim, kModified, kShort>::kMinBlocks)
    attention_fwd_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ ForwardPlan plan) {
  using Shape = ForwardShape<kQkDim, kVDim, kModified, kShort>;
  using QkTile = typename Shape::QkTile;
  using VTile = typename Shape::VTile;
  constexpr int kBlockM = Shape::kBlockM, kBlockN = Shape::kBlockN, kStages = Shape::kStages;
  constexpr int kSlices = Shape::kSlices, kThreads = Shape::kThreads;
  constexpr std::uint32_t kSlotBytes = Shape::kSlotBytes;
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
  const KeyRange range(p, b);
  const int first_query = (plan.q_tiles - 1 - static_cast<int>(tile_in_group)) * kBlockM;
  if (first_query >= range.q_len) return;
  const int last_query = min(range.q_len, first_query + kBlockM) - 1;
  const int first_key = range.first(first_query), last_key = range.last(last_query);
  // Tiles of keys [first_tile, end_tile); those outside of block.[first_full, end_full) are masked for some query.
  const int first_tile = first_key / kBlockN, end_tile = (last_key + kBlockN - 1) / kBlockN;
  // The tile of keys that follows one in the walk; first_tile - 1: none. Hidden blocks are left out.
  const auto after = [&](int tile) {
    if constexpr (kModified)
      if (p.mask.blocks.data)
        return shown_tile_before<kBlockN>(p.mask.blocks, p.mask.blocks.row(b, h, first_query), tile, first_tile);
    return tile - 1;
  };
  const int top_tile = last_key > first_key ? after(end_tile) : first_tile - 1;
  // What the loop needs once a phase waits in shared memory: registers are full.
  __shared__ struct {
    const T *k, *v;
    int first_key, last_key, first_full, end_full;
  } block;
  if (threadIdx.x == 0) {
    block.k = static_cast<const T*>(p.k) + g * p.stride_k_head +
              (p.is_paged()      ? 0
               : p.is_varlen_k() ? p.k_begin(b) * p.stride_k_token
                                 : b * p.stride_k_batch);
    block.v = static_cast<const T*>(p.v) + g * p.stride_v_head +
              (p.is_paged()      ? 0
               : p.is_varlen_k() ? p.k_begin(b) * p.stride_v_token
                                 : b * p.stride_v_batch);
    block.first_key = first_key;
    block.last_key = last_key;
    block.first_full = (range.first(last_query) + kBlockN - 1) / kBlockN;
    block.end_full = range.last(first_query) / kBlockN;
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::uint32_t shared_q = ptx::shared_address(shared), ring = shared_q + kBlockM * QkTile::kPitch;
  {
    const T* const q = static_cast<const T*>(p.q) + p.q_offset(b, h, first_query);
    load_tile<kBlockM, kQkDim, kThreads>(
        shared_q, static_cast<int>(p.head_dim), plan.vectors_q,
        plan.vectors_q && first_query + kBlockM <= range.q_len ? q : nullptr, p.stride_q_token,
        [&](int row) -> const T* { return first_query + row <= last_query ? q + row * p.stride_q_token : nullptr; });
  }
  __syncthreads();

  const std::uint32_t warp_q = shared_q + warp * kSlices * 16 * QkTile::kPitch;
  const std::uint32_t lane_q = warp_q + QkTile::lane_offset(LaneA::row(lane), LaneA::half(lane));
  const std::uint32_t lane_k = QkTile::lane_offset(LaneB::row(lane), LaneB::half(lane));
  const std::uint32_t lane_v = VTile::lane_offset(LaneA::row(lane), LaneA::half(lane));

  const auto page_row = [&](const T* base, std::int64_t stride_page, std::int64_t stride_token, int j) -> const T* {
    const unsigned page_size = static_cast<unsigned>(p.page_size), column = static_cast<unsigned>(j) / page_size;
    const std::int32_t page = p.block_table[b * p.stride_block_table + column];
    if (page < 0 || page >= p.num_pages) return nullptr;  // a bad table reads nothing
    return base + page * stride_page + (static_cast<unsigned>(j) - column * page_size) * stride_token;
  };
  // `columns`, a std::integral_constant: the tile's, which zeros fill from `dim` on.
  const auto load_keys = [&](auto columns, const T* base, std::int64_t stride_page, std::int64_t stride_token, int dim,
                             bool vectors, int tile, std::uint32_t slot) {
    const int first_j = tile * kBlockN, first_key = block.first_key, last_key = block.last_key;
    const T* first_row = nullptr;
    if (vectors && first_j >= first_key && first_j + kBlockN <= last_key) {
      if (!p.is_paged())
        first_row = base + first_j * stride_token;
      else if (plan.page_holds_tiles)
        first_row = page_row(base, stride_page, stride_token, first_j);
    }
    load_tile<kBlockN, decltype(columns)::value, kThreads>(
        slot, dim, vectors, first_row, stride_token, [&](int row) -> const T* {
          const int j = first_j + row;
          if (j < first_key || j >= last_key) return nullptr;
          return p.is_paged() ? page_row(base, stride_page, stride_token, j) : base + j * stride_token;
        });
  };
  // The copy of V (or K) of a tile; no tile left: an empty group, so that the counts stay right.
  const auto start_copy = [&](bool of_v, int tile, std::uint32_t slot) {
    if (tile >= first_tile) {
      if (of_v)
        load_keys(std::integral_constant<int, kVDim>{}, block.v, p.stride_v_batch, p.stride_v_token,
                  static_cast<int>(p.head_dim_v), plan.vectors_v, tile, slot);
      else
        load_keys(std::integral_constant<int, kQkDim>{}, block.k, p.stride_k_batch, p.stride_k_token,
                  static_cast<int>(p.head_dim), plan.vectors_k, tile, slot);
    }
    ptx::cp_async_commit();
  };

  const auto reads_biases = [&] { return Shape::kReadsBiases && plan.biases.ahead; };  // no register
  const float scale_log2 = kModified ? kLog2E : p.scale * kLog2E;  // modified scores are scaled already
  [[maybe_unused]] const float slope =
      kModified && p.alibi_slopes ? p.alibi_slopes[b * p.stride_alibi_batch + h] : 0.0f;
  const int row_in_block = warp * kSlices * 16 + lane / 4;  // of slice 0, upper half; +16 a slice, +8 the lower half
  float out[kSlices][kVDim / 8][4];
  float maximum[kSlices][2], sum[kSlices][2];

  for (bool careful = false;; careful = true) {
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
#pragma unroll
      for (int c = 0; c < kVDim / 8; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[s][c][e] = 0.0f;
      maximum[s][0] = maximum[s][1] = -INFINITY;
      sum[s][0] = sum[s][1] = 0.0f;
    }
#pragma unroll
    for (int item = 0; item < kStages - 1; ++item) start_copy(item % 2, top_tile, ring + item * kSlotBytes);
    const auto slot_of = [&](unsigned item) { return ring + item % kStages * kSlotBytes; };

    unsigned item = 0;  // K; V is the next one
    for (int tile = top_tile, next; tile >= first_tile; tile = next, item += 2) {
      next = after(tile);
      const int first_j = tile * kBlockN;
      const bool masked = tile < block.first_full || tile >= block.end_full;
      [[maybe_unused]] std::uint64_t shown[kSlices][2];
      bool multiplies = true;
      if constexpr (kModified)
        if (!reads_biases())
          multiplies = read_mask<kBlockN>(p, b, h, first_query + row_in_block, last_query, first_j,
                                          range.k_len - range.q_len, lane, shown);
      // Blocks of 16 keys, counted from the tile's first one, that a row of the warp sees. Of a short sequence many
      // rows and keys of a tile are none.
      [[maybe_unused]] int end_n = kBlockN / 16;
      if constexpr (kShort) {
        const int first = first_query + warp * kSlices * 16, last = min(last_query, first + kSlices * 16 - 1);
        const int keys = first <= last ? range.last(last) - first_j : 0;
        end_n = max(0, min(end_n, (keys + 15) / 16));
        multiplies = multiplies && end_n > 0;
      }

      [[maybe_unused]] LaneBiases<T, kBlockN> biases;
      if constexpr (kModified) {
        static_assert(kSlices == 1);
        if (reads_biases() && multiplies)
          biases.read(p.bias, static_cast<const T*>(p.bias.data) + b * p.bias.stride_batch + h * p.bias.stride_head,
                      plan.biases.in_pairs, first_query + row_in_block, last_query, first_j + 2 * (lane % 4),
                      range.k_len);
      }

      // S = Q K^T
      ptx::cp_async_wait<kStages - 2>();
      __syncthreads();  // K is there for all, and the slot that is filled next is read by nobody
      start_copy(kStages % 2 == 0, kStages > 2 ? next : tile, slot_of(item + kStages - 1));
      float score[kSlices][kBlockN / 8][4] = {};
      if (multiplies) {
        const std::uint32_t from = slot_of(item) + lane_k;
#pragma unroll
        for (int d = 0; d < kQkDim / 16; ++d) {
          std::uint32_t a[kSlices][4];
#pragma unroll
          for (int s = 0; s < kSlices; ++s)
            ptx::ldmatrix_x4(a[s], QkTile::at_slice(lane_q, d) + s * 16 * QkTile::kPitch);
#pragma unroll
          for (int n = 0; n < kBlockN / 16; ++n) {
            if (kShort && n >= end_n) continue;
            std::uint32_t keys[4];
            ptx::ldmatrix_x4(keys, QkTile::at_slice(from, d) + n * 16 * QkTile::kPitch);
#pragma unroll
            for (int s = 0; s < kSlices; ++s) {
              ptx::mma_m16n8k16<T>(score[s][2 * n], a[s], keys[0], keys[1]);
              ptx::mma_m16n8k16<T>(score[s][2 * n + 1], a[s], keys[2], keys[3]);
            }
          }
        }
      }

      // V is there, and every warp has read K.
      ptx::cp_async_wait<kStages - 2>();
      __syncthreads();
      start_copy(kStages % 2 != 0, next, slot_of(item + kStages));

      if (kModified && !reads_biases()) {
#pragma unroll
        for (int s = 0; s < kSlices; ++s)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int i = first_query + row_in_block + 16 * s + 8 * half, row = min(i, last_query);
            const int begin = range.first(row), end = i <= last_query ? range.last(row) : 0;
            const char* bias_row = static_cast<const char*>(p.bias.data) +
                                   (b * p.bias.stride_batch + h * p.bias.stride_head + row * p.bias.stride_q) *
                                       (p.bias.dtype == DType::kFloat32 ? 4 : 2);
#pragma unroll
            for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                const int j = first_j + 8 * n + 2 * (lane % 4) + e;
                float& x = score[s][n][2 * half + e];
                x = j >= begin && j < end && (shown[s][half] >> (8 * n + e) & 1) != 0
                        ? modified_score_fast(p, slope, bias_row, row, j, range.k_len - range.q_len, x)
                        : -INFINITY;
              }
          }
      } else {
        if constexpr (kModified)
#pragma unroll
          for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                float& x = score[0][n][2 * half + e];
                x = fmaf(x, p.scale, biases.at(half, n, e));
              }
        if (masked) {
#pragma unroll
          for (int s = 0; s < kSlices; ++s)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int i = first_query + row_in_block + 16 * s + 8 * half;
              const int begin = range.first(i) - first_j - 2 * (lane % 4);
              const unsigned count = static_cast<unsigned>(max(0, range.last(i) - range.first(i)));
#pragma unroll
              for (int n = 0; n < kBlockN / 8; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                  if (static_cast<unsigned>(8 * n + e - begin) >= count) score[s][n][2 * half + e] = -INFINITY;
            }
        }
      }

      // The shift of the exponentials: the row's maximum, but an older one serves while no exponential of the row
      // passes 2^8.
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
          rescale |= (m - maximum[s][half]) * scale_log2 > 8.0f;  // -inf - -inf is NaN: no
        }
      if (__any_sync(kFullMask, rescale)) {
#pragma unroll
        for (int s = 0; s < kSlices; ++s)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            // Each row moves for itself: its bits do not depend on its neighbours.
            const bool moves = (highest[s][half] - maximum[s][half]) * scale_log2 > 8.0f;
            const float next = moves ? highest[s][half] : maximum[s][half];
            const float factor = ptx::exp2_approx((maximum[s][half] - SoftmaxState::shift(next)) * scale_log2);
            maximum[s][half] = next;
            sum[s][half] *= factor;
#pragma unroll
            for (int c = 0; c < kVDim / 8; ++c) {
              out[s][c][2 * half] *= factor;
              out[s][c][2 * half + 1] *= factor;
            }
          }
      }
      float shift[kSlices][2];
#pragma unroll
      for (int s = 0; s < kSlices; ++s)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          shift[s][half] =
              kModified ? SoftmaxState::shift(maximum[s][half]) : SoftmaxState::shift(maximum[s][half]) * scale_log2;

      // O += P V
      const std::uint32_t values = slot_of(item + 1);
      if (careful && (masked || kModified)) {
        // Rare: give each row the non-finite values that it sees, then take them out of the tile. What a bias of -inf
        // hides only the scores know.
        [[maybe_unused]] std::uint64_t seen[kSlices][2];
        if constexpr (kModified) {
#pragma unroll
          for (int s = 0; s < kSlices; ++s)
#pragma unroll
            for (int half = 0; half < 2; ++half) seen[s][half] = visible_keys(score[s], half);
        }
#pragma unroll 1
        for (int n = 0; n < kBlockN; ++n) {
#pragma unroll
          for (int c = 0; c < kVDim / 8; ++c) {
            const std::uint32_t two = *reinterpret_cast<const std::uint32_t*>(
                __cvta_shared_to_generic(values + VTile::element(n, 8 * c + 2 * (lane % 4))));
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const std::uint32_t bits = two >> 16 * e & 0xffff;
              if (is_finite_bits<T>(bits)) continue;
#pragma unroll
              for (int s = 0; s < kSlices; ++s)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                  const int i = first_query + row_in_block + 16 * s + 8 * half, j = first_j + n;
                  const bool sees =
                      kModified ? (seen[s][half] >> n & 1) != 0 : j >= range.first(i) && j < range.last(i);
                  if (sees) out[s][c][2 * half + e] += bits_to_float<T>(bits);
                }
            }
          }
        }
        __syncthreads();
        for (int at = threadIdx.x; at < kBlockN * kVDim; at += kThreads) {
          auto* element = reinterpret_cast<unsigned short*>(__cvta_shared_to_generic(values + 2 * at));
          if (!is_finite_bits<T>(*element)) *element = 0;
        }
        __syncthreads();
      }
      if (!multiplies) continue;
#pragma unroll
      for (int n = 0; n < kBlockN / 16; ++n) {
        if (kShort && n >= end_n) continue;  // weights of 0
        std::uint32_t a[kSlices][4];
#pragma unroll
        for (int s = 0; s < kSlices; ++s)
#pragma unroll
          for (int quarter = 0; quarter < 4; ++quarter) {
            const int half = quarter % 2;
            float* x = &score[s][2 * n + quarter / 2][2 * half];
            x[0] = ptx::exp2_approx(kModified ? (x[0] - shift[s][half]) * kLog2E
                                              : fmaf(x[0], scale_log2, -shift[s][half]));
            x[1] = ptx::exp2_approx(kModified ? (x[1] - shift[s][half]) * kLog2E
                                              : fmaf(x[1], scale_log2, -shift[s][half]));
            sum[s][half] += x[0] + x[1];
            a[s][quarter] = pack<T>(x[0], x[1]);
          }
#pragma unroll
        for (int c = 0; c < kVDim / 16; ++c) {
          std::uint32_t columns[4];
          ptx::ldmatrix_x4_trans(columns, VTile::at_slice(values + lane_v, c) + n * 16 * VTile::kPitch);
#pragma unroll
          for (int s = 0; s < kSlices; ++s) {
            ptx::mma_m16n8k16<T>(out[s][2 * c], a[s], columns[0], columns[1]);
            ptx::mma_m16n8k16<T>(out[s][2 * c + 1], a[s], columns[2], columns[3]);
          }
        }
      }
    }

    ptx::cp_async_wait<0>();
    if (careful) break;
    if (!(kModified && p.hides_by_score()) && first_tile >= block.first_full && end_tile <= block.end_full)
      break;            // nothing partly masked
    float zero = 0.0f;  // NaN once any result is not finite
#pragma unroll
    for (int s = 0; s < kSlices; ++s)
#pragma unroll
      for (int c = 0; c < kVDim / 8; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) zero = fmaf(out[s][c][e], 0.0f, zero);
    if (!__syncthreads_or(zero != zero)) break;
  }

  if (top_tile < first_tile)
    __syncthreads();  // no phase has waited for the others' copies of Q, whose place is reused now

  // The four lanes of a row share its 2 * kSlices rows: each finishes one (with one slice two the same).
  constexpr int kRows = 2 * kSlices;
  float own_sum = 0.0f, own_maximum = -INFINITY;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float total = sum[r / 2][r % 2];
    total += __shfl_xor_sync(kFullMask, total, 1);
    total += __shfl_xor_sync(kFullMask, total, 2);
    own_sum = lane % kRows == r ? total : own_sum;
    const float natural = kModified ? maximum[r / 2][r % 2] : maximum[r / 2][r % 2] * p.scale;  // -inf stays
    own_maximum = lane % kRows == r ? natural : own_maximum;
  }
  SoftmaxState state;
  state.maximum = own_maximum;
  state.sum = own_sum;
  float lse;
  const float own_factor = state.finish(p.sinks, h, &lse);
  const int warp_first = first_query + warp * kSlices * 16;
  const int own_row = warp_first + lane % kRows * 8 + lane / 4;
  if (p.lse && lane % 4 < kRows && own_row <= last_query) p.lse[p.lse_offset(b, h, own_row)] = lse;
  if (__any_sync(kFullMask, own_factor == 0.0f)) {  // rare: rows that see nothing are zero, whatever the products say
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (__shfl_sync(kFullMask, own_factor, lane / 4 * 4 + r) == 0.0f)
#pragma unroll
        for (int c = 0; c < kVDim / 8; ++c) out[r / 2][c][r % 2 * 2] = out[r / 2][c][r % 2 * 2 + 1] = 0.0f;
  }

  // Rows of a warp go through the warp's part of Q's tile, so that they leave in vectors of 16 bytes.
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float factor = __shfl_sync(kFullMask, own_factor, lane / 4 * 4 + r);
#pragma unroll
    for (int c = 0; c < kVDim / 8; ++c)
      *reinterpret_cast<std::uint32_t*>(
          __cvta_shared_to_generic(warp_q + VTile::element(8 * r + lane / 4, 8 * c + 2 * (lane % 4)))) =
          pack<T>(out[r / 2][c][r % 2 * 2] * factor, out[r / 2][c][r % 2 * 2 + 1] * factor);
  }
  __syncwarp();
  T* const to = static_cast<T*>(p.out) + p.out_offset(b, h, warp_first);
  const int dim_v = static_cast<int>(p.head_dim_v);
  constexpr int kVectors = kSlices * 16 * VTile::kChunks;
  if (plan.vectors_out && dim_v == kVDim && warp_first + kSlices * 16 <= last_query + 1) {
#pragma unroll
    for (int at = 0; at < kVectors; at += 32) {
      const int row = (at + lane) / VTile::kChunks, chunk = (at + lane) % VTile::kChunks;
      *reinterpret_cast<uint4*>(to + row * p.stride_out_token + chunk * 8) =
          *reinterpret_cast<const uint4*>(__cvta_shared_to_generic(warp_q + VTile::offset(row, chunk)));
    }
    return;
  }
#pragma unroll 1
  for (int at = lane; at < kVectors; at += 32) {
    const int row = at / VTile::kChunks, column = at % VTile::kChunks * 8;
    if (warp_first + row > last_query || column >= dim_v) continue;
    const T* const from = static_cast<const T*>(__cvta_shared_to_generic(warp_q + VTile::offset(row, column / 8)));
    T* const row_to = to + row * p.stride_out_token + column;
    if (plan.vectors_out && column + 8 <= dim_v) {
      *reinterpret_cast<uint4*>(row_to) = *reinterpret_cast<const uint4*>(from);
    } else {
#pragma unroll 1
      for (int e = 0; e < min(8, dim_v - column); ++e) row_to[e] = from[e];
    }
  }
}

template <class T, int kQkDim, int kVDim, bool kModified, bool kShort>
void launch_attention_fwd(const AttentionParams& p, cudaStream_t stream) {
  using Shape = ForwardShape<kQkDim, kVDim, kModified, kShort>;
  const auto kernel = attention_fwd_kernel<T, kQkDim, kVDim, kModified, kShort>;
  const ForwardPlan plan = forward_plan(p, Shape::kBlockM, Shape::kBlockN);
  const std::int64_t heads = p.batch * p.heads_q;
  launch("attention_fwd sm80", kernel,
         {static_cast<unsigned>(heads * plan.q_tiles), Shape::kThreads, Shape::kSharedBytes, stream}, p, plan);
}

/// Scores that only scale (by a positive number, so that the largest product is the largest score) take the plain
/// kernel.
template <DType kDtype, int kQkDim, int kVDim, bool kShort>
void attention_fwd_of(const AttentionParams& p, Stream stream) {
  using T = Element<kDtype>;
  if (p.batch * p.heads_q * p.seq_q == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  if (p.has_score_modifier() || !(p.scale > 0.0f))
    launch_attention_fwd<T, kQkDim, kVDim, true, kShort>(p, native(stream));
  else
    launch_attention_fwd<T, kQkDim, kVDim, false, kShort>(p, native(stream));
}

/// An entry of the table.
template <DType kDtype, int kQkDim, int kVDim>
void attention_fwd(const AttentionParams& p, void*, Stream stream) {
  attention_fwd_of<kDtype, kQkDim, kVDim, false>(p, stream);
}

/// An entry of the table.
template <DType kDtype, int kQkDim, int kVDim>
void attention_fwd_short(const AttentionParams& p, void*, Stream stream) {
  attention_fwd_of<kDtype, kQkDim, kVDim, true>(p, stream);
}

}  // namespace flashkernel::cuda::sm80
