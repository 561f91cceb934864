// The product of gemm.hpp: persistent blocks of one producer warp (TMA into a ring of k-tiles) and two consumer
// warpgroups (wgmma, sums in registers, epilogue in fp32, whole sectors by the warps themselves). Called by linear.cu.
// A cooperative tile's sums over a part of k go out in fp32; split_sum.cuh adds the parts in the order of k.
// Invariants: slot s of the ring is filled only after every block that reads it has arrived at its `empty` barrier; in
// ping-pong a warpgroup waits for k-tiles only in its turn, so that it never sees a barrier two phases back.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90a/gemm.hpp"
#include "cuda/sm90a/operand_map.hpp"
#include "cuda/sm90a/register_pool.hpp"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/shared_tile.cuh"
#include "cuda/tile/split_sum.cuh"

namespace flashkernel::cuda::sm90a {

/// Walks groups of kGroup rows of tiles column by column, so that what runs at one time shares both operands in L2.
template <int kGroup>
struct TileIndex {
  int m, n;
  __device__ TileIndex(int index, int tiles_m, int tiles_n) {
    const int group = index / (kGroup * tiles_n), in_group = index - group * kGroup * tiles_n;
    const int rows = min(kGroup, tiles_m - group * kGroup);
    n = in_group / rows;
    m = group * kGroup + in_group - n * rows;
  }
};

/// kTileN columns a tile of 128 rows; kPair: two neighbours in m are one cluster and share B. kNeighbours: B's rows
/// come in the order of interleaved_rows (operand_map.hpp), so that a thread has 8 neighbouring columns of its rows and
/// stores them itself; else they change places in shared memory.
template <int kTileN_, bool kPingPong_, bool kPair_, bool kNeighbours_ = false>
struct GemmShape {
  static constexpr int kTileM = 128, kTileN = kTileN_, kTileK = 64;  // kTileK: lines of 128 bytes
  static constexpr bool kPingPong = kPingPong_, kNeighbours = kNeighbours_;
  static constexpr int kBlocks = kPair_ ? 2 : 1;  // of a cluster
  static_assert(!(kPair_ && kNeighbours));
  // Else both operands are k-major.
  static constexpr bool kAnyLayout = kTileN % 64 == 0 && !kPair_ && !kNeighbours;
  static constexpr int kConsumers = 2;                   // warpgroups
  static constexpr bool kParts = !kPingPong && !kPair_;  // k may be cut into parts
  // k-tiles by which a cooperative tile's second warpgroup is behind the first one in the end: that one's epilogue runs
  // under its products.
  static constexpr int kBehind = !kPingPong && kTileN == 96 ? 2 : 0;
  using Index = TileIndex<16 / kBlocks>;  // 2048 rows
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kPartsM = kPingPong ? 2 : 1;  // of 64 rows a warpgroup
  // Sums of 128 x 192 take 192 registers a thread: the most that fits beside the epilogue's.
  static constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= registers_a_row(kThreads));
  static constexpr int kColumns = kTileN % 64 == 0 ? 64 : 32;               // that leave together
  static constexpr int kStagedBytes = kNeighbours ? 0 : 16 * kColumns * 2;  // of a warp
  static constexpr int kBytesA = kTileM * kTileK * 2, kBytesB = kTileN * kTileK * 2;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kBesideRing = kConsumers * (4 * kStagedBytes + kTileN * 4) + 256;
  static constexpr int kStages = (227 * 1024 - kBesideRing) / kStageBytes;  // 5 of 40 KB; of 32 KB 6, 7 if kNeighbours
  static constexpr int kSharedBytes = kStages * kStageBytes + kBesideRing;
};

struct GemmArguments {
  CUtensorMap a, b;
  LinearEpilogue epilogue;
  float* partial;        // [parts, m, n] where k is cut, else null
  int m, n, num_k;       // num_k: k-tiles of a part
  int tiles_m, tiles_n;  // tiles_m counts pairs where blocks are paired
  int parts;
};

template <class Shape>
struct SharedStorage {
  // Byte offsets in dynamic shared memory; the ring's slots and staged tiles begin at multiples of 1024.
  static constexpr int kRing = 0;
  static constexpr int kStaged = Shape::kStages * Shape::kStageBytes;
  static constexpr int kBias = kStaged + Shape::kConsumers * 4 * Shape::kStagedBytes;
  static constexpr int kFull = kBias + Shape::kConsumers * Shape::kTileN * 4;
  static constexpr int kEmpty = kFull + 8 * Shape::kStages;
  static_assert(kEmpty + 8 * Shape::kStages <= Shape::kSharedBytes && kStaged % 1024 == 0);
};

/// Which part of k an index means; the tiles of a part follow each other.
template <class Shape>
__device__ inline int part_of(const GemmArguments& p, int index) {
  return Shape::kParts ? index / (p.tiles_m * p.tiles_n) : 0;
}

template <class Shape>
__device__ inline typename Shape::Index tile_of(const GemmArguments& p, int index) {
  return typename Shape::Index(index - part_of<Shape>(p, index) * p.tiles_m * p.tiles_n, p.tiles_m, p.tiles_n);
}

/// This block's place in its pair.
template <class Shape>
__device__ inline int rank_of() {
  return Shape::kBlocks == 2 ? static_cast<int>(ptx::cluster_rank()) : 0;
}

/// One lane: all tiles of this block, one k-tile after the other.
template <class Shape, bool kKMajorA, bool kKMajorB>
__device__ inline void produce(const GemmArguments& p, std::uint32_t shared, int first, int step) {
  using Storage = SharedStorage<Shape>;
  constexpr std::uint16_t kBoth = 3;
  // What comes in is read again by other blocks, what goes out is not: without this the results push the operands out
  // of L2.
  const std::uint64_t policy = ptx::l2_evict_last();
  const int rank = rank_of<Shape>();
  int slot = 0;
  std::uint32_t parity = 1;  // the first round finds empty slots
  for (int index = first; index < p.tiles_m * p.tiles_n * p.parts; index += step) {
    const typename Shape::Index tile = tile_of<Shape>(p, index);
    const int first_k = part_of<Shape>(p, index) * p.num_k * Shape::kTileK;
    const int m = (tile.m * Shape::kBlocks + rank) * Shape::kTileM, n = tile.n * Shape::kTileN;
    for (int kt = 0; kt < p.num_k; ++kt) {
      const std::uint32_t full = shared + Storage::kFull + 8 * slot;
      const std::uint32_t a = shared + Storage::kRing + slot * Shape::kStageBytes, b = a + Shape::kBytesA;
      const int k = first_k + kt * Shape::kTileK;  // past the end: zeros
      ptx::mbarrier_wait(shared + Storage::kEmpty + 8 * slot, parity);
      ptx::mbarrier_arrive_expect(full, Shape::kStageBytes);
      if constexpr (kKMajorA) {
        ptx::tma_load(a, &p.a, full, policy, k, m);
      } else {
#pragma unroll
        for (int i = 0; i < Shape::kTileM / 64; ++i) ptx::tma_load(a + i * 8192, &p.a, full, policy, m + 64 * i, k);
      }
      if constexpr (kKMajorB) {
        // A block of a pair fetches its half of B's rows for both.
        constexpr int kRows = Shape::kTileN / Shape::kBlocks;
        if constexpr (Shape::kBlocks == 2)
          ptx::tma_load_multicast(b + rank * kRows * 128, &p.b, full, kBoth, policy, k, n + rank * kRows);
        else if constexpr (Shape::kNeighbours)
          ptx::tma_load(b, &p.b, full, policy, k, 0, 0, n / kInterleavedRows);
        else
          ptx::tma_load(b, &p.b, full, policy, k, n);
      } else {
        constexpr int kRows = Shape::kTileK / Shape::kBlocks;  // or its half of the rows of k
#pragma unroll
        for (int i = 0; i < Shape::kTileN / 64; ++i) {
          if constexpr (Shape::kBlocks == 2)
            ptx::tma_load_multicast(b + i * 8192 + rank * kRows * 128, &p.b, full, kBoth, policy, n + 64 * i,
                                    k + rank * kRows);
          else
            ptx::tma_load(b + i * 8192, &p.b, full, policy, n + 64 * i, k);
        }
      }
      if (++slot == Shape::kStages) slot = 0, parity ^= 1;
    }
  }
}

template <class Shape>
using Sums = float[Shape::kPartsM][Shape::kTileN / 2];

constexpr std::uint32_t kTurn = 3;  // barriers 3 and 4: the turns; 1 and 2: a warpgroup's own

/// The sums of one tile: k-tiles `first_kt` .. + num_k of this block's sequence. Before k-tile `behind_at` it waits
/// until the other warpgroup has asked for all of its products.
template <class T, class Shape, bool kKMajorA, bool kKMajorB, class Turn>
__device__ inline void multiply(Sums<Shape>& sum, std::uint32_t shared, std::uint32_t row_offset, int first_kt,
                                int num_k, int behind_at, Turn end_of_turn) {
  using Storage = SharedStorage<Shape>;
  // Known to the compiler as the warp's: descriptors are worked out in uniform registers then, where wgmma reads them.
  // Here, not once for the warpgroup's number, which would take a register beside the sums then.
  first_kt = __shfl_sync(kFullMask, first_kt, 0);
  row_offset = __shfl_sync(kFullMask, row_offset, 0);
  int slot = first_kt % Shape::kStages;
  std::uint32_t parity = first_kt / Shape::kStages % 2;
  const bool signals = threadIdx.x % 128 < Shape::kBlocks;  // one thread of the warpgroup a block of the cluster
  const auto release = [&](int which) {
    if (!signals) return;
    const std::uint32_t empty = shared + Storage::kEmpty + 8 * which;
    if constexpr (Shape::kBlocks == 2)
      ptx::mbarrier_arrive_cluster(ptx::map_shared(empty, threadIdx.x % 128));
    else
      ptx::mbarrier_arrive(empty);
  };
  int previous = 0;
  for (int kt = 0; kt < num_k; ++kt) {
    if constexpr (Shape::kBehind > 0) {
      if (kt == behind_at) ptx::barrier_sync(kTurn, 256);
    }
    ptx::mbarrier_wait(shared + Storage::kFull + 8 * slot, parity);
    const std::uint32_t a = shared + Storage::kRing + slot * Shape::kStageBytes, b = a + Shape::kBytesA;
    const std::uint64_t operand_a = ptx::matrix_descriptor(a + row_offset, 8192, 1024);
    const std::uint64_t operand_b = ptx::matrix_descriptor(b, 8192, 1024);
    constexpr int kStepA = kKMajorA ? 32 / 16 : 2048 / 16, kStepB = kKMajorB ? 32 / 16 : 2048 / 16;
#pragma unroll
    for (int i = 0; i < Shape::kPartsM; ++i) ptx::hold(sum[i]);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Shape::kTileK / 16; ++step)
#pragma unroll
      for (int i = 0; i < Shape::kPartsM; ++i)
        ptx::wgmma_ss<T, !kKMajorA, !kKMajorB>(sum[i], operand_a + step * kStepA + i * (8192 / 16),
                                               operand_b + step * kStepB, kt > 0 || step > 0);
    ptx::wgmma_commit();
#pragma unroll
    for (int i = 0; i < Shape::kPartsM; ++i) ptx::hold(sum[i]);
    ptx::wgmma_wait<1>();  // the batch before has read its slot
    if (kt > 0) release(previous);
    previous = slot;
    if (++slot == Shape::kStages) slot = 0, parity ^= 1;
  }
  end_of_turn();
  ptx::wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < Shape::kPartsM; ++i) ptx::hold(sum[i]);
  release(previous);
}

/// Bias, activation, and the way out: 16 rows x kColumns of a warp at a time, through a place of its own in shared
/// memory, so that they leave as whole lines. (TMA stores would queue behind the producer's loads.)
template <class T, class Shape, Activation kActivation>
__device__ inline void store(const GemmArguments& p, Sums<Shape>& sum, char* shared, int group, int row, int column) {
  using Storage = SharedStorage<Shape>;
  using Staged = SharedTile<Shape::kColumns>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const float* bias = reinterpret_cast<const float*>(shared + Storage::kBias) + group * Shape::kTileN + lane % 4 * 2;
  char* const staged = shared + Storage::kStaged + (group * 4 + warp) * Shape::kStagedBytes;
  const std::uint32_t to_staged =
      ptx::shared_address(staged) + Staged::lane_offset(LaneA::row(lane), LaneA::half(lane));
  constexpr int kRowsAtOnce = 32 / Staged::kChunks;
  const int lane_row = lane / Staged::kChunks, chunk = lane % Staged::kChunks;
  const std::uint32_t at_staged = Staged::offset(lane_row, chunk);
  row += 16 * warp + lane_row;
  column += chunk * 8;
  const auto send = [&](void* data, std::int64_t stride, const float* x, int i, int part) {
#pragma unroll
    for (int c = 0; c < Shape::kColumns / 16; ++c)
      ptx::stmatrix_x4(Staged::at_slice(to_staged, c), pack<T>(x[8 * c], x[8 * c + 1]),
                       pack<T>(x[8 * c + 2], x[8 * c + 3]), pack<T>(x[8 * c + 4], x[8 * c + 5]),
                       pack<T>(x[8 * c + 6], x[8 * c + 7]));
    __syncwarp();
    const int n = p.n - column - part * Shape::kColumns, m = p.m - row - 64 * i;  // what is left there
    T* to = static_cast<T*>(data) + (row + 64 * i) * stride + column + part * Shape::kColumns;
#pragma unroll
    for (int r = 0; r < 16 / kRowsAtOnce; ++r, to += kRowsAtOnce * stride) {
      // Rows of 128 bytes: 4 further, the twist differs in one bit.
      const int twist = Staged::kChunks == 8 && r % 2 == 1 ? 64 : 0;
      const uint4 values =
          *reinterpret_cast<const uint4*>(staged + (at_staged ^ twist) + r * kRowsAtOnce * Staged::kPitch);
      if (r * kRowsAtOnce < m && n > 0) *reinterpret_cast<uint4*>(to) = values;  // n is a multiple of 8
    }
    __syncwarp();
  };
  const LinearEpilogue& e = p.epilogue;
#pragma unroll
  for (int i = 0; i < Shape::kPartsM; ++i)
#pragma unroll
    for (int part = 0; part < Shape::kTileN / Shape::kColumns; ++part) {
      float* const x = sum[i] + part * (Shape::kColumns / 2);
#pragma unroll
      for (int c = 0; c < Shape::kColumns / 8; ++c) {
        const float2 b = *reinterpret_cast<const float2*>(bias + part * Shape::kColumns + 8 * c);
        x[4 * c] += b.x, x[4 * c + 1] += b.y, x[4 * c + 2] += b.x, x[4 * c + 3] += b.y;
      }
      if (e.preactivation) send(e.preactivation, e.stride_preactivation, x, i, part);
#pragma unroll
      for (int v = 0; v < Shape::kColumns / 2; ++v) x[v] = activate_fast<kActivation>(x[v]);
      send(e.out, e.stride_out, x, i, part);
    }
}

/// The same where a thread stores 8 neighbours at once, 32 g + 8 (lane % 4) .. + 7 of its rows: in chunk c of 8 sums
/// the first one is column c of these, the second one 4 + c. Nothing waits for shared memory; four lanes fill two
/// sectors.
template <class T, class Shape, Activation kActivation>
__device__ inline void store_neighbours(const GemmArguments& p, const Sums<Shape>& sum, const char* shared, int group,
                                        int row, int column, void* data, std::int64_t stride) {
  using Storage = SharedStorage<Shape>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const float* bias = reinterpret_cast<const float*>(shared + Storage::kBias) + group * Shape::kTileN + lane % 4 * 8;
  row += 16 * warp + lane / 4;
  const int m = p.m - row;  // what is left there
  auto left = static_cast<std::uint32_t>(p.n - column);
  T* const to = static_cast<T*>(data) + row * stride + column + lane % 4 * 8;
#pragma unroll
  for (std::uint32_t g = 0; g < Shape::kTileN / 32; ++g) {
    const float4 b0 = *reinterpret_cast<const float4*>(bias + 32 * g);
    const float4 b1 = *reinterpret_cast<const float4*>(bias + 32 * g + 4);
    const float b[8] = {b0.x, b0.y, b0.z, b0.w, b1.x, b1.y, b1.z, b1.w};
#pragma unroll
    for (int i = 0; i < 2 * Shape::kPartsM; ++i) {
      const int down = i / 2 * 64 + i % 2 * 8;
      float x[8];
#pragma unroll
      for (int v = 0; v < 8; ++v)
        x[v] = activate_fast<kActivation>(sum[i / 2][16 * g + v % 4 * 4 + i % 2 * 2 + v / 4] + b[v]);
      const uint4 values = {pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7])};
      if (down < m && 32 * g < left) *reinterpret_cast<uint4*>(to + down * stride + 32 * g) = values;
    }
    ptx::hold(left);  // one group of columns after the other: all at once would not fit the registers
  }
}

template <class T, class Shape, Activation kActivation>
__device__ inline void finish(const GemmArguments& p, Sums<Shape>& sum, char* shared, int group, int row, int column) {
  if constexpr (Shape::kNeighbours) {
    const LinearEpilogue& e = p.epilogue;
    if (e.preactivation)
      store_neighbours<T, Shape, Activation::kNone>(p, sum, shared, group, row, column, e.preactivation,
                                                    e.stride_preactivation);
    store_neighbours<T, Shape, kActivation>(p, sum, shared, group, row, column, e.out, e.stride_out);
  } else {
    store<T, Shape, kActivation>(p, sum, shared, group, row, column);
  }
}

/// The sums of one part of k, as they are: four lanes' pairs are whole sectors of 32 bytes.
template <class Shape>
__device__ inline void store_part(const GemmArguments& p, const Sums<Shape>& sum, int part, int row, int column) {
  const int lane = threadIdx.x % 32;
  row += 16 * (threadIdx.x / 32 % 4) + lane / 4;
  column += lane % 4 * 2;
  float* const to = p.partial + (static_cast<std::int64_t>(part) * p.m + row) * p.n + column;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= p.m) continue;
#pragma unroll
    for (int c = 0; c < Shape::kTileN / 8; ++c)
      if (column + 8 * c < p.n)  // n is a multiple of 8
        *reinterpret_cast<float2*>(to + 8 * half * p.n + 8 * c) =
            make_float2(sum[0][4 * c + 2 * half], sum[0][4 * c + 2 * half + 1]);
  }
}

template <class T, class Shape, bool kKMajorA, bool kKMajorB>
__device__ inline void consume(const GemmArguments& p, char* shared, int group, int first, int step) {
  using Storage = SharedStorage<Shape>;
  const std::uint32_t base = ptx::shared_address(shared);
  float* const bias = reinterpret_cast<float*>(shared + Storage::kBias) + group * Shape::kTileN;
  // Parts' sums go out without an activation, which is soon done. Blocks have one tile where they have a kBehind.
  const bool staggered = Shape::kBehind > 0 && !p.partial;
  const int behind_at = staggered && group == 1 ? max(p.num_k - Shape::kBehind, 0) : -1;
  if (Shape::kPingPong && group == 1) ptx::barrier_arrive(kTurn, 256);  // the first turn is group 0's
  for (int i = Shape::kPingPong ? group : 0, index = first + i * step; index < p.tiles_m * p.tiles_n * p.parts;
       i += Shape::kPingPong ? 2 : 1, index = first + i * step) {
    ptx::barrier_sync(1 + group, 128);  // all have read the last tile's bias
    const int first_column = tile_of<Shape>(p, index).n * Shape::kTileN;
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
    const typename Shape::Index tile = tile_of<Shape>(p, static_cast<int>(again));
    const int column = tile.n * Shape::kTileN;
    const int row = (tile.m * Shape::kBlocks + rank_of<Shape>()) * Shape::kTileM + (Shape::kPingPong ? 0 : group * 64);
    if constexpr (Shape::kParts) {
      if (p.partial) {
        store_part<Shape>(p, sum, part_of<Shape>(p, static_cast<int>(again)), row, column);
        continue;
      }
    }
    if constexpr (kKMajorA) {
      with_activation(p.epilogue.activation, [&](auto activation) {
        constexpr Activation kActivation = decltype(activation)::value;
        finish<T, Shape, kActivation>(p, sum, shared, group, row, column);
      });
    } else {  // a gradient: see gemm.hpp
      finish<T, Shape, Activation::kNone>(p, sum, shared, group, row, column);
    }
  }
}

template <class T, class Shape, bool kKMajorA, bool kKMajorB>
__global__ void __launch_bounds__(Shape::kThreads, 1) gemm_kernel(const __grid_constant__ GemmArguments p) {
  using Storage = SharedStorage<Shape>;
  extern __shared__ __align__(1024) char shared[];
  const std::uint32_t base = ptx::shared_address(shared);
  if (threadIdx.x == 0) {
    ptx::tma_prefetch_map(&p.a);
    ptx::tma_prefetch_map(&p.b);
    for (int s = 0; s < Shape::kStages; ++s) {
      ptx::mbarrier_init(base + Storage::kFull + 8 * s, 1);
      ptx::mbarrier_init(base + Storage::kEmpty + 8 * s, Shape::kBlocks * (Shape::kPingPong ? 1 : 2));
    }
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
  if constexpr (Shape::kBlocks == 2) ptx::cluster_arrive();
  ptx::wait_for_previous_kernel();
  __syncthreads();
  if constexpr (Shape::kBlocks == 2) ptx::cluster_wait();  // the other block's barriers are ready too
  const int first = static_cast<int>(blockIdx.x) / Shape::kBlocks;
  const int step = static_cast<int>(gridDim.x) / Shape::kBlocks;
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    ptx::decrease_registers<Shape::kProducerRegisters>();
    if (threadIdx.x == 0) {
      produce<Shape, kKMajorA, kKMajorB>(p, base, first, step);
      ptx::allow_next_kernel();  // not before: its blocks would stand in the way of the loads
    }
  } else {
    ptx::increase_registers<Shape::kConsumerRegisters>();
    consume<T, Shape, kKMajorA, kKMajorB>(p, shared, group - 1, first, step);
  }
  if constexpr (Shape::kBlocks == 2) {  // nobody leaves while the other one may still write here
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
}

template <class T, class Shape>
void launch_gemm(const char* name, const GemmProblem& p, int num_sms, cudaStream_t stream) {
  GemmArguments arguments;
  arguments.a = operand_map<T>(name, p.a, p.m, p.k, Shape::kTileM, Shape::kTileK);
  if constexpr (Shape::kNeighbours)
    arguments.b = make_tensor_map(name, interleaved_rows<T>(p.b, p.n, p.k, Shape::kTileN));
  else
    arguments.b = operand_map<T>(name, p.b, p.n, p.k, Shape::kTileN / Shape::kBlocks, Shape::kTileK / Shape::kBlocks);
  arguments.epilogue = p.epilogue;
  arguments.m = static_cast<int>(p.m);
  arguments.n = static_cast<int>(p.n);
  arguments.parts = Shape::kParts ? p.parts : 1;
  arguments.partial = arguments.parts > 1 ? p.partial : nullptr;
  arguments.num_k = static_cast<int>(ceil_div(ceil_div(p.k, Shape::kTileK), arguments.parts));
  arguments.tiles_m = static_cast<int>(ceil_div(p.m, Shape::kTileM * Shape::kBlocks));
  arguments.tiles_n = static_cast<int>(ceil_div(p.n, Shape::kTileN));
  const std::int64_t tiles = static_cast<std::int64_t>(arguments.tiles_m) * arguments.tiles_n * arguments.parts;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(tiles, num_sms / Shape::kBlocks) * Shape::kBlocks);
  LaunchShape shape{blocks, Shape::kThreads, Shape::kSharedBytes, stream};
  shape.cluster = Shape::kBlocks;
  shape.early = true;
  if (p.a.k_major && p.b.k_major) {
    launch(name, gemm_kernel<T, Shape, true, true>, shape, arguments);
  } else if constexpr (Shape::kAnyLayout) {
    if (p.a.k_major)
      launch(name, gemm_kernel<T, Shape, true, false>, shape, arguments);
    else
      launch(name, gemm_kernel<T, Shape, false, false>, shape, arguments);
  }
  if (arguments.partial)
    launch(name, split_sum::kernel<T>, {split_sum::grid(p.m, p.n), split_sum::kThreads, 0, stream}, p.epilogue,
           p.partial, p.parts, arguments.m, arguments.n, p.n);
}

template <class T, int kTileN>
void launch_ping_pong(const char* name, const GemmProblem& p, int num_sms, cudaStream_t stream) {
  if (p.a.k_major && p.b.k_major && p.n % kInterleavedRows == 0 &&
      fits_tensor_map(interleaved_rows<T>(p.b, p.n, p.k, kTileN)))
    launch_gemm<T, GemmShape<kTileN, true, false, true>>(name, p, num_sms, stream);
  else
    launch_gemm<T, GemmShape<kTileN, true, false>>(name, p, num_sms, stream);
}

template <class T>
void gemm(const char* name, const GemmProblem& p, GemmVariant variant, int num_sms, cudaStream_t stream) {
  switch (variant) {
    case GemmVariant::kPingPong192Pair: return launch_gemm<T, GemmShape<192, true, true>>(name, p, num_sms, stream);
    case GemmVariant::kPingPong192: return launch_ping_pong<T, 192>(name, p, num_sms, stream);
    case GemmVariant::kPingPong128: return launch_ping_pong<T, 128>(name, p, num_sms, stream);
    case GemmVariant::kCooperative128: return launch_gemm<T, GemmShape<128, false, false>>(name, p, num_sms, stream);
    case GemmVariant::kCooperative96: return launch_gemm<T, GemmShape<96, false, false>>(name, p, num_sms, stream);
  }
}

}  // namespace flashkernel::cuda::sm90a
