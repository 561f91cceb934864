// The generic CUDA kernels: plain device code, any GPU, any shape and stride that the op allows. Rows are in
// cuda/kernels.cpp.
#pragma once

#include <cstddef>

#include "flashkernel/stream.hpp"
#include "ops/all_params.hpp"
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
/// attention_bwd_large_rows.cu.
struct LargeRows {
  const float* lse = nullptr;   // [batch, heads_q, seq_q]: the call's, but of large rows -inf, or NaN
  const float* rest = nullptr;  // [batch, heads_q, seq_q]: what exp(score - LSE - rest) needs; 0: the row is not large
  const int* found = nullptr;   // one of `num_found` is not 0 where a large row's gradients are
  int num_found = 0;
};
std::size_t large_rows_workspace(const AttentionBackwardParams&);
/// `as_nan`: large rows have the LSE NaN, unless their gradients are 0.
LargeRows find_large_rows(const AttentionBackwardParams&, void* workspace, bool as_nan, Stream);
/// For tensor-core kernels: computes every gradient but the sinks' again if one of `num_flags` is not 0 (read on the
/// device). `negative_delta` is -D, [batch, heads_q, pitch].
void attention_bwd_repair(const AttentionBackwardParams&, const float* negative_delta, std::int64_t pitch,
                          const int* flags, int num_flags, const float* lse_rest, Stream);
Verdict merge_states_supports(const MergeStatesParams&);
void merge_states(const MergeStatesParams&, void* workspace, Stream);

Verdict add_supports(const AddParams&);
void add(const AddParams&, void* workspace, Stream);
Verdict swiglu_supports(const SwigluParams&);
void swiglu(const SwigluParams&, void* workspace, Stream);
Verdict swiglu_bwd_supports(const SwigluBackwardParams&);
void swiglu_bwd(const SwigluBackwardParams&, void* workspace, Stream);

Verdict linear_supports(const LinearParams&);
Verdict linear_few_rows_supports(const LinearParams&);  // the same kernel where it is ahead of tensor-core tiles
void linear(const LinearParams&, void* workspace, Stream);
Verdict linear_bwd_supports(const LinearBackwardParams&);
void linear_bwd(const LinearBackwardParams&, void* workspace, Stream);
/// The bias gradient and, in the workspace, the pre-activation's; what is left to do is two products without
/// activation.
std::size_t linear_gradient_workspace(const LinearBackwardParams&);
LinearBackwardParams linear_gradient(const LinearBackwardParams&, void* workspace, Stream);

Verdict norm_fwd_supports(const NormParams&);
void norm_fwd(const NormParams&, void* workspace, Stream);
Verdict norm_bwd_supports(const NormBackwardParams&);
std::size_t norm_bwd_workspace(const NormBackwardParams&);
void norm_bwd(const NormBackwardParams&, void* workspace, Stream);

Verdict reduce_supports(const ReduceParams&);
std::size_t reduce_workspace(const ReduceParams&);
void reduce(const ReduceParams&, void* workspace, Stream);
Verdict softmax_supports(const SoftmaxParams&);
void softmax(const SoftmaxParams&, void* workspace, Stream);
Verdict softmax_bwd_supports(const SoftmaxBackwardParams&);
void softmax_bwd(const SoftmaxBackwardParams&, void* workspace, Stream);

Verdict cross_entropy_supports(const CrossEntropyParams&);
std::size_t cross_entropy_workspace(const CrossEntropyParams&);
void cross_entropy(const CrossEntropyParams&, void* workspace, Stream);
Verdict cross_entropy_bwd_supports(const CrossEntropyBackwardParams&);
std::size_t cross_entropy_bwd_workspace(const CrossEntropyBackwardParams&);
void cross_entropy_bwd(const CrossEntropyBackwardParams&, void* workspace, Stream);

Verdict rope_supports(const RopeParams&);
void rope(const RopeParams&, void* workspace, Stream);
Verdict kv_append_supports(const KvAppendParams&);
void kv_append(const KvAppendParams&, void* workspace, Stream);
void kv_append_rope(const KvAppendParams&, Stream);           // its part for calls with RoPE
Verdict kv_append_quantized_supports(const KvAppendParams&);  // kv_append and kv_read for 8-bit pages
void kv_append_quantized(const KvAppendParams&, Stream);
bool kv_append_in_registers(const KvAppendParams&);  // whether kv_append_quantized_rows takes it
void kv_append_quantized_rows(const KvAppendParams&, Stream);
void kv_read_quantized(const KvReadParams&, Stream);
Verdict kv_read_supports(const KvReadParams&);
void kv_read(const KvReadParams&, void* workspace, Stream);
Verdict kv_copy_supports(const KvCopyParams&);
void kv_copy(const KvCopyParams&, void* workspace, Stream);
Verdict find_bad_page_supports(const FindBadPageParams&);
std::size_t find_bad_page_workspace(const FindBadPageParams&);
void find_bad_page(const FindBadPageParams&, void* workspace, Stream);

}  // namespace flashkernel::cuda
