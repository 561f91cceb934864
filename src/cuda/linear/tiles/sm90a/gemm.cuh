// The product of gemm.hpp: persistent blocks of one producer warp (TMA into a ring of k-tiles) and two consumer
// warpgroups (wgmma, sums in registers, epilogue in fp32, whole sectors by the warps themselves). Called by linear.cu.
// A cooperative tile's sums over a part of k go out in fp32; linear/split_sum.cuh adds the parts in the order of k.
// Loads and products are in products.cuh; tiles whose k is shared by a cluster in linear/cluster_k/sm90a/kernel.cuh.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/linear/tiles/sm90a/gemm.hpp"
#include "cuda/linear/tiles/sm90a/epilogue.cuh"
#include "cuda/linear/tiles/sm90a/launch.cuh"
#include "cuda/linear/tiles/sm90a/products.cuh"
#include "cuda/linear/tiles/sm90a/sender.cuh"
#include "cuda/linear/tiles/sm90a/shape.cuh"
#include "cuda/linear/tiles/sm90a/operand_map.hpp"
#include "cuda/linear/split_sum.cuh"

namespace flashkernel::cuda::sm90a {

template <class T, class Shape, bool kKMajorA, bool kKMajorB>
__device__ inline void consume(const GemmArguments& p, char* shared, int group, int first, int step) {
  using Storage = SharedStorage<Shape>;
  const std::uint32_t base = ptx::shared_address(shared);
  float* const bias = reinterpret_cast<float*>(shared + Storage::kBias) + group * Shape::kTileN;
  // Parts' sums go out without an activation, which is soon done. Blocks have one tile where they have a kBehind.
  const bool staggered = Shape::kBehind > 0 && !p.partial;
  const int behind_at = staggered && group == 1 ? max(p.num_k - Shape::kBehind, 0) : -1;
  if (Shape::kPingPong && group == 1) ptx::barrier_arrive(kTurn, 256);  // the first turn is group 0's
  for (int i = Shape::kPingPong ? group : 0, index = first + i * step; index < p.tiles;
       i += Shape::kPingPong ? 2 : 1, index = first + i * step) {
    ptx::barrier_sync(1 + group, 128);  // all have read the last tile's bias
    const int first_column = columns_of<Shape>(p, tile_of<Shape>(p, index)).first;
    for (int c = threadIdx.x % 128; c < Shape::kTileN; c += 128)
      bias[c] = bias_of(p.epilogue.bias, first_column + c, p.n);
    Sums<Shape> sum;
    if constexpr (Shape::kPingPong)
      ptx::barrier_sync(kTurn + group, 256);
    else
      ptx::barrier_sync(1 + group, 128);
    const std::uint32_t row_offset = Shape::kPingPong ? 0 : group * 8192;
    multiply<T, Shape, kKMajorA, kKMajorB>(sum, base, row_offset, i * p.num_k, p.num_k, behind_at, [&] {
      if (Shape::kPingPong) ptx::barrier_arrive(kTurn + 1 - group, 256);
      if (staggered && group == 0) ptx::barrier_arrive(kTurn, 256);
    });
    // Worked out again, so that it takes no registers beside the sums.
    std::uint32_t again = static_cast<std::uint32_t>(first + i * step);
    ptx::hold(again);
    const TileIndex tile = tile_of<Shape>(p, static_cast<int>(again));
    if constexpr (Shape::kParts) {
      if (p.partial) {
        store_part<Shape>(p, sum, part_of<Shape>(p, static_cast<int>(again)), group, tile);
        continue;
      }
    }
    if constexpr (kKMajorA) {
      with_activation(p.epilogue.activation, [&](auto activation) {
        constexpr Activation kActivation = decltype(activation)::value;
        store<T, Shape, kActivation>(p, sum, shared, group, tile);
      });
    } else {  // a gradient: see gemm.hpp
      store<T, Shape, Activation::kNone>(p, sum, shared, group, tile);
    }
  }
}

/// This block's tile i, number `index` of all, and its bias in shared memory.
template <class T, class Shape>
struct FinishedTile {
  TileIndex tile;
  const T* bias;
  __device__ FinishedTile(const GemmArguments& p, char* shared, int index, int i)
      : tile(tile_of<Shape>(p, again(index))),
        bias(reinterpret_cast<const T*>(shared + SharedStorage<Shape>::kBias +
                                        i % Shape::kBiasPlaces * Shape::kBiasBytes)) {}

 private:
  // Worked out here, so that it takes no registers beside the sums.
  __device__ static int again(int index) {
    auto value = static_cast<std::uint32_t>(index);
    ptx::hold(value);
    return static_cast<int>(value);
  }
};

/// Pre-activation and result by `store`, which gets the activation and a NeighboursPlace.
template <class T, class Shape, class Store>
__device__ inline void finish_neighbours(const GemmArguments& p, const FinishedTile<T, Shape>& of, Store store) {
  const LinearEpilogue& e = p.epilogue;
  if (e.preactivation)
    store(std::integral_constant<Activation, Activation::kNone>{},
          NeighboursPlace<T, Shape>(p, of.tile, of.bias, e.preactivation, e.stride_preactivation));
  with_activation(e.activation, [&](auto activation) {
    store(activation, NeighboursPlace<T, Shape>(p, of.tile, of.bias, e.out, e.stride_out));
  });
}

/// finish(activation, sender), where results leave by the copy engine; else says that they don't.
template <class T, class Shape, class Finish>
__device__ inline bool by_sender(const GemmArguments& p, const FinishedTile<T, Shape>& of, char* shared, int group,
                                 Finish finish) {
  if constexpr (Shape::kSends) {
    if (!p.sends) return false;
    with_activation(p.epilogue.activation, [&](auto activation) {
      if constexpr (sends(decltype(activation)::value))
        finish(activation, PieceSender<T, Shape>(p, of.tile, of.bias, shared, group));
    });
    return true;
  }
  return false;
}

/// A tile's results, or those of the left half of a block's last one.
template <class T, class Shape>
__device__ inline void finish_own(const GemmArguments& p, const FinishedTile<T, Shape>& of, const Sums<Shape>& sum,
                                  char* shared, int group, bool last) {
  const bool sent = by_sender<T, Shape>(p, of, shared, group, [&](auto activation, const auto& sender) {
    send_groups<T, Shape, decltype(activation)::value>(sender, sum, last);
  });
  if (sent) return;
  finish_neighbours<T, Shape>(p, of, [&](auto activation, const NeighboursPlace<T, Shape>& place) {
    store_groups<T, Shape, decltype(activation)::value>(place, sum, last);
  });
}

/// Finishes the right half of the other warpgroup's last tile.
template <class T, class Shape>
__device__ inline void finish_given(const GemmArguments& p, const FinishedTile<T, Shape>& of, char* shared, int group) {
  const bool sent = by_sender<T, Shape>(p, of, shared, group, [&](auto activation, const auto& sender) {
    send_right_half<T, Shape, decltype(activation)::value>(sender, shared);
  });
  if (sent) return;
  finish_neighbours<T, Shape>(p, of, [&](auto activation, const NeighboursPlace<T, Shape>& place) {
    store_right_half<T, Shape, decltype(activation)::value>(place, shared);
  });
}

/// Ping-pong with neighbours. Each warpgroup finishes one half of the block's last tile: the other one has none left.
template <class T, class Shape>
__device__ inline void consume_neighbours(const GemmArguments& p, char* shared, int group, int first, int step) {
  using Storage = SharedStorage<Shape>;
  const std::uint32_t base = ptx::shared_address(shared);
  if (group == 1) ptx::barrier_arrive(kTurn, 256);  // the first turn is group 0's
  int i = group;
  for (; first + i * step < p.tiles; i += 2) {
    Sums<Shape> sum;
    ptx::barrier_sync(kTurn + group, 256);
    multiply<T, Shape, true, true>(sum, base, 0, i * p.num_k, p.num_k, -1,
                                   [&] { ptx::barrier_arrive(kTurn + 1 - group, 256); });
    const bool last = first + (i + 1) * step >= p.tiles;
    if (last) {  // its k-tiles have passed through every slot of the ring
      give_right_half<Shape>(sum, shared);
      ptx::mbarrier_arrive(base + Storage::kHanded);
    }
    finish_own<T, Shape>(p, {p, shared, first + i * step, i}, sum, shared, group, last);
    ptx::mbarrier_arrive(base + Storage::kBiasRead + 8 * (i % Shape::kBiasPlaces));
  }
  if (first + (i - 1) * step < p.tiles) {  // the last tile was the other one's
    ptx::mbarrier_wait(base + Storage::kHanded, 0);
    finish_given<T, Shape>(p, {p, shared, first + (i - 1) * step, i - 1}, shared, group);
  }
  if constexpr (Shape::kSends) wait_for_sent();
}

template <class T, class Shape, bool kKMajorA, bool kKMajorB>
__global__ void __launch_bounds__(Shape::kThreads, 1) gemm_kernel(const __grid_constant__ GemmArguments p) {
  using Storage = SharedStorage<Shape>;
  extern __shared__ __align__(1024) char shared[];
  const std::uint32_t base = ptx::shared_address(shared);
  if (threadIdx.x == 0) {
    ptx::tma_prefetch_map(&p.a);
    ptx::tma_prefetch_map(&p.b);
    if constexpr (Shape::kRest > 0) ptx::tma_prefetch_map(&p.b_rest);
    for (int s = 0; s < Shape::kStages; ++s) {
      ptx::mbarrier_init(base + Storage::kFull + 8 * s, 1);
      ptx::mbarrier_init(base + Storage::kEmpty + 8 * s, Shape::kPingPong ? 1 : 2);
    }
    if constexpr (Shape::kNeighbours) {
      for (int i = 0; i < Shape::kBiasPlaces; ++i) ptx::mbarrier_init(base + Storage::kBiasRead + 8 * i, 128);
      ptx::mbarrier_init(base + Storage::kHanded, 128);
    }
    ptx::fence_mbarrier_init();
  }
  if constexpr (Shape::kNeighbours) {
    if (!p.epilogue.bias && threadIdx.x < Shape::kBiasPlaces * Shape::kBiasBytes / 4)
      reinterpret_cast<float*>(shared + Storage::kBias)[threadIdx.x] = 0.0f;
  }
  __syncthreads();
  const int first = static_cast<int>(blockIdx.x);
  const int step = static_cast<int>(gridDim.x);
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    ptx::decrease_registers<Shape::kProducerRegisters>();
    if (threadIdx.x == 0) {
      produce<T, Shape, kKMajorA, kKMajorB>(p, base, first, step);
      ptx::allow_next_kernel();  // not before: its blocks would stand in the way of the loads
    }
  } else {
    ptx::increase_registers<Shape::kConsumerRegisters>();
    ptx::wait_for_previous_kernel();
    if constexpr (Shape::kNeighbours)
      consume_neighbours<T, Shape>(p, shared, group - 1, first, step);
    else
      consume<T, Shape, kKMajorA, kKMajorB>(p, shared, group - 1, first, step);
  }
}

template <class T, class Shape>
void launch_gemm(const char* name, const GemmProblem& p, int num_sms, cudaStream_t stream) {
  GemmArguments arguments = gemm_arguments<T, Shape>(name, p);
  if constexpr (Shape::kSends) {
    const TensorMapSpec results = results_map<T>(p);
    arguments.sends = sends_results(p, ceil_div(arguments.tiles, num_sms)) && fits_tensor_map(results);
    if (arguments.sends) arguments.out = make_tensor_map(name, results);
  }
  const auto blocks = static_cast<unsigned>(std::min(arguments.tiles, num_sms));
  LaunchShape shape{blocks, Shape::kThreads, Shape::kSharedBytes, stream};
  shape.early = true;
  with_layouts<Shape>(p, [&](auto k_major_a, auto k_major_b) {
    launch(name, gemm_kernel<T, Shape, decltype(k_major_a)::value, decltype(k_major_b)::value>, shape, arguments);
  });
  if (arguments.partial)
    launch(name, split_sum::kernel<T>, {split_sum::grid(p.m, p.n), split_sum::kThreads, 0, stream}, p.epilogue,
           p.partial, p.parts, arguments.m, arguments.n, p.n);
}

template <class T, int kTileN>
void launch_ping_pong(const char* name, const GemmProblem& p, int num_sms, cudaStream_t stream) {
  using Neighbours = GemmShape<kTileN, GemmWay::kPingPongNeighbours>;
  constexpr bool kAnyWay = kTileN == 128 || kTileN == 192;  // other widths are made for neighbours alone
  const LinearEpilogue& e = p.epilogue;
  // Places in the results are multiples of 32-bit strides.
  const bool strides_fit = std::max(e.stride_out, e.stride_preactivation) < (std::int64_t{1} << 32);
  if (p.a.k_major && p.b.k_major && p.n >= kTileN && bulk_bias(e, dtype_of<T>) && strides_fit &&
      ceil_div(p.k, Neighbours::kTileK) >= Neighbours::kStages &&
      fits_tensor_map(interleaved_rows<T>(p.b, p.n, p.k, Neighbours::kGroups)))
    launch_gemm<T, Neighbours>(name, p, num_sms, stream);
  else
    launch_gemm<T, GemmShape<kAnyWay ? kTileN : 128, GemmWay::kPingPong>>(name, p, num_sms, stream);
}

template <class T, int kTileN>
void launch_cooperative(const char* name, const GemmProblem& p, int num_sms, cudaStream_t stream) {
  launch_gemm<T, GemmShape<kTileN, GemmWay::kCooperative>>(name, p, num_sms, stream);
}

template <class T>
void gemm(const char* name, const GemmProblem& p, GemmVariant variant, int num_sms, cudaStream_t stream) {
  switch (variant) {
    case GemmVariant::kPingPong192: return launch_ping_pong<T, 192>(name, p, num_sms, stream);
    case GemmVariant::kPingPong176: return launch_ping_pong<T, 176>(name, p, num_sms, stream);
    case GemmVariant::kPingPong168: return launch_ping_pong<T, 168>(name, p, num_sms, stream);
    case GemmVariant::kPingPong160: return launch_ping_pong<T, 160>(name, p, num_sms, stream);
    case GemmVariant::kPingPong144: return launch_ping_pong<T, 144>(name, p, num_sms, stream);
    case GemmVariant::kPingPong128: return launch_ping_pong<T, 128>(name, p, num_sms, stream);
    case GemmVariant::kPingPong112: return launch_ping_pong<T, 112>(name, p, num_sms, stream);
    case GemmVariant::kPingPong80: return launch_ping_pong<T, 80>(name, p, num_sms, stream);
    case GemmVariant::kPingPong64: return launch_ping_pong<T, 64>(name, p, num_sms, stream);
    case GemmVariant::kCooperative128: return launch_cooperative<T, 128>(name, p, num_sms, stream);
    case GemmVariant::kCooperative96: return launch_cooperative<T, 96>(name, p, num_sms, stream);
    case GemmVariant::kCluster128:
    case GemmVariant::kCluster96: return gemm_in_clusters<T>(name, p, variant, stream);
  }
}

}  // namespace flashkernel::cuda::sm90a
