// Attention of one query a sequence over a cache (Flash-Decoding, Dao et al. 2023). Up to some 100 MB of keys and
// values, a call's time is a chain of latencies: launch, lengths, page table, keys, merging. Beyond that, its time is
// that of the bytes. instances/ has the file that instantiates the kernel.
//
// A cluster of up to 16 blocks serves one kv head, for all sequences or for a group of them. A warp takes 16 keys at a
// time (a granule) through its own ring of cp.async copies, so that the loop has no barrier. Keys are the rows of
// mma.sync m16n8k16 and query heads are its columns: S^T = K Q^T, O^T = V^T P^T.
//
// A border between blocks may cut a sequence. The cluster merges such a sequence: each of the sequence's blocks owns a
// share of the output, and every other one sends it the numerators of that share, which a barrier in the owner's shared
// memory counts. No global workspace, counter or second kernel is needed, except in two kinds of long calls: where many
// sequences are shared by blocks that form no cluster (shared_schedule.cuh), and where a few sequences are cut into
// pieces, which merge.cuh puts together. Where there are enough sequences and kv heads for a cluster each, group.cuh
// has another kernel.
//
// Invariant: parts are merged in the order of warps, then of blocks. Therefore results are the same bit for bit.
#pragma once

#include <type_traits>

#include "cuda/host/launch.hpp"
#include "cuda/host/zeroed_memory.hpp"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/attention/decode/sm90a/group.cuh"
#include "cuda/attention/decode/sm90a/merge.cuh"
#include "cuda/attention/decode/sm90a/producer.cuh"
#include "cuda/attention/decode/sm90a/shared_schedule.cuh"
#include "cuda/pipeline/departure.cuh"

namespace flashkernel::cuda::sm90a {

/// A block has kWarps warps, and each warp has a ring of kStages granules of K and V in shared memory. When a sequence
/// ends, one slot of the ring is free, and the warp's result is put there. Therefore a block takes no more than 96 KB,
/// and two blocks fit a multiprocessor. kTiles counts groups of 8 query heads: the columns of one matrix instruction.
template <int kQkDim_, int kVDim_, int kWarps_, int kStages_, int kTiles_ = 1>
struct ClusterDecodeShape {
  static constexpr int kQkDim = kQkDim_, kVDim = kVDim_;
  static constexpr int kWarps = kWarps_, kStages = kStages_, kThreads = kWarps * kWarp;
  static constexpr int kTiles = kTiles_, kRows = kTiles * kTileRows;
  static constexpr int kKBytes = kGranule * kQkDim * 2, kVBytes = kGranule * kVDim * 2, kSlotBytes = kKBytes + kVBytes;
  static constexpr int kRingBytes = kStages * kSlotBytes;  // of a warp
  static constexpr int kBlocksPerSm = kWarps * kRingBytes <= 100 * 1024 ? 2 : 1;
  static constexpr int kQuads = kVDim / 4;  // of a row, four columns each
  static_assert(kWarps % 4 == 0, "what follows the places of results is read 16 bytes at a time");

  /// The place of a column of a row of a warp's result, in floats. A store writes 8 columns of four rows of the same
  /// parity, which must lie in different banks. Rows are padded by 4 floats where the slot has room for that; elsewhere
  /// an exclusive or moves the columns.
  static constexpr bool kPadded = kRows * (kVDim + 4) * 4 <= kSlotBytes;
  static constexpr int kPitch = kPadded ? kVDim + 4 : kVDim;
  static_assert(kRows * kPitch * 4 <= kSlotBytes);
  __device__ static int result_at(int row, int column) {
    return row * kPitch + (kPadded ? column : column ^ row / 2 % 4 * 8);
  }

  /// Shared memory, in bytes: the rings; where the warps' results are, their maxima and sums; the inboxes of the two
  /// sequences that may cross this block's borders, and the maxima and sums that come with them.
  int results, states, inbox, inbox_states, barriers, bytes, inbox_quads;
  __host__ __device__ explicit ClusterDecodeShape(int rows)
      : results(kWarps * kRingBytes),
        states(results + kWarps * 4),
        inbox(states + kWarps * kRows * 8),
        inbox_states(0),
        barriers(0),
        bytes(0),
        inbox_quads(rows * kQuads + kMostDecodeBlocks) {  // each of n blocks sends an n-th of them, rounded up
    inbox_states = inbox + 2 * inbox_quads * 16;
    barriers = inbox_states + 2 * kMostDecodeBlocks * kRows * 8;
    bytes = barriers + 2 * 8;
  }
};

/// B operand of S^T: row 8 t + lane / 4 of the queries, of slice d columns 16 d + 2 (lane % 4) + {0, 1} and 8 further.
template <class T, int kQkDim, int kTiles>
__device__ inline void load_query(const AttentionParams& p, int b, int head, int rows,
                                  std::uint32_t (&query)[kTiles][kQkDim / 16][2]) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const int row = t * kTileRows + lane / 4;
    const T* from = static_cast<const T*>(p.q) + b * p.stride_q_batch +
                    (static_cast<std::int64_t>(head) * rows + min(row, rows - 1)) * p.stride_q_head + lane % 4 * 2;
#pragma unroll
    for (int d = 0; d < kQkDim / 16; ++d)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        query[t][d][half] = row < rows ? *reinterpret_cast<const std::uint32_t*>(from + 16 * d + 8 * half) : 0;
  }
}

/// A sequence that several blocks share: blocks first .. first + parts - 1, each of which finishes `share` quads.
struct CutSequence {
  int sequence = 0, first = 0, parts = 0, share = 0;
};

/// A warp's softmax and output over the granules that it has seen. Element e of tile t in a slice belongs to the key or
/// column lane / 4 (+ 8 where e is 2 or 3) and to the row 8 t + 2 (lane % 4) + e % 2.
template <class T, class Shape>
struct WarpSums {
  using QkTile = SharedTile<Shape::kQkDim>;
  using VTile = SharedTile<Shape::kVDim>;
  static constexpr int kQkSlices = Shape::kQkDim / 16, kVSlices = Shape::kVDim / 16, kTiles = Shape::kTiles;
  float out[kVSlices][kTiles][4] = {}, maximum[kTiles][2], sum[kTiles][2] = {};

  __device__ WarpSums() {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) maximum[t][0] = maximum[t][1] = -INFINITY;
  }

  /// The sequence has the first `rows` of the granule's keys.
  __device__ void add(std::uint32_t keys, std::uint32_t values, const std::uint32_t (&query)[kTiles][kQkSlices][2],
                      float scale_log2, int rows) {
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    const std::uint32_t lane_k = keys + QkTile::lane_offset(LaneA::row(lane), LaneA::half(lane));
    const std::uint32_t lane_v = values + VTile::lane_offset(LaneB::row(lane), LaneB::half(lane));
    float score[2][kTiles][4] = {};  // two independent sums
#pragma unroll
    for (int d = 0; d < kQkSlices; ++d) {
      std::uint32_t a[4];
      ptx::ldmatrix_x4(a, QkTile::at_slice(lane_k, d));
#pragma unroll
      for (int t = 0; t < kTiles; ++t) ptx::mma_m16n8k16<T>(score[d % 2][t], a, query[t][d][0], query[t][d][1]);
    }
    float x[kTiles][4];
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[t][e] = (score[0][t][e] + score[1][t][e]) * scale_log2;
        if (lane / 4 + e / 2 * 8 >= rows) x[t][e] = -INFINITY;
      }
    // The shift of the exponentials is the maximum so far, or an older one while no exponential passes 2^8.
    bool above = false;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e) above |= x[t][e] > maximum[t][e % 2] + 8.0f;
    if (__any_sync(kFullMask, above)) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float highest = fmaxf(maximum[t][e], fmaxf(x[t][e], x[t][2 + e]));
#pragma unroll
          for (int step = 4; step < kWarp; step *= 2)
            highest = fmaxf(highest, __shfl_xor_sync(kFullMask, highest, step));
          const float factor = ptx::exp2_approx(maximum[t][e] - SoftmaxState::shift(highest));
          maximum[t][e] = highest;
          sum[t][e] *= factor;
#pragma unroll
          for (int c = 0; c < kVSlices; ++c) out[c][t][e] *= factor, out[c][t][2 + e] *= factor;
        }
    }
    std::uint32_t probability[kTiles][2];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[t][e] = ptx::exp2_approx(x[t][e] - SoftmaxState::shift(maximum[t][e % 2]));
      sum[t][0] += x[t][0] + x[t][2];
      sum[t][1] += x[t][1] + x[t][3];
      probability[t][0] = ptx::movmatrix_trans(pack<T>(x[t][0], x[t][1]));
      probability[t][1] = ptx::movmatrix_trans(pack<T>(x[t][2], x[t][3]));
    }
#pragma unroll
    for (int c = 0; c < kVSlices; ++c) {
      std::uint32_t a[4];
      ptx::ldmatrix_x4_trans(a, VTile::at_slice(lane_v, c));
#pragma unroll
      for (int t = 0; t < kTiles; ++t) ptx::mma_m16n8k16<T>(out[c][t], a, probability[t][0], probability[t][1]);
    }
  }

  /// To shared memory: the result, and maximum and sum of each row.
  __device__ void put(float* result, float2* states, int rows) const {
    const int lane = static_cast<int>(threadIdx.x % kWarp);
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float total = sum[t][e];
#pragma unroll
        for (int step = 4; step < kWarp; step *= 2) total += __shfl_xor_sync(kFullMask, total, step);
        const int row = t * kTileRows + 2 * (lane % 4) + e;
        if (row >= rows) continue;
        if (lane < 4) states[row] = float2{maximum[t][e], total};
#pragma unroll
        for (int c = 0; c < kVSlices; ++c)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            result[Shape::result_at(row, 16 * c + 8 * half + lane / 4)] = out[c][t][2 * half + e];
      }
  }
};

/// The page table into L2 while lengths are on their way: a line a thread of the cluster.
__device__ inline void prefetch_table(const AttentionParams& p) {
  constexpr int kLine = 128 / sizeof(std::int32_t);
  const std::int64_t at = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kLine;
  if (at < (p.batch - 1) * p.stride_block_table + p.max_pages) ptx::prefetch_l2(p.block_table + at);
}

/// What a block reads first, into L2 while the kernel before still runs: hints change no value, so that kernel may
/// still write it. The cluster's threads share lengths, table and queries.
__device__ inline void fetch_ahead(const AttentionParams& p, const ClusterPlan& plan, int head) {
  constexpr int kLine = 128;
  const int index = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (p.is_paged()) {
    prefetch_table(p);
    const int bytes = static_cast<int>(p.batch) * (p.seq_lens.is_int64 ? 8 : 4);
    if (index * kLine < bytes) ptx::prefetch_l2(static_cast<const char*>(p.seq_lens.data) + index * kLine);
  }
  const int lines = static_cast<int>(p.head_dim) * 2 / kLine, all = static_cast<int>(p.batch) * plan.rows * lines;
  for (int i = index; i < all; i += plan.blocks * static_cast<int>(blockDim.x)) {
    const int b = i / (plan.rows * lines), row = i / lines % plan.rows;
    ptx::prefetch_l2(
        static_cast<const char*>(p.q) + i % lines * kLine +
        2 * (b * p.stride_q_batch + (static_cast<std::int64_t>(head) * plan.rows + row) * p.stride_q_head));
  }
}

/// Grid: blocks of a cluster, parts of kv heads, groups of sequences (or blocks that share them).
template <class T, class Shape, class Schedule>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    attention_decode_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ ClusterPlan plan,
                            float* workspace, int* counters) {
  constexpr int kQkDim = Shape::kQkDim, kWarps = Shape::kWarps, kStages = Shape::kStages, kQuads = Shape::kQuads;
  constexpr int kRows = Shape::kRows;
  constexpr bool kAlone = Schedule::kAlone, kPieces = Shape::kTiles > 1;
  constexpr bool kShared = std::is_same_v<Schedule, SharedSchedule>;
  using Producer =
      GranuleProducer<T, kQkDim, Shape::kVDim, kStages, Schedule, Shape::kBlocksPerSm == 1 && Shape::kTiles == 1>;
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = static_cast<int>(threadIdx.x % kWarp), warp = static_cast<int>(threadIdx.x / kWarp);
  const int rank = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
  const int group = static_cast<int>(blockIdx.z), rows = plan.rows, quads = rows * kQuads;
  const Shape at(rows);
  int* const results = reinterpret_cast<int*>(shared + at.results);      // of each warp: where, in bytes
  float2* const states = reinterpret_cast<float2*>(shared + at.states);  // [warp][kRows]

  const std::uint32_t inbox_full = ptx::shared_address(shared + at.barriers);  // two barriers
  const auto meet = [&] {
    if (plan.blocks == 1) return;
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(inbox_full, 1);
      ptx::mbarrier_init(inbox_full + 8, 1);
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
    ptx::cluster_arrive_relaxed();
  };
  const bool early = plan.early();
  if (early) {
    meet();
    fetch_ahead(p, plan, head);
  }
  // Up to here this block has read nothing that the previous kernel may write. The next kernel may start: it waits here
  // as well.
  ptx::wait_for_previous_kernel();
  if (!(kPieces && plan.late)) ptx::allow_next_kernel();

  const auto lengths = Schedule::load_lengths(p, plan);
  std::uint32_t query[Shape::kTiles][kQkDim / 16][2];
  const std::uint32_t ring = ptx::shared_address(shared) + warp * Shape::kRingBytes;
  const unsigned step = kAlone ? static_cast<unsigned>(kWarps) << plan.log2_blocks : kWarps;
  // With one sequence, neighbouring granules go to different blocks, so that a few granules still use all blocks.
  const unsigned first = kAlone ? (static_cast<unsigned>(warp) << plan.log2_blocks) + static_cast<unsigned>(rank) : 0;
  Producer producer(p, plan, head / plan.parts, ring, first, step);
  if constexpr (kAlone) load_query<T, kQkDim, Shape::kTiles>(p, 0, head, rows, query);
  if (!early) {  // nothing is done yet: start with what the keys wait for
    if constexpr (!kAlone) fetch_ahead(p, plan, head);
    meet();
  }
  const Schedule schedule = [&] {
    if constexpr (kShared) {
      __shared__ SharedSchedule::Table table;
      return SharedSchedule(p, plan.groups, group, lengths, table);
    } else {
      return Schedule(p, plan, rank, group, lengths);
    }
  }();
  unsigned place = kAlone ? first : schedule.begin + static_cast<unsigned>(warp);
  if constexpr (!kAlone) producer.move_to(place);
  producer.begin(p, plan, schedule);
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) producer.start(p, plan, schedule);
  [[maybe_unused]] Departure departure(counters, static_cast<int>(gridDim.y * gridDim.z));
  if constexpr (kShared) {
    if (schedule.begun < 0 && schedule.begins < 0) departure.announce_without_use();
  }
  __syncwarp();
  if (plan.blocks > 1) ptx::cluster_wait();

  // Stores the result of a row; of a piece's row, and of a row that blocks share, the numerators.
  const auto store = [&](int i, int row, int column, float maximum, float sum, const float(&values)[4]) {
    if constexpr (kShared) {
      if (i == schedule.begun || i == schedule.begins)
        return SharedParts<T, Shape>(workspace, p, plan, head)
            .put(group, i == schedule.begins, row, column / 4, maximum, sum, values);
    }
    const std::int64_t h = static_cast<std::int64_t>(head) * rows + row;
    if (kPieces && plan.pieces > 1)
      return PieceResults(workspace, p, plan).put(i * p.heads_q + h, column / 4, maximum, sum, values);
    store_quad<T>(p, Schedule::batch_of(plan, i), h, column, maximum, sum, values);
  };
  const float scale_log2 = p.scale * 1.4426950408889634f;
  int slot = 0;
  CutSequence ends_here, goes_on;  // sequences cut by this block's first and last border
#pragma unroll 1
  for (int i = kAlone ? 0 : schedule.first_sequence(); i < schedule.num_sequences; ++i) {
    const auto sequence = schedule.sequence(i);
    if (sequence.start >= schedule.end) break;
    if (sequence.count == 0) continue;
    if constexpr (!kAlone) load_query<T, kQkDim, Shape::kTiles>(p, Schedule::batch_of(plan, i), head, rows, query);
    const unsigned end = min(schedule.end, sequence.start + sequence.count);
    // While the keys are on their way: which block merges which share.
    int first_block = 0, last_block = plan.blocks - 1;
    if constexpr (!kAlone && !kShared) {
      first_block = schedule.block_of(sequence.start);
      last_block = schedule.block_of(sequence.start + sequence.count - 1);
    }
    const int parts = last_block - first_block + 1, share = (quads + parts - 1) / parts;
    const CutSequence mine{i, first_block, parts, share};
    if (parts > 1 && rank == last_block) ends_here = mine;
    if (parts > 1 && rank != last_block) goes_on = mine;
    const float per_share = __fdividef(1.0f, static_cast<float>(share));

    WarpSums<T, Shape> sums;
#pragma unroll 1
    for (; place < end; place += step) {
      ptx::cp_async_wait<kStages - 2>();
      __syncwarp();  // the granule is there for all lanes, and all have read the slot that is filled next
      producer.start(p, plan, schedule);
      const std::uint32_t keys = ring + slot * static_cast<std::uint32_t>(Shape::kSlotBytes);
      slot = slot + 1 == kStages ? 0 : slot + 1;
      sums.add(keys, keys + static_cast<std::uint32_t>(Shape::kKBytes), query, scale_log2,
               sequence.length - static_cast<int>(place - sequence.start) * kGranule);
    }

    const int result = warp * Shape::kRingBytes + producer.free_slot() * Shape::kSlotBytes;
    if (lane == 0) results[warp] = result;
    __syncwarp();  // all lanes have read the slot
    sums.put(reinterpret_cast<float*>(shared + result), states + warp * kRows, rows);
    __syncthreads();

    for (int quad = static_cast<int>(threadIdx.x); quad < quads; quad += Shape::kThreads) {
      const int row = quad / kQuads, column = quad % kQuads * 4;
      const MergedQuad merged(
          kWarps, [&](int w) { return states[w * kRows + row]; },
          [&](int w) {
            return *reinterpret_cast<const float4*>(shared + results[w] + Shape::result_at(row, column) * 4);
          });
      if (parts == 1) {
        store(i, row, column, merged.maximum, merged.sum, merged.values);
        continue;
      }
      // quad / share, by a product; the half keeps it away from whole numbers, where rounding would matter.
      const int index = static_cast<int>((static_cast<float>(quad) + 0.5f) * per_share), owner = first_block + index,
                inbox = owner == last_block ? 0 : 1;
      const int place_there = inbox * at.inbox_quads + (rank - first_block) * share + quad - index * share;
      const auto there = static_cast<std::uint32_t>(owner);
      ptx::store_async_4(ptx::map_shared(ptx::shared_address(shared + at.inbox) + place_there * 16, there),
                         float4{merged.values[0], merged.values[1], merged.values[2], merged.values[3]},
                         ptx::map_shared(inbox_full + 8 * inbox, there));
    }
    // Every block of the sequence gets each row's maximum and sum.
    if (parts > 1) {
      for (int i = static_cast<int>(threadIdx.x); i < parts * kRows; i += Shape::kThreads) {
        const int row = i % kRows, owner = first_block + i / kRows, inbox = owner == last_block ? 0 : 1;
        if (row >= rows) continue;
        const MergedQuad merged(
            kWarps, [&](int w) { return states[w * kRows + row]; }, [](int) { return float4{}; });
        const int place_there = (inbox * kMostDecodeBlocks + rank - first_block) * kRows + row;
        const auto there = static_cast<std::uint32_t>(owner);
        ptx::store_async_2(ptx::map_shared(ptx::shared_address(shared + at.inbox_states) + place_there * 8, there),
                           float2{merged.maximum, merged.sum}, ptx::map_shared(inbox_full + 8 * inbox, there));
      }
    }
    if constexpr (!kAlone) __syncthreads();  // the results are read: their slots are rings' again
  }

  if (kPieces && plan.late) ptx::allow_next_kernel();
  // Sequences without a key.
  if (warp == kWarps - 1) {
    for (int i = group * plan.blocks + rank; i < schedule.num_sequences; i += plan.groups * plan.blocks) {
      if (schedule.sequence(i).length > 0) continue;
      const float zeros[4] = {};
      for (int quad = lane; quad < quads; quad += kWarp)
        store(i, quad / kQuads, quad % kQuads * 4, -INFINITY, 0.0f, zeros);
    }
  }
#pragma unroll
  for (int inbox = 0; inbox < 2; ++inbox) {
    const CutSequence& mine = inbox == 0 ? ends_here : goes_on;
    if (mine.parts == 0) continue;
    const int first_quad = (rank - mine.first) * mine.share, quad = first_quad + static_cast<int>(threadIdx.x);
    const int here = max(0, min(mine.share, quads - first_quad));
    if (threadIdx.x == 0)
      ptx::mbarrier_arrive_expect(inbox_full + 8 * inbox,
                                  static_cast<std::uint32_t>(mine.parts * (here * 16 + rows * 8)));
    ptx::mbarrier_wait(inbox_full + 8 * inbox, 0);
    if (static_cast<int>(threadIdx.x) >= here) continue;
    const int row = quad / kQuads;
    const float2* const in_states =
        reinterpret_cast<const float2*>(shared + at.inbox_states) + inbox * kMostDecodeBlocks * kRows + row;
    const float4* const in = reinterpret_cast<const float4*>(shared + at.inbox) + inbox * at.inbox_quads + threadIdx.x;
    const MergedQuad merged(
        mine.parts, [&](int i) { return in_states[i * kRows]; }, [&](int i) { return in[i * mine.share]; });
    store(mine.sequence, row, quad % kQuads * 4, merged.maximum, merged.sum, merged.values);
  }
  if constexpr (kShared) {
    __shared__ bool is_last;
    const bool shares = schedule.begun >= 0 || schedule.begins >= 0;
#pragma unroll 1
    for (int k = 0; shares && k < 2; ++k) {
      const int i = k == 0 ? schedule.begun : schedule.begins;
      if (i >= 0) {
        const auto sequence = schedule.sequence(i);
        const int first_block = schedule.block_of(sequence.start);
        const int parts = schedule.block_of(sequence.start + sequence.count - 1) - first_block + 1;
        __syncthreads();  // the block's part is there; everybody knows of the sequence before
        if (threadIdx.x == 0)
          is_last = ptx::fetch_add_acq_rel(counters + head * plan.groups + first_block, 1) == parts - 1;
        __syncthreads();
        if (is_last) SharedParts<T, Shape>(workspace, p, plan, head).merge(i, first_block, parts);
      }
      if (k == 1) departure.announce();
    }
    departure.finish();
  }
}

template <class T, class Shape, class Schedule>
void launch_attention_decode(const AttentionParams& p, const ClusterPlan& plan, void* workspace, Stream stream,
                             int* counters = nullptr) {
  LaunchShape shape{dim3(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(p.heads_kv * plan.parts),
                         static_cast<unsigned>(plan.groups)),
                    Shape::kThreads, static_cast<std::size_t>(Shape(plan.rows).bytes), native(stream), plan.early()};
  shape.cluster = static_cast<unsigned>(plan.blocks);
  launch("attention_fwd decode sm90a", attention_decode_kernel<T, Shape, Schedule>, shape, p, plan,
         static_cast<float*>(workspace), counters);
}

template <class T, class Shape>
void launch_shared_decode(const AttentionParams& p, const ClusterPlan& plan, void* workspace, Stream stream) {
  const ZeroedMemory counters(p.device.index, Departure::bytes(p.heads_kv * plan.groups), stream);
  launch_attention_decode<T, Shape, SharedSchedule>(p, plan, workspace, stream, static_cast<int*>(counters.data()));
}

template <class T, class Shape>
void launch_decode_of_pieces(const AttentionParams& p, const ClusterPlan& plan, void* workspace, Stream stream) {
  launch_attention_decode<T, Shape, ClusterSchedule<false, true>>(p, plan, workspace, stream);
  if (plan.pieces == 1) return;
  launch("attention_fwd decode sm90a: merge", attention_decode_merge_kernel<T, Shape::kVDim>,
         {dim3(static_cast<unsigned>(p.heads_q), static_cast<unsigned>(p.batch)), kMergeWarps * kWarp, 0,
          native(stream), true},
         p, plan, static_cast<float*>(workspace));
}

template <DType kDtype, int kQkDim, int kVDim>
int decode_groups_at_once(int blocks, int device) {
  return groups_at_once<Element<kDtype>, GroupShape<kQkDim, kVDim, 6>>(blocks, device);
}

/// Entries of the table.
template <DType kDtype, int kQkDim, int kVDim>
void decode_group(const AttentionParams& p, const Plan& plan, void*, Stream stream) {
  if (p.batch * p.heads_q == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  launch_decode_group<Element<kDtype>, GroupShape<kQkDim, kVDim, 6>>(p, plan.as<GroupPlan>(), stream);
}

/// Every warp has 16 KB under way, and a block has 64 or 128 KB. A rate of 4.5 TB/s with a latency of 1 us needs 34 KB
/// for each multiprocessor, or 70 KB where a call uses 64 of them.
template <DType kDtype, int kQkDim, int kVDim>
void decode_clusters(const AttentionParams& p, const Plan& planned, void* workspace, Stream stream) {
  using T = Element<kDtype>;
  if (p.batch * p.heads_q == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  const ClusterPlan& plan = planned.as<ClusterPlan>();
  using Narrow = ClusterDecodeShape<kQkDim, kVDim, kQkDim <= 64 ? 8 : 4, 3>;
  using Wide = ClusterDecodeShape<kQkDim, kVDim, 8, 3>;  // at d64 this is Narrow
  using Alone = ClusterSchedule<true, false>;
  using Dealt = ClusterSchedule<false, false>;
  if (plan.shared) return launch_shared_decode<T, Wide>(p, plan, workspace, stream);
  if constexpr (kQkDim == 128) {
    if (plan.tiles > 1)
      return launch_decode_of_pieces<T, ClusterDecodeShape<kQkDim, kVDim, 8, 3, 2>>(p, plan, workspace, stream);
  }
  if (plan.wide) {
    if (p.batch == 1) return launch_attention_decode<T, Wide, Alone>(p, plan, workspace, stream);
    return launch_attention_decode<T, Wide, Dealt>(p, plan, workspace, stream);
  }
  if (p.batch == 1) return launch_attention_decode<T, Narrow, Alone>(p, plan, workspace, stream);
  launch_attention_decode<T, Narrow, Dealt>(p, plan, workspace, stream);
}

}  // namespace flashkernel::cuda::sm90a
