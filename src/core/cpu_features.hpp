// What this processor, its operating system and this process may use.
#pragma once

#include <cstdint>
#include <string>

namespace flashkernel {

/// Instruction sets a CPU kernel may need; bits.
enum CpuFeature : std::uint32_t {
  kCpuAny = 0,
  kCpuAvx2 = 1u << 0,    // with FMA and F16C
  kCpuAvx512 = 1u << 1,  // F, BW, DQ, VL, CD
  kCpuAvx512Bf16 = 1u << 2,
  kCpuAvx512Fp16 = 1u << 3,
  kCpuAmxBf16 = 1u << 4,  // with AMX-TILE and the kernel's permission to use it
  kCpuAmxFp16 = 1u << 5,
  kCpuAvx512Vnni = 1u << 6,
};

/// Bits of CpuFeature. Read once; asks the kernel for permission to use AMX on the first call.
std::uint32_t available_cpu_features() noexcept;

/// "avx2 avx512 amx_bf16"
std::string cpu_feature_names(std::uint32_t features);

}  // namespace flashkernel
