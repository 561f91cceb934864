// Turns four 8-bit elements of a KV-cache, which one register of ldmatrix holds, into fp16 for the tensor cores. That
// is exact for both kinds: e4m3 has 3 bits of mantissa, int8 has 7 bits and a sign. A pair of e4m3 takes one
// instruction from sm_89 on and 5 before; four int8 take 5, which place a byte in the
// mantissa of 1024 and subtract 1024 again. Used by kernel_quantized.cuh.
#pragma once

#include <cuda_fp16.h>

#include "cuda/ptx/convert.cuh"
#include "cuda/tile/quantized.cuh"

namespace flashkernel::cuda {

__device__ inline __half2 as_half2(std::uint32_t bits) { return *reinterpret_cast<const __half2*>(&bits); }
__device__ inline std::uint32_t as_bits(__half2 halves) { return *reinterpret_cast<const std::uint32_t*>(&halves); }

/// e4m3 numbers in the upper bytes of both halves; the lower bytes are ignored.
__device__ inline std::uint32_t widen_upper_bytes(std::uint32_t w) {
  // Exponent and mantissa in fp16's places are a number 2^8 too small (biases 7 and 15), subnormals included. All ones,
  // the NaN, would be 480 then: it gets all bits.
  const std::uint32_t placed = (w >> 1 & 0x3f803f80u) | (w & 0x80008000u);
  const std::uint32_t low = (placed & 0x00003f80u) == 0x00003f80u ? 0x00007fffu : 0u;
  const std::uint32_t high = (placed & 0x3f800000u) == 0x3f800000u ? 0x7fff0000u : 0u;
  return as_bits(__hmul2(as_half2(placed | low | high), __float2half2_rn(256.0f)));
}

/// Bytes 0 and 1 to `low`, bytes 2 and 3 to `high`.
template <class E>
__device__ inline void widen_neighbours(std::uint32_t w, std::uint32_t& low, std::uint32_t& high) {
  if constexpr (dtype_of<E> == DType::kInt8) {
    const std::uint32_t positive = w ^ 0x80808080u;  // 0..255: 128 more than the number
    // A byte under 0x64 is fp16's 1024 plus the byte.
    low = as_bits(__hadd2(as_half2(__byte_perm(positive, 0x64646464u, 0x4140)), __float2half2_rn(-1152.0f)));
    high = as_bits(__hadd2(as_half2(__byte_perm(positive, 0x64646464u, 0x4342)), __float2half2_rn(-1152.0f)));
  } else {
#if __CUDA_ARCH__ >= 890
    low = ptx::e4m3x2_to_f16x2(w);
    high = ptx::e4m3x2_to_f16x2(w >> 16);
#else
    low = widen_upper_bytes(__byte_perm(w, 0, 0x1404));
    high = widen_upper_bytes(__byte_perm(w, 0, 0x3424));
#endif
  }
}

/// Bytes 0 and 2 to `even`, bytes 1 and 3 to `odd`.
template <class E>
__device__ inline void widen_alternate(std::uint32_t w, std::uint32_t& even, std::uint32_t& odd) {
  if constexpr (dtype_of<E> == DType::kInt8) {
    const std::uint32_t positive = w ^ 0x80808080u;
    even = as_bits(__hadd2(as_half2(__byte_perm(positive, 0x64646464u, 0x4240)), __float2half2_rn(-1152.0f)));
    odd = as_bits(__hadd2(as_half2(__byte_perm(positive, 0x64646464u, 0x4341)), __float2half2_rn(-1152.0f)));
  } else {
#if __CUDA_ARCH__ >= 890
    const std::uint32_t sorted = __byte_perm(w, 0, 0x3120);
    even = ptx::e4m3x2_to_f16x2(sorted);
    odd = ptx::e4m3x2_to_f16x2(sorted >> 16);
#else
    even = widen_upper_bytes(w << 8);
    odd = widen_upper_bytes(w);
#endif
  }
}

/// Bytes of four e4m3 elements that are NaN, as 0x80 each.
__device__ inline std::uint32_t nan_bytes(std::uint32_t w) { return ((w & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u; }

}  // namespace flashkernel::cuda
