// Computes rows of the Hopper forward kernel again that met NaN behind a mask. Consumers only note that there are such
// rows. When all tiles of a block are done and their outputs are in place, each warp looks for such rows among its own.
// (In the middle of a tile this code would take registers from the loop of products, which d64 does not have.)
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/attention/forward/sm90a/shape.cuh"
#include "cuda/attention/forward/sm90a/sparse.cuh"
#include "cuda/attention/score.cuh"
#include "cuda/attention/score_fast.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/quantized.cuh"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda::sm90a {

/// Element offset of the row of key j.
__device__ inline std::int64_t row_of_key(const AttentionParams& p, const TileRecord& tile, int j,
                                          std::int64_t stride_batch, std::int64_t stride_head,
                                          std::int64_t stride_token) {
  std::int64_t batch = p.is_varlen_k() ? 0 : tile.b, token = p.is_varlen_k() ? p.k_begin(tile.b) + j : j;
  if (p.is_paged()) {
    const unsigned page_size = static_cast<unsigned>(p.page_size), column = static_cast<unsigned>(j) / page_size;
    batch = p.block_table[tile.b * p.stride_block_table + column];
    if (batch < 0 || batch >= p.num_pages) batch = 0;  // a bad id must not lead out of the pool
    token = static_cast<unsigned>(j) - column * page_size;
  }
  return batch * stride_batch + tile.g * stride_head + token * stride_token;
}

/// One warp computes one row from global memory, and reads only what the row sees. The tensor cores cannot do that when
/// a masked key or value is NaN or infinite, since they compute 0 * NaN = NaN. This is rare and slow.
/// E: the elements of q, k and v, which count score_scale (for p.scale) and value_scale.
template <class Shape, class T, class E>
__device__ inline void redo_row(const AttentionParams& p, const TileRecord& tile, int i, float score_scale,
                                float value_scale) {
  constexpr float kLog2E = 1.4426950408889634f;
  constexpr int kColumns = (Shape::kVDim + 31) / 32;  // a lane
  const int lane = threadIdx.x % 32;
  const E* const q = static_cast<const E*>(p.q) + p.q_offset(tile.b, tile.h, i);
  const int first = tile.range.first(i), last = tile.range.last(i);
  float out[kColumns] = {};
  SoftmaxState state;
#pragma unroll 1
  for (int j0 = first; j0 < last; j0 += 32) {
    float score = -INFINITY;
    if (j0 + lane < last) {
      const E* const k = static_cast<const E*>(p.k) +
                         row_of_key(p, tile, j0 + lane, p.stride_k_batch, p.stride_k_head, p.stride_k_token);
      float dot = 0.0f;
#pragma unroll 1
      for (int d = 0; d < p.head_dim; ++d) dot = fmaf(to_float(q[d]), to_float(k[d]), dot);
      if constexpr (Shape::kScored) {
        score = modified_score(p, ScoreContext(p, tile.b, tile.h), i, j0 + lane, dot);
      } else {
        score = dot * score_scale;
        if (p.softcap > 0.0f) score = p.softcap * tanh_exp2(score / p.softcap);
        if constexpr (Shape::kTakesBits)
          if (p.mask_hides(tile.b, tile.h, i, j0 + lane, tile.range.q_len, tile.range.k_len)) score = -INFINITY;
      }
    }
    float highest = fmaxf(state.maximum, score);
#pragma unroll
    for (int x = 16; x > 0; x /= 2) highest = fmaxf(highest, __shfl_xor_sync(kFullMask, highest, x));
    const float factor = ptx::exp2_approx((state.maximum - SoftmaxState::shift(highest)) * kLog2E);
    const float weight = j0 + lane < last ? ptx::exp2_approx((score - SoftmaxState::shift(highest)) * kLog2E) : 0.0f;
    state.maximum = highest;
    state.sum = state.sum * factor + warp_reduce(weight, Sum{});
#pragma unroll
    for (int c = 0; c < kColumns; ++c) out[c] *= factor;
#pragma unroll 1
    for (int j = j0; j < min(j0 + 32, last); ++j) {
      // A score of -inf hides the key and whatever its value holds.
      if ((Shape::kScored || Shape::kTakesBits) && p.hides_by_score() &&
          __shfl_sync(kFullMask, score, j - j0) == -INFINITY)
        continue;
      const float w = __shfl_sync(kFullMask, weight, j - j0);
      const E* const v =
          static_cast<const E*>(p.v) + row_of_key(p, tile, j, p.stride_v_batch, p.stride_v_head, p.stride_v_token);
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        if (lane + 32 * c < p.head_dim_v) out[c] = fmaf(w, to_float(v[lane + 32 * c]), out[c]);
    }
  }
  float lse;
  const float factor = state.finish(p.sinks, tile.h, &lse) * value_scale;
  if (p.lse && lane == 0) p.lse[p.lse_offset(tile.b, tile.h, i)] = lse;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int column = lane + 32 * c;
    if (column < p.head_dim_v)
      static_cast<T*>(p.out)[p.out_offset(tile.b, tile.h, i) + column] =
          from_float<T>(factor == 0.0f ? 0.0f : out[c] * factor);
  }
}

template <class Shape, class T>
__device__ inline void redo_row(const AttentionParams& p, const TileRecord& tile, int i) {
  redo_row<Shape, T, T>(p, tile, i, p.scale, 1.0f);
}

/// Reads the warp's rows of a tile's output and computes those that are not finite.
template <class Shape, class T>
__device__ inline void redo_tile(const AttentionParams& p, const typename Shape::Plan& plan, const TileRecord& tile,
                                 int warpgroup) {
  if (tile.num_blocks == 0) return;
  const int lane = threadIdx.x % 32;
  const int first = first_row<Shape>(tile, warpgroup) + static_cast<int>(threadIdx.x % 128) / 32 * 16;
#pragma unroll 1
  for (int i = first; i < min(first + 16, tile.range.q_len); ++i) {
    const T* const row = static_cast<const T*>(p.out) + p.out_offset(tile.b, tile.h, i);
    float zero = 0.0f;  // NaN once any element is not finite
#pragma unroll 1
    for (int column = lane; column < p.head_dim_v; column += 32) zero = fmaf(to_float(row[column]), 0.0f, zero);
    if (!__any_sync(kFullMask, zero != zero)) continue;
    if constexpr (Shape::kEightBits)
      redo_row<Shape, T, Float8>(p, tile, i, p.scale * plan.q.at(tile.b, tile.g) * plan.k.at(tile.b, tile.g),
                                 plan.v.at(tile.b, tile.g));
    else
      redo_row<Shape, T>(p, tile, i);
  }
}

/// Walks the block's tiles again.
template <class Shape, class T>
__device__ inline void redo_tiles(const AttentionParams& p, const typename Shape::Plan& plan,
                                  const SharedLayout<Shape>& shared, int warpgroup) {
  TileRecord tile;
  if constexpr (Shape::kSparse) {
#pragma unroll 1
    for (int index = *shared.taken(); index >= 0; index = plan.before[index]) {
      fill_ticket<Shape>(p, plan, index, &tile);
      redo_tile<Shape, T>(p, plan, tile, warpgroup);
    }
  } else {
#pragma unroll 1
    for (unsigned round = 0; locate_tile<Shape>(p, plan, round, &tile); ++round)
      redo_tile<Shape, T>(p, plan, tile, warpgroup);
  }
}

}  // namespace flashkernel::cuda::sm90a
