// Approximate functions of the special-function unit: one function, one instruction. PTX ISA 9.7.3.
#pragma once

#include <cstdint>

namespace flashkernel::cuda::ptx {

/// 2^x, relative error 2^-22; -inf gives 0.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 1 / x, relative error 2^-23.
__device__ inline float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// The square root of x >= 0, relative error 2^-23.
__device__ inline float sqrt_approx(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// The largest of three, of each half (one instruction from 9.0 on).
__device__ inline std::uint32_t max3_u16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  return __vimax3_u16x2(a, b, c);
}

}  // namespace flashkernel::cuda::ptx
