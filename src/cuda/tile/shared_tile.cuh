// Tiles of 16-bit rows in shared memory, swizzled so that ldmatrix (8 rows, one 16-byte chunk) and row-wise writes
// touch all 32 banks once. Rows are kDim * 2 bytes apart, without padding.
#pragma once

#include <cstdint>

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/matrix.cuh"

namespace flashkernel::cuda {

template <int kDim>
struct SharedTile {
  static_assert(kDim % 32 == 0 || kDim == 16, "whole groups of chunks");
  static constexpr int kPitch = kDim * 2;   // bytes
  static constexpr int kChunks = kDim / 8;  // of 16 bytes in a row
  // Rows of whole 128-byte lines: chunk ^ row % 8 spreads 8 rows over the 8 places of a line. Rows of 64 or 192 bytes:
  // two neighbouring rows already start half a line apart, chunk ^ row / 2 % 4 does the rest; of 32 bytes: row / 4 % 2.
  static constexpr int kGroup = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;
  static constexpr int kSlicesPerGroup = kGroup / 2;  // of 16 elements

  __device__ static std::uint32_t twist(int row) {
    return kGroup == 8 ? row & 7 : kGroup == 4 ? row >> 1 & 3 : row >> 2 & 1;
  }

  /// Byte offset of a 16-byte chunk.
  __device__ static std::uint32_t offset(int row, int chunk) {
    return row * kPitch + (static_cast<std::uint32_t>(chunk) ^ twist(row)) * 16;
  }
  /// Byte offset of one element.
  __device__ static std::uint32_t element(int row, int column) { return offset(row, column / 8) + column % 8 * 2; }

  /// What a lane adds to the address of the first row, for ldmatrix: `row` of the tile, `half` of a slice of 16
  /// columns. Rows 8 further have the same twist, so kPitch * 8 steps are plain additions.
  __device__ static std::uint32_t lane_offset(int row, int half) {
    return row * kPitch + (static_cast<std::uint32_t>(half) ^ twist(row)) * 16;
  }
  /// From a lane's address to the same rows at slice `slice`: the low bits are an exclusive or, the rest an addition.
  __device__ static std::uint32_t at_slice(std::uint32_t lane_address, int slice) {
    return (lane_address ^ (slice % kSlicesPerGroup * 32)) + slice / kSlicesPerGroup * kGroup * 16;
  }
};

/// Row and half of the lane's address when ldmatrix.x4 fetches an A operand (16 x 16), or, transposed, a B operand that
/// lies as rows of k (16 k x 16 n).
struct LaneA {
  __device__ static int row(int lane) { return lane % 16; }
  __device__ static int half(int lane) { return lane / 16; }
};
/// The same for a B operand that lies as rows of n: (16 n x 16 k); registers 0, 1 are n 0..7, registers 2, 3 n 8..15.
struct LaneB {
  __device__ static int row(int lane) { return lane / 16 * 8 + lane % 8; }
  __device__ static int half(int lane) { return lane / 8 % 2; }
};

/// Fills kRows rows; columns from `dim` on become zero. When all rows are there, evenly spaced and at multiples of 16
/// bytes, `first_row` says where (the path of nearly every tile); else it is null and `row_of(row)` is a row's first
/// element, or null for a row of zeros. Copies are asynchronous, except those of unaligned rows (`vectors` false).
template <int kRows, int kDim, int kThreads, class T, class RowOf>
__device__ inline void load_tile(std::uint32_t tile, int dim, bool vectors, const T* first_row, std::int64_t stride,
                                 RowOf row_of) {
  using Tile = SharedTile<kDim>;
  // A pass: kThreads / kAcross rows, kAcross chunks of each. Rows a pass apart have the same twist.
  constexpr int kAcross = Tile::kChunks % 16 == 0 ? 16 : Tile::kChunks % 8 == 0 ? 8 : 4;
  constexpr int kRowsAPass = kThreads / kAcross;
  static_assert(kRowsAPass % 8 == 0, "rows a pass apart have the same twist");
  static_assert(kRows % kRowsAPass == 0 || kRows < kRowsAPass, "every thread copies the same chunks of a row, or none");
  constexpr int kPasses = kRows < kRowsAPass ? 1 : kRows / kRowsAPass;
  const int row = threadIdx.x / kAcross, chunk = threadIdx.x % kAcross;
  if (kRows < kRowsAPass && row >= kRows) return;
  const std::uint32_t to = tile + Tile::offset(row, chunk);
  const auto bytes = [&](int group) { return min(max((dim - (group * kAcross + chunk) * 8) * 2, 0), 16); };
  if (first_row) {
    const T* from = first_row + row * stride + chunk * 8;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass, from += kRowsAPass * stride)
#pragma unroll
      for (int group = 0; group < Tile::kChunks / kAcross; ++group)
        ptx::cp_async_16(to + pass * kRowsAPass * Tile::kPitch + group * kAcross * 16, from + group * kAcross * 8,
                         static_cast<std::uint32_t>(bytes(group)));
    return;
  }
#pragma unroll 1
  for (int pass = 0; pass < kPasses; ++pass) {
    const T* from = row_of(pass * kRowsAPass + row);
#pragma unroll 1
    for (int group = 0; group < Tile::kChunks / kAcross; ++group) {
      const int count = from ? bytes(group) / 2 : 0;
      const T* source = from + (group * kAcross + chunk) * 8;
      uint4* target =
          static_cast<uint4*>(__cvta_shared_to_generic(to + pass * kRowsAPass * Tile::kPitch + group * kAcross * 16));
      if (count == 0) {
        *target = uint4{0, 0, 0, 0};
      } else if (vectors) {
        ptx::cp_async_16(ptx::shared_address(target), source, static_cast<std::uint32_t>(count * 2));
      } else {
#pragma unroll 1
        for (int e = 0; e < 8; ++e) reinterpret_cast<T*>(target)[e] = e < count ? source[e] : T(0.0f);
      }
    }
  }
}

/// Two floats rounded to T, the first in the low half.
template <class T>
__device__ inline std::uint32_t pack(float low, float high);
template <>
__device__ inline std::uint32_t pack<__half>(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&both);
}
template <>
__device__ inline std::uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&both);
}

/// The exponent bits of T; all set in infinities and NaN.
template <class T>
inline constexpr std::uint32_t kExponentBits = 0;
template <>
inline constexpr std::uint32_t kExponentBits<__half> = 0x7c00;
template <>
inline constexpr std::uint32_t kExponentBits<__nv_bfloat16> = 0x7f80;

template <class T>
__device__ inline bool is_finite_bits(std::uint32_t bits) {
  return (bits & kExponentBits<T>) != kExponentBits<T>;
}

template <class T>
__device__ inline float bits_to_float(std::uint32_t bits) {
  const auto half = static_cast<unsigned short>(bits);
  if constexpr (kExponentBits<T> == 0x7c00)
    return __half2float(__ushort_as_half(half));
  else
    return __bfloat162float(__ushort_as_bfloat16(half));
}

}  // namespace flashkernel::cuda
