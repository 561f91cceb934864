// Attention of few queries over many keys on Hopper: wgmma on rows that are queries of all heads of a group, keys by
// TMA, and the keys of a sequence cut into parts, one for each block. A cluster of blocks merges its parts in shared
// memory, each block some of the rows; what several clusters have of the same rows is merged by the block that arrives
// last. One launch; the number of parts follows from shapes, and where they begin from the lengths on the device.
//
//   variant.hpp   which calls                                consumer.cuh  both products and the softmax
//   plan.hpp      how many parts, the model                  shape.cuh     where a tile lies in shared memory
//   rows.cuh      rows, their ends, the merge                gather.cuh    keys in small pages, without the copy engine
//
// Invariant on NaN: a masked pair has the weight 0, but if its value is NaN, the tensor core computes 0 * NaN = NaN.
// Therefore a row whose result is not finite, and that does not see all keys, is computed again from those that it sees
// (forward/sm90a/redo.cuh).
#pragma once

#include <numeric>

#include "cuda/attention/few_queries/sm90a/consumer.cuh"
#include "cuda/attention/few_queries/sm90a/gather.cuh"
#include "cuda/attention/few_queries/sm90a/variant.hpp"
#include "cuda/attention/forward/sm90a/producer.cuh"
#include "cuda/attention/forward/sm90a/redo.cuh"
#include "cuda/host/launch.hpp"
#include "cuda/host/zeroed_memory.hpp"
#include "cuda/pipeline/departure.cuh"
#include "cuda/ptx/atomic.cuh"
#include "cuda/ptx/grid.cuh"

namespace flashkernel::cuda::sm90a {

/// One block of keys or values into its slot.
template <class Shape, bool kOfV>
__device__ inline void load_block(const AttentionParams& p, const ForwardPlan& walk, const Shape& shared,
                                  const CUtensorMap* map, const KeyPlace& place, int g, std::uint64_t policy,
                                  const Ring<Shape::kStages>& ring) {
  const int lane = static_cast<int>(threadIdx.x % kWarp), at = lane * walk.kv_box_rows;
  const std::uint32_t full = kOfV ? shared.v_full(ring.slot()) : shared.k_full(ring.slot());
  const std::uint32_t slot = kOfV ? shared.v(ring.slot()) : shared.k(ring.slot());
  ptx::mbarrier_wait(kOfV ? shared.v_empty(ring.slot()) : shared.k_empty(ring.slot()), ring.parity() ^ 1);
  if (lane == 0) ptx::mbarrier_arrive_expect(full, kOfV ? Shape::kVBytes : Shape::kKBytes);
  __syncwarp();
  if (at >= Shape::kBlockN) return;
  // No page, or a bad one: past the end of the tensor, which reads as zeros.
  const int image = place.image < 0 ? static_cast<int>(p.num_pages) : place.image;
#pragma unroll
  for (int c = 0; c < (kOfV ? Shape::kVBlocks : Shape::kQkBlocks); ++c)
    ptx::tma_load(slot + c * Shape::kKvBlockBytes + at * 128, map, full, policy, c * 64, place.row, g, image);
}

/// Computes rows [first, end) that are not finite again, if masks hid keys from them. The rows are stored.
template <class Shape, class T>
__device__ inline void redo_rows(const AttentionParams& p, const RowTile& tile, int first, int end) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  TileRecord record;
  record.b = tile.b, record.g = tile.g, record.range = tile.range;
#pragma unroll 1
  for (int row = first + static_cast<int>(threadIdx.x / kWarp); row < end; row += Shape::kConsumerThreads / kWarp) {
    const RowPlace at = tile.place(row);
    if (!p.mask.data && tile.range.first(at.query) == 0 && tile.range.sees_last_key(at.query)) continue;
    const T* const out = static_cast<const T*>(p.out) + at.out_offset(p, tile.b);
    float zero = 0.0f;  // NaN once any element is not finite
    for (int column = lane; column < p.head_dim_v; column += kWarp) zero = fmaf(to_float(out[column]), 0.0f, zero);
    record.h = static_cast<int>(at.head);
    if (__any_sync(kFullMask, zero != zero)) redo_row<Shape, T>(p, record, at.query);
  }
}

/// The blocks of keys of one part of a tile.
struct KeyPart {
  int parts;       // that have keys
  int end, count;  // the part's blocks are the `count` ones before `end`

  /// Every block of the tile finds the same parts: of the blocks of keys that the tile sees, each has as many as
  /// another one, but for the last part.
  template <class Shape>
  __device__ static KeyPart find(const RowTile& tile, int part, int splits) {
    const int first_key = tile.range.first(tile.place(0).query);
    const int last_key = tile.range.last(tile.place(Shape::kBlockM).query);
    const int first_block = first_key / Shape::kBlockN;
    const int blocks = last_key > first_key ? (last_key + Shape::kBlockN - 1) / Shape::kBlockN - first_block : 0;
    const int share = (blocks + splits - 1) / splits, begin = part * share;
    const int count = min(share, blocks - begin);
    return {share > 0 ? (blocks + share - 1) / share : 0, first_block + begin + count, count};
  }
};

/// The warps behind the consumers load the keys and values of a part: the first one, or all of them row by row.
template <class Shape, class T>
__device__ inline void produce_part(const AttentionParams& p, const ForwardPlan& walk, const Shape& shared,
                                    const CUtensorMap* map_k, const CUtensorMap* map_v, const RowTile& tile,
                                    const KeyPart& keys, int warp, bool leaves) {
  if (gathers_keys(p)) {
    KeyGatherer<Shape, T> gatherer{p, shared, tile.b, tile.g, tile.range.k_len, warp * kWarp, ptx::l2_policy(leaves)};
    gatherer.run(keys.end, keys.count);
    return;
  }
  if (warp > 0) return;
  TileRecord record;
  record.b = tile.b, record.g = tile.g, record.end_block = keys.end, record.range = tile.range;
  const int lane_keys = p.is_paged() ? KeyWalk<Shape>::first_key_of_lane(walk) : 0;
  const std::uint64_t policy = leaves ? ptx::kL2EvictFirst : ptx::kL2EvictNormal;
  KeyWalk<Shape> places(p, walk, record, lane_keys);
  Ring<Shape::kStages> at;
#pragma unroll 1
  for (int i = 0; i < keys.count; ++i, ++at.count) {
    const KeyPlace place = places.next(p, walk, record, lane_keys);
    load_block<Shape, false>(p, walk, shared, map_k, place, tile.g, policy, at);
    load_block<Shape, true>(p, walk, shared, map_v, place, tile.g, policy, at);
  }
}

/// The rows that a block merges of what its cluster has.
struct Slice {
  int first, end;  // rows of the tile
  int number;      // of the cluster
  int clusters;    // that have keys
  int parts;       // that this cluster has

  template <class Shape>
  __device__ static Slice find(const RowTile& tile, const KeyPart& keys, int part, int cluster) {
    const int number = part / cluster, rank = part - number * cluster;
    const int rows = (Shape::kBlockM / 2 + cluster - 1) / cluster * 2;  // whose states are read in pairs
    return {rank * rows, min(tile.rows, (rank + 1) * rows), number, (keys.parts + cluster - 1) / cluster,
            max(0, min(cluster, keys.parts - number * cluster))};
  }
};

/// Merges a slice: its parts lie in the shared memory of the cluster's blocks, and those of several clusters in the
/// workspace. Returns whether the thread has stored a value that is not finite.
template <class Shape, class T>
__device__ inline bool merge_slice(const AttentionParams& p, const Shape& shared, const RowTile& tile,
                                   const Slice& slice, const PartsOfTile<Shape>& all, int* counter) {
  constexpr int kColumns = Shape::kVDim / kWarp, kWarps = Shape::kConsumerThreads / kWarp;
  constexpr int kConsumers = Shape::kConsumers + 1;  // a barrier of their own, behind those of the warpgroups
  constexpr int kRows = 2;                           // at once, of a warp
  const int warp = static_cast<int>(threadIdx.x / kWarp), lane = static_cast<int>(threadIdx.x % kWarp);
  bool not_finite = false;
#pragma unroll 1
  for (int row = slice.first + kRows * warp; row < slice.end; row += kRows * kWarps) {
    float2 own[kRows];
    std::uint32_t place[kRows];
    MergedRow<kColumns> merged[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      place[r] = shared.part_row(row + r) + lane * kColumns / 4 * 16;
      own[r] = float2{-INFINITY, 0.0f};
    }
    if (lane < slice.parts) {  // of two rows: 16 bytes
      const float4 two = ptx::load_cluster_4(ptx::map_shared(shared.part_state(row), static_cast<std::uint32_t>(lane)));
      own[0] = float2{two.x, two.y}, own[1] = float2{two.z, two.w};
    }
    merge_rows<kColumns, kRows>(slice.parts, own, merged, [&](int r, int i) {
      const float4 four = ptx::load_cluster_4(ptx::map_shared(place[r], static_cast<std::uint32_t>(i)));
      Packed<float, kColumns> part;
      if constexpr (kColumns == 4) {
        part.values[0] = four.x, part.values[1] = four.y, part.values[2] = four.z, part.values[3] = four.w;
      } else {
        part.values[0] = lane & 1 ? four.z : four.x, part.values[1] = lane & 1 ? four.w : four.y;
      }
      return part;
    });
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row + r >= slice.end) break;
      if (slice.clusters <= 1) {
        not_finite |= store_merged_row<T>(p, tile.b, tile.place(row + r), merged[r]);
      } else {
        store_floats(all.values(slice.number, row + r) + lane * kColumns, merged[r].values);
        if (lane == 0) *all.state(slice.number, row + r) = float2{merged[r].maximum, merged[r].sum};
      }
    }
  }
  if (slice.clusters <= 1) return not_finite;
  const auto meet = [] { ptx::barrier_sync(kConsumers, Shape::kConsumerThreads); };
  meet();
  if (threadIdx.x == 0) shared.notes().is_last = ptx::fetch_add_acq_rel(counter, 1) == slice.clusters - 1;
  meet();
  if (!shared.notes().is_last) return false;
#pragma unroll 1
  for (int row = slice.first + kRows * warp; row < slice.end; row += kRows * kWarps) {
    float2 own[kRows];
    MergedRow<kColumns> merged[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      own[r] = lane < slice.clusters ? *all.state(lane, min(row + r, slice.end - 1)) : float2{-INFINITY, 0.0f};
    merge_rows<kColumns, kRows>(slice.clusters, own, merged, [&](int r, int i) {
      return load_vector<kColumns>(static_cast<const float*>(all.values(i, min(row + r, slice.end - 1))) +
                                   lane * kColumns);
    });
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (row + r < slice.end) not_finite |= store_merged_row<T>(p, tile.b, tile.place(row + r), merged[r]);
  }
  return not_finite;
}

/// For every thread of a block that takes no part in a merge: the cluster waits for all of its threads twice, whatever
/// lengths they have read.
__device__ inline void pass_cluster(int cluster) {
  if (cluster == 1) return;
  ptx::cluster_arrive();
  ptx::cluster_wait();
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();
}

/// The consumers of a block: its part of the keys, and its rows of the cluster's parts. Where several clusters share a
/// tile, every block of the grid leaves the counters once (pipeline/departure.cuh).
template <class Shape, class T>
__device__ inline void consume_part(const AttentionParams& p, const FewQueriesPlan& plan, const Shape& shared,
                                    const RowTile& tile, const KeyPart& keys, int part, float scale_log2,
                                    float* workspace, int* counters) {
  constexpr int kConsumers = Shape::kConsumers + 1;
  const auto meet = [] { ptx::barrier_sync(kConsumers, Shape::kConsumerThreads); };
  const int item = static_cast<int>(blockIdx.z * gridDim.y + blockIdx.y);
  const int items = static_cast<int>(gridDim.y * gridDim.z);
  Departure departure(counters, items * plan.cluster);
  bool not_finite = false;
  Slice slice{0, tile.rows, 0, 0, 0};
  if (part < keys.parts) {
    const int warpgroup = static_cast<int>(__shfl_sync(kFullMask, threadIdx.x / 128, 0));
    FewQueriesConsumer<Shape, T> consumer{p, tile, shared, scale_log2, warpgroup};
    consumer.run(keys.end, keys.count);
    if (keys.parts == 1) {
      not_finite = consumer.store_rows();
    } else {
      meet();
      consumer.leave_part();
    }
  }
  if (plan.cluster > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
    if (keys.parts != 1) {
      slice = Slice::find<Shape>(tile, keys, part, plan.cluster);
      const PartsOfTile<Shape> all(workspace, item, items, plan.splits / plan.cluster);
      int* const counter =
          slice.clusters > 1 ? counters + item * plan.cluster + (part - slice.number * plan.cluster) : nullptr;
      // Where the rows see no key, the first cluster says so.
      if (slice.number < max(1, slice.clusters))
        not_finite = merge_slice<Shape, T>(p, shared, tile, slice, all, counter);
    }
    ptx::cluster_arrive_relaxed();  // what was read of other blocks has been stored
    ptx::cluster_wait();
  } else if (keys.parts == 0) {
    constexpr int kColumns = Shape::kVDim / kWarp;
#pragma unroll 1
    for (int row = static_cast<int>(threadIdx.x / kWarp); row < tile.rows; row += Shape::kConsumerThreads / kWarp) {
      MergedRow<kColumns> none;
      store_merged_row<T>(p, tile.b, tile.place(row), none);
    }
  }
  if (plan.splits > plan.cluster) departure.announce();
  if (not_finite) shared.notes().met_nan = 1;
  meet();
  if (shared.notes().met_nan) redo_rows<Shape, T>(p, tile, slice.first, slice.end);
  if (plan.splits > plan.cluster) departure.finish();
}

/// Grid: parts of the keys; tiles of a kv head, then kv heads; sequences.
template <class Shape, class T>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kResidents)
    attention_few_queries_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ FewQueriesPlan plan,
                                 const __grid_constant__ ForwardPlan walk, const __grid_constant__ CUtensorMap map_k,
                                 const __grid_constant__ CUtensorMap map_v, float* workspace, int* counters) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];  // lines of the swizzle: 1024 bytes
  const Shape shared{ptx::shared_address(dynamic_shared)};
  if (threadIdx.x == 0) {
    ptx::tma_prefetch_map(&map_k);
    ptx::tma_prefetch_map(&map_v);
    const unsigned loaders = gathers_keys(p) ? Shape::kGatherWarps * kWarp : 1;  // threads
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      ptx::mbarrier_init(shared.k_full(stage), loaders);
      ptx::mbarrier_init(shared.v_full(stage), loaders);
      ptx::mbarrier_init(shared.k_empty(stage), 4 * Shape::kConsumers);
      ptx::mbarrier_init(shared.v_empty(stage), 4 * Shape::kConsumers);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::wait_for_previous_kernel();
  if (threadIdx.x == 0) {
    shared.notes().range = KeyRange(p, blockIdx.z);
    shared.notes().met_nan = 0;
  }
  __syncthreads();

  const int part = static_cast<int>(blockIdx.x);
  RowTile tile;
  tile.b = static_cast<int>(blockIdx.z);
  tile.g = static_cast<int>(blockIdx.y) / plan.tiles;
  tile.group = plan.group;
  tile.range = shared.notes().range;
  tile.first = (static_cast<int>(blockIdx.y) - tile.g * plan.tiles) * Shape::kBlockM;
  tile.rows = min(Shape::kBlockM, tile.range.q_len * plan.group - tile.first);
  if (tile.rows <= 0) {  // a shorter sequence has no such tile
    pass_cluster(plan.cluster);
    if (plan.splits == plan.cluster) return;
    Departure departure(counters, static_cast<int>(gridDim.y * gridDim.z) * plan.cluster);
    departure.announce_without_use();
    departure.finish();
    return;
  }
  const KeyPart keys = KeyPart::find<Shape>(tile, part, plan.splits);
  const int warp = static_cast<int>(__shfl_sync(kFullMask, threadIdx.x / kWarp, 0));
  if (warp >= 4 * Shape::kConsumers) {
    if constexpr (Shape::kHandsOver) ptx::decrease_registers<Shape::kProducerRegisters>();
    const int loader = warp - 4 * Shape::kConsumers;
    if (part < keys.parts) produce_part<Shape, T>(p, walk, shared, &map_k, &map_v, tile, keys, loader, plan.leaves);
    if (loader == 0) ptx::allow_next_kernel();
    __syncwarp();
    pass_cluster(plan.cluster);
  } else {
    if constexpr (Shape::kHandsOver) ptx::increase_registers<Shape::kConsumerRegisters>();
    consume_part<Shape, T>(p, plan, shared, tile, keys, part, walk.scale_log2, workspace, counters);
  }
}

template <class Shape, class T>
void launch_few_queries(const AttentionParams& p, const FewQueriesPlan& plan, void* workspace, Stream stream) {
  constexpr float kLog2E = 1.4426950408889634f;
  ForwardPlan walk{};  // what the walk over pages and the exponentials ask for
  walk.kv_box_rows = static_cast<int>(p.is_paged() ? std::gcd<std::int64_t, std::int64_t>(p.page_size, Shape::kBlockN)
                                                   : Shape::kBlockN);
  walk.block_pieces = Shape::kBlockN / walk.kv_box_rows;
  walk.batch_blocks = kWarp / walk.block_pieces;  // 0 where keys are gathered, without a walk
  walk.max_pages = static_cast<int>(std::min<std::int64_t>(p.max_pages, kMostTokens));
  walk.scale_log2 = p.scale * kLog2E;
  const auto box = static_cast<std::uint32_t>(walk.kv_box_rows);
  const std::int64_t items = p.batch * p.heads_kv * plan.tiles;
  LaunchShape shape{dim3(static_cast<unsigned>(plan.splits), static_cast<unsigned>(p.heads_kv * plan.tiles),
                         static_cast<unsigned>(p.batch)),
                    Shape::kThreads, Shape::kBytes, native(stream)};
  shape.early = true;
  shape.cluster = static_cast<unsigned>(plan.cluster);
  const auto start = [&](int* counters) {
    launch("attention_fwd few_queries sm90a", attention_few_queries_kernel<Shape, T>, shape, p, plan, walk,
           make_tensor_map("attention_fwd k", kv_map(p, false, box)),
           make_tensor_map("attention_fwd v", kv_map(p, true, box)), static_cast<float*>(workspace), counters);
  };
  if (plan.splits == plan.cluster) return start(nullptr);  // no two clusters have parts of a tile
  const ZeroedMemory counters(p.device.index, Departure::bytes(items * plan.cluster), stream);
  start(static_cast<int*>(counters.data()));
}

/// An entry of the table.
template <DType kDtype, int kQkDim, int kVDim>
void attention_few_queries(const AttentionParams& p, const Plan& planned, void* workspace, Stream stream) {
  using T = Element<kDtype>;
  if (p.batch * p.heads_q * p.seq_q == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  const FewQueriesPlan& plan = planned.as<FewQueriesPlan>();
  if (plan.consumers == 1)
    launch_few_queries<FewQueriesShape<kQkDim, kVDim, 1>, T>(p, plan, workspace, stream);
  else
    launch_few_queries<FewQueriesShape<kQkDim, kVDim, 2>, T>(p, plan, workspace, stream);
}

}  // namespace flashkernel::cuda::sm90a
