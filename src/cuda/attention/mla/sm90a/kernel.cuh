// MLA decoding on Hopper: all query heads against one latent row a token (DeepSeek-V2, 2024, in its absorbed form), on
// wgmma and TMA. instances/ has the files that instantiate it.
//
// A block has 64 rows of heads times queries. A tile of 64 latent rows lies in shared memory once and is used twice:
// its 576 columns are the keys of S = Q L^T, its first 512 are the values of O = P L. Warpgroup 0 makes the scores and
// the weights of a tile, and each of the two warpgroups adds 256 columns of the result. While they do, the tensor cores
// have the next tile's scores in their queue, and the copy engine brings the tile after that. Warpgroup 1 gets the
// weights through shared memory.
//
// Rows of 8 bits are widened on their way into a tile, by the four warps in the place of the copy engine (narrow.cuh).
//
//   variant.hpp   which calls, the plan        schedule.cuh  which block works on what        merge.cuh  parts and
//   results
//
// Invariant on NaN: what a tile holds past the end of its sequence becomes zero before the second product, and its
// scores count as hidden. Without a causal mask every query sees the rest.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/pipeline/register_pool.hpp"
#include "cuda/pipeline/ring.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/attention/forward/sm90a/epilogue.cuh"
#include "cuda/attention/mla/sm90a/merge.cuh"
#include "cuda/attention/mla/sm90a/narrow.cuh"

namespace flashkernel::cuda::sm90a {

/// Where things lie in dynamic shared memory, as 32-bit addresses. Tiles lie as blocks of 64 columns: lines of 128
/// bytes, swizzled.
struct MlaShared {
  static constexpr int kStages = 2, kColumnBlocks = kMlaDim / 64, kBlockBytes = 64 * 128;
  static constexpr int kTileBytes = kColumnBlocks * kBlockBytes;
  static constexpr int kWeights = (1 + kStages) * kTileBytes, kFactors = kWeights + kBlockBytes;
  static constexpr int kStates = kFactors + kMlaRows * 4, kBarriers = kStates + kMlaRows * 8;
  static constexpr int kNotes = kBarriers + 2 * kStages * 8;
  struct Notes {
    MlaWalk walk;
    MlaSegment segments[2];
  };
  static constexpr int kBytes = kNotes + static_cast<int>(sizeof(Notes));
  static_assert(kBytes + 1024 <= 227 * 1024, "a block of sm_90 has 227 KB");

  std::uint32_t base;

  __device__ std::uint32_t queries() const { return base; }
  __device__ std::uint32_t tile(std::uint32_t stage) const { return base + (1 + stage) * kTileBytes; }
  __device__ std::uint32_t weights() const { return base + kWeights; }
  __device__ float* factors() const { return static_cast<float*>(__cvta_shared_to_generic(base + kFactors)); }
  __device__ float* states() const { return static_cast<float*>(__cvta_shared_to_generic(base + kStates)); }
  __device__ std::uint32_t full(std::uint32_t stage) const { return base + kBarriers + 8 * stage; }
  __device__ std::uint32_t empty(std::uint32_t stage) const { return full(kStages + stage); }
  __device__ Notes& notes() const { return *static_cast<Notes*>(__cvta_shared_to_generic(base + kNotes)); }
};

inline constexpr int kMlaConsumers = 256, kMlaThreads = 384;  // two warpgroups, and one whose first warp loads
inline constexpr int kMlaProducerRegisters = 40, kMlaConsumerRegisters = 232;
static_assert(2 * kMlaConsumerRegisters + kMlaProducerRegisters <= registers_a_row(kMlaThreads));
// Barriers; 0 is __syncthreads.
inline constexpr int kConsumersMeet = 1, kWeightsAreThere = 2, kWeightsAreUsed = 3, kFirstMeets = 4, kAllMeet = 5;

using MlaRing = Ring<MlaShared::kStages>;

/// One warp: the latent rows of a segment.
__device__ inline void load_latent(const AttentionParams& p, const MlaPlan& plan, const MlaShared& shared,
                                   const CUtensorMap* map, const MlaSegment& segment, MlaRing& ring) {
  const int lane = static_cast<int>(threadIdx.x % kWarp), pieces = kMlaKeys / plan.box_rows;
  const std::int32_t* const table = p.block_table + segment.b * p.stride_block_table;
  const auto page_size = static_cast<unsigned>(p.page_size);
#pragma unroll 1
  for (int tile = segment.first; tile < segment.end; ++tile, ++ring.count) {
    ptx::mbarrier_wait(shared.empty(ring.slot()), ring.parity() ^ 1);
    // Pieces that begin before the sequence's end.
    const int there = min(pieces, (segment.keys - tile * kMlaKeys + plan.box_rows - 1) / plan.box_rows);
    if (lane == 0)
      ptx::mbarrier_arrive_expect(shared.full(ring.slot()),
                                  static_cast<std::uint32_t>(there * plan.box_rows * kMlaDim * 2));
    __syncwarp();
#pragma unroll 1
    for (int at = lane; at < there * MlaShared::kColumnBlocks; at += kWarp) {
      const int piece = at / MlaShared::kColumnBlocks, column = at % MlaShared::kColumnBlocks;
      const auto key = static_cast<unsigned>(tile * kMlaKeys + piece * plan.box_rows);
      const int page = table[key / page_size];
      // A bad page lies past the end of the tensor, which reads as zeros.
      const int image = page < 0 || page >= p.num_pages ? static_cast<int>(p.num_pages) : page;
      ptx::tma_load(shared.tile(ring.slot()) + column * MlaShared::kBlockBytes + piece * plan.box_rows * 128, map,
                    shared.full(ring.slot()), ptx::kL2EvictNormal, column * 64, static_cast<int>(key % page_size), 0,
                    image);
    }
  }
}

/// The same of rows of 8 bits, by the four warps of the producers.
template <class T>
__device__ inline void widen_latent(const AttentionParams& p, const LatentFormat& format, const MlaShared& shared,
                                    const MlaSegment& segment, int warp, MlaRing& ring) {
  const NarrowRows<T> rows(p, format, segment, warp);
  for (int tile = segment.first; tile < min(segment.end, segment.first + rows.kAhead); ++tile) rows.prefetch(tile);
#pragma unroll 1
  for (int tile = segment.first; tile < segment.end; ++tile, ++ring.count) {
    if (tile + rows.kAhead < segment.end) rows.prefetch(tile + rows.kAhead);
    ptx::mbarrier_wait(shared.empty(ring.slot()), ring.parity() ^ 1);
    rows.widen(tile, shared.tile(ring.slot()));
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (threadIdx.x % kWarp == 0) ptx::mbarrier_arrive(shared.full(ring.slot()));
  }
}

/// What the two consumers have in common: a warpgroup's 256 columns of the result.
template <class T>
struct MlaConsumer {
  const AttentionParams& p;
  const MlaPlan& plan;
  const MlaShared& shared;
  MlaRing ring;  // of the tile whose values are due
  float out[128];

  __device__ static int thread() { return static_cast<int>(threadIdx.x) % 128; }
  __device__ static int row(int half) { return thread() / 32 * 16 + thread() % 32 / 4 + 8 * half; }
  __device__ void release() {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(shared.empty(ring.slot()));
    ++ring.count;
  }
  __device__ void rescale(float upper, float lower) {
    if (upper == 1.0f && lower == 1.0f) return;
#pragma unroll
    for (int c = 0; c < 32; ++c) {
      out[4 * c] *= upper, out[4 * c + 1] *= upper;
      out[4 * c + 2] *= lower, out[4 * c + 3] *= lower;
    }
  }
  __device__ std::uint64_t values(int first_block) const {
    return ptx::matrix_descriptor(shared.tile(ring.slot()) + first_block * MlaShared::kBlockBytes,
                                  MlaShared::kBlockBytes, 1024);
  }
};

/// Warpgroup 0: scores, weights, and columns 0 to 255.
template <class T>
struct MlaFirst : MlaConsumer<T> {
  using Base = MlaConsumer<T>;
  using Base::out;
  using Base::ring;
  using Base::shared;
  float score[32], maximum[2], sum[2], factor[2];  // maxima in base 2; of the thread's two rows
  std::uint32_t weights[4][4];

  /// S = Q L^T of a tile, `ahead` of the one whose values are due; only issues.
  __device__ void issue_scores(std::uint32_t ahead) {
    const MlaRing at{ring.count + ahead};
    ptx::mbarrier_wait(shared.full(at.slot()), at.parity());
    std::uint32_t q = shared.queries(), k = shared.tile(at.slot());
    ptx::hold(score);
    ptx::wgmma_fence();
#pragma unroll
    for (int block = 0; block < MlaShared::kColumnBlocks; ++block) {
      const std::uint64_t of_q = ptx::matrix_descriptor(q, 16, 1024), of_k = ptx::matrix_descriptor(k, 16, 1024);
#pragma unroll
      for (int d = 0; d < 4; ++d) ptx::wgmma_ss<T>(score, of_q + d * 32 / 16, of_k + d * 32 / 16, d > 0 || block > 0);
      q += MlaShared::kBlockBytes;
      k += MlaShared::kBlockBytes;
      ptx::hold(q);  // or the operands of all 36 instructions would be made before the first, and registers are full
      ptx::hold(k);
    }
    ptx::wgmma_commit();
  }
  /// O += P L; only issues.
  __device__ void issue_values(bool accumulate) {
    const std::uint64_t v = this->values(0);
    hold_values();
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < 4; ++n) ptx::wgmma_rs<T, true>(out, weights[n], v + n * 2048 / 16, n > 0 || accumulate);
    ptx::wgmma_commit();
  }
  __device__ void hold_values() {
    ptx::hold(out);
#pragma unroll
    for (int n = 0; n < 4; ++n) ptx::hold(weights[n]);
  }

  /// Scores become weights in fp32, of which the tile's first `keys` count.
  __device__ void weigh(int keys) {
    const int column = 2 * (this->thread() % 4);
    float highest[2] = {maximum[0], maximum[1]};
#pragma unroll
    for (int c = 0; c < 8; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = score[4 * c + e];
        x = 8 * c + column + e % 2 < keys ? x * this->plan.scale_log2 : -INFINITY;
        highest[e / 2] = fmaxf(highest[e / 2], x);
      }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      highest[half] = fmaxf(highest[half], __shfl_xor_sync(kFullMask, highest[half], 1));
      highest[half] = fmaxf(highest[half], __shfl_xor_sync(kFullMask, highest[half], 2));
      factor[half] = ptx::exp2_approx(maximum[half] - SoftmaxState::shift(highest[half]));
      maximum[half] = highest[half];
      sum[half] *= factor[half];
    }
#pragma unroll
    for (int c = 0; c < 8; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = score[4 * c + e];
        x = ptx::exp2_approx(x - SoftmaxState::shift(maximum[e / 2]));
        sum[e / 2] += x;
      }
  }
  /// The weights as operands, here and in shared memory for the other warpgroup, with the factors of the rows.
  __device__ void hand_over() {
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) weights[n][r] = pack<T>(score[8 * n + 2 * r], score[8 * n + 2 * r + 1]);
    const int lane = this->thread() % 32;
    const int row = this->thread() / 32 * 16 + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
    for (int n = 0; n < 4; ++n)
      ptx::stmatrix_x4(shared.weights() + row_chunk(row, 2 * n + lane / 16), weights[n][0], weights[n][1],
                       weights[n][2], weights[n][3]);
    if (lane % 4 == 0) {
      shared.factors()[this->row(0)] = factor[0];
      shared.factors()[this->row(1)] = factor[1];
    }
  }
  /// Zeroes the tile's values from row `first` on.
  __device__ void clear_values(int first) const {
    const std::uint32_t tile = shared.tile(ring.slot());
#pragma unroll 1
    for (int at = first * 8 + this->thread(); at < kMlaKeys * 8; at += 128)
      for (int c = 0; c < kMlaValueDim / 64; ++c)
        *static_cast<uint4*>(__cvta_shared_to_generic(tile + c * MlaShared::kBlockBytes + at * 16)) = uint4{0, 0, 0, 0};
  }

  __device__ void run(const MlaSegment& segment) {
#pragma unroll
    for (int half = 0; half < 2; ++half) maximum[half] = -INFINITY, sum[half] = 0.0f;
    issue_scores(0);
    ptx::wgmma_wait<0>();
    ptx::hold(score);
    weigh(segment.keys - segment.first * kMlaKeys);
#pragma unroll 1
    for (int tile = segment.first; tile < segment.end; ++tile) {
      const int keys = segment.keys - tile * kMlaKeys;  // from the tile's first one on
      const bool begins = tile == segment.first, more = tile + 1 < segment.end;
      if (!begins) ptx::barrier_sync(kWeightsAreUsed, kMlaConsumers);
      hand_over();
      if (keys < kMlaKeys) clear_values(keys);
      ptx::fence_proxy_async_shared();
      if (keys < kMlaKeys) ptx::barrier_sync(kFirstMeets, 128);  // what it zeroed is an operand of all of its warps
      ptx::barrier_arrive(kWeightsAreThere, kMlaConsumers);
      if (!begins) this->rescale(factor[0], factor[1]);
      if (more) issue_scores(1);
      issue_values(!begins);
      ptx::wgmma_wait<0>();
      ptx::hold(score);
      hold_values();
      this->release();
      if (more) weigh(keys - kMlaKeys);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(kFullMask, sum[half], 1);
      sum[half] += __shfl_xor_sync(kFullMask, sum[half], 2);
      if (this->thread() % 4 == 0) {
        shared.states()[2 * this->row(half)] = maximum[half];
        shared.states()[2 * this->row(half) + 1] = sum[half];
      }
    }
  }
};

/// Warpgroup 1: columns 256 to 511.
template <class T>
struct MlaSecond : MlaConsumer<T> {
  using Base = MlaConsumer<T>;
  using Base::out;
  using Base::ring;
  using Base::shared;

  __device__ void run(const MlaSegment& segment) {
    const std::uint64_t weights = ptx::matrix_descriptor(shared.weights(), 16, 1024);
#pragma unroll 1
    for (int tile = segment.first; tile < segment.end; ++tile) {
      ptx::mbarrier_wait(shared.full(ring.slot()), ring.parity());
      ptx::barrier_sync(kWeightsAreThere, kMlaConsumers);
      const bool begins = tile == segment.first;
      if (!begins) this->rescale(shared.factors()[this->row(0)], shared.factors()[this->row(1)]);
      const std::uint64_t v = this->values(4);
      ptx::hold(out);
      ptx::wgmma_fence();
#pragma unroll
      for (int n = 0; n < 4; ++n)
        ptx::wgmma_ss<T, false, true>(out, weights + n * 32 / 16, v + n * 2048 / 16, n > 0 || !begins);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::hold(out);
      if (tile + 1 < segment.end) ptx::barrier_arrive(kWeightsAreUsed, kMlaConsumers);
      this->release();
    }
  }
};

/// Gathers the segment's rows of Q; both consumers take part. Rows past the last one are zeros.
template <class T>
__device__ inline void load_mla_queries(const AttentionParams& p, const MlaPlan& plan, const MlaShared& shared,
                                        const MlaSegment& segment) {
  constexpr int kChunks = kMlaDim / 8;
#pragma unroll 2
  for (int at = static_cast<int>(threadIdx.x); at < kMlaRows * kChunks; at += kMlaConsumers) {
    const int row = at / kChunks, chunk = at % kChunks;
    const bool there = row < plan.rows;
    const T* from = static_cast<const T*>(p.q);
    if (there)
      from += p.q_offset(segment.b, segment.head_group * plan.group + row % plan.group, row / plan.group) + chunk * 8;
    const std::uint32_t to = shared.queries() + row_chunk(row, chunk);
    if (plan.vectors_q) {
      ptx::cp_async_16(to, from, there ? 16 : 0);
    } else {
      T* const elements = static_cast<T*>(__cvta_shared_to_generic(to));
      for (int e = 0; e < 8; ++e) elements[e] = there ? from[e] : T(0.0f);
    }
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  ptx::fence_proxy_async_shared();
  ptx::barrier_sync(kConsumersMeet, kMlaConsumers);
}

/// A consumer's part of the block's work.
template <class T, class Consumer>
__device__ inline void consume_latent(const AttentionParams& p, const MlaPlan& plan, const MlaShared& shared,
                                      int first_column, float* partials) {
  Consumer consumer{{p, plan, shared, {}, {}}};
#pragma unroll 1
  for (int turn = 0; shared.notes().segments[turn].is_there(); turn ^= 1) {
    const MlaSegment segment = shared.notes().segments[turn];
    load_mla_queries<T>(p, plan, shared, segment);
    if (threadIdx.x == 0) shared.notes().segments[turn ^ 1] = shared.notes().walk.next(p, plan.head_groups);
    consumer.run(segment);
    ptx::barrier_sync(kConsumersMeet, kMlaConsumers);  // the rows' maxima and sums are there
#pragma unroll
    for (int half = 0; half < 2; ++half)
      put_mla_row<T>(p, plan, segment, consumer.row(half), first_column + 2 * (consumer.thread() % 4),
                     shared.states() + 2 * consumer.row(half), consumer.out + 2 * half, partials);
    ptx::barrier_sync(kAllMeet, kMlaThreads);  // the next segment is there, and this one's states are used up
  }
}

/// kNarrow: of rows of 8 bits, for which `map` is not used.
template <class T, bool kNarrow>
__global__ void __launch_bounds__(kMlaThreads, 1)
    mla_decode_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ MlaPlan plan,
                      const __grid_constant__ LatentFormat format, const __grid_constant__ CUtensorMap map,
                      float* partials) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];  // lines of the swizzle: 1024 bytes
  const MlaShared shared{ptx::shared_address(dynamic_shared)};
  const int warp = static_cast<int>(__shfl_sync(kFullMask, threadIdx.x / kWarp, 0));
  const MlaSchedule schedule(p, plan);
  const int block = static_cast<int>(blockIdx.x);
  if (block >= schedule.blocks()) {
    store_empty_mla_rows<T>(p, static_cast<int>(threadIdx.x), kMlaThreads);
    return;
  }
  const MlaWalk walk(p, schedule, block);
  if (threadIdx.x == 0) {
    if constexpr (!kNarrow) ptx::tma_prefetch_map(&map);
    for (int stage = 0; stage < MlaShared::kStages; ++stage) {
      ptx::mbarrier_init(shared.full(stage), kNarrow ? NarrowRows<T>::kWarps : 1);
      ptx::mbarrier_init(shared.empty(stage), kMlaConsumers / kWarp);
    }
    ptx::fence_mbarrier_init();
    shared.notes().walk = walk;
    shared.notes().segments[0] = shared.notes().walk.next(p, plan.head_groups);
  }
  __syncthreads();
  ptx::allow_next_kernel();
  if (warp == kMlaConsumers / kWarp + 1) store_empty_mla_rows<T>(p, static_cast<int>(threadIdx.x % kWarp), kWarp);
  if (warp >= kMlaConsumers / kWarp) {
    ptx::decrease_registers<kMlaProducerRegisters>();
    MlaRing ring;
#pragma unroll 1
    for (int turn = 0; shared.notes().segments[turn].is_there(); turn ^= 1) {
      const MlaSegment segment = shared.notes().segments[turn];
      if constexpr (kNarrow)
        widen_latent<T>(p, format, shared, segment, warp - kMlaConsumers / kWarp, ring);
      else if (warp == kMlaConsumers / kWarp)
        load_latent(p, plan, shared, &map, segment, ring);
      ptx::barrier_sync(kAllMeet, kMlaThreads);
    }
  } else {
    ptx::increase_registers<kMlaConsumerRegisters>();
    if (warp < 4)
      consume_latent<T, MlaFirst<T>>(p, plan, shared, 0, partials);
    else
      consume_latent<T, MlaSecond<T>>(p, plan, shared, 256, partials);
  }
}

/// An entry of the table.
template <DType kDtype, bool kNarrow>
void mla_decode(const MlaDecodeParams& params, const Plan& planned, void* workspace, Stream stream) {
  using T = Element<kDtype>;
  const AttentionParams& p = params.attention;
  if (p.batch * p.heads_q * p.seq_q == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  const MlaPlan& plan = planned.as<MlaPlan>();
  auto* const partials = static_cast<float*>(workspace);
  CUtensorMap map{};
  if constexpr (!kNarrow)
    map = make_tensor_map("attention_mla_decode latent", mla_map(p, static_cast<std::uint32_t>(plan.box_rows)));
  launch("attention_mla_decode sm90a", mla_decode_kernel<T, kNarrow>,
         {static_cast<unsigned>(plan.blocks), kMlaThreads, MlaShared::kBytes, native(stream)}, p, plan, params.format,
         map, partials);
  if (plan.blocks == 1) return;
  launch("attention_mla_decode sm90a: merge", mla_merge_kernel<T>,
         {dim3(static_cast<unsigned>(plan.blocks - 1), static_cast<unsigned>(ceil_div(plan.rows, kMlaMergeRows))),
          kMlaMergeWarps * kWarp, 0, native(stream), true},
         p, plan, static_cast<const float*>(partials));
}

}  // namespace flashkernel::cuda::sm90a
