// Elements of an 8-bit KV-cache on the device: to fp32 and back. element * scale is the number; see kv_ops.hpp for what
// rounding does. Bit for bit the same as core/float_types.hpp.
#pragma once

#include "cuda/ptx/convert.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda {

struct Float8 {
  std::uint8_t bits;
};  // float8_e4m3fn
struct Int8 {
  std::int8_t value;
};

template <class T>
inline constexpr bool kQuantized = false;
template <>
inline constexpr bool kQuantized<Float8> = true;
template <>
inline constexpr bool kQuantized<Int8> = true;
template <>
inline constexpr DType dtype_of<Float8> = DType::kFloat8E4M3;
template <>
inline constexpr DType dtype_of<Int8> = DType::kInt8;

__device__ inline float to_float(Int8 x) { return static_cast<float>(x.value); }
__device__ inline float to_float(Float8 x) {
  const std::uint32_t sign = (x.bits & 0x80u) << 24, rest = x.bits & 0x7fu;
  // Exponent and mantissa in fp32's places are a number 2^120 too small (biases 7 and 127), subnormals included.
  return __uint_as_float(rest == 0x7f ? sign | 0x7fffffffu
                                      : __float_as_uint(__uint_as_float(sign | rest << 20) * 0x1p120f));
}

/// Nearest even; infinities become 127 and -127, NaN 0.
template <>
__device__ inline Int8 from_float<Int8>(float x) {
  return {static_cast<std::int8_t>(__float2int_rn(x != x ? 0.0f : fminf(fmaxf(x, -127.0f), 127.0f)))};
}
/// Nearest even; infinities become 448 and -448, NaN stays.
template <>
__device__ inline Float8 from_float<Float8>(float x) {
  const std::uint32_t bits = __float_as_uint(x), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  std::uint32_t rest;
  if (magnitude > 0x7f800000u) {
    rest = 0x7f;
  } else if (magnitude >= 0x43e80000u) {  // 464 is half way to 480
    rest = 0x7e;
  } else if (magnitude < 0x3c800000u) {  // below 2^-6: subnormal; adding 2^14 aligns the last place to 2^-9 and rounds
    rest = __float_as_uint(__uint_as_float(magnitude) + 16384.0f) - 0x46800000u;
  } else {
    rest = (magnitude + 0x7ffffu + (magnitude >> 20 & 1u) - 0x3c000000u) >> 20;
  }
  return {static_cast<std::uint8_t>(sign | rest)};
}

/// Eight elements, in two words; the same bits as eight times from_float.
template <class E>
__device__ inline uint2 pack_eight(const float (&x)[8]) {
  std::uint32_t words[2];
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    const float* const four = x + 4 * w;
    if constexpr (dtype_of<E> == DType::kInt8) {
      words[w] = 0;
#pragma unroll
      for (int i = 3; i >= 0; --i) {
        const float bounded = four[i] != four[i] ? 0.0f : fminf(fmaxf(four[i], -127.0f), 127.0f);
        // 2^23 + 2^22 more leaves the integer, rounded to nearest even, in the low bits.
        words[w] = words[w] << 8 | (__float_as_uint(bounded + 12582912.0f) & 0xffu);
      }
    } else {
      const auto one_by_one = [&] {
        words[w] = 0;
#pragma unroll
        for (int i = 3; i >= 0; --i) words[w] = words[w] << 8 | from_float<Float8>(four[i]).bits;
      };
#if __CUDA_ARCH__ >= 890
      words[w] = ptx::f32x2_to_e4m3x2(four[0], four[1]) | ptx::f32x2_to_e4m3x2(four[2], four[3]) << 16;
      // The instruction drops a NaN's sign: a byte of all ones but for the sign carries into it.
      if ((((words[w] & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u) != 0) one_by_one();
#else
      one_by_one();
#endif
    }
  }
  return make_uint2(words[0], words[1]);
}

/// f(K{}) with K the type of a cache's elements: float, __half, __nv_bfloat16, Float8 or Int8.
template <class F>
void visit_cache(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16: f(__half{}); return;
    case DType::kBFloat16: f(__nv_bfloat16{}); return;
    case DType::kFloat8E4M3: f(Float8{}); return;
    case DType::kInt8: f(Int8{}); return;
    default: f(float{}); return;
  }
}

/// Element i of 8-bit ones; the branch is the same for the whole grid.
__device__ inline float load_narrow(const void* data, DType dtype, std::int64_t i) {
  return dtype == DType::kInt8 ? to_float(static_cast<const Int8*>(data)[i])
                               : to_float(static_cast<const Float8*>(data)[i]);
}

}  // namespace flashkernel::cuda
