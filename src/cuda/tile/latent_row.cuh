// Rows of an MLA cache on the device: one column at a time, and eight 8-bit elements at a time on their way to 16 bits.
// ops/latent_format.hpp says how they lie. Bit for bit what the CPU reads.
#pragma once

#include "cuda/tile/quantized.cuh"
#include "cuda/tile/shared_tile.cuh"
#include "ops/attention_mla_params.hpp"

namespace flashkernel::cuda {

/// A row whose numbers are of T, or are rounded to T.
template <class T>
class LatentRow {
 public:
  /// The row at `offset` (in elements; of 8-bit rows, in bytes) of the cache.
  __device__ LatentRow(const MlaDecodeParams& p, std::int64_t offset)
      : format_(p.format),
        data_(static_cast<const std::uint8_t*>(p.attention.k) +
              offset * (p.format.is_narrow() ? 1 : static_cast<std::int64_t>(sizeof(T)))) {}

  __device__ float operator[](int column) const {
    if (!format_.is_narrow()) return to_float(reinterpret_cast<const T*>(data_)[column]);
    const float number = column < format_.narrow_columns()
                             ? to_float(Float8{data_[column]}) * format_.scale_of(data_, column)
                             : __uint_as_float(static_cast<std::uint32_t>(format_.bits_of(data_, column)) << 16);
    return to_float(from_float<T>(number));
  }

 private:
  const LatentFormat& format_;
  const std::uint8_t* data_;
};

/// Four elements as fp32 numbers.
__device__ inline void widen_e4m3x4(std::uint32_t four, float (&x)[4]) {
#if __CUDA_ARCH__ >= 890
  const std::uint32_t halves[2] = {ptx::e4m3x2_to_f16x2(four & 0xffffu), ptx::e4m3x2_to_f16x2(four >> 16)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 two = __half22float2(reinterpret_cast<const __half2&>(halves[i]));
    x[2 * i] = two.x, x[2 * i + 1] = two.y;
  }
#else
  // In fp16's places an element is a number 2^8 too small (biases 7 and 15), subnormals included; NaN apart.
  const std::uint32_t spread[2] = {__byte_perm(four, 0, 0x1404), __byte_perm(four, 0, 0x3424)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t halves = (spread[i] & 0x80008000u) | (spread[i] & 0x7f007f00u) >> 1;
    const float2 two = __half22float2(reinterpret_cast<const __half2&>(halves));
    x[2 * i] = two.x * 256.0f, x[2 * i + 1] = two.y * 256.0f;
  }
  if ((((four & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u) != 0)
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = to_float(Float8{static_cast<std::uint8_t>(four >> 8 * i)});
#endif
}

/// Eight elements times `scale` in fp32, rounded to T: 16 bytes.
template <class T>
__device__ inline uint4 widen_e4m3x8(uint2 eight, float scale) {
  float low[4], high[4];
  widen_e4m3x4(eight.x, low);
  widen_e4m3x4(eight.y, high);
  return make_uint4(pack<T>(low[0] * scale, low[1] * scale), pack<T>(low[2] * scale, low[3] * scale),
                    pack<T>(high[0] * scale, high[1] * scale), pack<T>(high[2] * scale, high[3] * scale));
}

/// Eight bfloat16 numbers as those of T.
template <class T>
__device__ inline uint4 round_bf16x8(uint4 eight) {
  if constexpr (dtype_of<T> == DType::kBFloat16) return eight;
  const std::uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
  std::uint32_t to[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = pack<T>(ptx::widen_low_bf16(words[i]), ptx::widen_high_bf16(words[i]));
  return make_uint4(to[0], to[1], to[2], to[3]);
}

}  // namespace flashkernel::cuda
