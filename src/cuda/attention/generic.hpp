// Attention in plain device code: any GPU, any shape and stride that the op allows.
// Rows are in cuda/kernels.cpp.
#pragma once

#include <cstddef>

#include "flashkernel/stream.hpp"
#include "ops/attention_params.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel::cuda {

Verdict attention_fwd_naive_supports(const AttentionParams&);
std::size_t attention_fwd_naive_workspace(const AttentionParams&);
void attention_fwd_naive(const AttentionParams&, void* workspace, Stream);
Verdict attention_fwd_tiled_supports(const AttentionParams&);
void attention_fwd_tiled(const AttentionParams&, void* workspace, Stream);
Verdict attention_fwd_decode_supports(const AttentionParams&);
std::size_t attention_fwd_decode_workspace(const AttentionParams&);
void attention_fwd_decode(const AttentionParams&, void* workspace, Stream);
Verdict attention_bwd_supports(const AttentionBackwardParams&);
std::size_t attention_bwd_workspace(const AttentionBackwardParams&);
void attention_bwd(const AttentionBackwardParams&, void* workspace, Stream);
/// Rows with an LSE of kLargeLse and more, in a call with a bias (without one all are null):
/// attention/backward/generic/large_rows.cu.
struct LargeRows {
  const float* lse = nullptr;   // [batch, heads_q, seq_q]: that of the call, but -inf or NaN for large rows
  const float* rest = nullptr;  // [batch, heads_q, seq_q]: what exp(score - LSE - rest) needs; 0: the row is not large
  const int* found = nullptr;   // `num_found` flags; one is not 0 if some large row has gradients that are not 0
  int num_found = 0;
};
std::size_t large_rows_workspace(const AttentionBackwardParams&);
/// `as_nan`: large rows have the LSE NaN, unless their gradients are 0.
LargeRows find_large_rows(const AttentionBackwardParams&, void* workspace, bool as_nan, Stream);
/// For tensor-core kernels: computes every gradient again, except that of the sinks, if one of `num_flags` flags is not
/// 0 (read on the device). `negative_delta` is -D, [batch, heads_q, pitch].
void attention_bwd_repair(const AttentionBackwardParams&, const float* negative_delta, std::int64_t pitch,
                          const int* flags, int num_flags, const float* lse_rest, Stream);
Verdict merge_states_supports(const MergeStatesParams&);
void merge_states(const MergeStatesParams&, void* workspace, Stream);

}  // namespace flashkernel::cuda
