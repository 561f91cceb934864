// linear for up to 64 rows on 9.0, in the order of many rows' tiles (linear/tiles/sm90a): all of k, 16 after 16, in one
// chain of wgmma. A dot product of wgmma does not depend on which operand is which, nor on the other rows and columns.
// So the weights are the left operand here, and the rows of x the right one, as in blocks.cuh.
//
// One block a multiprocessor walks its even share of the features, in tiles of up to 64. One warp copies tile after
// tile into a ring by TMA. One warpgroup multiplies and finishes. A slot of the ring holds four lines of 128 bytes of
// each feature, which are neighbours in memory: with two of them a call took 1.4 times as long, with one 2.4 times
// (4096 to 4096). Called by linear/tiles/sm90a/linear.cu, in the invariant mode.
#pragma once

#include <algorithm>

#include "cuda/host/launch.hpp"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/linear/few_rows/sm90a/few_rows.hpp"
#include "cuda/linear/tiles/sm90a/operand_map.hpp"

namespace flashkernel::cuda::sm90a {

/// kRows columns of x (8, 16, 32, 64); kLines: of 128 bytes of a feature, and of a row, in a slot of the ring.
template <int kRows_>
struct InOrderShape {
  static constexpr int kRows = kRows_, kLines = 4, kFeatures = 64, kEights = kFeatures / 8;
  static constexpr int kMultipliers = 128, kThreads = kMultipliers + 32;
  static constexpr int kLineK = 64, kSlotK = kLines * kLineK;
  static constexpr int kBytesWeight = kFeatures * kSlotK * 2, kSlotBytes = kBytesWeight + kRows * kSlotK * 2;
  // Sums are [row][feature], floats; a fragment's lanes hit all banks. Where they are: the sums, the barriers, the
  // ring.
  static constexpr int kPitch = kFeatures + 4, kSumBytes = kRows * kPitch * 4;
  static constexpr int kMostSlots = 8, kBarriers = kSumBytes;
  static constexpr int kRing = (kBarriers + 16 * kMostSlots + 1023) / 1024 * 1024;
  static constexpr int kSlots = std::min(kMostSlots, (227 * 1024 - kRing) / kSlotBytes);
};

struct InOrderArguments {
  CUtensorMap weight, x;
  LinearEpilogue epilogue;
  int rows, features, num_k;  // num_k: slots of a tile
  int slots;                  // of the ring
};

/// A block's tiles: of its even share of the features, counted in eights, tile `index` of `count`.
struct InOrderTile {
  int first, eights;
  __device__ InOrderTile(int first_eight, int last_eight, int index, int count) {
    const int share = last_eight - first_eight, begin = share * index / count;
    first = 8 * (first_eight + begin);
    eights = share * (index + 1) / count - begin;
  }
};
template <class Shape>
struct InOrderShare {
  int first, last, tiles;  // of eights
  __device__ explicit InOrderShare(int features) {
    const std::int64_t eights = (features + 7) / 8;
    first = static_cast<int>(eights * blockIdx.x / gridDim.x);
    last = static_cast<int>(eights * (blockIdx.x + 1) / gridDim.x);
    tiles = (last - first + Shape::kEights - 1) / Shape::kEights;
  }
  __device__ InOrderTile tile(int index) const { return {first, last, index, tiles}; }
};

/// Where a block keeps what.
template <class Shape>
struct InOrderPlaces {
  std::uint32_t base;
  __device__ explicit InOrderPlaces(const void* shared) : base(ptx::shared_address(shared)) {}
  __device__ std::uint32_t full(int slot) const { return base + Shape::kBarriers + 8 * slot; }
  __device__ std::uint32_t empty(int slot) const { return full(Shape::kMostSlots + slot); }
  __device__ std::uint32_t weight(int slot) const { return base + Shape::kRing + slot * Shape::kSlotBytes; }
  __device__ std::uint32_t x(int slot) const { return weight(slot) + Shape::kBytesWeight; }
};

/// A warp: lane l < 8 loads a tile's eight l, kLines other lanes a line of x each.
template <class Shape>
__device__ inline void load_in_order(const InOrderArguments& p, const InOrderShare<Shape>& share,
                                     const InOrderPlaces<Shape>& places) {
  constexpr std::uint64_t kOnce = ptx::kL2EvictFirst, kSharedByAll = ptx::kL2EvictLast;
  const int lane = threadIdx.x % 32, line = lane - Shape::kEights;
  // The first slot is asked for in L2 before the block's turn: a hint changes no value, so the kernels before may still
  // be writing what it names. More of them cost more than they give.
  const InOrderTile begin = share.tile(0);
  if (lane < begin.eights) ptx::tma_prefetch(&p.weight, kOnce, 0, begin.first + 8 * lane, 0);
  ptx::wait_for_previous_kernel();
  int slot = 0;
  std::uint32_t parity = 1;  // the first round finds empty slots
  for (int t = 0; t < share.tiles; ++t) {
    const InOrderTile tile = share.tile(t);
    for (int k = 0; k < p.num_k; ++k) {
      if (lane == 0) {
        ptx::mbarrier_wait(places.empty(slot), parity);
        ptx::mbarrier_arrive_expect(places.full(slot),
                                    static_cast<std::uint32_t>(8 * tile.eights + p.rows) * Shape::kSlotK * 2);
      }
      __syncwarp();
      if (lane < tile.eights)
        ptx::tma_load(places.weight(slot) + lane * 1024 * Shape::kLines, &p.weight, places.full(slot), kOnce, 0,
                      tile.first + 8 * lane, k * Shape::kLines);
      else if (line >= 0 && line < Shape::kLines)
        ptx::tma_load(places.x(slot) + line * Shape::kRows * 128, &p.x, places.full(slot), kSharedByAll,
                      k * Shape::kSlotK + line * Shape::kLineK, 0);
      if (++slot == p.slots) slot = 0, parity ^= 1;
    }
  }
  ptx::allow_next_kernel();  // not before: its blocks would stand in the way of the weights
}

/// Which slot of the ring a warpgroup reads next.
struct InOrderTurn {
  int slot = 0;
  std::uint32_t parity = 0;
};

/// One tile's sums: element 4 c + e of lane l in warp w is feature 16 w + l/4 + 8 (e/2) of row 8 c + 2 (l%4) + e%2.
/// Features past the tile's are multiplied, too: what lies in their places, into sums that nobody reads.
template <class T, class Shape>
__device__ inline void multiply_in_order(const InOrderArguments& p, const InOrderPlaces<Shape>& places,
                                         InOrderTurn& turn, float (&sum)[Shape::kRows / 2]) {
  const auto release = [&](int slot) {  // one thread for the warpgroup
    if (threadIdx.x == 0) ptx::mbarrier_arrive(places.empty(slot));
  };
  int previous = 0;
#pragma unroll 1
  for (int k = 0; k < p.num_k; ++k) {
    ptx::mbarrier_wait(places.full(turn.slot), turn.parity);
    ptx::hold(sum);
    ptx::wgmma_fence();
#pragma unroll
    for (int line = 0; line < Shape::kLines; ++line) {
      // An eight is its first lines, then its second ones, and so on: the next one is kLines KB further.
      const std::uint64_t weight =
          ptx::matrix_descriptor(places.weight(turn.slot) + line * 1024, 8192, 1024 * Shape::kLines);
      const std::uint64_t x = ptx::matrix_descriptor(places.x(turn.slot) + line * Shape::kRows * 128, 8192, 1024);
#pragma unroll
      for (int step = 0; step < 4; ++step)
        ptx::wgmma_ss<T, false, false>(sum, weight + step * 2, x + step * 2, k > 0 || line > 0 || step > 0);
    }
    ptx::wgmma_commit();
    ptx::hold(sum);
    ptx::wgmma_wait<1>();
    if (k > 0) release(previous);
    previous = turn.slot;
    if (++turn.slot == p.slots) turn.slot = 0, turn.parity ^= 1;
  }
  ptx::wgmma_wait<0>();
  ptx::hold(sum);
  release(previous);
}

/// Four neighbours' bias, asked for now and looked at in the end: its conversion would wait for memory.
template <class T>
struct LateBias {
  const TypedPointer& from;
  int column, columns;
  bool is_plain;
  Packed<T, 4> raw{};
  __device__ LateBias(const TypedPointer& from, int column, int columns)
      : from(from),
        column(column),
        columns(columns),
        is_plain(from && from.dtype == dtype_of<T> && column + 4 <= columns &&
                 reinterpret_cast<std::uintptr_t>(from.data) % 8 == 0) {
    if (is_plain) raw = load_vector<4>(static_cast<const T*>(from.data) + column);
  }
  __device__ void get(float (&bias)[4]) const {
    if (is_plain) return unpack(bias, raw);
#pragma unroll
    for (int i = 0; i < 4; ++i) bias[i] = bias_of(from, column + i, columns);
  }
};

/// The warpgroup: products of each tile, and what becomes of them, by way of shared memory.
template <class T, class Shape>
__device__ inline void consume_in_order(const InOrderArguments& p, const InOrderShare<Shape>& share, char* shared) {
  const InOrderPlaces<Shape> places(shared);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  float* const sums = reinterpret_cast<float*>(shared);
  float* const to = sums + lane % 4 * 2 * Shape::kPitch + 16 * warp + lane / 4;
  const auto together = [] { ptx::barrier_sync(1, Shape::kMultipliers); };
  InOrderTurn turn;
  for (int t = 0; t < share.tiles; ++t) {
    // A thread finishes four neighbouring features for some of the rows.
    const InOrderTile tile = share.tile(t);
    const int across = 2 * tile.eights, rows_at_once = Shape::kMultipliers / across;
    const int mine = thread % across * 4, feature = tile.first + mine;
    const LateBias<T> bias_of_four(p.epilogue.bias, feature, p.features);
    float sum[Shape::kRows / 2];
    multiply_in_order<T, Shape>(p, places, turn, sum);
    together();  // the last tile's sums have been read
#pragma unroll
    for (int c = 0; c < Shape::kRows / 8; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) to[(8 * c + e % 2) * Shape::kPitch + e / 2 * 8] = sum[4 * c + e];
    together();
    float bias[4];
    bias_of_four.get(bias);
    const bool finishes = thread < rows_at_once * across && feature < p.features;
#pragma unroll 2
    for (int row = finishes ? thread / across : p.rows; row < p.rows; row += rows_at_once) {
      const float4 four = *reinterpret_cast<const float4*>(sums + row * Shape::kPitch + mine);
      float x[4] = {four.x + bias[0], four.y + bias[1], four.z + bias[2], four.w + bias[3]};
      finish_4<T>(p.epilogue, row, feature, p.features, x);
    }
    __syncwarp();
  }
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads)
    few_rows_in_order_kernel(const __grid_constant__ InOrderArguments p) {
  extern __shared__ __align__(1024) char shared[];
  const InOrderPlaces<Shape> places(shared);
  const InOrderShare<Shape> share(p.features);
  if (threadIdx.x == Shape::kMultipliers) {
    ptx::tma_prefetch_map(&p.weight);
    ptx::tma_prefetch_map(&p.x);
    for (int slot = 0; slot < p.slots; ++slot) {
      ptx::mbarrier_init(places.full(slot), 1);
      ptx::mbarrier_init(places.empty(slot), 1);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x >= Shape::kMultipliers) return load_in_order<Shape>(p, share, places);
  ptx::wait_for_previous_kernel();
  consume_in_order<T, Shape>(p, share, shared);
}

/// Weights [features, k], k a multiple of 64: boxes of `lines` lines of 8 features, their first lines before their
/// second ones.
template <class T>
TensorMapSpec lines_of_eights(const GemmOperand& weight, std::int64_t features, std::int64_t k, int lines) {
  TensorMapSpec spec;
  spec.data = weight.data;
  spec.dtype = dtype_of<T>;
  spec.rank = 3;
  spec.dims[0] = {64, 1, 64};
  spec.dims[1] = {features, weight.stride, 8};
  spec.dims[2] = {k / 64, 64, static_cast<std::uint32_t>(lines)};
  return spec;
}

/// Slots of a block's ring: all that a block reads, or what holds 128 KB of weights, or what shared memory holds.
template <class Shape>
int in_order_slots(const FewRowsProblem& p, int blocks) {
  constexpr std::int64_t kEnough = 128 * 1024;
  const std::int64_t eights = ceil_div(ceil_div(p.features, 8), blocks), tiles = ceil_div(eights, Shape::kEights);
  const std::int64_t slot_bytes = ceil_div(eights, tiles) * 16 * Shape::kSlotK;
  const std::int64_t all = tiles * ceil_div(p.k, Shape::kSlotK);
  return static_cast<int>(std::min<std::int64_t>({all, ceil_div(kEnough, slot_bytes), Shape::kSlots}));
}

template <class T, class Shape>
void launch_in_order(const FewRowsProblem& p, int blocks, int slots, cudaStream_t stream) {
  const char* const name = "linear: few rows in order";
  InOrderArguments arguments;
  arguments.weight = make_tensor_map(name, lines_of_eights<T>(p.weight, p.features, p.k, Shape::kLines));
  // Boxes end with x: what lies in the places of rows past it is multiplied into sums that nobody reads.
  arguments.x = operand_map<T>(name, p.x, p.rows, p.k, static_cast<int>(p.rows), Shape::kLineK);
  arguments.epilogue = p.epilogue;
  arguments.rows = static_cast<int>(p.rows);
  arguments.features = static_cast<int>(p.features);
  arguments.num_k = static_cast<int>(ceil_div(p.k, Shape::kSlotK));
  arguments.slots = slots;
  LaunchShape shape{static_cast<unsigned>(blocks), Shape::kThreads,
                    static_cast<std::size_t>(Shape::kRing + arguments.slots * Shape::kSlotBytes), stream};
  shape.early = true;
  launch(name, few_rows_in_order_kernel<T, Shape>, shape, arguments);
}

template <class T>
void few_rows(const FewRowsProblem& p, const FewRowsInOrderPlan& plan, cudaStream_t stream) {
  const auto run = [&](auto shape_type) {
    using Shape = decltype(shape_type);
    launch_in_order<T, Shape>(p, plan.blocks, in_order_slots<Shape>(p, plan.blocks), stream);
  };
  if (p.rows <= 8) return run(InOrderShape<8>{});
  if (p.rows <= 16) return run(InOrderShape<16>{});
  p.rows <= 32 ? run(InOrderShape<32>{}) : run(InOrderShape<64>{});
}

}  // namespace flashkernel::cuda::sm90a
