// Split-KV decode over 8-bit keys and values: kernel.cuh with half the bytes. Elements come into shared memory as they
// are, with their scales. They become fp16 in registers, between ldmatrix and the matrix instruction. Queries are fp16
// as well; bf16 queries are divided by a power of two of their row.
//
// ldmatrix moves pairs of bytes, so a lane gets four neighbouring dims of a key. The matrix instruction wants two dims
// and the two that lie 8 further; therefore queries are stored in the order that the keys have. From values, which are
// transposed, a lane gets two neighbouring dims of two keys: even dims become rows 0 to 7 of the output, odd dims rows
// 8 to 15. instances/ has the files that instantiate it.
#pragma once

#include "cuda/attention/decode/sm80/kernel.cuh"
#include "cuda/attention/decode/sm80/widen.cuh"

namespace flashkernel::cuda::sm80 {

/// The queries of a segment's heads, divided by a power of two of their row where that takes them into fp16;
/// factors[row] times them are the queries. A warp takes a row and a lane a slice of it: `store(head, row, slice, 16
/// dims)`.
template <int kQkDim, int kRows, class Store>
__device__ inline void load_scaled_queries(const AttentionParams& p, const DecodePlan& plan, const Segment& segment,
                                           int rows, float* factors, Store store) {
  static_assert(kQkDim <= 16 * kWarp, "each lane takes at most one slice of 16 dims of a query");
  const int group = static_cast<int>(p.heads_q / p.heads_kv), dim = static_cast<int>(p.head_dim);
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  for (int at = static_cast<int>(threadIdx.x / kWarp); at < plan.heads * kRows; at += plan.warps) {
    const int head = at / kRows, row = at % kRows;
    float values[16] = {}, largest = 0.0f;
    if (row < rows && lane < kQkDim / 16) {
      const std::int64_t h = static_cast<std::int64_t>(segment.head_group * plan.heads + head) * group + row % group;
      const std::int64_t at_q = p.q_offset(segment.b, h, query_of(row, group)) + lane * 16;
      const auto* const from = static_cast<const unsigned short*>(p.q) + at_q;  // elements of 16 bits
      std::uint32_t pairs[8] = {};
      if (plan.vectors_q && lane * 16 + 16 <= dim) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          *reinterpret_cast<uint4*>(pairs + 4 * half) = reinterpret_cast<const uint4*>(from)[half];
      } else {
#pragma unroll
        for (int e = 0; e < 16; ++e)
          if (lane * 16 + e < dim) pairs[e / 2] |= static_cast<std::uint32_t>(from[e]) << (e % 2 * 16);
      }
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        if (p.dtype_q == DType::kFloat16) {
          const float2 two = __half22float2(as_half2(pairs[c]));
          values[2 * c] = two.x, values[2 * c + 1] = two.y;
        } else {
          values[2 * c] = __uint_as_float(pairs[c] << 16), values[2 * c + 1] = __uint_as_float(pairs[c] & 0xffff0000u);
        }
      }
    }
    float factor = 1.0f, inverse = 1.0f;
    if (p.dtype_q != DType::kFloat16) {  // fp16 holds less: the largest becomes a number from 1 to 2
#pragma unroll
      for (int e = 0; e < 16; ++e) largest = fmaxf(largest, fabsf(values[e]));
      const std::uint32_t field = __float_as_uint(warp_reduce(largest, Largest{})) >> 23;
      if (field > 0 && field < 0xfe) {
        factor = __uint_as_float(field << 23);
        inverse = __uint_as_float((254 - field) << 23);
      }
    }
    if (lane < kQkDim / 16) {
#pragma unroll
      for (int e = 0; e < 16; ++e) values[e] *= inverse;
      store(head, row, lane, values);
    }
    if (lane == 0) factors[at] = factor;
  }
}

template <class E>
struct NarrowKeys {
  using Element = E;
  using Operand = __half;
  static constexpr int kBits = 8;

  /// Queries as fp16, in each slice of 16 dims in the order of the keys' operand; factors[row] times them are the
  /// queries.
  template <class, int kQkDim, int kRows>
  __device__ static void load_queries(const AttentionParams& p, const DecodePlan& plan, const Segment& segment,
                                      std::uint32_t tiles, int rows, float* factors) {
    using Tile = SharedTile<kQkDim>;
    load_scaled_queries<kQkDim, kRows>(
        p, plan, segment, rows, factors, [&](int head, int row, int slice, const float(&values)[16]) {
          // Dim 4 c + e stands at 2 c + e for e < 2, at 8 + 2 c + e - 2 for the others.
          std::uint32_t pairs[8];
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            pairs[c] = pack<__half>(values[4 * c], values[4 * c + 1]);
            pairs[4 + c] = pack<__half>(values[4 * c + 2], values[4 * c + 3]);
          }
          const std::uint32_t tile = tiles + head * kRows * Tile::kPitch;
#pragma unroll
          for (int half = 0; half < 2; ++half)
            *static_cast<uint4*>(__cvta_shared_to_generic(tile + Tile::offset(row, 2 * slice + half))) =
                uint4{pairs[4 * half], pairs[4 * half + 1], pairs[4 * half + 2], pairs[4 * half + 3]};
        });
  }

  template <int kQkDim, class F>
  __device__ static void each_key_slice(std::uint32_t lane_keys, std::uint32_t, F f) {
#pragma unroll
    for (int d = 0; d < kQkDim / 16; d += 2) {
      std::uint32_t bytes[4];  // keys 0 to 7 and 8 to 15 of slice d, then of slice d + 1
      ptx::ldmatrix_x4(bytes, KeyTile<E, kQkDim>::at_slice(lane_keys, d / 2));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t a[4];
        widen_neighbours<E>(bytes[2 * half], a[0], a[2]);
        widen_neighbours<E>(bytes[2 * half + 1], a[1], a[3]);
        f(d + half, a);
      }
    }
  }
  template <int kVDim, class F>
  __device__ static void each_value_slice(std::uint32_t lane_values, std::uint32_t, F f) {
#pragma unroll
    for (int c = 0; c < kVDim / 16; c += 2) {
      std::uint32_t bytes[4];  // keys 0 to 7 of slices c and c + 1, then keys 8 to 15
      ptx::ldmatrix_x4_trans(bytes, KeyTile<E, kVDim>::at_slice(lane_values, c / 2));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t a[4];
        widen_alternate<E>(bytes[half], a[0], a[1]);
        widen_alternate<E>(bytes[2 + half], a[2], a[3]);
        f(c + half, a);
      }
    }
  }
  __device__ static int column(int c, int half, int lane) { return 16 * c + 2 * (lane / 4) + half; }

  template <int kVDim>
  __device__ static float value_at(std::uint32_t values, std::uint32_t, int key, int column) {
    const std::uint32_t address = values + KeyTile<E, kVDim>::offset(key, column / 16) + column % 16;
    return to_float(*static_cast<const E*>(__cvta_shared_to_generic(address)));
  }
  // Only e4m3 has a NaN. (A scale that is one makes its probabilities NaN, where they are seen.)
  template <int kVDim>
  __device__ static bool any_not_finite(std::uint32_t values, std::uint32_t, int bytes, int lane) {
    std::uint32_t found = 0;
    if constexpr (dtype_of<E> == DType::kFloat8E4M3)
      for (int at = lane * 4; at < bytes; at += kWarp * 4)
        found |= nan_bytes(*static_cast<const std::uint32_t*>(__cvta_shared_to_generic(values + at)));
    return found != 0;
  }
  template <int kVDim>
  __device__ static void clean(std::uint32_t values, std::uint32_t, int bytes, int lane) {
    for (int at = lane * 4; at < bytes; at += kWarp * 4) {
      auto* const word = static_cast<std::uint32_t*>(__cvta_shared_to_generic(values + at));
      *word &= ~((nan_bytes(*word) >> 7) * 0xff);
    }
  }
};

/// An entry of the table. Queries in fp16 and bf16 share a kernel: it asks which they are where it loads them and where
/// it stores rows, not in its loop.
template <DType, int kQkDim, int kVDim>
void attention_decode_quantized(const AttentionParams& p, const Plan& planned, void* workspace, Stream stream) {
  if (p.batch * p.heads_q * p.seq_q == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  const DecodePlan& plan = planned.as<DecodePlan>();
  const ZeroedMemory counters(p.device.index, Departure::bytes(plan.blocks), stream);
  auto* const partials = static_cast<float*>(workspace);
  auto* const zeros = static_cast<int*>(counters.data());
  if (p.dtype == DType::kInt8)
    launch_attention_decode<EitherHalf, NarrowKeys<Int8>, kQkDim, kVDim>(p, plan, partials, zeros, native(stream));
  else
    launch_attention_decode<EitherHalf, NarrowKeys<Float8>, kQkDim, kVDim>(p, plan, partials, zeros, native(stream));
}

}  // namespace flashkernel::cuda::sm80
