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

/// bits & mask | others in one instruction, which the compiler takes apart where both are immediates.
__device__ inline std::uint32_t and_or(std::uint32_t bits, std::uint32_t mask, std::uint32_t others) {
  std::uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(bits), "r"(mask), "r"(others));
  return d;
}

/// a b + c of each half, rounded once: of two fp16 numbers a word, and of two bf16 ones (sm_80).
__device__ inline std::uint32_t fma_f16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ inline std::uint32_t fma_bf16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

}  // namespace flashkernel::cuda::ptx
