// TDPFP16PS (AMX-FP16): accumulator tile kC += tile kA times tile kB, fp16 products, fp32 sums. Used by amx/tiles.hpp
// and amx/gemm_amx.hpp. The one instruction on the CPU side that stands as bytes, because compilers of 2022 do not know
// it: it is TDPBF16PS with the prefix F2 for F3 (VEX.128.F2.0F38.W0 5C 11:c:a, vvvv = not b; Intel ISA extensions
// reference, AMX-FP16).
#pragma once

#include <immintrin.h>

namespace flashkernel::cpu {
namespace {

template <int kC, int kA, int kB>
inline void tdpfp16ps() {
#if defined(__GNUC__)
  __asm__ volatile(".byte 0xc4, 0xe2, %c0, 0x5c, %c1" ::"i"(((~kB & 15) << 3) | 3), "i"(0xC0 | kC << 3 | kA));
#else
  _tile_dpfp16ps(kC, kA, kB);
#endif
}

}  // namespace
}  // namespace flashkernel::cpu
