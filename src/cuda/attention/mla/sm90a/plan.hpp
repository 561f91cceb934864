// How a call of MLA decoding on wgmma (9.0) is spread over the device. Host code without a CUDA header;
// tests_cpp/mla_plan_test.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "core/device_facts.hpp"
#include "ops/attention_mla_params.hpp"

namespace flashkernel::cuda::sm90a {

inline constexpr int kMlaDim = 576, kMlaValueDim = 512;
inline constexpr int kMlaRows = 64, kMlaKeys = 64;           // of a tile of queries, of latent rows
inline constexpr int kMlaPartPitch = kMlaValueDim + 4;       // floats of a row's part: numerators, maximum, sum
inline constexpr int kMlaMergeWarps = 4, kMlaMergeRows = 8;  // of a block that merges

struct MlaPlan {
  int blocks = 0;  // persistent, one a multiprocessor
  int group = 0;   // heads of a tile of queries
  int head_groups = 0;
  int rows = 0;      // of a tile: group times queries
  int box_rows = 0;  // latent rows of a copy: they lie in one page
  bool vectors_q = false, vectors_out = false;
  float scale_log2 = 0;

  /// A block leaves at most two parts: of the pair that its share starts within, and of the one that it ends within.
  std::int64_t partial_floats() const { return std::int64_t{2} * blocks * kMlaRows * kMlaPartPitch; }
};

/// Heads of a tile: the most that divide heads_q and whose rows fit.
inline std::int64_t mla_group(const AttentionParams& p) {
  for (std::int64_t group = std::min<std::int64_t>(p.heads_q, kMlaRows / std::max<std::int64_t>(1, p.seq_q)); group > 1;
       --group)
    if (p.heads_q % group == 0) return group;
  return 1;
}

/// Query rows of a call from which on this kernel is faster than that of 8.0. With fewer, a call waits for the merge:
/// each block leaves a part of every row, and a block that merges reads those of all blocks. Measured at 128 and 512
/// rows.
inline constexpr std::int64_t kLeastMlaRows = 512;
/// Of rows of 8 bits, from which on a tile of query rows is: with 16 the two kernels are level.
inline constexpr std::int64_t kLeastNarrowTile = 17;
inline bool has_mla_rows(const AttentionParams& p, bool narrow = false) {
  if (narrow && mla_group(p) * p.seq_q < kLeastNarrowTile) return false;
  return p.batch * p.heads_q * p.seq_q >= kLeastMlaRows;
}

inline MlaPlan plan_mla_decode(const AttentionParams& p, const DeviceFacts& device) {
  constexpr float kLog2E = 1.4426950408889634f;
  MlaPlan plan;
  plan.blocks = device.num_sms;
  plan.group = static_cast<int>(mla_group(p));
  plan.head_groups = static_cast<int>(p.heads_q) / plan.group;
  plan.rows = plan.group * static_cast<int>(p.seq_q);
  plan.box_rows = static_cast<int>(std::gcd(p.page_size, std::int64_t{kMlaKeys}));
  const auto fits = [](const void* data, std::uintptr_t bytes, std::int64_t a, std::int64_t b, std::int64_t c) {
    const auto elements = static_cast<std::int64_t>(bytes / 2);
    return reinterpret_cast<std::uintptr_t>(data) % bytes == 0 && a % elements == 0 && b % elements == 0 &&
           c % elements == 0;
  };
  plan.vectors_q = fits(p.q, 16, p.stride_q_batch, p.stride_q_head, p.stride_q_token);
  plan.vectors_out = fits(p.out, 8, p.stride_out_batch, p.stride_out_head, p.stride_out_token);
  plan.scale_log2 = p.scale * kLog2E;
  return plan;
}

}  // namespace flashkernel::cuda::sm90a
