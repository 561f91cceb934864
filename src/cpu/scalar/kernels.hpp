// The scalar kernels: obvious loops over any shape and stride, accumulating in double. They are the oracle that every
// other kernel is tested against, and what runs on processors without a faster row. Listed in src/cpu/kernels.cpp.
// Invariant: each takes every call that its front door lets through.
#pragma once

#include <cstddef>

#include "flashkernel/stream.hpp"
#include "ops/op_list.hpp"

namespace flashkernel::cpu_scalar {

// attention
void attention_fwd(const AttentionParams& params, void* workspace, Stream stream);
void attention_bwd(const AttentionBackwardParams& params, void* workspace, Stream stream);
void attention_mla_decode(const MlaDecodeParams& params, void* workspace, Stream stream);
void latent_append(const LatentAppendParams& params, void* workspace, Stream stream);
void attention_fp8(const Float8AttentionParams& params, void* workspace, Stream stream);
void merge_states(const MergeStatesParams& params, void* workspace, Stream stream);

// rope
void rope(const RopeParams& params, void* workspace, Stream stream);

// linear
void linear(const LinearParams& params, void* workspace, Stream stream);
std::size_t linear_backward_workspace(const LinearBackwardParams& params);
void linear_backward(const LinearBackwardParams& params, void* workspace, Stream stream);
void quantized_linear(const QuantizedLinearParams& params, void* workspace, Stream stream);
void linear_fp8(const LinearFp8Params& params, void* workspace, Stream stream);
void quantize_fp8_blocks(const QuantizeFp8Params& params, void* workspace, Stream stream);
void fused_linear(const FusedLinearParams& params, void* workspace, Stream stream);
void qkv_append(const QkvAppendParams& params, void* workspace, Stream stream);

// elementwise
void add(const AddParams& params, void* workspace, Stream stream);
void swiglu(const SwigluParams& params, void* workspace, Stream stream);
void swiglu_backward(const SwigluBackwardParams& params, void* workspace, Stream stream);

// reduce, softmax
void reduce(const ReduceParams& params, void* workspace, Stream stream);
void softmax(const SoftmaxParams& params, void* workspace, Stream stream);
void softmax_backward(const SoftmaxBackwardParams& params, void* workspace, Stream stream);

// norm
void norm(const NormParams& params, void* workspace, Stream stream);
void norm_backward(const NormBackwardParams& params, void* workspace, Stream stream);

// sample
std::size_t sample_workspace(const SampleParams& params);
void sample(const SampleParams& params, void* workspace, Stream stream);

// loss
std::size_t cross_entropy_workspace(const CrossEntropyParams& params);
void cross_entropy(const CrossEntropyParams& params, void* workspace, Stream stream);
void cross_entropy_backward(const CrossEntropyBackwardParams& params, void* workspace, Stream stream);
void linear_cross_entropy(const LinearCrossEntropyParams& params, void* workspace, Stream stream);
void linear_cross_entropy_backward(const LinearCrossEntropyBackwardParams& params, void* workspace, Stream stream);

// pack_mask
void pack_mask(const PackMaskParams& params, void* workspace, Stream stream);

// kv
void kv_append(const KvAppendParams& params, void* workspace, Stream stream);
void kv_read(const KvReadParams& params, void* workspace, Stream stream);
void kv_copy_pages(const KvCopyParams& params, void* workspace, Stream stream);
void find_bad_page(const FindBadPageParams& params, void* workspace, Stream stream);

// decode_step
std::size_t decode_step_workspace(const DecodeStepParams& params);
void decode_step(const DecodeStepParams& params, void* workspace, Stream stream);

}  // namespace flashkernel::cpu_scalar
