// linear for up to 8 rows and large weights (decode of large layers) on 9.0: a stream of weights at the full rate of
// memory. The weights of one feature are contiguous. One warp copies them into a ring by bulk copies of at least 2 KB
// of a row, the size from which memory serves its full rate. A slot of the ring has 8 features.
//
// Eight warps multiply by mma.sync. They split k, and each keeps its part of x in registers for all features of the
// block. Other warps add the eight sums of a feature in the order of the warps, apply the epilogue and store, while the
// eight go on with the next features. The features are divided evenly among the multiprocessors, down to single
// features. Called by linear/tiles/sm90a/linear.cu.
#pragma once

#include <algorithm>
#include <limits>

#include "cuda/host/launch.hpp"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/linear/few_rows/sm90a/few_rows.hpp"
#include "cuda/pipeline/register_pool.hpp"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda::sm90a {

struct FewRowsStreamArguments : FewRowsPlainArguments {
  using FewRowsPlainArguments::FewRowsPlainArguments;
  // The ring: slots of 8 features' weights, `pitch` bytes from one feature to the next. `together`: a slot has all of
  // k, features follow each other in memory, and one copy brings them.
  int slots = 0, pitch = 0;
  bool together = false;
};

/// kRows: 4 or 8. A slot has at most kChunks chunks of 32 k of each warp, kPieces slots all of k.
template <int kRows_, int kChunks_, int kPieces_>
struct FewRowsStreamShape {
  static constexpr int kRows = kRows_, kFours = kRows / 4, kFeatures = 8;
  static constexpr int kChunks = kChunks_, kPieces = kPieces_;
  static constexpr int kWarps = 8, kMultipliers = 32 * kWarps, kFinishers = kRows * kFeatures;
  static constexpr int kThreads = kMultipliers + 128;  // of the last four warps not all have something to do
  static constexpr int kStep = kWarps * kFewRowsChunk, kPieceK = kChunks * kStep;
  static constexpr int kPlace = kWarps * kRows * kFeatures, kSumBytes = 2 * kPlace * 4;  // floats of a tile; of two
  // Where they are: the sums, the barriers, the ring.
  static constexpr int kMostSlots = 12, kBarriers = kSumBytes, kRing = kBarriers + 16 * (kMostSlots + 4);
  static constexpr int kRoom = 227 * 1024 - kRing;
  static_assert(kRing % 128 == 0);
  static constexpr int kMultiplierRegisters = 208, kOtherRegisters = 88;
  static_assert(2 * kMultiplierRegisters + kOtherRegisters <= registers_a_row(kThreads));
  static_assert(kFours * kPieces * kChunks * 2 <= 128 && 32 + kFinishers <= 128);  // registers of x; threads
};

constexpr int kStreamAhead = 32 * 1024;  // bytes asked for in L2 before a block's turn

/// The features of a block: [first, last), in tiles of 8, of which the last one may have less.
struct StreamShare {
  int first, last;
  __device__ explicit StreamShare(int features)
      : first(static_cast<int>(static_cast<std::int64_t>(features) * blockIdx.x / gridDim.x)),
        last(static_cast<int>(static_cast<std::int64_t>(features) * (blockIdx.x + 1) / gridDim.x)) {}
};

/// The barriers, in shared memory: of a slot, that it is full or empty; of the two places of sums, that they are sent
/// or read.
template <class Shape>
struct StreamBarriers {
  std::uint32_t base;
  __device__ explicit StreamBarriers(const void* shared) : base(ptx::shared_address(shared) + Shape::kBarriers) {}
  __device__ std::uint32_t full(int slot) const { return base + 8 * slot; }
  __device__ std::uint32_t empty(int slot) const { return full(Shape::kMostSlots + slot); }
  __device__ std::uint32_t sent(int place) const { return full(2 * Shape::kMostSlots + place); }
  __device__ std::uint32_t read(int place) const { return sent(2 + place); }
  /// By one thread.
  __device__ void make(int slots) const {
    for (int slot = 0; slot < slots; ++slot) {
      ptx::mbarrier_init(full(slot), 1);
      ptx::mbarrier_init(empty(slot), Shape::kWarps);
    }
    for (int place = 0; place < 2; ++place) {
      ptx::mbarrier_init(sent(place), Shape::kWarps);
      ptx::mbarrier_init(read(place), Shape::kFinishers / 32);
    }
    ptx::fence_mbarrier_init();
  }
};

/// A warp: lane l copies feature l of each tile, or one lane all of them.
template <class T, class Shape>
__device__ inline void load_stream(const FewRowsStreamArguments& p, const StreamShare& share, const char* shared) {
  const int lane = threadIdx.x % 32;
  const StreamBarriers<Shape> barriers(shared);
  // load(rows, from, bytes of each) for the first `most` slots.
  const auto each_slot = [&](int most, auto load) {
    for (int first = share.first; first < share.last; first += Shape::kFeatures) {
      const int features = min(Shape::kFeatures, share.last - first), rows = p.together ? 1 : features;
      const int length = p.together ? features * p.k : p.k, step = p.together ? length : Shape::kPieceK;
      const T* const from = static_cast<const T*>(p.weight) + (first + lane) * p.stride_weight;
      for (int k = 0; k < length; k += step) {
        if (most-- == 0) return;
        load(rows, from + k, static_cast<std::uint32_t>(min(step, length - k) * static_cast<int>(sizeof(T))));
      }
    }
  };
  // Hints change no value, so the kernels before may still be writing what they name.
  const int slot_bytes = Shape::kFeatures * p.pitch;
  each_slot(max(1, kStreamAhead / slot_bytes), [&](int rows, const T* from, std::uint32_t bytes) {
    if (lane < rows) ptx::bulk_prefetch(from, bytes);
  });
  ptx::wait_for_previous_kernel();
  const std::uint64_t once = ptx::l2_evict_first();
  int slot = 0;
  std::uint32_t parity = 1;  // the first round finds empty slots
  const std::uint32_t ring = ptx::shared_address(shared) + Shape::kRing;
  each_slot(std::numeric_limits<int>::max(), [&](int rows, const T* from, std::uint32_t bytes) {
    if (lane == 0) {
      ptx::mbarrier_wait(barriers.empty(slot), parity);
      ptx::mbarrier_arrive_expect(barriers.full(slot), bytes * static_cast<std::uint32_t>(rows));
    }
    __syncwarp();
    if (lane < rows) ptx::bulk_load(ring + slot * slot_bytes + lane * p.pitch, from, bytes, barriers.full(slot), once);
    if (++slot == p.slots) slot = 0, parity ^= 1;
  });
  ptx::allow_next_kernel();  // not before: its blocks would stand in the way of the weights
}

/// The warps that multiply. Lane l has 8 neighbours of feature l/4, k 8 (l%4) .. + 7 of a chunk of 32, by one load.
/// They are the left operand as they are: the first and third pair as row l/4, the second and fourth as row 8 + l/4.
/// The right one's first four columns are four rows of x at the k of those, its last four the same rows at the k of
/// these: of a product the first four columns of the upper half count and the last four of the lower one.
template <class T, class Shape>
__device__ inline void multiply_stream(const FewRowsStreamArguments& p, const StreamShare& share, char* shared) {
  constexpr int kFours = Shape::kFours, kChains = 2;  // products that don't wait for each other
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4;
  const int offset = kFewRowsChunk * warp + lane % 4 * 8;
  const StreamBarriers<Shape> barriers(shared);
  uint2 x[Shape::kPieces * Shape::kChunks][kFours];
#pragma unroll
  for (int four = 0; four < kFours; ++four) {
    const int row = 4 * four + group % 4;
    const T* const from = static_cast<const T*>(p.x) + row * p.stride_x + offset;
#pragma unroll
    for (int i = 0; i < Shape::kPieces * Shape::kChunks; ++i) {
      const bool inside = row < p.rows && kFewRowsChunk * warp + i * Shape::kStep < p.k;
      const uint4 v = inside ? ptx::load_16_once(from + i * Shape::kStep) : make_uint4(0, 0, 0, 0);
      x[i][four] = group < 4 ? make_uint2(v.x, v.z) : make_uint2(v.y, v.w);
    }
  }
  const char* const weight = shared + Shape::kRing + group * p.pitch + offset * sizeof(T);
  const int slot_bytes = Shape::kFeatures * p.pitch;
  float* const sums = reinterpret_cast<float*>(shared) + warp * Shape::kRows * Shape::kFeatures + group;
  int slot = 0;
  std::uint32_t parity = 0;
  for (int first = share.first, tile = 0; first < share.last; first += Shape::kFeatures, ++tile) {
    float sum[kChains][kFours][4] = {};
    // Chunks are counted again for each tile: the answers would take registers beside x.
    auto length = static_cast<std::uint32_t>(p.k - kFewRowsChunk * warp);
    ptx::settle(length);
#pragma unroll
    for (int piece = 0; piece < Shape::kPieces; ++piece) {
      if (piece * Shape::kPieceK >= p.k) break;
      ptx::mbarrier_wait(barriers.full(slot), parity);
      std::uint32_t w[Shape::kChunks][4];
#pragma unroll
      for (int c = 0; c < Shape::kChunks; ++c) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if ((piece * Shape::kChunks + c) * Shape::kStep < static_cast<int>(length))
          v = *reinterpret_cast<const uint4*>(weight + slot * slot_bytes + c * Shape::kStep * sizeof(T));
        w[c][0] = v.x, w[c][1] = v.y, w[c][2] = v.z, w[c][3] = v.w;
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(barriers.empty(slot));  // at once: memory waits for the slot
      if (++slot == p.slots) slot = 0, parity ^= 1;
#pragma unroll
      for (int c = 0; c < Shape::kChunks; ++c)
#pragma unroll
        for (int four = 0; four < kFours; ++four) {
          const uint2& v = x[piece * Shape::kChunks + c][four];
          ptx::mma_m16n8k16<T>(sum[c % kChains][four], w[c], v.x, v.y);
        }
    }
    const int place = tile % 2;
    ptx::mbarrier_wait(barriers.read(place), tile / 2 % 2 ^ 1);  // the first round finds empty places
#pragma unroll
    for (int four = 0; four < kFours; ++four)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float upper = sum[0][four][e] + sum[1][four][e];
        float lower = sum[0][four][2 + e] + sum[1][four][2 + e];
        lower = __shfl_xor_sync(kFullMask, lower, 2);
        if (lane % 4 < 2)
          sums[place * Shape::kPlace + (4 * four + lane % 4 * 2 + e) * Shape::kFeatures] = upper + lower;
      }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barriers.sent(place));
  }
}

/// One or two warps: a thread has one feature of each tile, in one row.
template <class T, class Shape>
__device__ inline void finish_stream(const FewRowsStreamArguments& p, const StreamShare& share, const char* shared,
                                     int thread) {
  const StreamBarriers<Shape> barriers(shared);
  const int column = thread % Shape::kFeatures, row = thread / Shape::kFeatures;
  const float* const sums = reinterpret_cast<const float*>(shared) + thread;
  float next_bias = bias_of(p.epilogue.bias, share.first + column, share.last);  // asked for a tile ahead
  for (int first = share.first, tile = 0; first < share.last; first += Shape::kFeatures, ++tile) {
    const int place = tile % 2, feature = first + column;
    float total = next_bias;
    next_bias = bias_of(p.epilogue.bias, feature + Shape::kFeatures, share.last);
    ptx::mbarrier_wait(barriers.sent(place), tile / 2 % 2);
#pragma unroll
    for (int warp = 0; warp < Shape::kWarps; ++warp)
      total += sums[place * Shape::kPlace + warp * Shape::kRows * Shape::kFeatures];
    __syncwarp();
    if (thread % 32 == 0) ptx::mbarrier_arrive(barriers.read(place));
    if (feature < share.last && row < p.rows) finish_element<T>(p.epilogue, row, feature, total);
  }
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    few_rows_stream_kernel(const __grid_constant__ FewRowsStreamArguments p) {
  extern __shared__ __align__(1024) char shared[];
  const int thread = static_cast<int>(threadIdx.x), other = thread - Shape::kMultipliers;
  const StreamShare share(p.features);
  if (other == 0) StreamBarriers<Shape>(shared).make(p.slots);
  __syncthreads();
  if (other < 0) {
    ptx::increase_registers<Shape::kMultiplierRegisters>();
    ptx::wait_for_previous_kernel();
    multiply_stream<T, Shape>(p, share, shared);
    return;
  }
  ptx::decrease_registers<Shape::kOtherRegisters>();
  if (other < 32) {
    load_stream<T, Shape>(p, share, shared);
  } else if (other < 32 + Shape::kFinishers) {
    ptx::wait_for_previous_kernel();
    finish_stream<T, Shape>(p, share, shared, other - 32);
  }
}

template <class T>
void few_rows(const FewRowsProblem& p, const FewRowsStreamPlan& plan, cudaStream_t stream) {
  FewRowsStreamArguments arguments(p);
  const bool is_short = p.k <= 2048;
  const auto run = [&](auto shape_type) {
    using Shape = decltype(shape_type);
    arguments.together = p.k <= Shape::kPieceK && p.weight.stride == p.k;
    const int row_bytes = static_cast<int>(std::min<std::int64_t>(p.k, Shape::kPieceK) * sizeof(T));
    // A copy to what is no multiple of 128 takes longer than two to a bank at a time do.
    arguments.pitch = arguments.together ? row_bytes : (row_bytes + 127) / 128 * 128;
    // More under way makes it slower.
    const int slot_bytes = Shape::kFeatures * arguments.pitch, enough = (is_short ? 96 : 128) * 1024;
    arguments.slots = std::min({Shape::kMostSlots, (enough + slot_bytes - 1) / slot_bytes, Shape::kRoom / slot_bytes});
    LaunchShape shape{static_cast<unsigned>(plan.blocks), Shape::kThreads,
                      static_cast<std::size_t>(Shape::kRing + arguments.slots * slot_bytes), stream};
    shape.early = true;
    launch("linear: few rows", few_rows_stream_kernel<T, Shape>, shape, arguments);
  };
  // A copy takes 120 cycles to ask for, 2 KB as long to come: copies of 2 KB where k is a multiple of that, else of 4.
  if (p.rows > 4) {
    if (is_short) return run(FewRowsStreamShape<8, 8, 1>{});
    return p.k <= 4096 ? run(FewRowsStreamShape<8, 4, 4>{}) : run(FewRowsStreamShape<8, 4, 8>{});
  }
  if (is_short) return run(FewRowsStreamShape<4, 8, 1>{});
  if (p.k % 1024 == 0) return p.k <= 8192 ? run(FewRowsStreamShape<4, 4, 8>{}) : run(FewRowsStreamShape<4, 4, 16>{});
  p.k <= 8192 ? run(FewRowsStreamShape<4, 8, 4>{}) : run(FewRowsStreamShape<4, 8, 8>{});
}

}  // namespace flashkernel::cuda::sm90a
