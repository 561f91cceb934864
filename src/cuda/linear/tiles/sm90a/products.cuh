// The two halves of the products in gemm.cuh: one thread fills a ring of k-tiles by TMA, warpgroups multiply them by
// wgmma. Invariants: slot s of the ring is filled only after each warpgroup that reads it has arrived at its `empty`
// barrier; in ping-pong a warpgroup waits for k-tiles only in its turn, so that it never sees a barrier two phases
// back.
#pragma once

#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/linear/tiles/sm90a/shape.cuh"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda::sm90a {

/// The bias of this block's tile i comes with the last k-tile, counted at the same barrier, so that a warpgroup has it
/// when it has the sums. Returns the bytes that are under way.
template <class T, class Shape>
__device__ inline std::uint32_t load_bias(const GemmArguments& p, std::uint32_t shared, int i, int n,
                                          std::uint32_t full) {
  using Storage = SharedStorage<Shape>;
  if (!p.epilogue.bias) return 0;
  const int place = i % Shape::kBiasPlaces;
  ptx::mbarrier_wait(shared + Storage::kBiasRead + 8 * place, i / Shape::kBiasPlaces % 2 ^ 1);
  ptx::bulk_load(shared + Storage::kBias + place * Shape::kBiasBytes, static_cast<const T*>(p.epilogue.bias.data) + n,
                 Shape::kBiasBytes, full);
  return Shape::kBiasBytes;
}

/// One lane: all tiles of this block, one k-tile after the other. Whatever takes time before the first load does so
/// before the wait for the kernel in front.
template <class T, class Shape, bool kKMajorA, bool kKMajorB>
__device__ inline void produce(const GemmArguments& p, std::uint32_t shared, int first, int step) {
  using Storage = SharedStorage<Shape>;
  // What comes in is read again by other blocks, what goes out is not: without this the results push the operands out
  // of L2. (B may be read once: gemm_arguments.)
  constexpr std::uint64_t policy = ptx::kL2EvictLast;
  int slot = 0;
  std::uint32_t parity = 1;  // the first round finds empty slots
  for (int i = 0, index = first; index < p.tiles; ++i, index = first + i * step) {
    const TileIndex tile = tile_of<Shape>(p, index);
    const KTiles tiles = k_tiles_of<Shape>(p, index);
    const int m = rows_of<Shape>(p, tile).first, n = columns_of<Shape>(p, tile).first;
    if (i == 0) ptx::wait_for_previous_kernel();
    for (int kt = 0; kt < tiles.count; ++kt) {
      const std::uint32_t full = shared + Storage::kFull + 8 * slot;
      const std::uint32_t a = shared + Storage::kRing + slot * Shape::kStageBytes, b = a + Shape::kBytesA;
      const int k = (tiles.first + kt) * Shape::kTileK;  // past the end: zeros
      ptx::mbarrier_wait(shared + Storage::kEmpty + 8 * slot, parity);
      std::uint32_t bytes = p.rows_a * Shape::kTileK * 2 + Shape::kBytesB;
      if constexpr (Shape::kNeighbours) {
        if (kt == tiles.count - 1) bytes += load_bias<T, Shape>(p, shared, i, n, full);
      }
      ptx::mbarrier_arrive_expect(full, bytes);
      if constexpr (kKMajorA) {
        ptx::tma_load(a, &p.a, full, policy, k, m);
      } else {
#pragma unroll
        for (int c = 0; c < Shape::kTileM / 64; ++c) ptx::tma_load(a + c * 8192, &p.a, full, policy, m + 64 * c, k);
      }
      if constexpr (Shape::kNeighbours) {
        constexpr int kInGroups = Shape::kGroups * kInterleavedRows;
        ptx::tma_load(b, &p.b, full, p.policy_b, k, 0, 0, 0, n / 8);
        if constexpr (Shape::kRest > 0)
          ptx::tma_load(b + kInGroups * 128, &p.b_rest, full, p.policy_b, k, n + kInGroups);
      } else if constexpr (kKMajorB) {
        ptx::tma_load(b, &p.b, full, p.policy_b, k, n);
      } else {
#pragma unroll
        for (int c = 0; c < Shape::kTileN / 64; ++c) ptx::tma_load(b + c * 8192, &p.b, full, p.policy_b, n + 64 * c, k);
      }
      if (++slot == Shape::kStages) slot = 0, parity ^= 1;
    }
  }
}

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
  const auto release = [&](int which) {  // one thread for the warpgroup
    if (threadIdx.x % 128 == 0) ptx::mbarrier_arrive(shared + Storage::kEmpty + 8 * which);
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

}  // namespace flashkernel::cuda::sm90a
