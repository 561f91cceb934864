// Attention of one query a sequence over a cache of up to some 100 MB, where time is a chain of latencies: launch,
// lengths, page table, keys, merging (Flash-Decoding, Dao et al. 2023). Instantiated by the generated
// attention_decode_*.cu.
//
// A cluster of up to 16 blocks serves a kv head of all sequences, or of a group of them. A warp takes 16 keys at a time
// (a granule) through its own ring of cp.async copies, so that the loop has no barrier; keys are the rows of mma.sync
// m16n8k16 and query heads its columns: S^T = K Q^T, O^T = V^T P^T. Sequences cut by a border between blocks are merged
// inside of the cluster: every block sends each of the sequence's blocks its part of that one's share of the output,
// counted by a barrier there. No global workspace, counters or second kernel.
//
// Invariant: parts are merged in the order of warps, then of blocks, so that results are the same bit for bit.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/sm90a/decode_producer.cuh"
#include "cuda/tile/attention_score.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda::sm90a {

/// kWarps a block; a warp has kStages granules of K and V in shared memory. Its result lies in the slot of its ring
/// that is free when a sequence ends, which keeps a block of 96 KB so small that two fit a multiprocessor.
template <int kDim_, int kWarps_, int kStages_>
struct ClusterDecodeShape {
  static constexpr int kDim = kDim_, kWarps = kWarps_, kStages = kStages_, kThreads = kWarps * kWarp;
  static constexpr int kSlotBytes = 2 * kGranule * kDim * 2;
  static constexpr int kRingBytes = kStages * kSlotBytes;  // of a warp
  static constexpr int kBlocksPerSm = kWarps * kRingBytes <= 100 * 1024 ? 2 : 1;
  static constexpr int kPitch = kDim + 4;  // floats of a row of a warp's result
  static constexpr int kQuads = kDim / 4;  // of a row, four columns each
  static_assert(kMostRows * kPitch * 4 <= kSlotBytes);
  static_assert(kWarps % 4 == 0, "what follows the places of results is read 16 bytes at a time");

  /// Shared memory, in bytes: the rings; where the warps' results are, their maxima and sums; the inboxes of the two
  /// sequences that may cross this block's borders, and the maxima and sums that come with them.
  int results, states, inbox, inbox_states, barriers, bytes, inbox_quads;
  __host__ __device__ explicit ClusterDecodeShape(int rows)
      : results(kWarps * kRingBytes),
        states(results + kWarps * 4),
        inbox(states + kWarps * kMostRows * 8),
        inbox_states(0),
        barriers(0),
        bytes(0),
        inbox_quads(rows * kQuads + kMostDecodeBlocks) {  // each of n blocks sends its n-th, rounded up
    inbox_states = inbox + 2 * inbox_quads * 16;
    barriers = inbox_states + 2 * kMostDecodeBlocks * kMostRows * 8;
    bytes = barriers + 2 * 8;
  }
};

/// B operand of S^T: row lane / 4 of the queries, of slice d columns 16 d + 2 (lane % 4) + {0, 1} and 8 further.
template <class T, int kDim>
__device__ inline void load_query(const AttentionParams& p, int b, int head, int rows,
                                  std::uint32_t (&query)[kDim / 16][2]) {
  const int lane = static_cast<int>(threadIdx.x % kWarp), row = lane / 4;
  const T* from = static_cast<const T*>(p.q) + b * p.stride_q_batch +
                  (static_cast<std::int64_t>(head) * rows + min(row, rows - 1)) * p.stride_q_head + lane % 4 * 2;
#pragma unroll
  for (int d = 0; d < kDim / 16; ++d)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      query[d][half] = row < rows ? *reinterpret_cast<const std::uint32_t*>(from + 16 * d + 8 * half) : 0;
}

/// Four columns of a finished row.
template <class T>
__device__ inline void store_quad(const AttentionParams& p, int b, std::int64_t h, int column, float maximum_log2,
                                  float sum, const float (&values)[4]) {
  constexpr float kLn2 = 0.69314718055994531f;
  SoftmaxState state;
  state.maximum = maximum_log2 * kLn2;  // -inf stays
  state.sum = sum;
  float lse;
  const float factor = state.finish(p.sinks, h, &lse);
  if (p.lse && column == 0) p.lse[p.lse_offset(b, h, 0)] = lse;
  float scaled[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) scaled[e] = factor == 0.0f ? 0.0f : values[e] * factor;
  store_floats(static_cast<T*>(p.out) + b * p.stride_out_batch + h * p.stride_out_head + column, scaled);
}

/// Parts of a quad: `state(i)` is maximum (base 2) and sum of part i, `values(i)` its numerators.
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

/// A sequence that several blocks share: blocks first .. first + parts - 1, each of which finishes `share` quads.
struct CutSequence {
  int b = 0, first = 0, parts = 0, share = 0;
};

/// A warp's softmax and output over the granules that it has seen. Element e of a slice: key or column lane / 4 (+ 8
/// for e of 2 and 3), row 2 (lane % 4) + e % 2.
template <class T, int kDim>
struct WarpSums {
  using Tile = SharedTile<kDim>;
  static constexpr int kSlices = kDim / 16;
  float out[kSlices][4] = {}, maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {};

  /// `rows`: of the granule's keys, those that the sequence has.
  __device__ void add(std::uint32_t keys, std::uint32_t values, const std::uint32_t (&query)[kSlices][2],
                      float scale_log2, int rows) {
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    const std::uint32_t lane_k = keys + Tile::lane_offset(LaneA::row(lane), LaneA::half(lane));
    const std::uint32_t lane_v = values + Tile::lane_offset(LaneB::row(lane), LaneB::half(lane));
    float score[2][4] = {};  // two independent sums
#pragma unroll
    for (int d = 0; d < kSlices; ++d) {
      std::uint32_t a[4];
      ptx::ldmatrix_x4(a, Tile::at_slice(lane_k, d));
      ptx::mma_m16n8k16<T>(score[d % 2], a, query[d][0], query[d][1]);
    }
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[e] = (score[0][e] + score[1][e]) * scale_log2;
      if (lane / 4 + e / 2 * 8 >= rows) x[e] = -INFINITY;
    }
    // The shift of the exponentials is the maximum so far, or an older one while no exponential passes 2^8.
    bool above = false;
#pragma unroll
    for (int e = 0; e < 4; ++e) above |= x[e] > maximum[e % 2] + 8.0f;
    if (__any_sync(kFullMask, above)) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float highest = fmaxf(maximum[e], fmaxf(x[e], x[2 + e]));
#pragma unroll
        for (int step = 4; step < kWarp; step *= 2) highest = fmaxf(highest, __shfl_xor_sync(kFullMask, highest, step));
        const float factor = ptx::exp2_approx(maximum[e] - SoftmaxState::shift(highest));
        maximum[e] = highest;
        sum[e] *= factor;
#pragma unroll
        for (int c = 0; c < kSlices; ++c) out[c][e] *= factor, out[c][2 + e] *= factor;
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = ptx::exp2_approx(x[e] - SoftmaxState::shift(maximum[e % 2]));
    sum[0] += x[0] + x[2];
    sum[1] += x[1] + x[3];
    const std::uint32_t probability[2] = {ptx::movmatrix_trans(pack<T>(x[0], x[1])),
                                          ptx::movmatrix_trans(pack<T>(x[2], x[3]))};
#pragma unroll
    for (int c = 0; c < kSlices; ++c) {
      std::uint32_t a[4];
      ptx::ldmatrix_x4_trans(a, Tile::at_slice(lane_v, c));
      ptx::mma_m16n8k16<T>(out[c], a, probability[0], probability[1]);
    }
  }

  /// To shared memory: rows `pitch` floats apart, and maximum and sum of each.
  __device__ void put(float* result, float2* states, int pitch, int rows) const {
    const int lane = static_cast<int>(threadIdx.x % kWarp);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float total = sum[e];
#pragma unroll
      for (int step = 4; step < kWarp; step *= 2) total += __shfl_xor_sync(kFullMask, total, step);
      const int row = 2 * (lane % 4) + e;
      if (row >= rows) continue;
      if (lane < 4) states[row] = float2{maximum[e], total};
#pragma unroll
      for (int c = 0; c < kSlices; ++c)
#pragma unroll
        for (int half = 0; half < 2; ++half) result[row * pitch + 16 * c + 8 * half + lane / 4] = out[c][2 * half + e];
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

/// kAlone: the batch is one sequence. Grid: blocks of a cluster, parts of kv heads, groups of sequences.
template <class T, class Shape, bool kAlone>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    attention_decode_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ ClusterPlan plan) {
  constexpr int kDim = Shape::kDim, kWarps = Shape::kWarps, kStages = Shape::kStages, kQuads = Shape::kQuads;
  using Producer = GranuleProducer<T, kDim, kStages, kAlone>;
  using Schedule = ClusterSchedule<kAlone>;
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = static_cast<int>(threadIdx.x % kWarp), warp = static_cast<int>(threadIdx.x / kWarp);
  const int rank = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
  const int group = static_cast<int>(blockIdx.z), rows = plan.rows, quads = rows * kQuads;
  const Shape at(rows);
  int* const results = reinterpret_cast<int*>(shared + at.results);      // of each warp: where, in bytes
  float2* const states = reinterpret_cast<float2*>(shared + at.states);  // [warp][kMostRows]

  const std::uint32_t inbox_full = ptx::shared_address(shared + at.barriers);  // two barriers
  if (plan.blocks > 1) {
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(inbox_full, 1);
      ptx::mbarrier_init(inbox_full + 8, 1);
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
    ptx::cluster_arrive_relaxed();
  }
  fetch_ahead(p, plan, head);
  // Up to here nothing is read that the kernel before may write. The next one may come: it waits here, too.
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();

  const int length = Schedule::load_length(p);
  std::uint32_t query[kDim / 16][2];
  const std::uint32_t ring = ptx::shared_address(shared) + warp * Shape::kRingBytes;
  const unsigned step = kAlone ? static_cast<unsigned>(kWarps) << plan.log2_blocks : kWarps;
  // One sequence: neighbouring granules in different blocks, so that few of them still use all.
  const unsigned first = kAlone ? (static_cast<unsigned>(warp) << plan.log2_blocks) + static_cast<unsigned>(rank) : 0;
  Producer producer(p, plan, head / plan.parts, ring, first, step);
  if constexpr (kAlone) load_query<T, kDim>(p, 0, head, rows, query);
  const Schedule schedule(p, plan, rank, group, length);
  unsigned place = kAlone ? first : schedule.begin + static_cast<unsigned>(warp);
  if constexpr (!kAlone) producer.move_to(place);
  producer.begin(p, plan, schedule);
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) producer.start(p, plan, schedule);
  __syncwarp();
  if (plan.blocks > 1) ptx::cluster_wait();

  const float scale_log2 = p.scale * 1.4426950408889634f;
  int slot = 0;
  CutSequence ends_here, goes_on;  // sequences cut by this block's first and last border
#pragma unroll 1
  for (int b = kAlone ? 0 : schedule.first_sequence(); b < p.batch; ++b) {
    const auto sequence = schedule.sequence(b);
    if (sequence.start >= schedule.end) break;
    if (sequence.count == 0) continue;
    if constexpr (!kAlone) load_query<T, kDim>(p, b, head, rows, query);
    const unsigned end = min(schedule.end, sequence.start + sequence.count);
    // Who merges what, while the keys are on their way.
    int first_block = 0, last_block = plan.blocks - 1;
    if constexpr (!kAlone) {
      first_block = schedule.block_of(sequence.start);
      last_block = schedule.block_of(sequence.start + sequence.count - 1);
    }
    const int parts = last_block - first_block + 1, share = (quads + parts - 1) / parts;
    const CutSequence mine{b, first_block, parts, share};
    if (parts > 1 && rank == last_block) ends_here = mine;
    if (parts > 1 && rank != last_block) goes_on = mine;
    const float per_share = __fdividef(1.0f, static_cast<float>(share));

    WarpSums<T, kDim> sums;
#pragma unroll 1
    for (; place < end; place += step) {
      ptx::cp_async_wait<kStages - 2>();
      __syncwarp();  // the granule is there for all lanes, and all have read the slot that is filled next
      producer.start(p, plan, schedule);
      const std::uint32_t keys = ring + slot * 2 * Producer::kTileBytes;
      slot = slot + 1 == kStages ? 0 : slot + 1;
      sums.add(keys, keys + Producer::kTileBytes, query, scale_log2,
               sequence.length - static_cast<int>(place - sequence.start) * kGranule);
    }

    const int result = warp * Shape::kRingBytes + producer.free_slot() * Shape::kSlotBytes;
    if (lane == 0) results[warp] = result;
    __syncwarp();  // all lanes have read the slot
    sums.put(reinterpret_cast<float*>(shared + result), states + warp * kMostRows, Shape::kPitch, rows);
    __syncthreads();

    for (int quad = static_cast<int>(threadIdx.x); quad < quads; quad += Shape::kThreads) {
      const int row = quad / kQuads, column = quad % kQuads * 4;
      const MergedQuad merged(
          kWarps, [&](int w) { return states[w * kMostRows + row]; },
          [&](int w) {
            return *reinterpret_cast<const float4*>(shared + results[w] + (row * Shape::kPitch + column) * 4);
          });
      if (parts == 1) {
        store_quad<T>(p, b, static_cast<std::int64_t>(head) * rows + row, column, merged.maximum, merged.sum,
                      merged.values);
        continue;
      }
      // quad / share: half a quad keeps the product away from whole numbers.
      const int index = static_cast<int>((static_cast<float>(quad) + 0.5f) * per_share), owner = first_block + index,
                inbox = owner == last_block ? 0 : 1;
      const int place_there = inbox * at.inbox_quads + (rank - first_block) * share + quad - index * share;
      const auto there = static_cast<std::uint32_t>(owner);
      ptx::store_async_4(ptx::map_shared(ptx::shared_address(shared + at.inbox) + place_there * 16, there),
                         float4{merged.values[0], merged.values[1], merged.values[2], merged.values[3]},
                         ptx::map_shared(inbox_full + 8 * inbox, there));
    }
    // Each row's maximum and sum to every block of the sequence.
    if (parts > 1) {
      for (int i = static_cast<int>(threadIdx.x); i < parts * kMostRows; i += Shape::kThreads) {
        const int row = i % kMostRows, owner = first_block + i / kMostRows, inbox = owner == last_block ? 0 : 1;
        if (row >= rows) continue;
        const MergedQuad merged(
            kWarps, [&](int w) { return states[w * kMostRows + row]; }, [](int) { return float4{}; });
        const int place_there = (inbox * kMostDecodeBlocks + rank - first_block) * kMostRows + row;
        const auto there = static_cast<std::uint32_t>(owner);
        ptx::store_async_2(ptx::map_shared(ptx::shared_address(shared + at.inbox_states) + place_there * 8, there),
                           float2{merged.maximum, merged.sum}, ptx::map_shared(inbox_full + 8 * inbox, there));
      }
    }
    if constexpr (!kAlone) __syncthreads();  // the results are read: their slots are rings' again
  }

  // Sequences without a key.
  if (warp == kWarps - 1) {
    for (int b = group * plan.blocks + rank; b < p.batch; b += plan.groups * plan.blocks) {
      if (__shfl_sync(kFullMask, schedule.length, b) > 0) continue;
      const float zeros[4] = {};
      for (int quad = lane; quad < quads; quad += kWarp)
        store_quad<T>(p, b, static_cast<std::int64_t>(head) * rows + quad / kQuads, quad % kQuads * 4, -INFINITY, 0.0f,
                      zeros);
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
        reinterpret_cast<const float2*>(shared + at.inbox_states) + inbox * kMostDecodeBlocks * kMostRows + row;
    const float4* const in = reinterpret_cast<const float4*>(shared + at.inbox) + inbox * at.inbox_quads + threadIdx.x;
    const MergedQuad merged(
        mine.parts, [&](int i) { return in_states[i * kMostRows]; }, [&](int i) { return in[i * mine.share]; });
    store_quad<T>(p, mine.b, static_cast<std::int64_t>(head) * rows + row, quad % kQuads * 4, merged.maximum,
                  merged.sum, merged.values);
  }
}

template <class T, class Shape>
void launch_attention_decode(const AttentionParams& p, const ClusterPlan& plan, cudaStream_t stream) {
  LaunchShape shape{dim3(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(p.heads_kv * plan.parts),
                         static_cast<unsigned>(plan.groups)),
                    Shape::kThreads, static_cast<std::size_t>(Shape(plan.rows).bytes), stream,
                    !plan.wide || plan.blocks <= 2};
  shape.cluster = static_cast<unsigned>(plan.blocks);
  if (p.batch == 1)
    launch("attention_fwd decode sm90a", attention_decode_kernel<T, Shape, true>, shape, p, plan);
  else
    launch("attention_fwd decode sm90a", attention_decode_kernel<T, Shape, false>, shape, p, plan);
}

/// An entry of the table. Wide blocks in clusters of 4 and more do not start early: some of them would find a place,
/// the others stand behind the kernel before (72 us against 66 at 65536 keys in pages of 256, call after call). 16 KB
/// of every warp are under way: 64 or 128 KB a block, where 4.5 TB/s with 1 us of latency needs 34 KB a multiprocessor
/// (70 KB of each where 64 of them are used).
template <class T, int kDim>
void attention_decode_instance(const AttentionParams& p, void*, Stream stream) {
  if (p.batch * p.heads_q == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  const ClusterPlan plan = plan_cluster(p);
  if constexpr (kDim == 128) {
    if (plan.wide) return launch_attention_decode<T, ClusterDecodeShape<kDim, 8, 3>>(p, plan, native(stream));
  }
  launch_attention_decode<T, ClusterDecodeShape<kDim, kDim <= 64 ? 8 : 4, 3>>(p, plan, native(stream));
}

}  // namespace flashkernel::cuda::sm90a
