// Conversions of floating-point numbers: one function, one instruction. PTX ISA 9.7.9.21 (cvt), 9.7.9.7 (prmt).
#pragma once

#include <cstdint>

namespace flashkernel::cuda::ptx {

/// The bf16 number in a word's lower half.
__device__ inline float widen_low_bf16(std::uint32_t two) {
  std::uint32_t bits;
  asm("prmt.b32 %0, %1, 0, 0x1044;" : "=r"(bits) : "r"(two));  // bytes 1 and 0 of `two` over zeros
  return __uint_as_float(bits);
}
/// And in its upper half.
__device__ inline float widen_high_bf16(std::uint32_t two) {
  std::uint32_t bits;
  asm("prmt.b32 %0, %1, 0, 0x3244;" : "=r"(bits) : "r"(two));
  return __uint_as_float(bits);
}

#if __CUDA_ARCH__ >= 890
/// Two e4m3 numbers (the low 16 bits) as two fp16 ones, the lower byte in the lower half; exact, NaN stays NaN. sm_89.
__device__ inline std::uint32_t e4m3x2_to_f16x2(std::uint32_t two) {
  std::uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<std::uint16_t>(two)));
  return halves;
}

/// Two numbers as e4m3 in the low 16 bits, `low` in the lower byte: nearest even, beyond 448 (infinities too) 448, NaN
/// 0x7f whatever its sign. sm_89.
__device__ inline std::uint32_t f32x2_to_e4m3x2(float low, float high) {
  std::uint16_t two;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(high), "f"(low));
  return two;
}
#endif

}  // namespace flashkernel::cuda::ptx
