// Element types on the device: float, __half and __nv_bfloat16 to and from fp32, one rounding to nearest even.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "flashkernel/dtype.hpp"
#include "ops/params_common.hpp"

namespace flashkernel::cuda {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
inline constexpr DType dtype_of = DType::kFloat32;
template <>
inline constexpr DType dtype_of<__half> = DType::kFloat16;
template <>
inline constexpr DType dtype_of<__nv_bfloat16> = DType::kBFloat16;

template <DType kDtype>
struct ElementOf;
template <>
struct ElementOf<DType::kFloat32> {
  using type = float;
};
template <>
struct ElementOf<DType::kFloat16> {
  using type = __half;
};
template <>
struct ElementOf<DType::kBFloat16> {
  using type = __nv_bfloat16;
};
/// The element type that a dtype names: `Element<dtype_of<T>>` is T.
template <DType kDtype>
using Element = typename ElementOf<kDtype>::type;

template <class T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

__device__ inline void round_two(__half& a, __half& b, float x, float y) {
  const __half2 two = __floats2half2_rn(x, y);
  a = two.x;
  b = two.y;
}
__device__ inline void round_two(__nv_bfloat16& a, __nv_bfloat16& b, float x, float y) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(x, y);
  a = two.x;
  b = two.y;
}

/// Element i of a vector in fp32, fp16 or bf16; the branch is the same for the whole grid.
__device__ inline float load_typed(const void* data, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::kFloat16: return __half2float(static_cast<const __half*>(data)[i]);
    case DType::kBFloat16: return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
    default: return static_cast<const float*>(data)[i];
  }
}

__device__ inline void store_typed(void* data, DType dtype, std::int64_t i, float value) {
  switch (dtype) {
    case DType::kFloat16: static_cast<__half*>(data)[i] = __float2half_rn(value); return;
    case DType::kBFloat16: static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(value); return;
    default: static_cast<float*>(data)[i] = value; return;
  }
}

}  // namespace flashkernel::cuda
