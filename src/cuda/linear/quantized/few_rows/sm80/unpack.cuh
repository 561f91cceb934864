// Elements of 4 and 8 bits as 16-bit numbers, two a word: exact, by putting the bits into the mantissa of a number
// whose last place is 1 and taking that number off.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/ptx/math.cuh"

namespace flashkernel::cuda::sm80 {

/// The word of two ones.
template <class T>
inline constexpr std::uint32_t kOnes = 0x3c003c00;
template <>
inline constexpr std::uint32_t kOnes<__nv_bfloat16> = 0x3f803f80;

/// Four bytes of two numbers of 4 bits each, less 8: low[0] has those of bytes 0 and 1's lower halves, low[1] of bytes
/// 2 and 3, and high of the upper halves.
template <class T>
__device__ inline void unpack_nibbles(std::uint32_t bytes, std::uint32_t (&low)[2], std::uint32_t (&high)[2]);

template <>
__device__ inline void unpack_nibbles<__half>(std::uint32_t bytes, std::uint32_t (&low)[2], std::uint32_t (&high)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t two = __byte_perm(bytes, 0, i == 0 ? 0x4140 : 0x4342);
    // 1024 + q, and 1024 + 16 q.
    low[i] = ptx::fma_f16x2(ptx::and_or(two, 0x000f000fu, 0x64006400u), kOnes<__half>, 0xe408e408u);  // - 1032
    high[i] = ptx::fma_f16x2(ptx::and_or(two, 0x00f000f0u, 0x64006400u), 0x2c002c00u, 0xd480d480u);   // / 16 - 72
  }
}

template <>
__device__ inline void unpack_nibbles<__nv_bfloat16>(std::uint32_t bytes, std::uint32_t (&low)[2],
                                                     std::uint32_t (&high)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t two = __byte_perm(bytes, 0, i == 0 ? 0x4140 : 0x4342);
    // 128 + q
    low[i] = ptx::fma_bf16x2(ptx::and_or(two, 0x000f000fu, 0x43004300u), kOnes<__nv_bfloat16>, 0xc308c308u);  // - 136
    high[i] = ptx::fma_bf16x2(ptx::and_or(two >> 4, 0x000f000fu, 0x43004300u), kOnes<__nv_bfloat16>, 0xc308c308u);
  }
}

/// Four signed bytes, in their order.
template <class T>
__device__ inline void unpack_bytes(std::uint32_t bytes, std::uint32_t (&numbers)[2]);

template <>
__device__ inline void unpack_bytes<__half>(std::uint32_t bytes, std::uint32_t (&numbers)[2]) {
  const std::uint32_t positive = bytes ^ 0x80808080u;  // q + 128
#pragma unroll
  for (int i = 0; i < 2; ++i)
    numbers[i] = ptx::fma_f16x2(__byte_perm(positive, 0x64646464u, i == 0 ? 0x4140 : 0x4342), kOnes<__half>,
                                0xe480e480u);  // 1024 + 128 + q - 1152
}

template <>
__device__ inline void unpack_bytes<__nv_bfloat16>(std::uint32_t bytes, std::uint32_t (&numbers)[2]) {
  // bf16 has no room for 256 values above a power of two; fp32 has, and its upper half is the number.
  const std::uint32_t positive = bytes ^ 0x80808080u;
  std::uint32_t wide[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    wide[i] = __float_as_uint(__uint_as_float(__byte_perm(positive, 0x4b000000u, 0x7440 + i)) - 8388736.0f);
#pragma unroll
  for (int i = 0; i < 2; ++i) numbers[i] = __byte_perm(wide[2 * i], wide[2 * i + 1], 0x7632);
}

}  // namespace flashkernel::cuda::sm80
