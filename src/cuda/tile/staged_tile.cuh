// A tile of 16-bit rows on its way from global to shared memory on a GPU without cp.async: `fetch` starts the loads
// into registers, matrix products run while they are under way, `store` puts them in place. The layout is that of
// SharedTile.
#pragma once

#include "cuda/tile/shared_tile.cuh"

namespace flashkernel::cuda {

/// With kFetchRows false only whole tiles are fetched, the others are copied by `store`: fewer registers.
template <class T, int kRows, int kDim, int kThreads, bool kFetchRows = true>
class StagedTile {
 public:
  using Tile = SharedTile<kDim>;
  static constexpr int kBytes = kRows * Tile::kPitch;

  /// Columns from `dim` on, and rows that `row_of` calls null, become zeros. When all rows are there and evenly spaced,
  /// `first_row` says where (the path of nearly every tile); else it is null. With `vectors` false (rows that do not
  /// start at multiples of 16 bytes, or a dim that is no multiple of 8) nothing is fetched: `store` copies by elements.
  template <class RowOf>
  __device__ void fetch(int dim, bool vectors, const T* first_row, std::int64_t stride, RowOf row_of) {
    fetched_ = vectors && (kFetchRows || first_row);
    if (!fetched_) return;
    const int row = threadIdx.x / kAcross, chunk = threadIdx.x % kAcross;
    if (first_row) {
      const T* from = first_row + row * stride + chunk * 8;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass, from += kRowsAPass * stride)
#pragma unroll
        for (int group = 0; group < kGroups; ++group)
          held_[pass][group] = (group * kAcross + chunk) * 8 < dim
                                   ? *reinterpret_cast<const uint4*>(from + group * kAcross * 8)
                                   : uint4{0, 0, 0, 0};
    } else if constexpr (kFetchRows) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const T* const from = row_of(pass * kRowsAPass + row);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          const int column = (group * kAcross + chunk) * 8;
          held_[pass][group] =
              from && column < dim ? *reinterpret_cast<const uint4*>(from + column) : uint4{0, 0, 0, 0};
        }
      }
    }
  }

  /// `to` is the tile's place in shared memory; the arguments are those of `fetch`.
  template <class RowOf>
  __device__ void store(unsigned char* to, int dim, bool vectors, RowOf row_of) const {
    const int row = threadIdx.x / kAcross, chunk = threadIdx.x % kAcross;
    to += Tile::offset(row, chunk);
    if (fetched_) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
        for (int group = 0; group < kGroups; ++group)
          *reinterpret_cast<uint4*>(to + pass * kRowsAPass * Tile::kPitch + group * kAcross * 16) = held_[pass][group];
      return;
    }
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      const T* const from = row_of(pass * kRowsAPass + row);
#pragma unroll 1
      for (int group = 0; group < kGroups; ++group) {
        T* const target = reinterpret_cast<T*>(to + pass * kRowsAPass * Tile::kPitch + group * kAcross * 16);
        if (vectors) {
          const int column = (group * kAcross + chunk) * 8;
          *reinterpret_cast<uint4*>(target) =
              from && column < dim ? *reinterpret_cast<const uint4*>(from + column) : uint4{0, 0, 0, 0};
          continue;
        }
#pragma unroll 1
        for (int e = 0; e < 8; ++e) {
          const int column = (group * kAcross + chunk) * 8 + e;
          target[e] = from && column < dim ? from[column] : T(0.0f);
        }
      }
    }
  }

 private:
  // A pass: kThreads / kAcross rows, kAcross chunks of 16 bytes of each. Rows a pass apart have the same twist.
  static constexpr int kAcross = Tile::kChunks % 16 == 0 ? 16 : Tile::kChunks % 8 == 0 ? 8 : 4;
  static constexpr int kRowsAPass = kThreads / kAcross, kPasses = kRows / kRowsAPass;
  static constexpr int kGroups = Tile::kChunks / kAcross;
  static_assert(kRows % kRowsAPass == 0 && kRowsAPass % 8 == 0, "every thread copies the same chunks of a row");

  uint4 held_[kPasses][kGroups];
  bool fetched_ = false;
};

/// A warp writes its kRows rows of a tile in shared memory, `count` of them and `dim` columns of each.
template <class T, int kRows, int kDim>
__device__ inline void store_rows(const unsigned char* from, int lane, int count, int dim, bool vectors, T* to,
                                  std::int64_t stride) {
  using Tile = SharedTile<kDim>;
#pragma unroll 4
  for (int at = lane; at < kRows * Tile::kChunks; at += 32) {
    const int row = at / Tile::kChunks, column = at % Tile::kChunks * 8;
    if (row >= count || column >= dim) continue;
    const uint4 packed = *reinterpret_cast<const uint4*>(from + Tile::offset(row, column / 8));
    T* const row_to = to + row * stride + column;
    if (vectors && column + 8 <= dim) {
      *reinterpret_cast<uint4*>(row_to) = packed;
    } else {
      const T* const elements = reinterpret_cast<const T*>(&packed);
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (column + e < dim) row_to[e] = elements[e];
    }
  }
}

/// d += a b with an A operand of 16 x 16 and a B operand of 16 x 8 as ldmatrix.x4 delivers them.
__device__ inline void mma_16x8x16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  ptx::mma_m16n8k8(d, a[0], a[1], b0);
  ptx::mma_m16n8k8(d, a[2], a[3], b1);
}

}  // namespace flashkernel::cuda
