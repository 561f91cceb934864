// Emulates src/cuda/ptx/convert.cuh, but for what needs sm_89: device code is compiled as for a GPU before it here.
#pragma once

#include <cstdint>

#include "cuda_runtime.h"

namespace flashkernel::cuda::ptx {

inline float widen_low_bf16(std::uint32_t two) { return __uint_as_float(two << 16); }
inline float widen_high_bf16(std::uint32_t two) { return __uint_as_float(two & 0xffff0000u); }

}  // namespace flashkernel::cuda::ptx
