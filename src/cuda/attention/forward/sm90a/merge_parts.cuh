// Folds the states that thread blocks have left for the chunks of a row (parts.cuh), in the order in which one block
// would have met them, and writes the output and the LSE. A thread block has a row, a thread a column.
#pragma once

#include "cuda/attention/forward/sm90a/epilogue.cuh"
#include "cuda/attention/forward/sm90a/parts.cuh"
#include "cuda/attention/forward/sm90a/redo.cuh"
#include "cuda/ptx/grid.cuh"

namespace flashkernel::cuda::sm90a {

/// The columns of 32 chunks below chunk `end`, the last one first, and the lane's own one's state.
template <class Shape>
struct PartBatch {
  float out[kWarp], maximum, sum;

  __device__ void load(const PartsPlan& plan, std::int64_t row, int begin, int end) {
    const std::int64_t last = row * plan.most_chunks + end - 1;
    const float* const from = plan.out + last * Shape::kVDim + threadIdx.x;
    const int lane = threadIdx.x % kWarp, count = end - begin;
#pragma unroll
    for (int i = 0; i < kWarp; ++i) out[i] = i < count ? from[-i * Shape::kVDim] : 0.0f;
    const float2 state = lane < count ? plan.states[last - lane] : float2{-INFINITY, 0.0f};
    maximum = state.x, sum = state.y;
  }
};

template <class Shape, class T>
__global__ void __launch_bounds__(Shape::kVDim)
    merge_parts_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ PartsPlan plan) {
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();
  const unsigned head = blockIdx.x / plan.rows, column = threadIdx.x;
  const int lane = threadIdx.x % kWarp, i = static_cast<int>(blockIdx.x - head * plan.rows);
  TileRecord tile{};
  tile.b = static_cast<int>(head / plan.heads_q), tile.h = static_cast<int>(head % plan.heads_q);
  tile.g = tile.h / plan.group;
  tile.range = KeyRange(p, tile.b);
  if (i >= tile.range.q_len) return;
  const int first = tile.range.first(i), last = tile.range.last(i);
  constexpr int kChunk = Shape::kChunkBlocks * Shape::kBlockN;
  const int begin = first / kChunk;
  float out = kEmptyTotal;
  RunningRows rows;  // the first one
  rows.clear();
  PartBatch<Shape> next;
  int end = last > first ? (last - 1) / kChunk + 1 : begin;
  if (end > begin) next.load(plan, blockIdx.x, begin, end);
#pragma unroll 1
  for (; end > begin; end -= kWarp) {
    const PartBatch<Shape> batch = next;
    if (end - kWarp > begin) next.load(plan, blockIdx.x, begin, end - kWarp);
    // A lane works out the factors of its chunk, from the maximum of the chunks before.
    float after = batch.maximum;
#pragma unroll
    for (int x = 1; x < kWarp; x *= 2) {
      const float other = __shfl_up_sync(kFullMask, after, x);
      if (lane >= x) after = fmaxf(after, other);
    }
    after = fmaxf(after, rows.maximum[0]);
    float before = __shfl_up_sync(kFullMask, after, 1);
    if (lane == 0) before = rows.maximum[0];
    const Fold own(before, after, batch.maximum, batch.sum, plan.scale_log2);
#pragma unroll
    for (int c = 0; c < kWarp; ++c) {
      Fold fold = own;
      fold.of_total = __shfl_sync(kFullMask, own.of_total, c);
      fold.of_part = __shfl_sync(kFullMask, own.of_part, c);
      const float sum = __shfl_sync(kFullMask, batch.sum, c);
      fold.seen = !(sum == 0.0f);
      out = fold(out, batch.out[c]);
      rows.sum[0] = fold(rows.sum[0], sum);
    }
    rows.maximum[0] = __shfl_sync(kFullMask, after, kWarp - 1);
  }
  float factor = rows.sum[0] == 0.0f ? 0.0f : ptx::reciprocal_approx(rows.sum[0]);
  if (p.lse || p.sinks) {
    const float lse = lse_of_row(p, tile, rows.maximum[0], false, rows.sum[0], &factor);
    if (p.lse && threadIdx.x == 0) p.lse[p.lse_offset(tile.b, tile.h, i)] = lse;
  }
  if (column < p.head_dim_v)
    static_cast<T*>(p.out)[p.out_offset(tile.b, tile.h, i) + column] = from_float<T>(out * factor);
  const float zero = out * 0.0f;
  if (__syncthreads_or(zero != zero) && threadIdx.x < kWarp) redo_row<Shape, T>(p, tile, i);
}

}  // namespace flashkernel::cuda::sm90a
