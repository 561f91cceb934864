// linear for calls with few output tiles and a long k, on 9.0. The blocks of a cluster share one output tile: each
// block multiplies its own part of k. Then the blocks exchange their partial sums through distributed shared memory,
// and each block finishes a share of the tile's columns (sum.cuh). A block has two consumer warpgroups, which multiply,
// and one producer warp, which loads. Called by linear/tiles/sm90a/gemm.cuh; bf16.cu and f16.cu have the instances.
//
// Shared memory has a place for received sums ("mail") beside the ring of operands. So a block may send its sums while
// another block still multiplies. A block may exit when all of its mail has arrived: from then on no other block writes
// to its shared memory.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/linear/tiles/sm90a/gemm.hpp"
#include "cuda/linear/cluster_k/sm90a/sum.cuh"
#include "cuda/linear/tiles/sm90a/launch.cuh"
#include "cuda/linear/tiles/sm90a/products.cuh"

namespace flashkernel::cuda::sm90a {

template <int kTileN, int kParts>
using ClusterShape = GemmShape<kTileN, GemmWay::kCooperative, kParts>;

/// A column's bias as it lies in memory: asked for before the products, converted after them.
struct RawBias {
  std::uint32_t bits = 0;
  __device__ RawBias(const TypedPointer& bias, int column, int columns) {
    if (!bias || column >= columns) return;
    bits = bias.dtype == DType::kFloat32 ? static_cast<const std::uint32_t*>(bias.data)[column]
                                         : static_cast<const std::uint16_t*>(bias.data)[column];
  }
  __device__ float value(const TypedPointer& bias) const { return bias ? load_typed(&bits, bias.dtype, 0) : 0.0f; }
};

/// This block's share of one tile, from its own sums on. kActivates: see linear/tiles/sm90a/gemm.hpp.
template <class T, class Shape, bool kActivates>
__device__ inline void finish_share(const GemmArguments& p, const Sums<Shape>& sum, char* shared, int group, int rank,
                                    const RawBias& raw) {
  using Storage = SharedStorage<Shape>;
  const int thread = threadIdx.x % 128, mail = Storage::kMail + (group * 128 + thread) * 16;
  const std::uint32_t base = ptx::shared_address(shared), full = base + Storage::kMailFull + 8 * group;
  send_shares<Shape>(sum, base + mail, full, rank);
  float* const bias = reinterpret_cast<float*>(shared + Storage::kBias) + group * Shape::kTileN;
  if (thread < Shape::kTileN) bias[thread] = raw.value(p.epilogue.bias);
  float x[Shape::kMostChunks][4] = {};
  receive_share<Shape>(sum, shared + mail, full, rank, x);
  ptx::barrier_sync(1 + group, 128);  // the bias is there
  const int first = 8 * Shares<Shape>::begin(rank), count = Shares<Shape>::count(rank);
#pragma unroll
  for (int i = 0; i < Shape::kMostChunks; ++i) {
    if (i >= count) continue;
    const float2 b = *reinterpret_cast<const float2*>(bias + first + 8 * i + thread % 4 * 2);
    x[i][0] += b.x, x[i][1] += b.y, x[i][2] += b.x, x[i][3] += b.y;
  }
  const TileIndex tile = tile_of<Shape>(p, static_cast<int>(blockIdx.x));
  const TileSpan rows = rows_of<Shape>(p, tile).from(group * 64 + thread / 32 * 16);
  const TileSpan columns = columns_of<Shape>(p, tile).from(first);
  if constexpr (kActivates) {
    with_activation(p.epilogue.activation,
                    [&](auto activation) { store_share<T, decltype(activation)::value>(p, x, count, rows, columns); });
  } else {
    store_share<T, Activation::kNone>(p, x, count, rows, columns);
  }
}

template <class T, class Shape, bool kKMajorA, bool kKMajorB>
__device__ inline void consume_part(const GemmArguments& p, char* shared, int group, int index, int rank) {
  const int thread = threadIdx.x % 128, first_column = columns_of<Shape>(p, tile_of<Shape>(p, index)).first;
  const RawBias raw(p.epilogue.bias, thread < Shape::kTileN ? first_column + thread : p.n, p.n);
  const int num_k = k_tiles_of<Shape>(p, index).count;
  const int behind_at = group == 1 ? max(num_k - Shape::kBehind, 0) : -1;
  Sums<Shape> sum;
  multiply<T, Shape, kKMajorA, kKMajorB>(sum, ptx::shared_address(shared), group * 8192, 0, num_k, behind_at, [&] {
    if (group == 0) ptx::barrier_arrive(kTurn, 256);
  });
  __syncwarp();
  ptx::cluster_wait();  // all blocks are there, and their mail's barriers
  finish_share<T, Shape, kKMajorA>(p, sum, shared, group, rank, raw);
}

/// One thread, before the block's turn: barriers, and the part's first weights asked for, to L2 only, so that what the
/// kernels before may still write to them is seen.
template <class Shape, bool kKMajorB>
__device__ inline void prepare_part(const GemmArguments& p, std::uint32_t base, int index, int rank) {
  using Storage = SharedStorage<Shape>;
  constexpr int kAhead = 2;  // k-tiles
  ptx::tma_prefetch_map(&p.a);
  ptx::tma_prefetch_map(&p.b);
  for (int s = 0; s < Shape::kStages; ++s) {
    ptx::mbarrier_init(base + Storage::kFull + 8 * s, 1);
    ptx::mbarrier_init(base + Storage::kEmpty + 8 * s, Shape::kConsumers);
  }
  const int bytes = (Shape::kCluster - 1) * Shares<Shape>::count(rank) * Shape::kChunkBytes / Shape::kConsumers;
  for (int group = 0; group < Shape::kConsumers; ++group) {
    ptx::mbarrier_init(base + Storage::kMailFull + 8 * group, 1);
    ptx::mbarrier_arrive_expect(base + Storage::kMailFull + 8 * group, static_cast<std::uint32_t>(bytes));
  }
  ptx::fence_mbarrier_init();
  if constexpr (kKMajorB) {
    const int n = columns_of<Shape>(p, tile_of<Shape>(p, index)).first;
    const KTiles tiles = k_tiles_of<Shape>(p, index);
    for (int kt = 0; kt < min(tiles.count, kAhead); ++kt)
      ptx::tma_prefetch(&p.b, p.policy_b, (tiles.first + kt) * Shape::kTileK, n);
  }
}

template <class T, class Shape, bool kKMajorA, bool kKMajorB>
__global__ void __launch_bounds__(Shape::kThreads, 1) gemm_cluster_kernel(const __grid_constant__ GemmArguments p) {
  extern __shared__ __align__(1024) char shared[];
  constexpr int kProducer = 128 * Shape::kConsumers;  // its first thread
  const std::uint32_t base = ptx::shared_address(shared);
  const int index = static_cast<int>(blockIdx.x), rank = part_of<Shape>(p, index);
  if (threadIdx.x == kProducer) prepare_part<Shape, kKMajorB>(p, base, index, rank);
  __syncwarp();
  ptx::cluster_arrive_relaxed();
  __syncthreads();
  if (threadIdx.x < kProducer) {
    ptx::wait_for_previous_kernel();
    consume_part<T, Shape, kKMajorA, kKMajorB>(p, shared, static_cast<int>(threadIdx.x) / 128, index, rank);
  } else {
    if (threadIdx.x == kProducer) {
      produce<T, Shape, kKMajorA, kKMajorB>(p, base, index, static_cast<int>(gridDim.x));
      ptx::allow_next_kernel();  // not before: its blocks would stand in the way of the loads
    }
    __syncwarp();
    ptx::cluster_wait();
  }
}

template <class T, class Shape>
void launch_cluster(const char* name, const GemmProblem& p, cudaStream_t stream) {
  const GemmArguments arguments = gemm_arguments<T, Shape>(name, p);
  LaunchShape shape{static_cast<unsigned>(arguments.tiles), Shape::kThreads, Shape::kSharedBytes, stream};
  shape.cluster = Shape::kCluster;
  shape.early = true;
  with_layouts<Shape>(p, [&](auto k_major_a, auto k_major_b) {
    launch(name, gemm_cluster_kernel<T, Shape, decltype(k_major_a)::value, decltype(k_major_b)::value>, shape,
           arguments);
  });
}

/// f(an integral_constant of `parts`), one of kClusterParts.
template <class F>
void with_cluster_parts(int parts, F&& f) {
  switch (parts) {
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    case 4: return f(std::integral_constant<int, 4>{});
    case 5: return f(std::integral_constant<int, 5>{});
    case 6: return f(std::integral_constant<int, 6>{});
    case 8: return f(std::integral_constant<int, 8>{});
  }
}

template <class T>
void gemm_in_clusters(const char* name, const GemmProblem& p, GemmVariant variant, cudaStream_t stream) {
  with_cluster_parts(p.parts, [&](auto parts) {
    constexpr int kParts = decltype(parts)::value;
    if (variant == GemmVariant::kCluster96) return launch_cluster<T, ClusterShape<96, kParts>>(name, p, stream);
    launch_cluster<T, ClusterShape<128, kParts>>(name, p, stream);
  });
}

}  // namespace flashkernel::cuda::sm90a
