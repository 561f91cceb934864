// Finds and removes NaN and infinity in tiles of 16-bit elements in shared memory. A masked pair has the weight 0, but
// the tensor core computes 0 * NaN = NaN. Therefore kernels search the tiles that have masked pairs.
#pragma once

#include "cuda/tile/shared_tile.cuh"

namespace flashkernel::cuda {

/// Zeroes what is not finite in `bytes` of shared memory; all `threads` take part. Returns whether this one found any.
template <class T>
__device__ inline bool clean(std::uint32_t address, int bytes, int thread, int threads) {
  bool found = false;
  for (int at = thread * 16; at < bytes; at += threads * 16) {
    uint4* vector = reinterpret_cast<uint4*>(__cvta_shared_to_generic(address + at));
    uint4 bits = *vector;
    std::uint32_t* words = reinterpret_cast<std::uint32_t*>(&bits);
    bool dirty = false;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if (!is_finite_bits<T>(words[w])) words[w] &= 0xffff0000u, dirty = true;
      if (!is_finite_bits<T>(words[w] >> 16)) words[w] &= 0x0000ffffu, dirty = true;
    }
    if (dirty) *vector = bits;
    found |= dirty;
  }
  return found;
}

/// Whether this thread's part of `bytes` of shared memory holds a value that is not finite.
template <class T>
__device__ inline bool any_not_finite(std::uint32_t address, int bytes, int thread, int threads) {
  bool found = false;
  for (int at = thread * 16; at < bytes; at += threads * 16) {
    const uint4 bits = *reinterpret_cast<const uint4*>(__cvta_shared_to_generic(address + at));
    for (const std::uint32_t word : {bits.x, bits.y, bits.z, bits.w})
      found |= !is_finite_bits<T>(word) || !is_finite_bits<T>(word >> 16);
  }
  return found;
}

/// Bit j of the result says whether the lane's row sees key j: neither a mask nor a bias of -inf hides it. `score` is a
/// tile of scores as an m16n8 accumulator, and `half` chooses the upper or lower row of the lane. All lanes of a warp
/// call this together.
template <int kTiles>
__device__ inline std::uint64_t visible_keys(const float (&score)[kTiles][4], int half) {
  static_assert(kTiles <= 8, "a bit a key");
  const int lane = threadIdx.x % 32;
  std::uint64_t bits = 0;
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      bits |= static_cast<std::uint64_t>(score[n][2 * half + e] != -INFINITY) << (8 * n + 2 * (lane % 4) + e);
  bits |= __shfl_xor_sync(0xffffffffu, bits, 1);
  bits |= __shfl_xor_sync(0xffffffffu, bits, 2);
  return bits;
}

}  // namespace flashkernel::cuda
