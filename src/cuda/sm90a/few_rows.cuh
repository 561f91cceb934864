// linear for up to 64 rows (decode) on 9.0: bound by reading the weights, once, at the speed of memory. The weights are
// the left operand of wgmma (64 features a block), the rows of x the right one (8 to 64 columns); one warp
// streams both by TMA into a ring deep enough to hide the memory's latency, one warpgroup multiplies. A cluster of
// blocks shares the features of a tile and splits k; the parts meet through distributed shared memory and are added in
// the order of k. Called by linear.cu.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90a/few_rows.hpp"
#include "cuda/sm90a/operand_map.hpp"

namespace flashkernel::cuda::sm90a {

/// kRows columns of x (8, 16, 32, 64) and 64 features.
template <int kRows_>
struct FewRowsShape {
  static constexpr int kParts = 1;  // of 64 features; 2 and 4 read x less often, and were not faster
  static constexpr int kRows = kRows_, kFeatures = 64 * kParts, kTileK = 64;
  static constexpr int kThreads = 160;  // one warpgroup multiplies, one warp loads
  static constexpr int kBytesWeight = kFeatures * kTileK * 2, kBytesX = kRows * kTileK * 2;
  static constexpr int kStageBytes = kBytesWeight + kBytesX;  // multiples of 1024
  static constexpr int kBlocksPerSm = 2;
  static constexpr int kStages =
      (227 / kBlocksPerSm - 2) * 1024 / kStageBytes < 16 ? (227 / kBlocksPerSm - 2) * 1024 / kStageBytes : 16;
  static constexpr int kPitch = kFeatures + 4;  // of the parts, floats: a fragment's lanes hit all banks
  static constexpr int kPartBytes = kRows * kPitch * 4;
  static constexpr int kBarriers = kStages * kStageBytes > kPartBytes ? kStages* kStageBytes : kPartBytes;
  static constexpr int kSharedBytes = kBarriers + 16 * kStages;
};

struct FewRowsArguments {
  CUtensorMap weight, x;
  LinearEpilogue epilogue;
  int rows, features, num_k;  // num_k: k-tiles
  int splits;                 // blocks of a cluster
};

inline constexpr int kMostSplits = 8;  // the largest portable cluster

template <class T, class Shape, bool kAlongIn>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    few_rows_kernel(const __grid_constant__ FewRowsArguments p) {
  extern __shared__ __align__(1024) char shared[];
  const std::uint32_t base = ptx::shared_address(shared);
  const auto full = [&](int slot) { return base + Shape::kBarriers + 8 * slot; };
  const auto empty = [&](int slot) { return base + Shape::kBarriers + 8 * (Shape::kStages + slot); };
  const int rank = static_cast<int>(blockIdx.x) % p.splits;
  const int first_feature = static_cast<int>(blockIdx.x) / p.splits * Shape::kFeatures;
  const int first = rank * p.num_k / p.splits, count = (rank + 1) * p.num_k / p.splits - first;  // k-tiles
  if (threadIdx.x == 128) {
    ptx::tma_prefetch_map(&p.weight);
    ptx::tma_prefetch_map(&p.x);
    for (int s = 0; s < Shape::kStages; ++s) {
      ptx::mbarrier_init(full(s), 1);
      ptx::mbarrier_init(empty(s), 1);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::wait_for_previous_kernel();
  __syncthreads();

  // This block finishes `share` features; a thread of the warpgroup four neighbours, for some of the rows.
  const int share = Shape::kFeatures / p.splits, across = share / 4;  // 2 to 64: divides 128
  const int mine = rank * share + static_cast<int>(threadIdx.x) % across * 4, feature = first_feature + mine;
  float bias[4];

  if (threadIdx.x >= 128) {
    if (threadIdx.x == 128) {
      const std::uint64_t once = ptx::l2_evict_first(), shared_by_all = ptx::l2_evict_last();
      for (int t = 0; t < count; ++t) {
        const int slot = t % Shape::kStages, k = (first + t) * Shape::kTileK;
        const std::uint32_t weight = base + slot * Shape::kStageBytes, x = weight + Shape::kBytesWeight;
        ptx::mbarrier_wait(empty(slot), t / Shape::kStages % 2 ^ 1);
        ptx::mbarrier_arrive_expect(full(slot), Shape::kStageBytes);
        if constexpr (kAlongIn) {
          ptx::tma_load(weight, &p.weight, full(slot), once, k, first_feature);
        } else {
#pragma unroll
          for (int i = 0; i < Shape::kParts; ++i)
            ptx::tma_load(weight + i * 8192, &p.weight, full(slot), once, first_feature + 64 * i, k);
        }
        ptx::tma_load(x, &p.x, full(slot), shared_by_all, k, 0);
      }
      ptx::allow_next_kernel();  // not before: its blocks would stand in the way of the weights
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) bias[i] = bias_of(p.epilogue.bias, feature + i, p.features);
    float sum[Shape::kParts][Shape::kRows / 2];
    for (int t = 0; t < count; ++t) {
      const int slot = t % Shape::kStages;
      const std::uint32_t weight = base + slot * Shape::kStageBytes;
      ptx::mbarrier_wait(full(slot), t / Shape::kStages % 2);
      const std::uint64_t a = ptx::matrix_descriptor(weight, 8192, 1024);
      const std::uint64_t b = ptx::matrix_descriptor(weight + Shape::kBytesWeight, 8192, 1024);
#pragma unroll
      for (int i = 0; i < Shape::kParts; ++i) ptx::hold(sum[i]);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < Shape::kTileK / 16; ++step)
#pragma unroll
        for (int i = 0; i < Shape::kParts; ++i)
          ptx::wgmma_ss<T, !kAlongIn, false>(sum[i], a + i * (8192 / 16) + step * (kAlongIn ? 2 : 128), b + step * 2,
                                             t > 0 || step > 0);
      ptx::wgmma_commit();
#pragma unroll
      for (int i = 0; i < Shape::kParts; ++i) ptx::hold(sum[i]);
      ptx::wgmma_wait<1>();
      if (threadIdx.x == 0 && t > 0) ptx::mbarrier_arrive(empty((t - 1) % Shape::kStages));
    }
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < Shape::kParts; ++i) ptx::hold(sum[i]);
    ptx::barrier_sync(1, 128);  // the ring is read: this block's part takes its place, [row of x][feature]
    float* const part = reinterpret_cast<float*>(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < Shape::kParts; ++i)
#pragma unroll
      for (int c = 0; c < Shape::kRows / 8; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          part[(8 * c + lane % 4 * 2 + e % 2) * Shape::kPitch + 64 * i + 16 * warp + lane / 4 + e / 2 * 8] =
              sum[i][4 * c + e];
  }
  if (p.splits > 1) {
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }
  if (threadIdx.x < 128 && feature < p.features) {
#pragma unroll 2
    for (int row = static_cast<int>(threadIdx.x) / across; row < p.rows; row += 128 / across) {
      const std::uint32_t at = base + 4 * (row * Shape::kPitch + mine);
      float4 part[kMostSplits];  // all are under way at once
#pragma unroll
      for (int other = 0; other < kMostSplits; ++other)
        if (other < p.splits) part[other] = ptx::load_cluster_4(ptx::map_shared(at, static_cast<std::uint32_t>(other)));
      float x[4] = {bias[0], bias[1], bias[2], bias[3]};
#pragma unroll
      for (int other = 0; other < kMostSplits; ++other)
        if (other < p.splits)
          x[0] += part[other].x, x[1] += part[other].y, x[2] += part[other].z, x[3] += part[other].w;
      finish_4<T>(p.epilogue, row, feature, p.features, x);
    }
  }
  if (p.splits > 1) {  // nobody leaves while another one may still read here
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
}

template <class T>
void few_rows(const FewRowsProblem& p, int splits, cudaStream_t stream) {
  const auto run = [&](auto rows, auto along_in) {
    using Shape = FewRowsShape<decltype(rows)::value>;
    constexpr bool kAlongIn = decltype(along_in)::value;
    const char* const name = "linear: few rows";
    FewRowsArguments arguments;
    arguments.weight = operand_map<T>(name, p.weight, p.features, p.k, Shape::kFeatures, Shape::kTileK);
    arguments.x = operand_map<T>(name, p.x, p.rows, p.k, Shape::kRows, Shape::kTileK);
    arguments.epilogue = p.epilogue;
    arguments.rows = static_cast<int>(p.rows);
    arguments.features = static_cast<int>(p.features);
    arguments.num_k = static_cast<int>(ceil_div(p.k, Shape::kTileK));
    arguments.splits = splits;
    LaunchShape shape{static_cast<unsigned>(ceil_div(p.features, Shape::kFeatures) * splits), Shape::kThreads,
                      Shape::kSharedBytes, stream};
    shape.cluster = static_cast<unsigned>(splits);
    shape.early = true;
    launch(name, few_rows_kernel<T, Shape, kAlongIn>, shape, arguments);
  };
  const auto with_layout = [&](auto rows) {
    if (p.weight.k_major)
      run(rows, std::true_type{});
    else
      run(rows, std::false_type{});
  };
  if (p.rows <= 8) return with_layout(std::integral_constant<int, 8>{});
  if (p.rows <= 16) return with_layout(std::integral_constant<int, 16>{});
  if (p.rows <= 32) return with_layout(std::integral_constant<int, 32>{});
  with_layout(std::integral_constant<int, 64>{});
}

}  // namespace flashkernel::cuda::sm90a
