// Decode of 9 to 32 query heads a kv head where sequences and kv heads are enough for a cluster each
// (decode_group.hpp): all heads of a group read each key once, by wgmma (decode_group_sums.cuh). The cluster's blocks
// take the sequence's tiles of 64 keys in turn, so that each of them knows its pages before it knows the length; two
// warps bring them by TMA, two warpgroups compute. What they have meets in shared memory: each block finishes a share
// of the output from what the others send it (st.async, counted by a barrier there). No workspace, counters or second
// kernel.
//
// Invariant: parts are merged in the order of warpgroups, then of blocks, so that results are the same bit for bit.
// Nobody waits for what another reading of a length decides: a block reads it once, and sends and is sent the same
// bytes whatever it is. A length that somebody writes meanwhile spoils the call, and the call ends.
#pragma once

#include "cuda/host/clusters.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/sm90a/decode_group.hpp"
#include "cuda/sm90a/decode_group_sums.cuh"
#include "cuda/sm90a/decode_merge.cuh"
#include "cuda/sm90a/decode_schedule.cuh"

namespace flashkernel::cuda::sm90a {

/// A block's shared memory. kStages tiles of K and V are on their way or in use: 128 KB, some four times what 1 us of
/// latency takes of a multiprocessor's share of memory. A warpgroup leaves its result in a slot of its own.
template <int kDim_, int kStages_>
struct GroupShape {
  static constexpr int kDim = kDim_, kStages = kStages_, kConsumers = kGroupWarpgroups, kProducers = 2;
  // Slots are a warpgroup's own then. It has seen each phase of a slot's barrier end before it waits for the next.
  static_assert(kStages % kConsumers == 0);
  static constexpr int kKeys = kGroupKeys, kRows = kGroupRows, kQuads = kDim / 4;
  static constexpr int kWarps = 4 * kConsumers, kThreads = (kWarps + kProducers) * kWarp;
  // K and V lie as blocks of 64 columns: lines of 128 bytes, swizzled.
  static constexpr int kBlocks = kDim / 64, kBlockBytes = kKeys * 128, kMatrixBytes = kBlocks * kBlockBytes;
  static constexpr int kStageBytes = 2 * kMatrixBytes;
  static constexpr int kPitch = kDim + 8;  // of results, in floats: four rows' float2 fall into different banks
  static_assert(kRows * kPitch * 4 <= kStageBytes);

  static constexpr int kStates = kStages * kStageBytes, kBarriers = kStates + kConsumers * kRows * 8;
  static constexpr int kInboxFull = kBarriers + 2 * kStages * 8, kLength = kInboxFull + 8;
  static constexpr int kInbox = (kLength + 4 + 15) / 16 * 16;

  /// What the other blocks of a cluster send: parts of this block's share of the quads, then maxima and sums of all
  /// rows.
  int share, inbox_states, bytes;
  __host__ __device__ GroupShape(int rows, int blocks)
      : share((rows * kQuads + blocks - 1) / blocks),
        inbox_states(kInbox + (blocks - 1) * share * 16),
        bytes(inbox_states + (blocks - 1) * kRows * 8) {}
};

/// Named barriers of a block: a warpgroup's is 1 and its number.
inline constexpr std::uint32_t kLengthBarrier = 1 + kGroupWarpgroups;

/// The warp that brings the tiles rank, rank + blocks, ... of K (producer 0) or V. A copy is of 64 columns and plan's
/// box of keys; a lane asks for it. Boxes are looked up 32 at a time, a batch ahead, the first ones before the length.
template <class Shape>
class TileProducer {
 public:
  /// Looks the first boxes up.
  __device__ TileProducer(const AttentionParams& p, const GroupPlan& plan, int producer, int rank, int sequence,
                          int head, const CUtensorMap* map)
      : p_(p), plan_(plan), map_(map), producer_(producer), rank_(rank), sequence_(sequence), head_(head) {
    static_assert(Shape::kKeys == 1 << 6);
    log2_boxes_ = 6 - plan.log2_box;
    next_ = look_up(0);
  }

  __device__ void run(std::uint32_t shared, int length) {
    static_assert(Shape::kBlocks == 2, "a pair of lanes asks for a box's columns");
    const int tiles = (length + Shape::kKeys - 1) / Shape::kKeys, column = lane() % 2, from = lane() / 2;
    const int at_once = kWarp >> log2_boxes_;  // tiles
    const std::uint32_t to = static_cast<std::uint32_t>(producer_ * Shape::kMatrixBytes + column * Shape::kBlockBytes +
                                                        (from << plan_.log2_box) * 128);
    Box now{0, 0, 0};
#pragma unroll 1
    for (int n = 0; rank_ + n * plan_.blocks < tiles; ++n) {
      const int in = n & (at_once - 1), stage = n % Shape::kStages;
      if (in == 0) {
        now = next_;
        next_ = look_up(n + at_once);
      }
      const int at = (in << log2_boxes_) + (from & (boxes() - 1));
      const int image = __shfl_sync(kFullMask, now.image, at), row = __shfl_sync(kFullMask, now.row, at);
      const bool is_there = __shfl_sync(kFullMask, now.key, at) < length && from < boxes();
      const unsigned copies = __popc(__ballot_sync(kFullMask, is_there));
      const std::uint32_t full = shared + Shape::kBarriers + stage * 8;
      ptx::mbarrier_wait(full + Shape::kStages * 8, (n / Shape::kStages & 1) ^ 1);
      if (lane() == 0) ptx::mbarrier_arrive_expect(full, copies << (plan_.log2_box + 7));
      __syncwarp();
      if (is_there)
        ptx::tma_load(shared + stage * Shape::kStageBytes + to, map_, full, ptx::kL2EvictFirst, column * 64, row, head_,
                      image);
    }
    __syncwarp();
  }

 private:
  struct Box {
    int image, row, key;
  };
  __device__ static int lane() { return static_cast<int>(threadIdx.x % kWarp); }
  __device__ int boxes() const { return 1 << log2_boxes_; }  // of a tile

  /// This lane's box of those that begin with the block's tile `first`.
  __device__ Box look_up(int first) const {
    const int tile = rank_ + (first + (lane() >> log2_boxes_)) * plan_.blocks;
    const int key = tile * Shape::kKeys + ((lane() & (boxes() - 1)) << plan_.log2_box);
    if (!p_.is_paged()) return {sequence_, key, key};
    Box box{0, key & ((1 << plan_.log2_page) - 1), key};
    // An entry past the sequence's end may be read, and nothing follows from it.
    const int column = key >> plan_.log2_page;
    if (column < p_.max_pages) box.image = p_.block_table[sequence_ * p_.stride_block_table + column];
    if (box.image < 0) box.image = static_cast<int>(p_.num_pages);  // outside of the tensor, which reads as zeros
    return box;
  }

  const AttentionParams& p_;
  const GroupPlan& plan_;
  const CUtensorMap* map_;
  int producer_, rank_, sequence_, head_, log2_boxes_;
  Box next_;
};

/// What a cluster reads first, into L2 while the kernel before still runs: hints change no value, so that kernel may
/// still write it.
__device__ inline void fetch_ahead_of_group(const AttentionParams& p, const GroupPlan& plan, int sequence, int head) {
  constexpr int kLine = 128;
  const int index = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int all = plan.blocks * static_cast<int>(blockDim.x);
  if (p.is_paged()) {
    const std::int32_t* const table = p.block_table + sequence * p.stride_block_table;
    for (int i = index; i * (kLine / 4) < p.max_pages; i += all) ptx::prefetch_l2(table + i * (kLine / 4));
    if (index == 0)
      ptx::prefetch_l2(static_cast<const char*>(p.seq_lens.data) + sequence * (p.seq_lens.is_int64 ? 8 : 4));
  }
  const int lines = static_cast<int>(p.head_dim) * 2 / kLine;
  for (int i = index; i < plan.rows * lines; i += all)
    ptx::prefetch_l2(static_cast<const char*>(p.q) + i % lines * kLine +
                     2 * (sequence * p.stride_q_batch +
                          (static_cast<std::int64_t>(head) * plan.rows + i / lines) * p.stride_q_head));
}

/// Grid: blocks of a cluster, kv heads, sequences.
template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    decode_group_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ GroupPlan plan,
                        const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_v) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];  // lines of the swizzle: 1024 bytes
  const std::uint32_t shared = ptx::shared_address(dynamic_shared), inbox_full = shared + Shape::kInboxFull;
  int* const length_here = reinterpret_cast<int*>(dynamic_shared + Shape::kLength);
  const int warp = static_cast<int>(__shfl_sync(kFullMask, threadIdx.x / kWarp, 0));
  const int rank = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y), blocks = plan.blocks;
  const int sequence = static_cast<int>(blockIdx.z), rows = plan.rows, quads = rows * Shape::kQuads;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      ptx::mbarrier_init(shared + Shape::kBarriers + stage * 8, Shape::kProducers);
      ptx::mbarrier_init(shared + Shape::kBarriers + (Shape::kStages + stage) * 8, 4);
    }
    ptx::mbarrier_init(inbox_full, 1);
    ptx::fence_mbarrier_init();
    ptx::tma_prefetch_map(&map_k);
    ptx::tma_prefetch_map(&map_v);
  }
  __syncthreads();
  ptx::cluster_arrive_relaxed();
  fetch_ahead_of_group(p, plan, sequence, head);
  // Up to here nothing is read that the kernel before may write. The next one may come: it waits here, too.
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();

  float2* const states = reinterpret_cast<float2*>(dynamic_shared + Shape::kStates);
  if (warp >= Shape::kWarps) {
    const int producer = warp - Shape::kWarps;
    TileProducer<Shape> tiles(p, plan, producer, rank, sequence, head, producer ? &map_v : &map_k);
    ptx::barrier_sync(kLengthBarrier, Shape::kThreads);
    tiles.run(shared, *length_here);
  } else {
    if (threadIdx.x == 0) *length_here = keys_of(p, sequence);
    ptx::barrier_sync(kLengthBarrier, Shape::kThreads);
    const int length = *length_here, tiles = (length + Shape::kKeys - 1) / Shape::kKeys, consumer = warp / 4;
    const std::uint32_t warpgroup_barrier = 1 + static_cast<std::uint32_t>(consumer);
    const float scale_log2 = p.scale * 1.4426950408889634f;
    GroupSums<T, Shape> sums;
    sums.begin(p, sequence, head, rows);
#pragma unroll 1
    for (int n = consumer; rank + n * blocks < tiles; n += Shape::kConsumers) {
      const int stage = n % Shape::kStages, keys = length - (rank + n * blocks) * Shape::kKeys;
      const std::uint32_t full = shared + Shape::kBarriers + stage * 8, tile = shared + stage * Shape::kStageBytes;
      ptx::mbarrier_wait(full, n / Shape::kStages & 1);
      if (keys < Shape::kKeys) clear_values<Shape>(tile, keys, warpgroup_barrier);
      sums.add(tile, scale_log2, keys);
      if (threadIdx.x % kWarp == 0) ptx::mbarrier_arrive(full + Shape::kStages * 8);
    }
    ptx::barrier_sync(warpgroup_barrier, 128);  // the warpgroup's slots have been read
    sums.put(reinterpret_cast<float*>(dynamic_shared + consumer * Shape::kStageBytes),
             states + consumer * Shape::kRows);
  }
  // The parts are there; the other blocks' inboxes can be sent to. In this order, and at one place for all warps:
  // compute-sanitizer's racecheck loses a block's barrier that comes behind the cluster's.
  __syncthreads();
  ptx::cluster_wait();
  if (warp >= Shape::kWarps) return;

  constexpr int kThreads = Shape::kWarps * kWarp;
  const auto here = [&](int row, int column) {  // this block's part
    return MergedQuad(
        Shape::kConsumers, [&](int w) { return states[w * Shape::kRows + row]; },
        [&](int w) {
          return *reinterpret_cast<const float4*>(dynamic_shared + w * Shape::kStageBytes +
                                                  (row * Shape::kPitch + column) * 4);
        });
  };
  const auto store = [&](int row, int column, const MergedQuad& merged) {
    store_quad<T>(p, sequence, static_cast<std::int64_t>(head) * rows + row, column, merged.maximum, merged.sum,
                  merged.values);
  };
  if (blocks == 1) {
    for (int quad = static_cast<int>(threadIdx.x); quad < quads; quad += kThreads)
      store(quad / Shape::kQuads, quad % Shape::kQuads * 4, here(quad / Shape::kQuads, quad % Shape::kQuads * 4));
    return;
  }
  const Shape at(rows, blocks);
  const auto place_of = [&](int owner) { return rank - (rank > owner ? 1 : 0); };  // of this block's part, there
  // quad / share: half a quad keeps the product away from whole numbers.
  const float per_share = __fdividef(1.0f, static_cast<float>(at.share));
  for (int quad = static_cast<int>(threadIdx.x); quad < quads; quad += kThreads) {
    const int owner = static_cast<int>((static_cast<float>(quad) + 0.5f) * per_share);
    if (owner == rank) continue;
    const MergedQuad merged = here(quad / Shape::kQuads, quad % Shape::kQuads * 4);
    const int place = place_of(owner) * at.share + quad - owner * at.share;
    const auto there = static_cast<std::uint32_t>(owner);
    ptx::store_async_4(ptx::map_shared(shared + Shape::kInbox + place * 16, there),
                       float4{merged.values[0], merged.values[1], merged.values[2], merged.values[3]},
                       ptx::map_shared(inbox_full, there));
  }
  // Each row's maximum and sum to every other block.
  for (int i = static_cast<int>(threadIdx.x); i < blocks * Shape::kRows; i += kThreads) {
    const int row = i % Shape::kRows, owner = i / Shape::kRows;
    if (owner == rank || row >= rows) continue;
    const MergedQuad merged(
        Shape::kConsumers, [&](int w) { return states[w * Shape::kRows + row]; }, [](int) { return float4{}; });
    const auto there = static_cast<std::uint32_t>(owner);
    ptx::store_async_2(ptx::map_shared(shared + at.inbox_states + (place_of(owner) * Shape::kRows + row) * 8, there),
                       float2{merged.maximum, merged.sum}, ptx::map_shared(inbox_full, there));
  }
  const int first = rank * at.share, count = max(0, min(at.share, quads - first));
  if (threadIdx.x == 0)
    ptx::mbarrier_arrive_expect(inbox_full, static_cast<std::uint32_t>((blocks - 1) * (count * 16 + rows * 8)));
  ptx::mbarrier_wait(inbox_full, 0);
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    const int row = (first + i) / Shape::kQuads, column = (first + i) % Shape::kQuads * 4;
    const float2* const in_states = reinterpret_cast<const float2*>(dynamic_shared + at.inbox_states) + row;
    const float4* const in = reinterpret_cast<const float4*>(dynamic_shared + Shape::kInbox) + i;
    const MergedQuad own = here(row, column);
    store(row, column,
          MergedQuad(
              blocks,
              [&](int k) {
                return k == rank ? float2{own.maximum, own.sum} : in_states[(k - (k > rank ? 1 : 0)) * Shape::kRows];
              },
              [&](int k) {
                return k == rank ? float4{own.values[0], own.values[1], own.values[2], own.values[3]}
                                 : in[(k - (k > rank ? 1 : 0)) * at.share];
              }));
  }
}

template <class T, class Shape>
void launch_decode_group(const AttentionParams& p, Stream stream) {
  constexpr const char* kName = "attention_fwd decode sm90a: a cluster for a group";
  const auto kernel = decode_group_kernel<T, Shape>;
  const GroupPlan plan = plan_group(p, [&](int blocks) {
    return clusters_at_once(kName, reinterpret_cast<const void*>(kernel), blocks, Shape::kThreads,
                            Shape(Shape::kRows, blocks).bytes, p.device.index);
  });
  LaunchShape shape{
      dim3(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(p.heads_kv), static_cast<unsigned>(p.batch)),
      Shape::kThreads, static_cast<std::size_t>(Shape(plan.rows, plan.blocks).bytes), native(stream), true};
  shape.cluster = static_cast<unsigned>(plan.blocks);
  const auto box = 1u << plan.log2_box;
  launch(kName, kernel, shape, p, plan, make_tensor_map("attention_fwd k", kv_map(p, false, box)),
         make_tensor_map("attention_fwd v", kv_map(p, true, box)));
}

}  // namespace flashkernel::cuda::sm90a
