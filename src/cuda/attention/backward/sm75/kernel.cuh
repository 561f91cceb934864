// FlashAttention-2 backward (Dao, 2023; Algorithm 2) on the tensor cores of 7.5, without sums in global memory. One
// kernel owns keys and computes dK and dV, the other owns queries and computes dQ. Each of them computes the scores
// again. instances/ has the file that instantiates them.
//
//   keys:     S^T = K Q^T   P^T = exp(S^T - LSE)   dP^T = V dO^T   dS^T = P^T (dP^T - D)   dV += P^T dO   dK += dS^T Q
//   queries:  S = Q K^T     P = exp(S - LSE)       dP = dO V^T     dS = P (dP - D)         dQ += dS K
//
// Both are one template: a block's own rows X1 and X2 (K and V, or Q and dO) meet streamed rows Y1 and Y2 (Q and dO, or
// K and V). P and dS never leave registers, since the accumulator of one product is an operand of the next. That takes
// seven products instead of five. In return every sum has a fixed order, so results are always deterministic, and dQ
// causes no traffic.
//
// A block has 8 warps: four share its own rows, for each half of the 64 streamed rows of a step. The sums of both
// halves are added at the end. Y1 and Y2 of the next step are on their way into registers during the products.
//
// Invariant on NaN (0 * NaN is NaN in the tensor core): streamed rows that no own row sees are zero-filled. Those of
// partly masked tiles are searched. They are cleaned once the scores are computed, which hold every NaN that a pair
// must get, and what is not finite in dO is added to exactly the rows of dV that see it. A NaN in an own row reaches
// only that row's results.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/attention/backward/sm75/variant.hpp"
#include "cuda/attention/block_order.cuh"
#include "cuda/tile/staged_tile.cuh"
#include "cuda/attention/score_fast.cuh"
#include "cuda/attention/key_range.cuh"
#include "cuda/attention/not_finite.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda::sm75 {

// Registers of a thread that owns keys. At d128: 128 of dK and dV, 32 of S and dP, 32 under way; at d64: 128, 64, 16.
template <int kQkDim_, int kVDim_, bool kModified>
struct BackwardShape {
  static constexpr int kQkDim = kQkDim_, kVDim = kVDim_, kWidest = HeadDims{kQkDim, kVDim}.widest();
  using Tile1 = SharedTile<kQkDim>;  // of X1 and Y1, which are Q and K
  using Tile2 = SharedTile<kVDim>;   // of X2 and Y2, which are dO and V
  static constexpr int kRowWarps = 4, kHalves = 2, kThreads = kRowWarps * kHalves * 32;
  static constexpr int kSlices = kWidest <= 64 && !kModified ? 2 : 1;  // of 16 own rows a warp
  static constexpr int kWarpRows = kSlices * 16, kRows = kRowWarps * kWarpRows;
  static constexpr int kPart = 32, kColumns = kHalves * kPart;  // streamed rows of a warp, of a step
  // Shared memory: own rows 2 x 16 KB (d64 and d128), streamed ones 2 x 8 and 2 x 16 KB; one block an SM.
  static constexpr int kY1Bytes = kColumns * Tile1::kPitch, kY2Bytes = kColumns * Tile2::kPitch;
  static constexpr int kX1 = 0, kX2 = kX1 + kRows * Tile1::kPitch, kY1 = kX2 + kRows * Tile2::kPitch;
  static constexpr int kY2 = kY1 + kY1Bytes, kSharedBytes = kY2 + kY2Bytes;
  static constexpr int kFoldBytes = kSlices * kWidest * 64;  // a warp's sums in fp32
  static_assert(kSharedBytes <= 64 * 1024 && kRowWarps * kFoldBytes <= kSharedBytes, "what a T4's SM has");
};

/// A tensor of rows: q, k, v, dO or a gradient.
struct RowsView {
  const void* data;
  std::int64_t stride_batch, stride_head, stride_token;
  int dim;
  bool vectors;  // rows start at multiples of 16 bytes and hold whole vectors
};

struct BackwardPlan {
  BlockOrder order;
  RowsView x1, x2, y1, y2, grad1, grad2;
  std::int64_t pitch;  // of a head in `delta` and `lse`
  const float *delta, *lse;
};

// Computes -D = dLSE - rowsum(dO * O) and -LSE in base 2 of a tile of queries. Rows past the sequence get D = 0 and a
// weight of 0.
template <class T, int kVDim>
__global__ void __launch_bounds__(256)
    prepare_kernel(const __grid_constant__ AttentionBackwardParams p, float* delta, float* lse, bool vectors) {
  constexpr int kTile = BackwardWorkspace::kTile;
  constexpr int kLanes = kVDim == 32 ? 4 : kVDim == 64 ? 8 : 16;  // a row; 16 bytes each
  static_assert(kVDim <= 8 * kLanes, "the lanes of a row hold all of its columns");
  constexpr float kLog2E = 1.4426950408889634f;
  const AttentionParams& f = p.forward;
  const unsigned tiles = static_cast<unsigned>((f.seq_q + kTile - 1) / kTile);
  const unsigned head = blockIdx.x / tiles, b = head / static_cast<unsigned>(f.heads_q);
  const unsigned h = head % static_cast<unsigned>(f.heads_q);
  const int q_len = static_cast<int>(f.q_length(b)), m = blockIdx.x % tiles * kTile;
  if (m >= q_len) return;
  const int lane = threadIdx.x % kLanes, column = lane * 8, dim = static_cast<int>(f.head_dim_v);
  const std::int64_t begin = f.q_begin(b);
  for (int row = threadIdx.x / kLanes; row < kTile; row += 256 / kLanes) {  // the same count for every thread
    const int i = min(m + row, q_len - 1);
    const T* const out = static_cast<const T*>(f.out) + f.out_offset(b, h, i) + column;
    const T* const grad_out = static_cast<const T*>(p.grad_out) +
                              row_offset(f.is_varlen_q(), begin, b, h, i, p.stride_grad_out_batch,
                                         p.stride_grad_out_head, p.stride_grad_out_token) +
                              column;
    float sum = 0.0f;
    if (vectors && column + 8 <= dim) {
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
    if (lane > 0) continue;
    const bool inside = m + row < q_len;
    if (p.grad_lse)
      sum -= p.grad_lse[row_offset(f.is_varlen_q(), begin, b, h, i, p.stride_grad_lse_batch, p.stride_grad_lse_head,
                                   p.stride_grad_lse_token)];
    const float row_lse = f.lse[f.lse_offset(b, h, i)];
    const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kTile + row;
    delta[at] = inside ? -sum : 0.0f;
    // A row without a key, or whose gradient is 0 (large_rows), weighs nothing, whatever its scores: exp2(-inf) = 0.
    lse[at] = inside && row_lse != -INFINITY ? -kLog2E * row_lse : -INFINITY;
  }
}

/// What a kernel computes. Where a thread has no registers for the sums of both dK and dV, each gets a kernel of its
/// own.
enum class Gradient { kQ, kK, kV, kKeys };  // kKeys: dK and dV

/// What a block works on: own rows [first_row, last_row], and the streamed rows [begin, end) that some of them see.
struct BlockRows {
  KeyWindow range;
  int first_row, last_row, begin, end;
};

template <class T, int kQkDim, int kVDim, Gradient kGradient, bool kModified>
__global__ void __launch_bounds__(BackwardShape<kQkDim, kVDim, kModified>::kThreads, 1)
    attention_bwd_kernel(const __grid_constant__ AttentionBackwardParams p, const __grid_constant__ BackwardPlan plan) {
  using Shape = BackwardShape<kQkDim, kVDim, kModified>;
  using Tile1 = typename Shape::Tile1;
  using Tile2 = typename Shape::Tile2;
  constexpr int kRows = Shape::kRows, kColumns = Shape::kColumns, kPart = Shape::kPart, kSlices = Shape::kSlices;
  constexpr int kThreads = Shape::kThreads;
  constexpr bool kOfKeys = kGradient != Gradient::kQ;
  constexpr bool kSumsS = kGradient != Gradient::kV;                                  // dK or dQ, from dS
  constexpr bool kSumsP = kGradient == Gradient::kV || kGradient == Gradient::kKeys;  // dV, from P
  // Operands of the own rows stay in registers where those suffice.
  constexpr int kHeld = Shape::kWidest * kSlices;
  constexpr bool kHoldX1 = kGradient != Gradient::kKeys && kHeld <= (kModified ? 96 : 128);
  constexpr bool kHoldX2 = kHoldX1 && kSumsS && (kSlices == 1 || kHeld <= 96);
  constexpr bool kRowsInShared =
      kHoldX2 && Shape::kWidest == 128;  // where registers are full and the own rows' place is free
  constexpr float kLog2E = 1.4426950408889634f;
  extern __shared__ __align__(128) unsigned char shared[];
  const AttentionParams& f = p.forward;

  unsigned head;
  int order;
  plan.order.find(blockIdx.x, &head, &order);
  const int heads_q = static_cast<int>(f.heads_q), heads_kv = static_cast<int>(f.heads_kv), group = heads_q / heads_kv;
  const int own_heads = kOfKeys ? heads_kv : heads_q;
  const int b = static_cast<int>(head) / own_heads, own_head = static_cast<int>(head) % own_heads;
  const KeyWindow range(f, b);
  // Heavy tiles, if causal, first: the first keys, the last queries.
  const int first_row = (kOfKeys ? order : static_cast<int>(plan.order.tiles) - 1 - order) * kRows;
  const int own_len = kOfKeys ? range.k_len : range.q_len;
  if (first_row >= own_len) return;
  const int last_row = min(own_len, first_row + kRows) - 1;
  const BlockRows found{range, first_row, last_row, kOfKeys ? range.first_query(first_row) : range.first(first_row),
                        kOfKeys ? range.last_query(last_row) : range.last(last_row)};
  BlockRows* const in_shared = reinterpret_cast<BlockRows*>(shared + Shape::kX1);
  const BlockRows& rows = kRowsInShared ? *in_shared : found;

  const auto rows_of = [&](const RowsView& view, bool of_queries, int h, int row) {
    const bool varlen = of_queries ? f.is_varlen_q() : f.is_varlen_k();
    const std::int64_t first = !varlen ? 0 : of_queries ? f.q_begin(b) : f.k_begin(b);
    return static_cast<const T*>(view.data) +
           row_offset(varlen, first, b, h, row, view.stride_batch, view.stride_head, view.stride_token);
  };
  const auto load_own = [&](auto columns, const RowsView& view, int to) {
    const T* const from = rows_of(view, !kOfKeys, own_head, first_row);
    const auto row_of = [&](int row) -> const T* {
      return first_row + row <= last_row ? from + row * view.stride_token : nullptr;
    };
    StagedTile<T, kRows, decltype(columns)::value, kThreads> staged;
    staged.fetch(view.dim, view.vectors, first_row + kRows <= own_len ? from : nullptr, view.stride_token, row_of);
    staged.store(shared + to, view.dim, view.vectors, row_of);
  };
  load_own(std::integral_constant<int, kQkDim>{}, plan.x1, Shape::kX1);
  if constexpr (kSumsS) load_own(std::integral_constant<int, kVDim>{}, plan.x2, Shape::kX2);

  // A step: 64 streamed rows from `first` on, of query head h.
  struct Step {
    int h, first;
  };
  const int end_head = kOfKeys ? (own_head + 1) * group : own_head + 1;
  Step step{found.end > found.begin ? end_head - (kOfKeys ? group : 1) : end_head, found.begin / kColumns * kColumns};
  StagedTile<T, kColumns, kQkDim, kThreads> staged1;
  StagedTile<T, kColumns, kVDim, kThreads> staged2;
  const auto streamed_rows = [&](const RowsView& view, Step at) {
    return rows_of(view, kOfKeys, kOfKeys ? at.h : own_head / group, at.first);
  };
  // Row of a step from `from` on; null where nobody looks.
  const auto streamed_row = [&](const T* from, std::int64_t stride, int first, int row) -> const T* {
    return first + row >= rows.begin && first + row < rows.end ? from + row * stride : nullptr;
  };
  const auto fetch = [&](auto& staged, const RowsView& view, Step at) {
    const T* const from = streamed_rows(view, at);
    staged.fetch(view.dim, view.vectors, at.first >= rows.begin && at.first + kColumns <= rows.end ? from : nullptr,
                 view.stride_token, [&](int row) { return streamed_row(from, view.stride_token, at.first, row); });
  };
  const auto store = [&](const auto& staged, int to, const RowsView& view) {
    const T* const from = streamed_rows(view, step);
    staged.store(shared + to, view.dim, view.vectors,
                 [&](int row) { return streamed_row(from, view.stride_token, step.first, row); });
  };
  const int lane = threadIdx.x % 32, row_warp = threadIdx.x / 32 % Shape::kRowWarps;
  const int half = threadIdx.x / 32 / Shape::kRowWarps;
  const std::uint32_t base = ptx::shared_address(shared);
  // A lane's addresses in the own rows, and in the streamed ones as operands of either product; to each comes a tile's
  // place.
  const auto own_rows_of = [&](auto tile) {
    using Tile = decltype(tile);
    return base + row_warp * Shape::kWarpRows * Tile::kPitch + Tile::lane_offset(LaneA::row(lane), LaneA::half(lane));
  };
  const std::uint32_t lane_own1 = own_rows_of(Tile1{}), lane_own2 = own_rows_of(Tile2{});
  const std::uint32_t part1 = base + half * kPart * Tile1::kPitch, part2 = base + half * kPart * Tile2::kPitch;
  const std::uint32_t lane_scores1 = part1 + Tile1::lane_offset(LaneB::row(lane), LaneB::half(lane));
  const std::uint32_t lane_scores2 = part2 + Tile2::lane_offset(LaneB::row(lane), LaneB::half(lane));
  const std::uint32_t lane_sums1 = part1 + Tile1::lane_offset(LaneA::row(lane), LaneA::half(lane));
  const std::uint32_t lane_sums2 = part2 + Tile2::lane_offset(LaneA::row(lane), LaneA::half(lane));
  const int own_row = first_row + row_warp * Shape::kWarpRows + lane / 4;  // of slice 0, upper half
  const float scale_log2 = f.scale * kLog2E;
  [[maybe_unused]] float row_lse[kSlices][2], row_delta[kSlices][2];
  if constexpr (!kOfKeys) {
#pragma unroll
    for (int s = 0; s < kSlices; ++s)
#pragma unroll
      for (int hf = 0; hf < 2; ++hf) {
        const int i = own_row + 16 * s + 8 * hf;
        row_lse[s][hf] = i < own_len ? plan.lse[head * plan.pitch + i] : 0.0f;
        row_delta[s][hf] = i < own_len ? plan.delta[head * plan.pitch + i] : 0.0f;
      }
  }

  [[maybe_unused]] std::uint32_t held1[kSlices][kQkDim / 16][4], held2[kSlices][kVDim / 16][4];
  if constexpr (kHoldX1) {
    __syncthreads();
#pragma unroll
    for (int s = 0; s < kSlices; ++s)
#pragma unroll
      for (int d = 0; d < Shape::kWidest / 16; ++d) {
        if (d < kQkDim / 16)
          ptx::ldmatrix_x4(held1[s][d], Tile1::at_slice(lane_own1 + Shape::kX1, d) + s * 16 * Tile1::kPitch);
        if constexpr (kHoldX2)
          if (d < kVDim / 16)
            ptx::ldmatrix_x4(held2[s][d], Tile2::at_slice(lane_own2 + Shape::kX2, d) + s * 16 * Tile2::kPitch);
      }
  }

  if constexpr (kRowsInShared) {
    __syncthreads();
    if (threadIdx.x == 0) *in_shared = found;
    __syncthreads();
  }
  if (step.h < end_head) {
    fetch(staged1, plan.y1, step);
    fetch(staged2, plan.y2, step);
  }

  [[maybe_unused]] float sum1[kSumsS ? kSlices : 1][kSumsS ? kQkDim / 8 : 1][4] = {};  // dK or dQ
  [[maybe_unused]] float sum2[kSumsP ? kSlices : 1][kSumsP ? kVDim / 8 : 1][4] = {};   // dV

#pragma unroll 1
  while (step.h < end_head) {
    const int first_column = step.first;
    store(staged1, Shape::kY1, plan.y1);
    store(staged2, Shape::kY2, plan.y2);
    __syncthreads();
    // Are there pairs in the tile that do not see each other? (Rows past the end are zero and give nothing.)
    bool masked = kOfKeys ? rows.range.first(min(rows.range.q_len, first_column + kColumns) - 1) > rows.first_row ||
                                rows.range.last(first_column) < rows.first_row + kRows
                          : rows.range.first(rows.last_row) > first_column ||
                                rows.range.last(rows.first_row) < first_column + kColumns;
    if constexpr (kModified) masked = masked || f.mask.is_given();

    const int column = first_column + half * kPart + 2 * (lane % 4);  // + 8 n + e % 2
    const auto product = [&](auto tile, auto& to, auto is_held, const auto& held, std::uint32_t x, std::uint32_t y) {
      using Tile = decltype(tile);
#pragma unroll
      for (int d = 0; d < Tile::kChunks / 2; ++d) {
        std::uint32_t a[kSlices][4];
#pragma unroll
        for (int s = 0; s < kSlices; ++s) {
          if constexpr (decltype(is_held)::value) {
#pragma unroll
            for (int r = 0; r < 4; ++r) a[s][r] = held[s][d][r];
          } else {
            ptx::ldmatrix_x4(a[s], Tile::at_slice(x, d) + s * 16 * Tile::kPitch);
          }
        }
#pragma unroll
        for (int n = 0; n < kPart / 16; ++n) {
          std::uint32_t columns[4];
          ptx::ldmatrix_x4(columns, Tile::at_slice(y, d) + n * 16 * Tile::kPitch);
#pragma unroll
          for (int s = 0; s < kSlices; ++s) {
            mma_16x8x16(to[s][2 * n], a[s], columns[0], columns[1]);
            mma_16x8x16(to[s][2 * n + 1], a[s], columns[2], columns[3]);
          }
        }
      }
    };
    float score[kSlices][kPart / 8][4] = {}, grad[kSlices][kPart / 8][4];
    product(Tile1{}, score, std::bool_constant<kHoldX1>{}, held1, lane_own1 + Shape::kX1, lane_scores1 + Shape::kY1);
    const std::int64_t of_columns =
        kOfKeys ? (static_cast<std::int64_t>(b) * heads_q + step.h) * plan.pitch + column : 0;
    [[maybe_unused]] float bend[kModified ? kPart / 8 : 1][4];  // what the softcap does to a gradient
    [[maybe_unused]] const int bias_bytes = f.bias.dtype == DType::kFloat32 ? 4 : 2;
    [[maybe_unused]] const char* const bias =
        static_cast<const char*>(f.bias.data) + (b * f.bias.stride_batch + step.h * f.bias.stride_head) * bias_bytes;
    [[maybe_unused]] const float slope =
        kModified && f.alibi_slopes ? f.alibi_slopes[b * f.stride_alibi_batch + step.h] : 0.0f;
    [[maybe_unused]] const float inverse_softcap = kModified && f.softcap > 0.0f ? 1.0f / f.softcap : 0.0f;
#pragma unroll
    for (int n = 0; n < kPart / 8; ++n) {
      float2 column_lse{}, column_delta{};
      if constexpr (kOfKeys) {
        column_lse = *reinterpret_cast<const float2*>(plan.lse + of_columns + 8 * n);
        column_delta = *reinterpret_cast<const float2*>(plan.delta + of_columns + 8 * n);
      }
#pragma unroll
      for (int s = 0; s < kSlices; ++s)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float lse = kOfKeys ? (e % 2 ? column_lse.y : column_lse.x) : row_lse[s][e / 2];
          float& x = score[s][n][e];
          if constexpr (kModified) {
            const int own = min(own_row + 16 * s + e / 2 * 8, rows.last_row);
            const int other = min(column + 8 * n + e % 2, rows.end - 1);
            const int i = kOfKeys ? other : own, j = kOfKeys ? own : other;
            float capped;
            const float full = modified_score_fast(f, slope, bias + i * f.bias.stride_q * bias_bytes, i, j,
                                                   rows.range.k_len - rows.range.q_len, x, &capped);
            const float t = capped * inverse_softcap;
            bend[n][e] = 1.0f - t * t;
            x = ptx::exp2_approx(fmaf(full, kLog2E, lse));
          } else {
            x = ptx::exp2_approx(fmaf(x, scale_log2, lse));
          }
          grad[s][n][e] = kOfKeys ? (e % 2 ? column_delta.y : column_delta.x) : row_delta[s][e / 2];
        }
    }
    if constexpr (kSumsS) {
      product(Tile2{}, grad, std::bool_constant<kHoldX2>{}, held2, lane_own2 + Shape::kX2, lane_scores2 + Shape::kY2);
#pragma unroll
      for (int s = 0; s < kSlices; ++s)
#pragma unroll
        for (int n = 0; n < kPart / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            grad[s][n][e] *= score[s][n][e];
            if constexpr (kModified) grad[s][n][e] *= bend[n][e];
          }
    }
    const auto visible = [&](int own, int other) {
      const int i = kOfKeys ? other : own, j = kOfKeys ? own : other;
      if (j < rows.range.first(i) || j >= rows.range.last(i) || i >= rows.range.q_len) return false;
      return !kModified || !f.mask.hides(b, step.h, i, j);
    };
    if (masked) {
#pragma unroll
      for (int s = 0; s < kSlices; ++s)
#pragma unroll
        for (int n = 0; n < kPart / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (!visible(own_row + 16 * s + e / 2 * 8, column + 8 * n + e % 2)) score[s][n][e] = grad[s][n][e] = 0.0f;
    }
    // An accumulator of 16 own rows x 16 columns is the operand of a product over the columns.
    [[maybe_unused]] std::uint32_t weights1[kSlices][kPart / 16][4], weights2[kSlices][kPart / 16][4];
#pragma unroll
    for (int s = 0; s < kSlices; ++s)
#pragma unroll
      for (int n = 0; n < kPart / 16; ++n)
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
          const int at = 2 * n + quarter / 2, e = 2 * (quarter % 2);
          weights1[s][n][quarter] = pack<T>(grad[s][at][e], grad[s][at][e + 1]);
          weights2[s][n][quarter] = pack<T>(score[s][at][e], score[s][at][e + 1]);
        }
    if (masked) {
      constexpr int kSearched = kSumsS ? Shape::kY1 : Shape::kY2;  // what is summed: Y1, Y2 or both
      constexpr int kBytes = kSumsS * Shape::kY1Bytes + kSumsP * Shape::kY2Bytes;
      if (__syncthreads_or(any_not_finite<T>(base + kSearched, kBytes, threadIdx.x, kThreads))) {
        // Rare. A non-finite dO reaches dV of the keys that its query sees.
        if constexpr (kSumsP) {
#pragma unroll 1
          for (int n = 0; n < kPart; ++n) {
            const int i = first_column + half * kPart + n;
#pragma unroll
            for (int c = 0; c < kVDim / 8; ++c) {
              const std::uint32_t two = *reinterpret_cast<const std::uint32_t*>(
                  shared + Shape::kY2 + Tile2::element(half * kPart + n, 8 * c + 2 * (lane % 4)));
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                const std::uint32_t bits = two >> 16 * e & 0xffff;
                const float value = is_finite_bits<T>(bits) ? 0.0f : bits_to_float<T>(bits);
#pragma unroll
                for (int s = 0; s < kSlices; ++s)
#pragma unroll
                  for (int hf = 0; hf < 2; ++hf)
                    sum2[s][c][2 * hf + e] += visible(own_row + 16 * s + 8 * hf, i) ? value : 0.0f;
              }
            }
          }
        }
        __syncthreads();
        clean<T>(base + kSearched, kBytes, threadIdx.x, kThreads);
        __syncthreads();
      }
    }

    // The rows of the next step are fetched during the products that are left, since fewer registers are free before.
    step.first += kColumns;
    if (step.first >= rows.end) step = {step.h + 1, rows.begin / kColumns * kColumns};
    const auto accumulate = [&](auto tile, auto& to, const auto& weights, std::uint32_t y) {
      using Tile = decltype(tile);
#pragma unroll
      for (int n = 0; n < kPart / 16; ++n) {
#pragma unroll
        for (int c = 0; c < Tile::kChunks / 2; ++c) {
          std::uint32_t columns[4];
          ptx::ldmatrix_x4_trans(columns, Tile::at_slice(y, c) + n * 16 * Tile::kPitch);
#pragma unroll
          for (int s = 0; s < kSlices; ++s) {
            mma_16x8x16(to[s][2 * c], weights[s][n], columns[0], columns[1]);
            mma_16x8x16(to[s][2 * c + 1], weights[s][n], columns[2], columns[3]);
          }
        }
      }
    };
    const bool more = step.h < end_head;
    constexpr bool kOneByOne = kSumsS && kSumsP;  // two products are left: each covers one tensor's way
    if (more) fetch(staged1, plan.y1, step);
    if (more && !kOneByOne) fetch(staged2, plan.y2, step);
    if constexpr (kSumsP) accumulate(Tile2{}, sum2, weights2, lane_sums2 + Shape::kY2);
    if (more && kOneByOne) fetch(staged2, plan.y2, step);
    if constexpr (kSumsS) accumulate(Tile1{}, sum1, weights1, lane_sums1 + Shape::kY1);
    __syncthreads();  // Y1 and Y2 are read
  }

  const int end_row = rows.last_row + 1, warp_first = rows.first_row + row_warp * Shape::kWarpRows;
  // The two halves meet in shared memory, in a fixed order; from there rows leave in vectors of 16 bytes.
  const auto finish = [&](auto tile, const auto& sums, float factor, const RowsView& view) {
    using Tile = decltype(tile);
    constexpr int kDim = Tile::kChunks * 8;
    if (!view.data) return;
    __syncthreads();
    unsigned char* const place = shared + row_warp * Shape::kFoldBytes;
    float* const fold = reinterpret_cast<float*>(place) + lane;
    if (half == 1) {
#pragma unroll
      for (int s = 0; s < kSlices; ++s)
#pragma unroll
        for (int c = 0; c < kDim / 8; ++c)
#pragma unroll
          for (int e = 0; e < 4; ++e) fold[((s * (kDim / 8) + c) * 4 + e) * 32] = sums[s][c][e];
    }
    __syncthreads();
    if (half == 1) return;
    std::uint32_t packed[kSlices][kDim / 8][2];
#pragma unroll
    for (int s = 0; s < kSlices; ++s)
#pragma unroll
      for (int c = 0; c < kDim / 8; ++c)
#pragma unroll
        for (int hf = 0; hf < 2; ++hf) {
          const float* const other = fold + ((s * (kDim / 8) + c) * 4 + 2 * hf) * 32;
          packed[s][c][hf] =
              pack<T>((sums[s][c][2 * hf] + other[0]) * factor, (sums[s][c][2 * hf + 1] + other[32]) * factor);
        }
    __syncwarp();
#pragma unroll
    for (int s = 0; s < kSlices; ++s)
#pragma unroll
      for (int c = 0; c < kDim / 8; ++c)
#pragma unroll
        for (int hf = 0; hf < 2; ++hf)
          *reinterpret_cast<std::uint32_t*>(place + Tile::element(16 * s + 8 * hf + lane / 4, 8 * c + 2 * (lane % 4))) =
              packed[s][c][hf];
    __syncwarp();
    T* const to = const_cast<T*>(rows_of(view, !kOfKeys, own_head, warp_first));
    store_rows<T, Shape::kWarpRows, kDim>(place, lane, end_row - warp_first, view.dim, view.vectors, to,
                                          view.stride_token);
  };
  if constexpr (kSumsS) finish(Tile1{}, sum1, f.scale, plan.grad1);
  if constexpr (kSumsP) finish(Tile2{}, sum2, 1.0f, plan.grad2);
}

template <class T, int kQkDim, int kVDim, bool kModified>
void launch_attention_bwd(const AttentionBackwardParams& p, float* workspace, cudaStream_t stream) {
  using Shape = BackwardShape<kQkDim, kVDim, kModified>;
  const AttentionParams& f = p.forward;
  const BackwardWorkspace layout(f);
  const auto view = [](const void* data, bool varlen, std::int64_t dim, std::int64_t batch, std::int64_t head,
                       std::int64_t token) {
    const bool vectors = is_aligned(data, 16) && (dim | (varlen ? 0 : batch) | head | token) % 8 == 0;
    return RowsView{data, batch, head, token, static_cast<int>(dim), vectors};
  };
  const bool varlen_q = f.is_varlen_q(), varlen_k = f.is_varlen_k();
  const RowsView q = view(f.q, varlen_q, f.head_dim, f.stride_q_batch, f.stride_q_head, f.stride_q_token);
  const RowsView k = view(f.k, varlen_k, f.head_dim, f.stride_k_batch, f.stride_k_head, f.stride_k_token);
  const RowsView v = view(f.v, varlen_k, f.head_dim_v, f.stride_v_batch, f.stride_v_head, f.stride_v_token);
  const RowsView grad_out = view(p.grad_out, varlen_q, f.head_dim_v, p.stride_grad_out_batch, p.stride_grad_out_head,
                                 p.stride_grad_out_token);
  const std::int64_t row_bytes = (f.head_dim + f.head_dim_v) * 2, group = f.heads_q / f.heads_kv;
  BackwardPlan plan{};
  plan.pitch = layout.pitch;
  plan.delta = workspace;
  plan.lse = workspace + layout.floats;
  if ((p.grad_k || p.grad_v) && f.batch * f.heads_kv * f.seq_k > 0) {
    plan.order =
        BlockOrder(f.batch * f.heads_kv, ceil_div(f.seq_k, Shape::kRows), row_bytes * f.seq_q * group, f.device.index);
    plan.x1 = k, plan.x2 = v, plan.y1 = q, plan.y2 = grad_out;
    plan.grad1 =
        view(p.grad_k, varlen_k, f.head_dim, p.stride_grad_k_batch, p.stride_grad_k_head, p.stride_grad_k_token);
    plan.grad2 =
        view(p.grad_v, varlen_k, f.head_dim_v, p.stride_grad_v_batch, p.stride_grad_v_head, p.stride_grad_v_token);
    const LaunchShape shape{plan.order.blocks(), Shape::kThreads, Shape::kSharedBytes, stream};
    if constexpr (Shape::kWidest <= 96) {
      launch("attention_bwd sm75: grad_k, grad_v", attention_bwd_kernel<T, kQkDim, kVDim, Gradient::kKeys, kModified>,
             shape, p, plan);
    } else {
      if (p.grad_k)
        launch("attention_bwd sm75: grad_k", attention_bwd_kernel<T, kQkDim, kVDim, Gradient::kK, kModified>, shape, p,
               plan);
      if (p.grad_v)
        launch("attention_bwd sm75: grad_v", attention_bwd_kernel<T, kQkDim, kVDim, Gradient::kV, kModified>, shape, p,
               plan);
    }
  }
  if (p.grad_q && f.batch * f.heads_q * f.seq_q > 0) {
    plan.order =
        BlockOrder(f.batch * f.heads_q, ceil_div(f.seq_q, Shape::kRows), row_bytes * f.seq_k / group, f.device.index);
    plan.x1 = q, plan.x2 = grad_out, plan.y1 = k, plan.y2 = v;
    plan.grad1 =
        view(p.grad_q, varlen_q, f.head_dim, p.stride_grad_q_batch, p.stride_grad_q_head, p.stride_grad_q_token);
    plan.grad2 = RowsView{};
    launch("attention_bwd sm75: grad_q", attention_bwd_kernel<T, kQkDim, kVDim, Gradient::kQ, kModified>,
           {plan.order.blocks(), Shape::kThreads, Shape::kSharedBytes, stream}, p, plan);
  }
}

/// An entry of the table, but for the gradient of the sinks: cuda/kernels.cpp has the generic kernel compute that
/// first, in the same workspace.
template <DType kDtype, int kQkDim, int kVDim>
void attention_bwd(const AttentionBackwardParams& p, void* workspace, Stream stream) {
  using T = Element<kDtype>;
  const AttentionParams& f = p.forward;
  if (!p.grad_q && !p.grad_k && !p.grad_v) return;
  const CudaDeviceGuard guard(f.device.index);
  const BackwardWorkspace layout(f);
  float* const floats = static_cast<float*>(workspace);
  const std::int64_t blocks = f.batch * f.heads_q * layout.tiles;
  if (blocks > 0) {
    const auto fits = [](const void* data, std::int64_t strides) { return is_aligned(data, 16) && strides % 8 == 0; };
    const bool varlen = f.is_varlen_q();
    const bool vectors =
        fits(f.out, (varlen ? 0 : f.stride_out_batch) | f.stride_out_head | f.stride_out_token) &&
        fits(p.grad_out, (varlen ? 0 : p.stride_grad_out_batch) | p.stride_grad_out_head | p.stride_grad_out_token);
    launch("attention_bwd sm75: prepare", prepare_kernel<T, kVDim>,
           {static_cast<unsigned>(blocks), 256, 0, native(stream)}, p, floats, floats + layout.floats, vectors);
  }
  if (f.has_score_modifier())
    launch_attention_bwd<T, kQkDim, kVDim, true>(p, floats, native(stream));
  else
    launch_attention_bwd<T, kQkDim, kVDim, false>(p, floats, native(stream));
}

}  // namespace flashkernel::cuda::sm75
