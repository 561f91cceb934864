// Split-KV decode over int4 keys and values: kernel.cuh with a quarter of the bytes, and a scale and a zero for 32
// elements. Elements come into shared memory as they are; in registers, between ldmatrix and the matrix instruction,
// they become fp16 numbers, element * scale + zero. Queries are fp16 as well; bf16 queries are divided by a power of
// two.
//
// ldmatrix moves pairs of bytes. Of keys a lane so gets a word of eight neighbouring dims, dims 8 c to 8 c + 7 of 32.
// Two masks and a shift take dims e and e + 4 out of it together, one in each half of a register; queries are stored in
// that order. Of values, which are transposed, a lane gets four neighbouring dims of two keys: each mask takes one dim
// of both, and the dims of a slice's rows follow from that (`column`). 32 dims of a row are a group, and one chunk of
// ldmatrix.
#pragma once

#include "cuda/attention/decode/sm80/kernel_quantized.cuh"
#include "cuda/tile/packed.cuh"

namespace flashkernel::cuda::sm80 {

/// Elements of a word as pairs of fp16: pair e has element e and element e + 4.
__device__ inline void split_int4(std::uint32_t word, __half2 (&pairs)[4]) {
  const __half2 sixteenth = __float2half2_rn(0.0625f);
  const auto placed = [](std::uint32_t bits, std::uint32_t mask) { return as_half2((bits & mask) | 0x64006400u); };
#pragma unroll
  for (int e = 0; e < 4; e += 2) {
    // In the mantissa of 1024 an element is 1024 more, and one that stands four bits higher 1024 and 16 times as much.
    pairs[e] = __hadd2(placed(word, 0x000f000fu), __float2half2_rn(-1024.0f));
    pairs[e + 1] = __hfma2(placed(word, 0x00f000f0u), sixteenth, __float2half2_rn(-64.0f));
    word >>= 8;
  }
}

/// A key's scale and zero, twice each; or those of two keys.
struct Int4Scales {
  __half2 scale, zero;
  __device__ explicit Int4Scales(std::uint32_t both) : Int4Scales(both, both) {}
  __device__ Int4Scales(std::uint32_t low, std::uint32_t high) {
    scale = as_half2(__byte_perm(low, high, 0x5410));
    zero = as_half2(__byte_perm(low, high, 0x7632));
  }
  __device__ std::uint32_t operator()(__half2 elements) const { return as_bits(__hfma2(elements, scale, zero)); }
};

struct Int4Keys {
  using Element = Int4x2;
  using Operand = __half;
  static constexpr int kBits = 4;

  /// As NarrowKeys's, in the order of these keys.
  template <class, int kQkDim, int kRows>
  __device__ static void load_queries(const AttentionParams& p, const DecodePlan& plan, const Segment& segment,
                                      std::uint32_t tiles, int rows, float* factors) {
    using Tile = SharedTile<kQkDim>;
    load_scaled_queries<kQkDim, kRows>(
        p, plan, segment, rows, factors, [&](int head, int row, int slice, const float(&values)[16]) {
          // Dims 8 c + e and 8 c + e + 4 of 32 stand in words c of chunk e.
          const std::uint32_t tile = tiles + head * kRows * Tile::kPitch;
#pragma unroll
          for (int e = 0; e < 4; ++e)
            *static_cast<uint2*>(
                __cvta_shared_to_generic(tile + Tile::offset(row, slice / 2 * 4 + e) + slice % 2 * 8)) =
                uint2{pack<__half>(values[e], values[e + 4]), pack<__half>(values[8 + e], values[12 + e])};
        });
  }

  /// The words of key or value `key` for groups g to g + kCount.
  template <int kDim, int kCount>
  __device__ static void scales_of(std::uint32_t scales, int key, int g, std::uint32_t (&words)[kCount]) {
    const void* const at = __cvta_shared_to_generic(scales + (key * (kDim / 32) + g) * 4);
    if constexpr (kCount == 4) {
      const uint4 four = *static_cast<const uint4*>(at);
      words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    } else {
      static_assert(kCount == 2);
      const uint2 two = *static_cast<const uint2*>(at);
      words[0] = two.x, words[1] = two.y;
    }
  }

  template <int kQkDim, class F>
  __device__ static void each_key_slice(std::uint32_t lane_keys, std::uint32_t scales, F f) {
    constexpr int kAtOnce = kQkDim >= 128 ? 4 : 2;  // groups
    const int key = static_cast<int>(threadIdx.x % kWarp) / 4;
#pragma unroll
    for (int first = 0; first < kQkDim / 32; first += kAtOnce) {
      std::uint32_t words[2][kAtOnce];
      scales_of<kQkDim>(scales, key, first, words[0]);
      scales_of<kQkDim>(scales, key + 8, first, words[1]);
#pragma unroll
      for (int g = 0; g < kAtOnce; g += 2) {
        std::uint32_t bytes[4];  // keys 0 to 7 and 8 to 15 of group g, then of group g + 1
        ptx::ldmatrix_x4(bytes, KeyTile<Element, kQkDim>::at_slice(lane_keys, (first + g) / 2));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Int4Scales low(words[0][g + half]), high(words[1][g + half]);
          __half2 low_pairs[4], high_pairs[4];
          split_int4(bytes[2 * half], low_pairs);
          split_int4(bytes[2 * half + 1], high_pairs);
#pragma unroll
          for (int slice = 0; slice < 2; ++slice) {
            const std::uint32_t a[4] = {low(low_pairs[2 * slice]), high(high_pairs[2 * slice]),
                                        low(low_pairs[2 * slice + 1]), high(high_pairs[2 * slice + 1])};
            f(2 * (first + g + half) + slice, a);
          }
        }
      }
    }
  }

  template <int kVDim, class F>
  __device__ static void each_value_slice(std::uint32_t lane_values, std::uint32_t scales, F f) {
    constexpr int kAtOnce = kVDim >= 128 ? 4 : 2;
    const int key = static_cast<int>(threadIdx.x % 4) * 2;
#pragma unroll
    for (int first = 0; first < kVDim / 32; first += kAtOnce) {
      std::uint32_t words[4][kAtOnce];
#pragma unroll
      for (int k = 0; k < 4; ++k) scales_of<kVDim>(scales, key + k / 2 * 8 + k % 2, first, words[k]);
#pragma unroll
      for (int g = 0; g < kAtOnce; g += 2) {
        std::uint32_t bytes[4];  // keys 0 to 7 of groups g and g + 1, then keys 8 to 15
        ptx::ldmatrix_x4_trans(bytes, KeyTile<Element, kVDim>::at_slice(lane_values, (first + g) / 2));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Int4Scales low(words[0][g + half], words[1][g + half]), high(words[2][g + half], words[3][g + half]);
          __half2 low_pairs[4], high_pairs[4];
          split_int4(bytes[half], low_pairs);
          split_int4(bytes[2 + half], high_pairs);
#pragma unroll
          for (int slice = 0; slice < 2; ++slice) {
            const std::uint32_t a[4] = {low(low_pairs[2 * slice]), low(low_pairs[2 * slice + 1]),
                                        high(high_pairs[2 * slice]), high(high_pairs[2 * slice + 1])};
            f(2 * (first + g + half) + slice, a);
          }
        }
      }
    }
  }
  __device__ static int column(int c, int half, int lane) { return c / 2 * 32 + lane / 4 * 4 + c % 2 * 2 + half; }

  template <int kVDim>
  __device__ static float value_at(std::uint32_t values, std::uint32_t scales, int key, int column) {
    const std::uint32_t at = values + KeyTile<Element, kVDim>::offset(key, column / 32) + column % 32 / 2;
    const std::uint32_t byte = *static_cast<const std::uint8_t*>(__cvta_shared_to_generic(at));
    const std::uint32_t both =
        *static_cast<const std::uint32_t*>(__cvta_shared_to_generic(scales + (key * (kVDim / 32) + column / 32) * 4));
    return fmaf(static_cast<float>(byte >> (column % 2 * 4) & 15u), __half2float(half_of_bits(both & 0xffffu)),
                __half2float(half_of_bits(both >> 16)));
  }
  /// Elements are numbers; a scale or a zero may be none.
  __device__ static bool is_not_finite(std::uint32_t both) {
    return (both & 0x7c00u) == 0x7c00u || (both & 0x7c000000u) == 0x7c000000u;
  }
  template <int kVDim>
  __device__ static bool any_not_finite(std::uint32_t, std::uint32_t scales, int, int lane) {
    bool found = false;
    for (int at = lane; at < kGranule * kVDim / 32; at += kWarp)
      found = found || is_not_finite(*static_cast<const std::uint32_t*>(__cvta_shared_to_generic(scales + at * 4)));
    return found;
  }
  template <int kVDim>
  __device__ static void clean(std::uint32_t, std::uint32_t scales, int, int lane) {
    for (int at = lane; at < kGranule * kVDim / 32; at += kWarp) {
      auto* const both = static_cast<std::uint32_t*>(__cvta_shared_to_generic(scales + at * 4));
      if (is_not_finite(*both)) *both = 0;
    }
  }
};

/// An entry of the table, as attention_decode_quantized.
template <DType, int kQkDim, int kVDim>
void attention_decode_int4(const AttentionParams& p, const Plan& planned, void* workspace, Stream stream) {
  if (p.batch * p.heads_q * p.seq_q == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  const DecodePlan& plan = planned.as<DecodePlan>();
  const ZeroedMemory counters(p.device.index, Departure::bytes(plan.blocks), stream);
  launch_attention_decode<EitherHalf, Int4Keys, kQkDim, kVDim>(p, plan, static_cast<float*>(workspace),
                                                               static_cast<int*>(counters.data()), native(stream));
}

}  // namespace flashkernel::cuda::sm80
