// How 8-bit values lie for the Hopper forward kernel: the tensor cores read operands of 8 bits along the summed dim
// alone, so that a kernel before it (transpose_values.cuh) transposes V into the workspace.
// tests_cpp/float8_plan_test.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/attention_params.hpp"

namespace flashkernel::cuda::sm90a {

/// Keys from one sequence's transposed values to the next one's are whole blocks of kBlockN. Where sequences lie side
/// by side, sequence b, whose first key is `begin`, starts here: the next one starts late enough.
template <int kBlockN>
FK_HOST_DEVICE constexpr int first_transposed_key(int begin, int b) {
  return (begin / kBlockN + b) * kBlockN;
}

/// Transposed values: [batch, heads_kv, head_dim_v, keys], `keys` whole blocks with zeros behind a sequence's last key;
/// sequences side by side are one batch. In each 16 keys, place 4 t + 2 j + e is that of key 8 j + 2 t + e: so a
/// thread's weights, which it has by pairs, are what it hands to the tensor cores by fours.
struct TransposedValues {
  std::int64_t keys, batch;

  template <int kBlockN>
  static TransposedValues of(const AttentionParams& p) {
    const auto blocks = [](std::int64_t n) { return (n + kBlockN - 1) / kBlockN; };
    if (p.is_varlen_k()) return {(p.total_k / kBlockN + p.batch + 1) * kBlockN, 1};
    return {blocks(p.seq_k) * kBlockN, p.batch};
  }
  std::size_t bytes(const AttentionParams& p) const {
    return static_cast<std::size_t>(batch * p.heads_kv * p.head_dim_v * keys);
  }
};

}  // namespace flashkernel::cuda::sm90a
