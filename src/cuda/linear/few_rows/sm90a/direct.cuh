// linear for up to 8 rows and weights of a few MB (decode of small layers) on 9.0, without a ring. The time of such a
// call is a chain of latencies: the launch, the weights, the products, the sums, the results. So the chain is kept
// short. Each lane loads weights and rows of x from global memory directly into the fragments of mma.sync, 16 bytes at
// a time. All loads of a block are issued at once. Before the kernel in front has ended, the block has asked for its
// weights to be brought to the L2 cache. The warps of a block split k, and their sums are added in shared memory in the
// order of the warps. No ring, no copy barrier and no cluster is needed. Called by linear/tiles/sm90a/linear.cu.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/linear/few_rows/sm90a/few_rows.hpp"

namespace flashkernel::cuda::sm90a {

/// 8 kTiles features a block, of which each warp takes every kWarps-th chunk of 32 k, kChunks of them at most. Within a
/// chunk lane l holds k 8 (l%4) .. + 7 of feature (or row) l/4: an order of k that both operands share. x is the left
/// operand (its rows 8 to 15 are zero), the weights are the right one.
template <class T, int kWarps, int kTiles, int kChunks>
__global__ void __launch_bounds__(32 * kWarps, kWarps <= 8 ? 2 : 1)
    few_rows_direct_kernel(const __grid_constant__ FewRowsPlainArguments p) {
  constexpr int kFeatures = 8 * kTiles, kThreads = 32 * kWarps, kStep = kWarps * kFewRowsChunk;
  __shared__ float partial[kWarps][kDirectMostRows][kFeatures];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32, group = lane / 4;
  const int first = static_cast<int>(blockIdx.x) * kFeatures, features = min(kFeatures, p.features - first);
  const auto weight_of = [&](int feature) {
    return static_cast<const T*>(p.weight) + static_cast<std::int64_t>(first + feature) * p.stride_weight;
  };

  // Features and rows beyond the last one repeat it: their sums are not stored.
  const int offset = kFewRowsChunk * warp + lane % 4 * 8;
  const T* weight[kTiles];
#pragma unroll
  for (int f = 0; f < kTiles; ++f) {
    weight[f] = weight_of(min(8 * f + group, features - 1)) + offset;
    ptx::settle(weight[f]);
  }
  const T* x = static_cast<const T*>(p.x) + min(group, p.rows - 1) * p.stride_x + offset;
  ptx::settle(x);
  // Hints change no value, so the kernels before may still be writing what they name.
  if (thread < features) ptx::bulk_prefetch(weight_of(thread), static_cast<std::uint32_t>(p.k) * sizeof(T));
  if (p.epilogue.bias && thread == kThreads - 1)
    ptx::prefetch_l2(static_cast<const char*>(p.epilogue.bias.data) + first * dtype_bytes(p.epilogue.bias.dtype));
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();  // it asks for its weights while this one computes

  uint4 w[kChunks][kTiles], v[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const bool inside = kFewRowsChunk * warp + i * kStep < p.k;
#pragma unroll
    for (int f = 0; f < kTiles; ++f)
      w[i][f] = inside ? ptx::load_16_once(weight[f] + i * kStep) : make_uint4(0, 0, 0, 0);
    v[i] = inside && group < p.rows ? ptx::load_16_once(x + i * kStep) : make_uint4(0, 0, 0, 0);
  }
  // A thread finishes one feature of some rows; its bias comes behind the weights.
  constexpr int kRowsAtOnce = kThreads / kFeatures;
  const int feature = thread % kFeatures;
  const float bias = bias_of(p.epilogue.bias, first + feature, p.features);

  float sum[kTiles][4] = {};
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const std::uint32_t low[4] = {v[i].x, 0, v[i].y, 0}, high[4] = {v[i].z, 0, v[i].w, 0};
#pragma unroll
    for (int f = 0; f < kTiles; ++f) {
      ptx::mma_m16n8k16<T>(sum[f], low, w[i][f].x, w[i][f].y);
      ptx::mma_m16n8k16<T>(sum[f], high, w[i][f].z, w[i][f].w);
    }
  }
  if (group < p.rows) {
#pragma unroll
    for (int f = 0; f < kTiles; ++f)
#pragma unroll
      for (int e = 0; e < 2; ++e) partial[warp][group][8 * f + lane % 4 * 2 + e] = sum[f][e];
  }
  __syncthreads();

  if (feature >= features || thread >= kRowsAtOnce * kFeatures) return;
#pragma unroll 1
  for (int row = thread / kFeatures; row < p.rows; row += kRowsAtOnce) {
    float total = bias;
#pragma unroll
    for (int from = 0; from < kWarps; ++from) total += partial[from][row][feature];
    finish_element<T>(p.epilogue, row, first + feature, total);
  }
}

template <class T>
void few_rows(const FewRowsProblem& p, const FewRowsDirectPlan& plan, cudaStream_t stream) {
  const FewRowsPlainArguments arguments(p);
  const auto run = [&](auto num_warps, auto num_tiles, auto num_chunks) {
    constexpr int kWarps = decltype(num_warps)::value, kTiles = decltype(num_tiles)::value;
    LaunchShape shape{static_cast<unsigned>(ceil_div(p.features, 8 * kTiles)), 32 * kWarps, 0, stream};
    shape.early = true;
    launch("linear: few rows", few_rows_direct_kernel<T, kWarps, kTiles, decltype(num_chunks)::value>, shape,
           arguments);
  };
  const std::integral_constant<int, 3> three;
  const std::integral_constant<int, 4> four;
  const std::integral_constant<int, 8> eight;
  const std::integral_constant<int, 12> twelve;
  if (plan.tiles == 3) return plan.chunks <= 3 ? run(eight, three, three) : run(eight, three, four);
  const std::integral_constant<int, 2> two;
  if (plan.tiles == 2) return plan.chunks <= 4 ? run(eight, two, four) : run(eight, two, eight);
  const std::integral_constant<int, 1> one;
  if (plan.chunks > 12) return run(std::integral_constant<int, 16>{}, one, eight);
  plan.chunks <= 4 ? run(eight, one, four) : run(eight, one, twelve);
}

}  // namespace flashkernel::cuda::sm90a
