// What MLA decoding on 9.0 does with rows: it stores them, or leaves a part of them where a border of shares cuts a
// sequence, and a second kernel merges such parts in the order of the blocks. Used by kernel.cuh.
#pragma once

#include "cuda/attention/mla/sm90a/schedule.cuh"
#include "cuda/attention/score.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace flashkernel::cuda::sm90a {

/// Query and head of a tile's row: rows are ordered by query, then by head.
struct MlaRow {
  int query;
  std::int64_t head;

  __device__ MlaRow(const MlaPlan& plan, int head_group, int row)
      : query(row / plan.group), head(static_cast<std::int64_t>(head_group) * plan.group + row % plan.group) {}
};

/// Stores a row's LSE, and returns what its numerators are multiplied with.
__device__ inline float finish_mla_row(const AttentionParams& p, int b, const MlaRow& at, float maximum_log2, float sum,
                                       bool stores) {
  constexpr float kLn2 = 0.69314718055994531f;
  SoftmaxState state;
  state.maximum = maximum_log2 * kLn2;  // -inf stays
  state.sum = sum;
  float lse;
  const float factor = state.finish(nullptr, at.head, &lse);
  if (stores && p.lse) p.lse[p.lse_offset(b, at.head, at.query)] = lse;
  return factor;
}

/// Where a block leaves its part of a row. A block has two places: `begins` says whether the sequence begins in it.
template <class Float>
__device__ inline Float* mla_part(Float* partials, int block, bool begins, int row) {
  return partials + (static_cast<std::int64_t>(2 * block + (begins ? 1 : 0)) * kMlaRows + row) * kMlaPartPitch;
}

/// Two neighbouring elements of the output.
template <class T>
__device__ inline void store_mla_pair(T* to, bool vectors, float low, float high) {
  const std::uint32_t packed = pack<T>(low, high);
  auto* const bits = reinterpret_cast<unsigned short*>(to);
  if (vectors) {
    *reinterpret_cast<std::uint32_t*>(bits) = packed;
  } else {
    bits[0] = static_cast<unsigned short>(packed);
    bits[1] = static_cast<unsigned short>(packed >> 16);
  }
}

/// A thread's columns of a row: 32 pairs, 8 columns apart from `column` on, which lie 4 floats apart in `values`.
/// `state` is the row's maximum (base 2) and sum.
template <class T>
__device__ inline void put_mla_row(const AttentionParams& p, const MlaPlan& plan, const MlaSegment& segment, int row,
                                   int column, const float* state, const float* values, float* partials) {
  if (row >= plan.rows) return;
  if (!segment.begins() || !segment.ends()) {
    float* const to = mla_part(partials, static_cast<int>(blockIdx.x), segment.begins(), row);
#pragma unroll
    for (int c = 0; c < 32; ++c)
      *reinterpret_cast<float2*>(to + column + 8 * c) = float2{values[4 * c], values[4 * c + 1]};
    if (column == 0) *reinterpret_cast<float2*>(to + kMlaValueDim) = float2{state[0], state[1]};
    return;
  }
  const MlaRow at(plan, segment.head_group, row);
  const float factor = finish_mla_row(p, segment.b, at, state[0], state[1], column == 0);
  T* const to = static_cast<T*>(p.out) + p.out_offset(segment.b, at.head, at.query) + column;
#pragma unroll
  for (int c = 0; c < 32; ++c)
    store_mla_pair(to + 8 * c, plan.vectors_out, factor == 0.0f ? 0.0f : values[4 * c] * factor,
                   factor == 0.0f ? 0.0f : values[4 * c + 1] * factor);
}

/// Output 0 and LSE -inf for sequences without keys, which are dealt out over the grid.
template <class T>
__device__ inline void store_empty_mla_rows(const AttentionParams& p, int thread, int threads) {
  for (int b = static_cast<int>(blockIdx.x); b < p.batch; b += static_cast<int>(gridDim.x)) {
    if (mla_tiles_of(p, b) > 0) continue;
    const std::int64_t elements = p.heads_q * p.seq_q * kMlaValueDim;
#pragma unroll 1
    for (std::int64_t at = thread; at < elements; at += threads) {
      const std::int64_t row = at / kMlaValueDim, i = row / p.heads_q, h = row - i * p.heads_q;
      const int column = static_cast<int>(at % kMlaValueDim);
      static_cast<T*>(p.out)[p.out_offset(b, h, i) + column] = T(0.0f);
      if (column == 0 && p.lse) p.lse[p.lse_offset(b, h, i)] = -INFINITY;
    }
  }
}

/// Merges the rows of a sequence and head group that several blocks have worked on. Grid: borders between blocks, and
/// kMlaMergeRows rows each; a sequence is merged where its first border is. It starts while the other kernel runs.
template <class T>
__global__ void __launch_bounds__(kMlaMergeWarps* kWarp)
    mla_merge_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ MlaPlan plan,
                     const float* partials) {
  constexpr int kPieces = kMlaValueDim / (4 * kWarp);  // of four columns a lane
  const int lane = static_cast<int>(threadIdx.x % kWarp), warp = static_cast<int>(threadIdx.x / kWarp);
  const MlaSchedule schedule(p, plan);
  MlaPair pair{};
  int first = 0, last = 0;
  if (static_cast<int>(blockIdx.x) + 1 < schedule.blocks())
    pair = schedule.pair_at(p, schedule.begin(blockIdx.x + 1) - 1);
  if (pair.count > 0) {
    first = schedule.block_of(pair.start);
    last = schedule.block_of(pair.start + pair.count - 1);
  }
  const bool cut = first < last && first == static_cast<int>(blockIdx.x);
  // One block waits in any case: this kernel must not end before the other one.
  if (cut || (blockIdx.x == 0 && blockIdx.y == 0)) ptx::wait_for_previous_kernel();
  if (!cut) return;
#pragma unroll 1
  for (int row = static_cast<int>(blockIdx.y) * kMlaMergeRows + warp;
       row < min(plan.rows, static_cast<int>(blockIdx.y + 1) * kMlaMergeRows); row += kMlaMergeWarps) {
    float maximum = -INFINITY, sum = 0.0f, values[kPieces][4] = {};
    for (int block = first; block <= last; ++block) {
      const float* const from = mla_part(partials, block, block == first, row);
      const float2 state = *reinterpret_cast<const float2*>(from + kMlaValueDim);
      const float highest = fmaxf(maximum, state.x), shift = SoftmaxState::shift(highest);
      const float mine = ptx::exp2_approx(maximum - shift), other = ptx::exp2_approx(state.x - shift);
      maximum = highest;
      sum = sum * mine + state.y * other;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const float4 part = *reinterpret_cast<const float4*>(from + (piece * kWarp + lane) * 4);
        values[piece][0] = fmaf(part.x, other, values[piece][0] * mine);
        values[piece][1] = fmaf(part.y, other, values[piece][1] * mine);
        values[piece][2] = fmaf(part.z, other, values[piece][2] * mine);
        values[piece][3] = fmaf(part.w, other, values[piece][3] * mine);
      }
    }
    const MlaRow at(plan, pair.head_group, row);
    const float factor = finish_mla_row(p, pair.b, at, maximum, sum, lane == 0);
    T* const to = static_cast<T*>(p.out) + p.out_offset(pair.b, at.head, at.query);
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece)
#pragma unroll
      for (int e = 0; e < 4; e += 2)
        store_mla_pair(to + (piece * kWarp + lane) * 4 + e, plan.vectors_out,
                       factor == 0.0f ? 0.0f : values[piece][e] * factor,
                       factor == 0.0f ? 0.0f : values[piece][e + 1] * factor);
  }
}

}  // namespace flashkernel::cuda::sm90a
