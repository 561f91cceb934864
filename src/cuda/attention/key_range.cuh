// Which keys a tile of queries sees, in 32-bit numbers of one sequence; the masks of the tensor-core kernels.
#pragma once

#include <cstdint>

#include "ops/attention_params.hpp"

namespace flashkernel::cuda {

/// One sequence's lengths and window. By these alone query i sees keys [first(i), last(i)).
struct KeyWindow {
  int q_len, k_len;
  int left, right;  // first(i) = i + left, last(i) = i + right, cut to [0, k_len]

  KeyWindow() = default;  // in shared memory: assigned by one thread
  __device__ KeyWindow(const AttentionParams& p, std::int64_t b)
      : q_len(static_cast<int>(p.q_length(b))), k_len(static_cast<int>(p.k_length(b))) {
    // Far outside of any sequence, yet i + left and i + right stay inside 32 bits.
    constexpr std::int64_t kFar = std::int64_t{1} << 30;
    const std::int64_t shift = static_cast<std::int64_t>(k_len) - q_len;
    left = static_cast<int>(p.window_left < 0 ? -kFar : max(-kFar, min(kFar, shift - p.window_left)));
    right = static_cast<int>(p.window_right < 0 ? kFar : min(kFar, shift + p.window_right + 1));
  }
  __device__ int first(int i) const { return max(0, i + left); }
  __device__ int last(int i) const { return max(0, min(k_len, i + right)); }
  /// Whether query i sees all keys up to the last one. To be asked here, never as last(i) == k_len: ptxas of CUDA 12.9
  /// and 13.0 gives max(0, min(a, b)) == b the code of max(0, min(a, b)) == a on 9.0 and later.
  __device__ bool sees_last_key(int i) const { return i + right >= k_len; }
  /// Queries that see key j are [first_query(j), last_query(j)).
  __device__ int first_query(int j) const { return max(0, j - right + 1); }
  __device__ int last_query(int j) const { return min(q_len, j - left + 1); }
};

/// The same, and no query sees the keys before `start` (padding on the left, AttentionOptions::k_starts). The backward
/// pass has no such keys, and its kernels no register to spare for them.
struct KeyRange : KeyWindow {
  int start;

  KeyRange() = default;
  __device__ KeyRange(const AttentionParams& p, std::int64_t b)
      : KeyWindow(p, b), start(static_cast<int>(p.k_start(b, k_len))) {}
  __device__ int first(int i) const { return max(start, i + left); }
};

/// Element offset of a row of q, k, v or a gradient; `begin` is the sequence's first row when variable-length.
__device__ inline std::int64_t row_offset(bool varlen, std::int64_t begin, std::int64_t b, std::int64_t h,
                                          std::int64_t i, std::int64_t stride_batch, std::int64_t stride_head,
                                          std::int64_t stride_token) {
  return (varlen ? (begin + i) * stride_token : b * stride_batch + i * stride_token) + h * stride_head;
}

}  // namespace flashkernel::cuda
