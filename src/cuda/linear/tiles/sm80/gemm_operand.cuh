// One operand of gemm.cuh: its way from global memory into a ring of swizzled tiles (cp.async, zeros outside the
// matrix), and from there into the fragments of mma.sync.
#pragma once

#include "cuda/linear/tiles/sm80/gemm.hpp"
#include "cuda/tile/shared_tile.cuh"

namespace flashkernel::cuda::sm80 {

/// kMn x kK elements a tile, copied by kThreads threads. A stored row is a tile row: kMn rows along k, or kK rows along
/// the other dim.
template <class T, int kMn, int kK, bool kKMajor, int kThreads>
class Operand {
 public:
  static constexpr int kRows = kKMajor ? kMn : kK, kColumns = kKMajor ? kK : kMn;
  using Tile = SharedTile<kColumns* static_cast<int>(sizeof(T)) / 2>;
  static constexpr int kTileBytes = kRows * Tile::kPitch;
  static constexpr int kSlice = 32 / static_cast<int>(sizeof(T));  // k of one matrix instruction

  /// The tiles of rows (of A, or of B) from `first_mn`, k from `first_k`.
  __device__ Operand(const GemmOperand& operand, int first_mn, int num_mn, int first_k)
      : stride_(operand.stride), vectors_(operand.vectors), mn_left_(num_mn - first_mn) {
    const int row = threadIdx.x / Tile::kChunks, chunk = threadIdx.x % Tile::kChunks;
    const std::int64_t first_row = (kKMajor ? first_mn : first_k) + row;
    from_ = static_cast<const T*>(operand.data) + first_row * stride_ + (kKMajor ? first_k : first_mn) +
            chunk * kVectorElements<T>;
    to_ = Tile::offset(row, chunk);
  }

  /// Starts the copy of the next tile, of which `k_left` values of k exist.
  __device__ void load(char* slot, int k_left) {
    const int row = threadIdx.x / Tile::kChunks, column = threadIdx.x % Tile::kChunks * kVectorElements<T>;
    const int rows = (kKMajor ? mn_left_ : k_left) - row;
    const int count = min(max((kKMajor ? k_left : mn_left_) - column, 0), kVectorElements<T>);
    if (vectors_) {
      const std::uint32_t to = ptx::shared_address(slot) + to_;
      const T* from = from_;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass, from += kRowsAPass * stride_)
        ptx::cp_async_16(to + pass * kRowsAPass * Tile::kPitch, from,
                         pass * kRowsAPass < rows ? count * static_cast<int>(sizeof(T)) : 0);
    } else {
#pragma unroll 1
      for (int pass = 0; pass < kPasses; ++pass) {
        T* to = reinterpret_cast<T*>(slot + to_ + pass * kRowsAPass * Tile::kPitch);
        const T* from = from_ + pass * kRowsAPass * stride_;
        const int there = pass * kRowsAPass < rows ? count : 0;
#pragma unroll 1
        for (int i = 0; i < kVectorElements<T>; ++i) to[i] = i < there ? from[i] : T(0.0f);
      }
    }
    from_ += kKMajor ? kK : kK * stride_;
  }

  /// Fragments of 16 rows of A each, from row `first` of the tile, at slice `slice` of k.
  template <int kCount>
  __device__ static void fragments_a(std::uint32_t (&a)[kCount][4], const char* slot, int first, int slice) {
    const int lane = threadIdx.x % 32;
    if constexpr (kKMajor) {
      const std::uint32_t from =
          ptx::shared_address(slot) + first * Tile::kPitch + Tile::lane_offset(LaneA::row(lane), LaneA::half(lane));
#pragma unroll
      for (int i = 0; i < kCount; ++i) ptx::ldmatrix_x4(a[i], Tile::at_slice(from, slice) + i * 16 * Tile::kPitch);
    } else if constexpr (sizeof(T) == 2) {
      const std::uint32_t from = Tile::at_slice(
          ptx::shared_address(slot) + Tile::lane_offset(LaneB::row(lane), LaneB::half(lane)), first / 16);
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        ptx::ldmatrix_x4_trans(a[i], Tile::at_slice(from, i) + slice * 16 * Tile::kPitch);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) a[i][e] = word(slot, 8 * slice + e / 2 * 4, first + 16 * i + e % 2 * 8);
    }
  }

  /// Fragments of 16 rows of B each: registers 0, 1 for rows 0..7, 2, 3 for rows 8..15.
  template <int kCount>
  __device__ static void fragments_b(std::uint32_t (&b)[kCount][4], const char* slot, int first, int slice) {
    const int lane = threadIdx.x % 32;
    if constexpr (kKMajor) {
      const std::uint32_t from =
          ptx::shared_address(slot) + first * Tile::kPitch + Tile::lane_offset(LaneB::row(lane), LaneB::half(lane));
#pragma unroll
      for (int i = 0; i < kCount; ++i) ptx::ldmatrix_x4(b[i], Tile::at_slice(from, slice) + i * 16 * Tile::kPitch);
    } else if constexpr (sizeof(T) == 2) {
      const std::uint32_t from = Tile::at_slice(
          ptx::shared_address(slot) + Tile::lane_offset(LaneA::row(lane), LaneA::half(lane)), first / 16);
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        ptx::ldmatrix_x4_trans(b[i], Tile::at_slice(from, i) + slice * 16 * Tile::kPitch);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) b[i][e] = word(slot, 8 * slice + e % 2 * 4, first + 16 * i + e / 2 * 8);
    }
  }

 private:
  static constexpr int kRowsAPass = kThreads / Tile::kChunks;
  static constexpr int kPasses = kRows / kRowsAPass;
  static_assert(kRows % kRowsAPass == 0 && kRowsAPass % 8 == 0, "rows a pass apart have the same twist");

  /// The fp32 word at k = `k` + lane % 4, row `mn` + lane / 4 of a tile whose rows lie along the other dim.
  __device__ static std::uint32_t word(const char* slot, int k, int mn) {
    const int lane = threadIdx.x % 32, column = mn + lane / 4;
    return *reinterpret_cast<const std::uint32_t*>(slot + Tile::offset(k + lane % 4, column / 4) + column % 4 * 4);
  }

  const T* from_;
  std::int64_t stride_;
  std::uint32_t to_;
  bool vectors_;
  int mn_left_;
};

}  // namespace flashkernel::cuda::sm80
