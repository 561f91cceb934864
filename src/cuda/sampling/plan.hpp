// How rows of sample are cut on 9.0: the blocks of a cluster, and the tokens of a block. Host code;
// tests_cpp/sample_plan_test.cpp.
#pragma once

#include <algorithm>

#include "cuda/host/ceil_div.hpp"
#include "ops/kernel_entry.hpp"
#include "ops/sample_params.hpp"

namespace flashkernel::cuda {

inline constexpr int kSampleMostBlocks = 8;  // of a cluster: every GPU of 9.0 runs them
/// Tokens that a block holds, four bytes each: 192 KB of the 227 KB that a block may have.
inline constexpr std::int64_t kSampleMostHeld = 48 * 1024;
/// Fewer tokens a block are not worth an exchange with one more.
inline constexpr std::int64_t kSampleEnoughTokens = 4096;
inline constexpr int kSampleBlocksPerSm = 2;

struct SamplePlan {
  int blocks;  // of a cluster: one row
  int share;   // tokens of a block, a multiple of 32
};

inline SamplePlan sample_plan(std::int64_t rows, std::int64_t vocab, int num_sms) {
  int blocks = 1;
  const auto tokens = [&] { return ceil_div(vocab, std::int64_t{blocks}); };
  while (blocks < kSampleMostBlocks &&
         (tokens() > kSampleMostHeld ||
          (tokens() > kSampleEnoughTokens && rows * 2 * blocks <= std::int64_t{kSampleBlocksPerSm} * num_sms)))
    blocks *= 2;
  return {blocks, static_cast<int>(ceil_div(tokens(), std::int64_t{32}) * 32)};
}

}  // namespace flashkernel::cuda
