// Conversions of 8-bit floating-point numbers: one function, one instruction. PTX ISA 9.7.9.21 (cvt).
#pragma once

#include <cstdint>

namespace flashkernel::cuda::ptx {

#if __CUDA_ARCH__ >= 890
/// Two e4m3 numbers (the low 16 bits) as two fp16 ones, the lower byte in the lower half; exact, NaN stays NaN. sm_89.
__device__ inline std::uint32_t e4m3x2_to_f16x2(std::uint32_t two) {
  std::uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<std::uint16_t>(two)));
  return halves;
}
#endif

}  // namespace flashkernel::cuda::ptx
