// Decode with up to 32 query heads for each kv head, where there are enough sequences and kv heads for a cluster each
// (group_plan.hpp). All query heads of a group read each key once, by wgmma (group_sums.cuh). The blocks of a cluster
// take the tiles of 64 keys of a sequence in turn, so that a block knows its pages before it knows the length. In each
// block one warpgroup loads tiles by TMA and two compute. Results are merged through shared memory (group_merge.cuh),
// without workspace, counters or a second kernel.
//
// Invariant: a block reads the length of its sequence once. How many bytes it sends and receives does not depend on the
// length, so no block waits for what another block has read. If a length is overwritten during the call, its results
// are wrong, but the call ends.
#pragma once

#include "cuda/host/clusters.hpp"
#include "cuda/host/device.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/attention/decode/sm90a/group.hpp"
#include "cuda/attention/decode/sm90a/group_merge.cuh"
#include "cuda/attention/decode/sm90a/group_sums.cuh"
#include "cuda/attention/decode/sm90a/schedule.cuh"
#include "cuda/pipeline/register_pool.hpp"

namespace flashkernel::cuda::sm90a {

/// Shared memory, threads and registers of a block. kStages tiles of K and V are on their way or in use: 192 KB at
/// d128. A block that has a multiprocessor to itself can read 53 bytes a clock. With a latency of 1 us that is 95 KB on
/// their way; besides, each warpgroup uses one tile and waits for the next.
template <int kQkDim_, int kVDim_, int kStages_>
struct GroupShape {
  static constexpr int kQkDim = kQkDim_, kVDim = kVDim_, kStages = kStages_, kConsumers = kGroupWarpgroups;
  // Then each slot belongs to one warpgroup, which has seen every phase of the slot's barrier end before it waits for
  // the next one.
  static_assert(kStages % kConsumers == 0);
  static constexpr int kKeys = kGroupKeys, kRows = kGroupRows;
  static constexpr int kWarps = 4 * kConsumers, kThreads = (kWarps + 4) * kWarp;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= registers_a_row(kThreads));
  // K and V lie as blocks of 64 columns: lines of 128 bytes, swizzled.
  static constexpr int kQkBlocks = kQkDim / 64, kVBlocks = kVDim / 64, kBlockBytes = kKeys * 128;
  static constexpr int kKBytes = kQkBlocks * kBlockBytes, kVBytes = kVBlocks * kBlockBytes;
  static constexpr int kProducers =
      kQkBlocks + kVBlocks;  // warps, of the four that hold none of the consumers' registers
  static_assert(kProducers <= 4);
  static constexpr int kStageBytes = kKBytes + kVBytes;

  static constexpr int kBarriers = kStages * kStageBytes, kInboxFull = kBarriers + 2 * kStages * 8;
  static constexpr int kLengthKnown = kInboxFull + 8, kExchanged = kLengthKnown + 8, kLength = kExchanged + 8;
  // What the warpgroups exchange: half of the results of each, and the maximum and sum of each thread.
  static constexpr int kExchange = (kLength + 4 + 15) / 16 * 16, kExchangeStates = kExchange + kRows * kVDim * 4;
  static constexpr int kInbox = kExchangeStates + kConsumers * 128 * 8;
};

/// A warp that loads a block of 64 columns of K (the first half of the producers) or of V, for the tiles rank, rank +
/// blocks, and so on. One copy brings these columns of one box of keys. The lanes ask for copies one after another, and
/// each request takes some 40 clocks; therefore there are four such warps. Boxes are looked up 32 at a time, one batch
/// ahead of their use, and the first batch before the length is known.
template <class Shape>
class TileProducer {
 public:
  /// Looks the first boxes up.
  __device__ TileProducer(const AttentionParams& p, const GroupPlan& plan, int producer, int rank, int sequence,
                          int head, const CUtensorMap* map)
      : p_(p), plan_(plan), map_(map), producer_(producer), rank_(rank), sequence_(sequence), head_(head) {
    static_assert(Shape::kKeys == 1 << 6);
    static_assert(Shape::kQkBlocks == Shape::kVBlocks, "as many warps bring blocks of K as bring blocks of V");
    log2_boxes_ = 6 - plan.log2_box;
    next_ = look_up(0);
  }

  __device__ void run(std::uint32_t shared, int length) {
    const int tiles = (length + Shape::kKeys - 1) / Shape::kKeys, block = producer_ % Shape::kQkBlocks;
    const int at_once = kWarp >> log2_boxes_;  // tiles
    const std::uint32_t to = static_cast<std::uint32_t>(producer_ / Shape::kQkBlocks * Shape::kKBytes +
                                                        block * Shape::kBlockBytes + (lane() << plan_.log2_box) * 128);
    Box now{0, 0, 0};
#pragma unroll 1
    for (int n = 0; rank_ + n * plan_.blocks < tiles; ++n) {
      const int in = n & (at_once - 1), stage = n % Shape::kStages;
      if (in == 0) now = next_;
      const int at = (in << log2_boxes_) + (lane() & (boxes() - 1));
      const int image = __shfl_sync(kFullMask, now.image, at), row = __shfl_sync(kFullMask, now.row, at);
      const bool is_there = __shfl_sync(kFullMask, now.key, at) < length && lane() < boxes();
      const unsigned copies = __popc(__ballot_sync(kFullMask, is_there));
      const std::uint32_t full = shared + Shape::kBarriers + stage * 8;
      ptx::mbarrier_wait(full + Shape::kStages * 8, (n / Shape::kStages & 1) ^ 1);
      if (lane() == 0) ptx::mbarrier_arrive_expect(full, copies << (plan_.log2_box + 7));
      __syncwarp();
      if (is_there)
        ptx::tma_load(shared + stage * Shape::kStageBytes + to, map_, full, ptx::kL2EvictFirst, block * 64, row, head_,
                      image);
      if (in == 0) next_ = look_up(n + at_once);
    }
    __syncwarp();
  }

 private:
  struct Box {
    int image, row, key;
  };
  __device__ static int lane() { return static_cast<int>(threadIdx.x % kWarp); }
  __device__ int boxes() const { return 1 << log2_boxes_; }  // of a tile

  /// The lane's box, in the batch that starts with the block's tile `first`. Nothing here waits for the entry of the
  /// page table: where an entry names no page, the box lies outside of the tensor, and TMA reads zeros.
  __device__ Box look_up(int first) const {
    const int tile = rank_ + (first + (lane() >> log2_boxes_)) * plan_.blocks;
    const int key = tile * Shape::kKeys + ((lane() & (boxes() - 1)) << plan_.log2_box);
    if (!p_.is_paged()) return {sequence_, key, key};
    Box box{0, key & ((1 << plan_.log2_page) - 1), key};
    // An entry past the end of the sequence may be read, but is not used.
    const int column = key >> plan_.log2_page;
    if (column < p_.max_pages) box.image = p_.block_table[sequence_ * p_.stride_block_table + column];
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
  const std::uint32_t length_known = shared + Shape::kLengthKnown;
  int* const length_here = reinterpret_cast<int*>(dynamic_shared + Shape::kLength);
  const int warp = static_cast<int>(__shfl_sync(kFullMask, threadIdx.x / kWarp, 0));
  const int rank = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y), blocks = plan.blocks;
  const int sequence = static_cast<int>(blockIdx.z);
  const GroupInbox<Shape> inbox(plan.rows, blocks);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      ptx::mbarrier_init(shared + Shape::kBarriers + stage * 8, Shape::kProducers);
      ptx::mbarrier_init(shared + Shape::kBarriers + (Shape::kStages + stage) * 8, 4);
    }
    ptx::mbarrier_init(inbox_full, 1);
    ptx::mbarrier_init(length_known, 1);
    ptx::mbarrier_init(shared + Shape::kExchanged, 128 * Shape::kConsumers);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect(inbox_full, static_cast<std::uint32_t>(inbox.expected(plan.rows, rank)));
    ptx::tma_prefetch_map(&map_k);
    ptx::tma_prefetch_map(&map_v);
  }
  __syncthreads();
  ptx::cluster_arrive_relaxed();
  fetch_ahead_of_group(p, plan, sequence, head);
  ptx::cluster_wait();  // the other blocks are there: their inboxes can be sent to
  // Up to here this block has read nothing that the previous kernel may write. The next kernel may start: it waits here
  // as well.
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();

  if (warp >= Shape::kWarps) {
    ptx::decrease_registers<Shape::kProducerRegisters>();
    const int producer = warp - Shape::kWarps;
    if (producer >= Shape::kProducers) return;
    TileProducer<Shape> tiles(p, plan, producer, rank, sequence, head, producer < Shape::kQkBlocks ? &map_k : &map_v);
    ptx::mbarrier_wait(length_known, 0);
    tiles.run(shared, *length_here);
  } else {
    ptx::increase_registers<Shape::kConsumerRegisters>();
    if (threadIdx.x == 0) {
      *length_here = keys_of(p, sequence);
      ptx::mbarrier_arrive(length_known);
    }
    ptx::mbarrier_wait(length_known, 0);
    const int length = *length_here, tiles = (length + Shape::kKeys - 1) / Shape::kKeys, consumer = warp / 4;
    const float scale_log2 = p.scale * 1.4426950408889634f;
    const auto tile = [&](int n) { return shared + n % Shape::kStages * Shape::kStageBytes; };
    const auto full = [&](int n) { return shared + Shape::kBarriers + n % Shape::kStages * 8; };
    const auto keys = [&](int n) { return length - (rank + n * blocks) * Shape::kKeys; };
    GroupSums<T, Shape> sums;
    const auto start_scores = [&](int n) {
      ptx::mbarrier_wait(full(n), n / Shape::kStages & 1);
      if (keys(n) < Shape::kKeys) clear_values<Shape>(tile(n), keys(n), 1 + static_cast<std::uint32_t>(consumer));
      sums.start_scores(tile(n));
    };
    sums.begin(p, sequence, head, plan.rows);
    if (keys(consumer) > 0) {
      start_scores(consumer);
      sums.end_scores();
      sums.weigh(scale_log2, keys(consumer));
      int n = consumer;
#pragma unroll 1
      for (int next = n + Shape::kConsumers; rank + next * blocks < tiles; n = next, next += Shape::kConsumers) {
        sums.start_values(tile(n));
        start_scores(next);
        sums.template end_values<1>();
        if (threadIdx.x % kWarp == 0) ptx::mbarrier_arrive(full(n) + Shape::kStages * 8);  // the slot is free
        sums.end_scores();
        sums.weigh(scale_log2, keys(next));
      }
      sums.start_values(tile(n));
      sums.template end_values<0>();
    }
    sums.finish();
    const GroupPart<Shape> part = merge_warpgroups(sums, consumer, dynamic_shared);
    merge_blocks<T>(p, part, inbox, plan.rows, rank, sequence, head, dynamic_shared, inbox_full);
  }
}

inline constexpr const char* kGroupName = "attention_fwd decode sm90a: a cluster for a group";  // in errors

template <class T, class Shape>
int groups_at_once(int blocks, int device) {
  const CudaDeviceGuard guard(device);
  return clusters_at_once(kGroupName, reinterpret_cast<const void*>(decode_group_kernel<T, Shape>), blocks,
                          Shape::kThreads, GroupInbox<Shape>(Shape::kRows, blocks).bytes, device);
}

template <class T, class Shape>
void launch_decode_group(const AttentionParams& p, const GroupPlan& plan, Stream stream) {
  LaunchShape shape{
      dim3(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(p.heads_kv), static_cast<unsigned>(p.batch)),
      Shape::kThreads, static_cast<std::size_t>(GroupInbox<Shape>(plan.rows, plan.blocks).bytes), native(stream), true};
  shape.cluster = static_cast<unsigned>(plan.blocks);
  // Two warps copy the two halves of a row. With fetches of 256 bytes, memory would be asked for each row twice (32
  // sequences of 4096 keys, 64/2 heads: 36.2 us instead of 34.5).
  const auto map = [&](const char* name, bool of_v) {
    TensorMapSpec spec = kv_map(p, of_v, 1u << plan.log2_box);
    spec.fetch_bytes = 128;
    return make_tensor_map(name, spec);
  };
  launch(kGroupName, decode_group_kernel<T, Shape>, shape, p, plan, map("attention_fwd k", false),
         map("attention_fwd v", true));
}

}  // namespace flashkernel::cuda::sm90a
