// fp32 numbers as sums of two fp16 ones, for products of fp32 accuracy on the fp16 tensor cores: x = (high + low) *
// multiplier, error at most 2^-23 |x| + 2^-39 of the largest number of the group. The tensor core multiplies halves
// exactly, and high * high + high * low + low * high leaves out 2^-24 of a product. Ootomo & Yokota, 2022 (with a scale
// a group of rows in place of a scale of the low half, so that all three products share an accumulator).
//
// A group is some neighbouring rows of a tile; one warp loads it, finds the power of two that brings its largest number
// to 2^14 <= |x| < 2^15, and stores both halves. A group that holds an infinity has NaN for a multiplier.
#pragma once

#include "cuda/tile/reduce.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace flashkernel::cuda {

/// Two numbers below 2^16 in magnitude; the first one lies in the low bits.
__device__ inline void split_pair(float x, float y, std::uint32_t& high, std::uint32_t& low) {
  const __half2 rounded = __floats2half2_rn(x, y);
  const float2 back = __half22float2(rounded);
  high = *reinterpret_cast<const std::uint32_t*>(&rounded);
  low = pack<__half>(x - back.x, y - back.y);
}

/// The power of two that brings `largest` to 2^14 <= x < 2^15, and its inverse: NaN for an infinity. From 2^-100 down
/// it stays, since it must be finite.
struct PowerOfTwo {
  float to, back;
  __device__ explicit PowerOfTwo(float largest) {
    const unsigned e = max(__float_as_uint(largest) >> 23, 27u);  // biased by 127
    to = __uint_as_float((14 + 127 + 127 - e) << 23);
    back = e == 255 ? NAN : __uint_as_float((e - 14) << 23);
  }
};

template <int kRows, int kDim>
struct SplitGroup {
  static_assert(kRows * kDim % 128 == 0, "whole float4s a lane");
  static constexpr int kChunks = kRows * kDim / 128;  // float4s a lane; a load covers 512 neighbouring bytes
  using Tile = SharedTile<kDim>;
  float4 values[kChunks];

  __device__ static int row(int chunk) { return (static_cast<int>(threadIdx.x % 32) + 32 * chunk) / (kDim / 4); }
  __device__ static int column(int chunk) { return (static_cast<int>(threadIdx.x % 32) + 32 * chunk) % (kDim / 4) * 4; }

  /// Columns from `dim` on are zero. When all rows are there, evenly spaced, at multiples of 16 bytes and dim % 4 == 0,
  /// `first_row` says where; else it is null and `row_of(row)` is a row's first element, or null for a row of zeros.
  template <class RowOf>
  __device__ void load(const float* first_row, std::int64_t stride, int dim, bool vectors, RowOf row_of) {
    if (first_row) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i)
        values[i] = column(i) < dim ? *reinterpret_cast<const float4*>(first_row + row(i) * stride + column(i))
                                    : float4{0.0f, 0.0f, 0.0f, 0.0f};
      return;
    }
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const float* const from = row_of(row(i));
      const int count = from ? dim - column(i) : 0;
      float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
      if (count >= 4 && vectors) {
        x = *reinterpret_cast<const float4*>(from + column(i));
      } else {
        if (count > 0) x.x = from[column(i)];
        if (count > 1) x.y = from[column(i) + 1];
        if (count > 2) x.z = from[column(i) + 2];
        if (count > 3) x.w = from[column(i) + 3];
      }
      values[i] = x;
    }
  }

  /// Both halves to rows `first` and on of two tiles; returns the multiplier. The whole warp takes part.
  __device__ float store(std::uint32_t high, std::uint32_t low, int first) const {
    float largest = 0.0f;  // fmaxf passes NaN by: it stays in its own row
#pragma unroll
    for (int i = 0; i < kChunks; ++i)
      largest = fmaxf(
          largest, fmaxf(fmaxf(fabsf(values[i].x), fabsf(values[i].y)), fmaxf(fabsf(values[i].z), fabsf(values[i].w))));
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, lane));
    const PowerOfTwo power(largest);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const std::uint32_t at = Tile::element(first + row(i), column(i));
      uint2 halves[2];
      split_pair(values[i].x * power.to, values[i].y * power.to, halves[0].x, halves[1].x);
      split_pair(values[i].z * power.to, values[i].w * power.to, halves[0].y, halves[1].y);
      *reinterpret_cast<uint2*>(__cvta_shared_to_generic(high + at)) = halves[0];
      *reinterpret_cast<uint2*>(__cvta_shared_to_generic(low + at)) = halves[1];
    }
    return power.back;
  }
};

}  // namespace flashkernel::cuda
