// Biases of a 16-bit call's own dtype, read a tile at a time: a lane's loads are then under way together, where one by
// one each would wait for the last.
#pragma once

#include <cstdint>

#include "cuda/host/launch.hpp"
#include "cuda/tile/convert.cuh"
#include "ops/attention_params.hpp"

namespace flashkernel::cuda {

/// How the biases of a call are read by a kernel that may read those of a tile all at once, before its products.
struct BiasReads {
  bool ahead = false;     // the bias has the call's 16-bit dtype, and nothing else changes a score
  bool in_pairs = false;  // two neighbouring keys lie in 4 bytes of their own

  BiasReads() = default;
  explicit BiasReads(const AttentionParams& p) {
    const AttentionBias& bias = p.bias;
    ahead = bias.data && bias.dtype == p.dtype && p.dtype != DType::kFloat32 && !(p.softcap > 0.0f) &&
            !p.alibi_slopes && !p.mask.is_given();
    in_pairs = ahead && bias.stride_k == 1 && bias.stride_q % 2 == 0 && bias.stride_head % 2 == 0 &&
               bias.stride_batch % 2 == 0 && is_aligned(bias.data, 4);
  }
};

/// The biases of the scores that a lane has of a tile of 16 rows a warp and kBlockN keys, in the accumulator's order.
template <class T, int kBlockN>
struct LaneBiases {
  std::uint32_t pairs[2][kBlockN / 8];

  /// `bias` is the head's; `row` and `row` + 8 are the lane's rows, of which those past `last_query` are not read, nor
  /// are keys from k_len on. `first_j` is the lane's first key.
  __device__ __forceinline__ void read(const AttentionBias& of, const T* bias, bool in_pairs, int row, int last_query,
                                       int first_j, int k_len) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const T* const from = bias + min(row + 8 * half, last_query) * of.stride_q;
#pragma unroll
      for (int n = 0; n < kBlockN / 8; ++n) {
        const int j = first_j + 8 * n;
        std::uint32_t both = 0;
        if (in_pairs && j + 1 < k_len) {
          both = *reinterpret_cast<const std::uint32_t*>(from + j);
        } else {
          if (j < k_len) both = *reinterpret_cast<const std::uint16_t*>(from + j * of.stride_k);
          if (j + 1 < k_len)
            both |= static_cast<std::uint32_t>(*reinterpret_cast<const std::uint16_t*>(from + (j + 1) * of.stride_k))
                    << 16;
        }
        pairs[half][n] = both;
      }
    }
  }
  __device__ __forceinline__ float at(int half, int n, int e) const {
    const auto bits = static_cast<std::uint16_t>(pairs[half][n] >> 16 * e);
    return to_float(reinterpret_cast<const T&>(bits));
  }
};

}  // namespace flashkernel::cuda
