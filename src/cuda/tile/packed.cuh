// Rows of 4-bit elements of a KV-cache on the device, eight neighbours at a time: what ops/kv_packed_params.hpp says
// one by one, with the same bits.
#pragma once

#include "cuda/tile/convert.cuh"
#include "ops/kv_packed_params.hpp"

namespace flashkernel::cuda {

/// A byte of two elements of int4.
struct Int4x2 {
  std::uint8_t bits;
};
template <>
inline constexpr DType dtype_of<Int4x2> = DType::kInt4x2;
template <class E>
inline constexpr bool kIsInt4 = dtype_of<E> == DType::kInt4x2;

__device__ inline __half half_of_bits(std::uint32_t bits) {
  return __ushort_as_half(static_cast<unsigned short>(bits));
}

/// Elements [column, column + 8) of a row of `dim` numbers; column is a multiple of 8, and what lies past the row is 0.
/// `words`: a row's elements begin at a multiple of 4 bytes.
__device__ inline void load_packed(const PackedRow& row, int column, int dim, bool words, float (&x)[8]) {
  if (!words || column + 8 > dim) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = column + i < dim ? row[column + i] : 0.0f;
    return;
  }
  const std::uint32_t eight = *reinterpret_cast<const std::uint32_t*>(row.elements + column / 2);
  const std::int64_t at =
      row.page * row.scale.stride_page + row.head * row.scale.stride_head + row.slot * row.scale.stride_slot;
  if (row.dtype == DType::kInt4x2) {
    const std::uint32_t both = *reinterpret_cast<const std::uint32_t*>(row.scale.data + at + column / kInt4Group);
    const float step = __half2float(half_of_bits(both & 0xffffu)), zero = __half2float(half_of_bits(both >> 16));
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = fmaf(static_cast<float>(eight >> (4 * i) & 15u), step, zero);
  } else {
    const auto* const scales = reinterpret_cast<const unsigned char*>(row.scale.data) + at;
    const float scale = packed_e4m3(scales[column / kNvfp4Group]);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = packed_e2m1(eight >> (4 * i) & 15u) * scale * row.scale.tensor;
  }
}

/// A group of int4 as it is written: scale and zero in one word, and what turns numbers into elements.
struct Int4Step {
  std::uint32_t word;
  float zero, inverse;
  bool nan;

  __device__ static float bounded(float x) { return fminf(fmaxf(x, -kInt4Largest), kInt4Largest); }
  /// From the least and the largest of the bounded numbers, and whether one is NaN.
  __device__ Int4Step(float least, float largest, bool has_nan) : nan(has_nan) {
    const __half zero_half = __float2half_rn(least);
    zero = __half2float(zero_half);
    const __half step_half = __float2half_rn(fmaxf(largest - zero, 0.0f) * kFifteenth);
    const float step = __half2float(step_half);
    inverse = step > 0.0f ? 1.0f / step : 0.0f;
    word = nan ? kInt4NanWord
               : __half_as_ushort(step_half) | static_cast<std::uint32_t>(__half_as_ushort(zero_half)) << 16;
  }
  __device__ std::uint32_t element(float x) const {
    if (nan) return 0;
    return static_cast<std::uint32_t>(min(max(__float2int_rn((bounded(x) - zero) * inverse), 0), 15));
  }
};

}  // namespace flashkernel::cuda
