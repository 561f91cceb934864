// FlashAttention-2 forward (Dao, 2023; Algorithm 1) on the tensor cores of 7.5: mma.sync m16n8k8 and ldmatrix, fp16, no
// cp.async. instances/ has the file that instantiates it; a row of cuda/kernels.cpp launches it.
//
// A block owns kBlockM queries of one head and walks the tiles of keys that any of them sees, the last one first. Q
// stays in registers as operands. K and V have one tile each in shared memory. While one product runs, the next tile of
// the other one is on its way into registers. Scores stay in registers: an accumulator of Q K^T is an operand of P V.
//
// What decides the shape (lab/notebooks/attention_sm75.md): the 64 KB of shared memory and 64 K registers of a
// multiprocessor serve two blocks of 128 threads with 255 registers. Shared memory gives 64 bytes a cycle, which is
// what the tensor cores take if each fragment of K or V serves 16 queries. Therefore a warp takes 32 queries up to d64.
//
// Invariant on NaN: a masked pair has the weight 0, but the tensor core computes 0 * NaN = NaN. Rows of K and V that no
// query of the block sees are zero-filled. V of a partly masked tile is searched: values that are not finite are added
// to exactly the rows that see them, and zeroed before the product.
#pragma once

#include <algorithm>

#include "cuda/attention/forward/sm75/variant.hpp"
#include "cuda/attention/block_order.cuh"
#include "cuda/tile/in_turn.cuh"
#include "cuda/tile/staged_tile.cuh"
#include "cuda/attention/score_fast.cuh"
#include "cuda/attention/key_range.cuh"
#include "cuda/attention/not_finite.cuh"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda::sm75 {

// Plain scores: scale only. Registers at d64: 64 of O, 64 scores, 32 of Q, 16 under way; at d128: 64, 32, 32, 32; at
// d256: 128, 8, 64, 16.
template <int kQkDim_, int kVDim_, bool kModified>
struct ForwardShape {
  static constexpr int kQkDim = kQkDim_, kVDim = kVDim_, kWidest = std::max(kQkDim, kVDim);
  using QkTile = SharedTile<kQkDim>;
  using VTile = SharedTile<kVDim>;
  static constexpr int kWarps = 4, kThreads = kWarps * 32;
  static constexpr int kSlices = kWidest <= 64 && !kModified ? 2 : 1;  // of 16 rows a warp
  static constexpr int kBlockM = kWarps * kSlices * 16;
  static constexpr int kBlockN = kWidest <= 128 ? 64 : 16;
  static constexpr bool kHoldQ = kQkDim <= 192 || !kModified;
  static constexpr int kMinBlocks = kHoldQ ? 2 : 1;
  // Shared memory: d64 8 + 8 = 16 KB (Q comes and O leaves through the same place), d128 16 + 16, d256 8 + 8, Q 32.
  static constexpr int kKBytes = kBlockN * QkTile::kPitch, kVBytes = kBlockN * VTile::kPitch;
  static constexpr int kQBytes = kBlockM * kWidest * 2;  // of Q, and of the output
  static constexpr int kK = 0, kV = kKBytes, kQ = kHoldQ ? 0 : kKBytes + kVBytes;
  static constexpr int kSharedBytes = std::max(kQ + kQBytes, kKBytes + kVBytes);
  static_assert(kSharedBytes * kMinBlocks <= 64 * 1024, "what a T4's SM has");
};

struct ForwardPlan {
  BlockOrder order;
  int page_shift;         // page_size = 2^page_shift; only then is paged memory fetched in vectors
  bool page_holds_tiles;  // pages are whole tiles of keys
  bool vectors_q, vectors_k, vectors_v, vectors_out;  // rows start at multiples of 16 bytes and hold whole vectors
};

template <class T, int kQkDim, int kVDim, bool kModified>
__global__ void __launch_bounds__(ForwardShape<kQkDim, kVDim, kModified>::kThreads,
                                  ForwardShape<kQkDim, kVDim, kModified>::kMinBlocks)
    attention_fwd_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ ForwardPlan plan) {
  using Shape = ForwardShape<kQkDim, kVDim, kModified>;
  using QkTile = typename Shape::QkTile;
  using VTile = typename Shape::VTile;
  constexpr int kBlockM = Shape::kBlockM, kBlockN = Shape::kBlockN, kSlices = Shape::kSlices;
  constexpr int kThreads = Shape::kThreads;
  constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
  extern __shared__ __align__(128) unsigned char shared[];

  unsigned head;
  int order;
  plan.order.find(blockIdx.x, &head, &order);
  const unsigned b = head / static_cast<unsigned>(p.heads_q), h = head % static_cast<unsigned>(p.heads_q);
  const unsigned g = h / static_cast<unsigned>(p.heads_q / p.heads_kv);
  const KeyRange range(p, b);
  const int first_query = (static_cast<int>(plan.order.tiles) - 1 - order) * kBlockM;  // heavy tiles, if causal, first
  if (first_query >= range.q_len) return;
  const int last_query = min(range.q_len, first_query + kBlockM) - 1;
  const int first_key = range.first(first_query), last_key = range.last(last_query);
  // Tiles of keys [first_tile, end_tile); those outside of [first_full, end_full) are masked for some query.
  const int first_tile = first_key / kBlockN;
  const int end_tile = last_key > first_key ? (last_key + kBlockN - 1) / kBlockN : first_tile;
  const int first_full = (range.first(last_query) + kBlockN - 1) / kBlockN,
            end_full = range.last(first_query) / kBlockN;

  const T* const keys = static_cast<const T*>(p.k) + (p.is_paged() ? g * p.stride_k_head : p.k_offset(b, g, 0));
  const T* const values = static_cast<const T*>(p.v) + (p.is_paged() ? g * p.stride_v_head : p.v_offset(b, g, 0));
  // Row j of K or V, or null: where no query of the block looks, and where a bad table points.
  const auto key_row = [&](const T* from, std::int64_t stride_page, std::int64_t stride_token, int j,
                           auto page_column) -> const T* {
    if (j < first_key || j >= last_key) return nullptr;
    if (!p.is_paged()) return from + j * stride_token;
    const int page_size = static_cast<int>(p.page_size), column = page_column(j);
    const std::int32_t page = p.block_table[b * p.stride_block_table + column];
    if (page < 0 || page >= p.num_pages) return nullptr;
    return from + page * stride_page + (j - column * page_size) * stride_token;
  };
  // What is fetched has pages of a power of two; the rest is copied by elements.
  const auto shifted = [&](int j) { return j >> plan.page_shift; };
  const auto divided = [&](int j) { return j / static_cast<int>(p.page_size); };
  const bool even = !p.is_paged() || plan.page_holds_tiles;  // whole tiles have evenly spaced rows
  InTurn<StagedTile<T, kBlockN, kQkDim, kThreads>, StagedTile<T, kBlockN, kVDim, kThreads>> staged;  // of K, of V
  const auto fetch = [&](auto& tile_of, const T* from, std::int64_t stride_page, std::int64_t stride_token,
                         std::int64_t dim, bool vectors, int tile) {
    const auto row_of = [&](int row) {
      return key_row(from, stride_page, stride_token, tile * kBlockN + row, shifted);
    };
    const bool whole = even && tile * kBlockN >= first_key && (tile + 1) * kBlockN <= last_key;
    tile_of.fetch(static_cast<int>(dim), vectors, whole ? row_of(0) : nullptr, stride_token, row_of);
  };
  const auto store = [&](const auto& tile_of, unsigned char* to, const T* from, std::int64_t stride_page,
                         std::int64_t stride_token, std::int64_t dim, bool vectors, int tile) {
    tile_of.store(to, static_cast<int>(dim), vectors,
                  [&](int row) { return key_row(from, stride_page, stride_token, tile * kBlockN + row, divided); });
  };
  const auto fetch_k = [&](int tile) {
    fetch(staged.first(), keys, p.stride_k_batch, p.stride_k_token, p.head_dim, plan.vectors_k, tile);
  };
  const auto fetch_v = [&](int tile) {
    fetch(staged.second(), values, p.stride_v_batch, p.stride_v_token, p.head_dim_v, plan.vectors_v, tile);
  };
  const auto store_k = [&](int tile) {
    store(staged.first(), shared + Shape::kK, keys, p.stride_k_batch, p.stride_k_token, p.head_dim, plan.vectors_k,
          tile);
  };
  const auto store_v = [&](int tile) {
    store(staged.second(), shared + Shape::kV, values, p.stride_v_batch, p.stride_v_token, p.head_dim_v, plan.vectors_v,
          tile);
  };

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::uint32_t base = ptx::shared_address(shared);
  const std::uint32_t lane_q = base + Shape::kQ + warp * kSlices * 16 * QkTile::kPitch +
                               QkTile::lane_offset(LaneA::row(lane), LaneA::half(lane));
  const std::uint32_t lane_k = base + Shape::kK + QkTile::lane_offset(LaneB::row(lane), LaneB::half(lane));
  const std::uint32_t lane_v = base + Shape::kV + VTile::lane_offset(LaneA::row(lane), LaneA::half(lane));

  [[maybe_unused]] std::uint32_t held_q[Shape::kHoldQ ? kSlices : 1][Shape::kHoldQ ? kQkDim / 16 : 1][4];
  {
    const T* const q = static_cast<const T*>(p.q) + p.q_offset(b, h, first_query);
    const auto row_of = [&](int row) -> const T* {
      return first_query + row <= last_query ? q + row * p.stride_q_token : nullptr;
    };
    StagedTile<T, kBlockM, kQkDim, kThreads> staged_q;
    staged_q.fetch(static_cast<int>(p.head_dim), plan.vectors_q, first_query + kBlockM <= range.q_len ? q : nullptr,
                   p.stride_q_token, row_of);
    staged_q.store(shared + Shape::kQ, static_cast<int>(p.head_dim), plan.vectors_q, row_of);
  }
  if (end_tile > first_tile) fetch_k(end_tile - 1);
  __syncthreads();
  if constexpr (Shape::kHoldQ) {
#pragma unroll
    for (int s = 0; s < kSlices; ++s)
#pragma unroll
      for (int d = 0; d < kQkDim / 16; ++d)
        ptx::ldmatrix_x4(held_q[s][d], QkTile::at_slice(lane_q, d) + s * 16 * QkTile::kPitch);
    __syncthreads();  // K takes the place of Q
  }

  // Exponentials are 2^(score * scale_log2 - shift). Modified scores are scaled already and can be as large as a bias,
  // where a product's rounding would count: 2^((score - shift) * log2(e)).
  const float scale_log2 = kModified ? kLog2E : p.scale * kLog2E;
  constexpr float kShiftUnit = kModified ? kLog2E : 1.0f;   // of `shift`, in powers of 2
  const int row_in_block = warp * kSlices * 16 + lane / 4;  // of slice 0, upper half; +16 a slice, +8 the lower half
  float out[kSlices][kVDim / 8][4] = {};
  float shift[kSlices][2], sum[kSlices][2];
#pragma unroll
  for (int s = 0; s < kSlices; ++s) {
    shift[s][0] = shift[s][1] = -INFINITY;
    sum[s][0] = sum[s][1] = 0.0f;
  }

#pragma unroll 1
  for (int tile = end_tile - 1; tile >= first_tile; --tile) {
    const int first_j = tile * kBlockN;
    const bool masked = tile < first_full || tile >= end_full;
    [[maybe_unused]] std::uint64_t shown[kSlices][2];
    bool multiplies = true;
    if constexpr (kModified)
      multiplies = read_mask<kBlockN>(p, b, h, first_query + row_in_block, last_query, first_j,
                                      range.k_len - range.q_len, lane, shown);

    // S = Q K^T. Nobody reads K's place: every warp has passed the barrier between the two products.
    store_k(tile);
    __syncthreads();
    fetch_v(tile);
    float score[kSlices][kBlockN / 8][4] = {};
    if (multiplies)
#pragma unroll
      for (int d = 0; d < kQkDim / 16; ++d) {
        std::uint32_t a[kSlices][4];
#pragma unroll
        for (int s = 0; s < kSlices; ++s) {
          if constexpr (Shape::kHoldQ) {
#pragma unroll
            for (int r = 0; r < 4; ++r) a[s][r] = held_q[s][d][r];
          } else {
            ptx::ldmatrix_x4(a[s], QkTile::at_slice(lane_q, d) + s * 16 * QkTile::kPitch);
          }
        }
#pragma unroll
        for (int n = 0; n < kBlockN / 16; ++n) {
          std::uint32_t columns[4];
          ptx::ldmatrix_x4(columns, QkTile::at_slice(lane_k, d) + n * 16 * QkTile::kPitch);
#pragma unroll
          for (int s = 0; s < kSlices; ++s) {
            mma_16x8x16(score[s][2 * n], a[s], columns[0], columns[1]);
            mma_16x8x16(score[s][2 * n + 1], a[s], columns[2], columns[3]);
          }
        }
      }

    // V's place is free since the last barrier; from the next one on V is there, and K's place is free.
    store_v(tile);
    __syncthreads();
    if (tile > first_tile) fetch_k(tile - 1);

    if constexpr (kModified) {
      const float slope = p.alibi_slopes ? p.alibi_slopes[b * p.stride_alibi_batch + h] : 0.0f;
#pragma unroll
      for (int s = 0; s < kSlices; ++s)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = min(first_query + row_in_block + 16 * s + 8 * half, last_query);
          const int begin = range.first(row), end = range.last(row);
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
    } else if (masked) {
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

    // The shift follows the row's maximum, but an older one serves while no exponential of the row passes 2^8.
    float top[kSlices][2];
    bool rescale = false;
#pragma unroll
    for (int s = 0; s < kSlices; ++s)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float m = score[s][0][2 * half];
#pragma unroll
        for (int n = 0; n < kBlockN / 8; ++n) m = fmaxf(m, fmaxf(score[s][n][2 * half], score[s][n][2 * half + 1]));
        m = fmaxf(m, __shfl_xor_sync(kFullMask, m, 1));
        m = fmaxf(m, __shfl_xor_sync(kFullMask, m, 2));
        top[s][half] = kModified ? m : m * scale_log2;
        rescale |= (top[s][half] - shift[s][half]) * kShiftUnit > 8.0f;  // -inf - -inf is NaN: no
      }
    if (__any_sync(kFullMask, rescale)) {
#pragma unroll
      for (int s = 0; s < kSlices; ++s)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // Each row moves for itself: its bits do not depend on its neighbours.
          const bool moves = (top[s][half] - shift[s][half]) * kShiftUnit > 8.0f;
          const float next = moves ? top[s][half] : shift[s][half];
          const float factor = ptx::exp2_approx((shift[s][half] - SoftmaxState::shift(next)) * kShiftUnit);
          shift[s][half] = next;
          sum[s][half] *= factor;
#pragma unroll
          for (int c = 0; c < kVDim / 8; ++c) {
            out[s][c][2 * half] *= factor;
            out[s][c][2 * half + 1] *= factor;
          }
        }
    }

    if ((masked || (kModified && p.hides_by_score())) &&
        __syncthreads_or(any_not_finite<T>(base + Shape::kV, Shape::kVBytes, threadIdx.x, kThreads))) {
      // Rare: give each row the values that it sees, then take them out of the tile. What a bias of -inf hides only the
      // scores know.
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
          const std::uint32_t two =
              *reinterpret_cast<const std::uint32_t*>(shared + Shape::kV + VTile::element(n, 8 * c + 2 * (lane % 4)));
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const std::uint32_t bits = two >> 16 * e & 0xffff;
            if (is_finite_bits<T>(bits)) continue;
#pragma unroll
            for (int s = 0; s < kSlices; ++s)
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                const int i = first_query + row_in_block + 16 * s + 8 * half, j = first_j + n;
                const bool sees = kModified ? (seen[s][half] >> n & 1) != 0 : j >= range.first(i) && j < range.last(i);
                if (sees) out[s][c][2 * half + e] += bits_to_float<T>(bits);
              }
          }
        }
      }
      __syncthreads();
      clean<T>(base + Shape::kV, Shape::kVBytes, threadIdx.x, kThreads);
      __syncthreads();
    }

    // O += P V
    if (!multiplies) continue;
#pragma unroll
    for (int n = 0; n < kBlockN / 16; ++n) {
      std::uint32_t a[kSlices][4];
#pragma unroll
      for (int s = 0; s < kSlices; ++s)
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
          const int half = quarter % 2;
          const float* x = &score[s][2 * n + quarter / 2][2 * half];
          const float by = SoftmaxState::shift(shift[s][half]);
          const float low = ptx::exp2_approx(kModified ? (x[0] - by) * kLog2E : fmaf(x[0], scale_log2, -by));
          const float high = ptx::exp2_approx(kModified ? (x[1] - by) * kLog2E : fmaf(x[1], scale_log2, -by));
          sum[s][half] += low + high;
          a[s][quarter] = pack<T>(low, high);
        }
#pragma unroll
      for (int c = 0; c < kVDim / 16; ++c) {
        std::uint32_t columns[4];
        ptx::ldmatrix_x4_trans(columns, VTile::at_slice(lane_v, c) + n * 16 * VTile::kPitch);
#pragma unroll
        for (int s = 0; s < kSlices; ++s) {
          mma_16x8x16(out[s][2 * c], a[s], columns[0], columns[1]);
          mma_16x8x16(out[s][2 * c + 1], a[s], columns[2], columns[3]);
        }
      }
    }
  }
  __syncthreads();  // all is read: the output passes through the same memory

  // Rows of a warp go through the warp's part of Q's place, so that they leave in vectors of 16 bytes.
  unsigned char* const warp_rows = shared + Shape::kQ + warp * kSlices * 16 * VTile::kPitch;
#pragma unroll
  for (int s = 0; s < kSlices; ++s)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum[s][half];
      total += __shfl_xor_sync(kFullMask, total, 1);
      total += __shfl_xor_sync(kFullMask, total, 2);
      SoftmaxState state;
      state.maximum = kModified ? shift[s][half] : shift[s][half] * kLn2;
      state.sum = total;
      float lse;
      const float factor = state.finish(p.sinks, h, &lse);
      const int row = 16 * s + 8 * half + lane / 4, i = first_query + warp * kSlices * 16 + row;
      if (p.lse && lane % 4 == 0 && i <= last_query) p.lse[p.lse_offset(b, h, i)] = lse;
      const bool empty = factor == 0.0f;
#pragma unroll
      for (int c = 0; c < kVDim / 8; ++c)
        *reinterpret_cast<std::uint32_t*>(warp_rows + VTile::element(row, 8 * c + 2 * (lane % 4))) =
            pack<T>(empty ? 0.0f : out[s][c][2 * half] * factor, empty ? 0.0f : out[s][c][2 * half + 1] * factor);
    }
  __syncwarp();
  const int warp_first = first_query + warp * kSlices * 16;
  T* const to = static_cast<T*>(p.out) + p.out_offset(b, h, warp_first);
  store_rows<T, kSlices * 16, kVDim>(warp_rows, lane, last_query + 1 - warp_first, static_cast<int>(p.head_dim_v),
                                     plan.vectors_out, to, p.stride_out_token);
}

template <class T, int kQkDim, int kVDim, bool kModified>
void launch_attention_fwd(const AttentionParams& p, Stream stream) {
  using Shape = ForwardShape<kQkDim, kVDim, kModified>;
  const std::int64_t heads = p.batch * p.heads_q;
  const auto fits = [](const void* data, std::int64_t dim, std::int64_t a, std::int64_t b, std::int64_t c) {
    return is_aligned(data, 16) && (dim | a | b | c) % 8 == 0;
  };
  ForwardPlan plan{};
  bool pages_fit = true;
  if (p.is_paged()) {
    pages_fit = (p.page_size & (p.page_size - 1)) == 0;
    while (std::int64_t{2} << plan.page_shift <= p.page_size) ++plan.page_shift;
  }
  plan.page_holds_tiles = p.is_paged() && p.page_size % Shape::kBlockN == 0;
  const bool varlen_q = p.is_varlen_q(), varlen_k = p.is_varlen_k();
  plan.vectors_q = fits(p.q, p.head_dim, varlen_q ? 0 : p.stride_q_batch, p.stride_q_head, p.stride_q_token);
  plan.vectors_k =
      pages_fit && fits(p.k, p.head_dim, varlen_k ? 0 : p.stride_k_batch, p.stride_k_head, p.stride_k_token);
  plan.vectors_v =
      pages_fit && fits(p.v, p.head_dim_v, varlen_k ? 0 : p.stride_v_batch, p.stride_v_head, p.stride_v_token);
  plan.vectors_out = fits(p.out, 0, varlen_q ? 0 : p.stride_out_batch, p.stride_out_head, p.stride_out_token);
  const std::int64_t group = p.heads_q / p.heads_kv, bytes_per_head = (p.head_dim + p.head_dim_v) * 2 * p.seq_k / group;
  plan.order = BlockOrder(heads, ceil_div(p.seq_q, Shape::kBlockM), bytes_per_head, p.device.index);
  launch("attention_fwd sm75", attention_fwd_kernel<T, kQkDim, kVDim, kModified>,
         {plan.order.blocks(), Shape::kThreads, Shape::kSharedBytes, native(stream)}, p, plan);
}

/// An entry of the table. Scores that only scale (by a positive number, so that the largest product is the largest
/// score) take the plain kernel.
template <DType kDtype, int kQkDim, int kVDim>
void attention_fwd(const AttentionParams& p, void*, Stream stream) {
  using T = Element<kDtype>;
  if (p.batch * p.heads_q * p.seq_q == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  if (p.has_score_modifier() || !(p.scale > 0.0f))
    launch_attention_fwd<T, kQkDim, kVDim, true>(p, stream);
  else
    launch_attention_fwd<T, kQkDim, kVDim, false>(p, stream);
}

}  // namespace flashkernel::cuda::sm75
