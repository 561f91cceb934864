// Attention forward for Hopper: a persistent kernel on wgmma and TMA with one producer warpgroup and two to four
// consumer warpgroups. After FlashAttention-3 (Shah et al., 2024). instances/ has the files that instantiate it.
//
// A thread block takes tiles of queries, 64 rows for each consumer, until no tile is left. While the consumers finish a
// tile, the producer loads the next one. One thread of the producer finds the tiles and tells the other threads, so
// that sequence lengths are read from memory once.
//
//   tiles.cuh     which tile sizes serve which call       producer.cuh  loads Q, K and V by TMA
//   shape.cuh     where a tile lies in shared memory      consumer.cuh  both products, and the steps between them
//   order.hpp     which block takes which tile            softmax.cuh   maxima, exponentials and sums of a row
//                                                         epilogue.cuh  writes the output and the LSE
//                                                         redo.cuh      computes single rows again (see below)
//                                                         scored.cuh    bias, ALiBi and the packed mask
//                                                         sparse.cuh    block masks
//   chunks.cuh    chunks of keys, in the invariant mode   parts.cuh     their states, where thread blocks share a tile
// lab/notebooks/attention_hopper.md draws the schedule.
//
// Invariant on NaN: a masked pair has the weight 0, but if its value is NaN, the tensor core computes 0 * NaN = NaN.
// Therefore a row whose result is not finite, and that met a masked block, is computed again from the keys that it sees
// (redo_tiles).
#pragma once

#include <numeric>
#include <type_traits>

#include "cuda/host/launch.hpp"
#include "cuda/host/zeroed_memory.hpp"
#include "cuda/ptx/grid.cuh"
#include "cuda/attention/forward/sm90a/variant.hpp"
#include "cuda/attention/forward/sm90a/consumer.cuh"
#include "cuda/attention/forward/sm90a/merge_parts.cuh"
#include "cuda/attention/forward/sm90a/producer.cuh"
#include "cuda/attention/forward/sm90a/scored.cuh"
#include "cuda/attention/forward/sm90a/tiles.cuh"
#include "cuda/attention/forward/sm90a/transpose_values.cuh"

namespace flashkernel::cuda::sm90a {

/// Fills the columns of ones behind V in all slots: their product with the weights is the sum of a row.
template <class Shape, class T>
__device__ inline void fill_ones(const SharedLayout<Shape>& shared) {
  constexpr int kPieces = SharedLayout<Shape>::kOnesBytes / 16;
  const std::uint32_t ones = pack<T>(1.0f, 1.0f);
  for (int at = threadIdx.x; at < Shape::kStages * kPieces; at += Shape::kThreads)
    *static_cast<uint4*>(__cvta_shared_to_generic(shared.ones(at / kPieces) + at % kPieces * 16)) =
        uint4{ones, ones, ones, ones};
  ptx::fence_proxy_async_shared();
}

template <class Shape, class T, bool kModified>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kResident)
    attention_fwd_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ typename Shape::Plan plan,
                         const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                         const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_out) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];  // lines of the swizzle: 1024 bytes
  const SharedLayout<Shape> shared{ptx::shared_address(dynamic_shared)};
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&map_q, &map_k, &map_v, &map_out}) ptx::tma_prefetch_map(map);
    for (int slot = 0; slot < Shape::kQSlots; ++slot)
      for (int w = 0; w < Shape::kConsumers; ++w) {
        ptx::mbarrier_init(shared.q_full(slot, w), 1);
        ptx::mbarrier_init(shared.q_empty(slot, w), 128);  // each thread arrives: it has read the tile's record
      }
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      ptx::mbarrier_init(shared.k_full(stage), 1);
      ptx::mbarrier_init(shared.v_full(stage), 1);
      ptx::mbarrier_init(shared.k_empty(stage), 4 * Shape::kConsumers);
      ptx::mbarrier_init(shared.v_empty(stage), 4 * Shape::kConsumers);
    }
    for (int slot = 0; slot < shared.kRecords; ++slot) {
      ptx::mbarrier_init(shared.found_full(slot), 1);
      ptx::mbarrier_init(shared.found_empty(slot), 2 * kWarp + Shape::kScored);  // the warps of K and V; a thread
    }
    for (int slot = 0; slot < Shape::kBiasStages; ++slot)
      for (int w = 0; w < Shape::kConsumers; ++w) {
        ptx::mbarrier_init(shared.bias_full(slot, w), 1);
        ptx::mbarrier_init(shared.bias_empty(slot, w), 4);
      }
    for (int w = 0; w < Shape::kConsumers; ++w) {
      ptx::mbarrier_init(shared.out_full(w), 4);
      ptx::mbarrier_init(shared.out_empty(w), 1);
    }
    for (int w = 0; w < Shape::kConsumers; ++w) *shared.met_nan(w) = 0;
    if constexpr (Shape::kSparse) *shared.taken() = -1;
    ptx::fence_mbarrier_init();
  }
  if constexpr (Shape::kSums) fill_ones<Shape, T>(shared);
  __syncthreads();
  const int warpgroup = static_cast<int>(__shfl_sync(kFullMask, threadIdx.x / 128, 0));
  if (warpgroup == 0) {
    ptx::decrease_registers<Shape::kProducerRegisters>();
    if (threadIdx.x < kWarp)
      produce_keys<Shape, false>(p, plan, shared, &map_k, nullptr);
    else if (threadIdx.x < 2 * kWarp)
      produce_keys<Shape, true>(p, plan, shared, &map_v, &map_out);
    else if (threadIdx.x == 2 * kWarp) {
      produce_queries<Shape>(p, plan, shared, &map_q);
      ptx::allow_next_kernel();
    }
    if constexpr (Shape::kScored) {
      if (threadIdx.x == 3 * kWarp) produce_bias<Shape>(plan, shared);
    }
  } else {
    ptx::increase_registers<Shape::kConsumerRegisters>();
    Consumer<Shape, T, kModified> consumer{{}, {}, p, plan, shared, &map_out, warpgroup - 1};
    consumer.run();
  }
}

/// One block a multiprocessor. If all tiles have the same work, fewer blocks, as long as they need no more rounds.
inline int count_blocks(const AttentionParams& p, int items, int multiprocessors) {
  if (items <= multiprocessors || p.window_right >= 0 || p.has_lengths() || p.mask.blocks.data)
    return std::min(items, multiprocessors);
  return static_cast<int>(ceil_div(items, ceil_div(items, multiprocessors)));
}

/// Without a right bound of the window all tiles have the same work, and the tiles of a head follow one another. With
/// one, order_tiles decides by the work of each tile, as if every sequence had the length of the longest one.
template <class Shape>
TileOrder tile_order(const AttentionParams& p, const CudaDeviceProperties& device) {
  OrderedCall call;
  call.heads = p.batch * p.heads_q;
  if (p.window_right < 0) {
    TileOrder by_heads;
    by_heads.groups = static_cast<int>(call.heads);
    return by_heads;
  }
  for (std::int64_t lighter = 0; lighter < ceil_div(p.seq_q, Shape::kBlockM); ++lighter) {
    const auto first = first_row_of_tile<std::int64_t>(ceil_div(p.seq_q, 64), Shape::kConsumers, lighter);
    const std::int64_t first_key = p.first_key(std::max<std::int64_t>(0, first), p.seq_q, p.seq_k);
    const std::int64_t last_key = p.last_key(std::min(p.seq_q, first + Shape::kBlockM) - 1, p.seq_q, p.seq_k);
    const std::int64_t blocks = ceil_div(std::max(first_key, last_key), Shape::kBlockN) - first_key / Shape::kBlockN;
    call.work.push_back(static_cast<int>(blocks) + kTileChange);
  }
  const std::int64_t key_bytes = (p.head_dim + p.head_dim_v) * 2 * p.seq_k;
  call.l2_share =
      static_cast<double>(key_bytes * p.heads_kv) / static_cast<double>(p.heads_q * std::int64_t{device.l2_bytes});
  call.num_sms = device.num_sms;
  call.may_mix = Shape::kQkDim > 64;
  call.may_pair = !Shape::kSparse && Shape::kBlockM != 192 && p.window_left < 0 && !p.has_lengths();
  return remembered_order(call);
}

template <class Shape, bool kModified>
ForwardPlan forward_plan(const AttentionParams& p, const CudaDeviceProperties& device) {
  ForwardPlan plan{};
  plan.q_tiles = static_cast<int>(ceil_div(p.seq_q, Shape::kBlockM));
  const std::int64_t heads = p.batch * p.heads_q;
  plan.heads = static_cast<int>(heads);
  plan.heads_q = static_cast<int>(p.heads_q);
  plan.group = static_cast<int>(p.heads_q / p.heads_kv);
  plan.items = static_cast<int>(heads * plan.q_tiles);
  plan.order = tile_order<Shape>(p, device);
  plan.group_tiles = plan.order.heads_at_once * plan.q_tiles;
  plan.kv_box_rows = static_cast<int>(p.is_paged() ? std::gcd<std::int64_t, std::int64_t>(p.page_size, Shape::kBlockN)
                                                   : Shape::kBlockN);
  plan.block_pieces = Shape::kBlockN / plan.kv_box_rows;
  plan.batch_blocks = kWarp / plan.block_pieces;
  const auto cut = [](std::int64_t n) { return static_cast<int>(n < 0 || n > kMostTokens ? kMostTokens : n); };
  plan.window_left = cut(p.window_left);
  plan.window_right = cut(p.window_right);
  plan.max_pages = cut(p.max_pages);
  plan.most_keys = cut(p.max_pages * p.page_size);
  constexpr float kLog2E = 1.4426950408889634f;
  plan.scale_log2 = kModified ? kLog2E : p.scale * kLog2E;
  // An output too large for the L2 cache would not be there for the next kernel: it leaves the cache to the keys.
  const std::int64_t rows = p.heads_q * (p.is_varlen_q() ? p.total_q : p.batch * p.seq_q);
  plan.out_policy = 2 * rows * p.head_dim_v > device.l2_bytes ? ptx::kL2EvictFirst : ptx::kL2EvictNormal;
  return plan;
}

inline void plan_bias(const AttentionParams& p, ScoredPlan* plan) {
  const TensorMapSpec spec = bias_map(p);
  plan->bias = bias_from(p);
  if (plan->bias != BiasFrom::kTiles) return;
  plan->map_bias = make_tensor_map("attention_fwd bias", spec);
  plan->bias_heads = spec.dims[2].extent > 1, plan->bias_batches = spec.dims[3].extent > 1;
  // What every block reads once leaves the cache to keys; what several sequences share is small enough to stay, or is
  // read again soon.
  plan->bias_policy = plan->bias_heads && plan->bias_batches ? ptx::kL2EvictFirst : ptx::kL2EvictNormal;
}

/// Launches the kernel with a plan whose own part, beyond ForwardPlan, is there.
template <class Shape, class T, bool kModified>
void launch_planned(const AttentionParams& p, typename Shape::Plan plan, cudaStream_t stream) {
  const CudaDeviceProperties& device = cuda_device_properties(p.device.index);
  static_cast<ForwardPlan&>(plan) = forward_plan<Shape, kModified>(p, device);
  const auto box = static_cast<std::uint32_t>(plan.kv_box_rows);
  int blocks = count_blocks(p, plan.items, device.num_sms);
  if constexpr (Shape::kParts) blocks = std::min(plan.items * plan.splits, Shape::kResident * device.num_sms);
  LaunchShape shape{static_cast<unsigned>(blocks), Shape::kThreads, SharedLayout<Shape>::kBytes, stream};
  shape.early = true;
  launch("attention_fwd sm90a", attention_fwd_kernel<Shape, T, kModified>, shape, p, plan,
         make_tensor_map("attention_fwd q", q_map(p, 64)), make_tensor_map("attention_fwd k", kv_map(p, false, box)),
         make_tensor_map("attention_fwd v", kv_map(p, true, box)),
         make_tensor_map("attention_fwd out", out_map(p, 64)));
}

template <class Shape, class T, bool kModified>
void launch_attention_fwd(const AttentionParams& p, cudaStream_t stream) {
  typename Shape::Plan plan{};
  if constexpr (Shape::kScored) plan_bias(p, &plan);
  launch_planned<Shape, T, kModified>(p, plan, stream);
}

/// An entry of the table.
template <DType kDtype, int kQkDim, int kVDim>
void attention_fwd(const AttentionParams& given, bool invariant, void*, Stream stream) {
  using T = Element<kDtype>;
  if (given.batch * given.heads_q * given.seq_q == 0) return;
  const CudaDeviceGuard guard(given.device.index);
  const AttentionParams p = invariant ? heads_as_rows(given) : given;
  // The fast kernels rely on this: if scores are products times a positive scale, the largest product is the maximum.
  if (p.softcap > 0.0f || !(p.scale > 0.0f))
    return launch_attention_fwd<ForwardShape<typename ForwardTiles<kQkDim, kVDim>::Modified>, T, true>(p,
                                                                                                       native(stream));
  if constexpr (!kInChunks<kQkDim, kVDim>)
    if (invariant)
      return launch_attention_fwd<ForwardShape<typename ForwardTiles<kQkDim, kVDim>::Invariant>, T, false>(
          p, native(stream));
  ForwardTiles<kQkDim, kVDim>::choose(p, [&](auto tile) {
    using Shape = ForwardShape<decltype(tile)>;
    if constexpr (sums_pay<Shape>())
      if (!p.lse) return launch_attention_fwd<SummedShape<Shape>, T, false>(p, native(stream));
    launch_attention_fwd<Shape, T, false>(p, native(stream));
  });
}

/// An entry of the table: calls of the invariant mode whose keys come in chunks.
template <DType kDtype, int kQkDim, int kVDim>
void attention_fwd_in_chunks(const AttentionParams& given, int splits, void* workspace, Stream stream) {
  using T = Element<kDtype>;
  using Tiles = ForwardTiles<kQkDim, kVDim>;
  if (given.batch * given.heads_q * given.seq_q == 0) return;
  const CudaDeviceGuard guard(given.device.index);
  const AttentionParams p = heads_as_rows(given);
  if (splits == 0) return launch_attention_fwd<ForwardShape<typename Tiles::Invariant>, T, false>(p, native(stream));
  using Shape = PartsShape<typename Tiles::FewRows>;
  PartsPlan plan{};
  plan.splits = splits;
  plan.most_chunks = static_cast<int>(most_chunks<kVDim>(p));
  plan.rows = static_cast<int>(p.seq_q);
  const std::int64_t rows = p.batch * p.heads_q * p.seq_q;
  plan.out = static_cast<float*>(workspace);
  plan.states = reinterpret_cast<float2*>(plan.out + rows * plan.most_chunks * kVDim);
  launch_planned<Shape, T, false>(p, plan, native(stream));
  static_cast<ForwardPlan&>(plan) = forward_plan<Shape, false>(p, cuda_device_properties(p.device.index));
  launch("attention_fwd sm90a parts", merge_parts_kernel<Shape, T>,
         {static_cast<unsigned>(rows), kVDim, 0, native(stream), true}, p, plan);
}

/// An entry of the table.
template <DType kDtype, int kQkDim, int kVDim>
void attention_fwd_scored(const AttentionParams& p, void*, Stream stream) {
  using T = Element<kDtype>;
  if (p.batch * p.heads_q * p.seq_q == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  launch_attention_fwd<ScoredShape<typename ForwardTiles<kQkDim, kVDim>::Scored>, T, true>(p, native(stream));
}

/// An entry of the table.
template <DType kDtype, int kQkDim, int kVDim>
void attention_fwd_sparse(const AttentionParams& p, void* workspace, Stream stream) {
  using Shape = SparseShape<typename ForwardTiles<kQkDim, kVDim>::Sparse>;
  static_assert(Shape::kBlockM == 128, "of which the workspace is made");
  if (p.batch * p.heads_q * p.seq_q == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  const ZeroedMemory counters(p.device.index, 2 * sizeof(int), stream);
  SparsePlan plan{};
  plan.counters = static_cast<int*>(counters.data());
  plan.before = static_cast<int*>(workspace);
  launch_planned<Shape, Element<kDtype>, false>(p, plan, native(stream));
}

template <int kDim>
std::size_t attention_fp8_workspace(const Float8AttentionParams& p) {
  return TransposedValues::of<Float8Tile<kDim>::kBlockN>(p.attention).bytes(p.attention);
}

/// An entry of the table.
template <DType kOut, int kDim>
void attention_fp8(const Float8AttentionParams& call, void* workspace, Stream stream) {
  using Shape = Float8Shape<Float8Tile<kDim>>;
  const AttentionParams& p = call.attention;
  if (p.batch * p.heads_q * p.seq_q == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  const auto values = TransposedValues::of<Shape::kBlockN>(p);
  transpose_values<Shape::kBlockN>(p, values, workspace, native(stream));
  const CudaDeviceProperties& device = cuda_device_properties(p.device.index);
  Float8Plan plan{};
  static_cast<ForwardPlan&>(plan) = forward_plan<Shape, false>(p, device);
  plan.q = call.q, plan.k = call.k, plan.v = call.v;
  LaunchShape shape{static_cast<unsigned>(count_blocks(p, plan.items, device.num_sms)), Shape::kThreads,
                    SharedLayout<Shape>::kBytes, native(stream)};
  shape.early = true;
  launch("attention_fp8 sm90a", attention_fwd_kernel<Shape, Element<kOut>, false>, shape, p, plan,
         make_tensor_map("attention_fp8 q", float8_q_map(p, 64)),
         make_tensor_map("attention_fp8 k", float8_k_map(p, Shape::kBlockN)),
         make_tensor_map("attention_fp8 v", transposed_map(p, values, workspace, Shape::kVLine, Shape::kVDim)),
         make_tensor_map("attention_fp8 out", float8_out_map(call)));
}

}  // namespace flashkernel::cuda::sm90a
