// Transposes 8-bit values for the Hopper forward kernel, in the order of keys that float8_plan.hpp tells. Bound by
// memory: a block of threads takes 128 keys by 64 columns, a thread 16 keys by 4 columns.
#pragma once

#include "cuda/ptx/grid.cuh"
#include "cuda/attention/forward/sm90a/float8.hpp"

namespace flashkernel::cuda::sm90a {

inline constexpr int kTransposeKeys = 128, kTransposeColumns = 64;
inline constexpr int kTransposePitch = kTransposeColumns / 4 + 1;  // words: 16 threads in a row hit 16 banks

/// The bytes i of four words, as one word: byte j is that of word j.
__device__ inline std::uint32_t bytes_of(const std::uint32_t (&words)[4], int i) {
  const std::uint32_t pick = static_cast<std::uint32_t>(i | (4 + i) << 4);
  return __byte_perm(__byte_perm(words[0], words[1], pick), __byte_perm(words[2], words[3], pick), 0x5410);
}

/// Grid: (pieces of keys, pieces of columns x heads, batch). kBlockN: that of the kernel behind.
template <int kBlockN>
__global__ void __launch_bounds__(128) transpose_values_kernel(const __grid_constant__ AttentionParams p,
                                                               std::uint8_t* out, std::int64_t keys, bool vectors) {
  __shared__ std::uint32_t tile[kTransposeKeys * kTransposePitch];
  ptx::allow_next_kernel();
  ptx::wait_for_previous_kernel();
  const int column_pieces = static_cast<int>((p.head_dim_v + kTransposeColumns - 1) / kTransposeColumns);
  const int b = static_cast<int>(blockIdx.z), first = static_cast<int>(blockIdx.x) * kTransposeKeys;
  const int column0 = static_cast<int>(blockIdx.y) % column_pieces * kTransposeColumns;
  const std::int64_t g = blockIdx.y / column_pieces;
  const int k_len = static_cast<int>(p.k_length(b)), end = (k_len + kBlockN - 1) / kBlockN * kBlockN;
  if (first >= end) return;
  const auto* const from = static_cast<const std::uint8_t*>(p.v);
  for (int i = threadIdx.x; i < kTransposeKeys * 4; i += 128) {
    const int key = first + i / 4, column = column0 + i % 4 * 16;
    std::uint32_t words[4] = {};
    if (key < k_len) {
      const std::uint8_t* const row = from + p.v_offset(b, g, key) + column;
      if (vectors && column + 16 <= p.head_dim_v) {
        const uint4 four = *reinterpret_cast<const uint4*>(row);
        words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
      } else {
        for (int e = 0; e < 16; ++e)
          if (column + e < p.head_dim_v) words[e / 4] |= static_cast<std::uint32_t>(row[e]) << e % 4 * 8;
      }
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) tile[i / 4 * kTransposePitch + i % 4 * 4 + w] = words[w];
  }
  __syncthreads();
  const int quad = threadIdx.x % 16, group = threadIdx.x / 16;  // of columns, and of keys
  if (first + group * 16 >= end) return;
  std::uint32_t rows[4][4];  // of column 4 quad + c, places 4 t .. 4 t + 3
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    std::uint32_t words[4];
#pragma unroll
    for (int place = 0; place < 4; ++place)
      words[place] = tile[(group * 16 + 8 * (place / 2) + 2 * t + place % 2) * kTransposePitch + quad];
#pragma unroll
    for (int c = 0; c < 4; ++c) rows[c][t] = bytes_of(words, c);
  }
  const int begin = p.is_varlen_k() ? first_transposed_key<kBlockN>(static_cast<int>(p.k_begin(b)), b) : 0;
  const std::int64_t image = p.is_varlen_k() ? g : b * p.heads_kv + g;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const int column = column0 + 4 * quad + c;
    if (column >= p.head_dim_v) break;
    *reinterpret_cast<uint4*>(out + (image * p.head_dim_v + column) * keys + begin + first + group * 16) =
        uint4{rows[c][0], rows[c][1], rows[c][2], rows[c][3]};
  }
}

template <int kBlockN>
void transpose_values(const AttentionParams& p, const TransposedValues& values, void* out, cudaStream_t stream) {
  bool vectors = is_aligned(p.v, 16) && p.stride_v_token % 16 == 0 && p.stride_v_head % 16 == 0;
  if (!p.is_varlen_k()) vectors = vectors && p.stride_v_batch % 16 == 0;
  const auto pieces = [](std::int64_t n, int of) { return static_cast<unsigned>((n + of - 1) / of); };
  const std::int64_t padded = (p.seq_k + kBlockN - 1) / kBlockN * kBlockN;
  LaunchShape shape{
      dim3(pieces(padded, kTransposeKeys), pieces(p.head_dim_v, kTransposeColumns) * static_cast<unsigned>(p.heads_kv),
           static_cast<unsigned>(p.batch)),
      128, 0, stream};
  shape.early = true;
  launch("attention_fp8 transpose", transpose_values_kernel<kBlockN>, shape, p, static_cast<std::uint8_t*>(out),
         values.keys, vectors);
}

}  // namespace flashkernel::cuda::sm90a
