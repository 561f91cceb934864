// Stores that must be one instruction.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flashkernel::cuda::ptx {

/// 16 bytes, if `there`: the compiler may take a plain store of a uint4 apart into four.
__device__ inline void store_16(void* global, const uint4& v, bool there) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.u32 p, %5, 0;\n"
      "@p st.global.v4.u32 [%0], {%1, %2, %3, %4};\n}" ::"l"(global),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(static_cast<std::uint32_t>(there))
      : "memory");
}

}  // namespace flashkernel::cuda::ptx
