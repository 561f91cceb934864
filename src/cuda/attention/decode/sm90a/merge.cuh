// How the parts of a row of the output are merged, finished and stored, and the kernel that merges the pieces of a
// sequence whose keys are shared by more blocks than a cluster has. Used by kernel.cuh.
// Invariant: parts are merged in their order. Therefore results are the same bit for bit.
#pragma once

#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/attention/decode/sm90a/variant.hpp"
#include "cuda/attention/score.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda::sm90a {

/// The factor that turns a row's numerators into the output; 0 where the row has seen no key. One of the row's threads
/// stores the LSE.
///
/// All threads wait for this, and nothing else runs meanwhile. Therefore sinks and the LSE, which few calls ask for,
/// stay behind branches, and the quotient is an approximation. Together that saves 0.1 of 4.0 us (8 sequences of 128
/// keys, 32/8 heads).
__device__ inline float finish_row(const AttentionParams& p, int b, std::int64_t h, float maximum_log2, float sum,
                                   bool stores_lse) {
  constexpr float kLn2 = 0.69314718055994531f;
  float factor = sum == 0.0f ? 0.0f : ptx::reciprocal_approx(sum);
  if (p.sinks || p.lse) {
    SoftmaxState state;
    state.maximum = maximum_log2 * kLn2;  // -inf stays
    state.sum = sum;
    float lse;
    const float joined = state.finish(p.sinks, h, &lse);
    if (p.sinks) factor = joined;  // the output is the same bit for bit whether an LSE is asked for or not
    if (p.lse && stores_lse) p.lse[p.lse_offset(b, h, 0)] = lse;
  }
  return factor;
}

/// Four columns of a finished row.
template <class T>
__device__ inline void store_quad(const AttentionParams& p, int b, std::int64_t h, int column, float maximum_log2,
                                  float sum, const float (&values)[4]) {
  const float factor = finish_row(p, b, h, maximum_log2, sum, column == 0);
  float scaled[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) scaled[e] = factor == 0.0f ? 0.0f : values[e] * factor;
  store_floats(static_cast<T*>(p.out) + b * p.stride_out_batch + h * p.stride_out_head + column, scaled);
}

/// Merges the parts of a quad: `state(i)` has the maximum (base 2) and the sum of part i, `values(i)` its numerators.
struct MergedQuad {
  float maximum = -INFINITY, sum = 0.0f, values[4] = {};

  template <class State, class Values>
  __device__ MergedQuad(int parts, State state, Values values_of) {
#pragma unroll 4
    for (int i = 0; i < parts; ++i) maximum = fmaxf(maximum, state(i).x);
#pragma unroll 4
    for (int i = 0; i < parts; ++i) {
      const float factor = ptx::exp2_approx(state(i).x - SoftmaxState::shift(maximum));
      const float4 part = values_of(i);
      sum = fmaf(state(i).y, factor, sum);
      values[0] = fmaf(part.x, factor, values[0]);
      values[1] = fmaf(part.y, factor, values[1]);
      values[2] = fmaf(part.z, factor, values[2]);
      values[3] = fmaf(part.w, factor, values[3]);
    }
  }
};

/// The results of pieces in global memory: first the numerators of all rows, then their maxima (base 2) and sums.
struct PieceResults {
  float4* values;
  float2* states;
  int quads;  // of a row

  __device__ PieceResults(float* workspace, const AttentionParams& p, const ClusterPlan& plan)
      : values(reinterpret_cast<float4*>(workspace)),
        states(reinterpret_cast<float2*>(workspace + p.batch * plan.pieces * p.heads_q * p.head_dim)),
        quads(static_cast<int>(p.head_dim) / 4) {}
  __device__ void put(std::int64_t row, int quad, float maximum, float sum, const float (&x)[4]) const {
    values[row * quads + quad] = float4{x[0], x[1], x[2], x[3]};
    if (quad == 0) states[row] = float2{maximum, sum};
  }
};

/// Merges the pieces of a row. Grid: query heads, sequences. Each lane has one of 32 quads.
constexpr int kMergeWarps = 4;
template <class T, int kVDim>
__global__ void __launch_bounds__(kMergeWarps* kWarp)
    attention_decode_merge_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ ClusterPlan plan,
                                  float* workspace) {
  static_assert(kVDim == 4 * kWarp, "a lane has four columns of a row");
  __shared__ float4 parts[kMergeWarps][kWarp];
  const int lane = static_cast<int>(threadIdx.x % kWarp), warp = static_cast<int>(threadIdx.x / kWarp);
  const int b = static_cast<int>(blockIdx.y);
  const auto h = static_cast<std::int64_t>(blockIdx.x);
  const PieceResults results(workspace, p, plan);
  const std::int64_t row = static_cast<std::int64_t>(b) * plan.pieces * p.heads_q + h;  // of the first piece
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();

  const float2 state = lane < plan.pieces ? results.states[row + lane * p.heads_q] : float2{-INFINITY, 0.0f};
  const int end = plan.pieces * (warp + 1) / kMergeWarps;
  float maximum = state.x;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) maximum = fmaxf(maximum, __shfl_xor_sync(kFullMask, maximum, step));
  const float factor = ptx::exp2_approx(state.x - SoftmaxState::shift(maximum));
  float sum = state.y * factor;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
  float values[4] = {};
#pragma unroll 8
  for (int i = plan.pieces * warp / kMergeWarps; i < end; ++i) {
    const float4 part = results.values[(row + i * p.heads_q) * results.quads + lane];
    const float weight = __shfl_sync(kFullMask, factor, i);
    values[0] = fmaf(part.x, weight, values[0]);
    values[1] = fmaf(part.y, weight, values[1]);
    values[2] = fmaf(part.z, weight, values[2]);
    values[3] = fmaf(part.w, weight, values[3]);
  }
  parts[warp][lane] = float4{values[0], values[1], values[2], values[3]};
  __syncthreads();
  if (warp != 0) return;
#pragma unroll
  for (int w = 1; w < kMergeWarps; ++w) {
    const float4 part = parts[w][lane];
    values[0] += part.x, values[1] += part.y, values[2] += part.z, values[3] += part.w;
  }
  store_quad<T>(p, b, h, lane * 4, maximum, sum, values);
}

}  // namespace flashkernel::cuda::sm90a
