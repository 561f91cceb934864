// The list of ops. Everything that has to know them all reads it: the registry, the CUDA tables of a build without
// CUDA, `flashkernel::ops()`, and through that the Python module, its Triton switch, doctor, bench and the tests.
#pragma once

#include "ops/attention_fp8_params.hpp"
#include "ops/attention_mla_params.hpp"
#include "ops/attention_params.hpp"
#include "ops/decode_step_params.hpp"
#include "ops/elementwise_params.hpp"
#include "ops/fused_linear_params.hpp"
#include "ops/kv_params.hpp"
#include "ops/linear_fp8_params.hpp"
#include "ops/linear_loss_params.hpp"
#include "ops/linear_params.hpp"
#include "ops/loss_params.hpp"
#include "ops/mask_params.hpp"
#include "ops/norm_params.hpp"
#include "ops/qkv_append_params.hpp"
#include "ops/quantized_linear_params.hpp"
#include "ops/reduce_params.hpp"
#include "ops/rope_params.hpp"
#include "ops/sample_params.hpp"

namespace flashkernel {

/// One op of the registry (its params struct has the name, `kOp`), and the public functions that its kernels serve:
/// those of the C++ headers and of the Python package, which have the same names.
template <class Params>
struct Op {
  const char* functions[4];  // null behind the last, where there are fewer
};

template <class... Params>
struct OpList : Op<Params>... {};
template <class... Params>
OpList(Op<Params>...) -> OpList<Params...>;

inline constexpr OpList kOps{
    Op<AttentionParams>{{"attention", "attention_varlen", "attention_paged", "attention_cascade"}},
    Op<AttentionBackwardParams>{{"attention_backward", "attention_varlen_backward"}},
    Op<MlaDecodeParams>{{"attention_mla_decode"}},
    Op<LatentAppendParams>{{"latent_append"}},
    Op<Float8AttentionParams>{{"attention_fp8"}},
    Op<MergeStatesParams>{{"merge_states"}},
    Op<PackMaskParams>{{"pack_mask"}},
    Op<RopeParams>{{"rope", "rope_table"}},
    Op<LinearParams>{{"linear"}},
    Op<LinearBackwardParams>{{"linear_backward"}},
    Op<QuantizedLinearParams>{{"quantized_linear"}},
    Op<LinearFp8Params>{{"linear_fp8"}},
    Op<QuantizeFp8Params>{{"quantize_fp8_blocks"}},
    Op<FusedLinearParams>{{"fused_linear"}},
    Op<QkvAppendParams>{{"qkv_append"}},
    Op<AddParams>{{"add"}},
    Op<SwigluParams>{{"swiglu"}},
    Op<SwigluBackwardParams>{{"swiglu_backward"}},
    Op<ReduceParams>{{"reduce_sum", "reduce_mean", "reduce_max", "argmax"}},
    Op<SoftmaxParams>{{"softmax", "log_softmax"}},
    Op<SoftmaxBackwardParams>{{"softmax_backward", "log_softmax_backward"}},
    Op<NormParams>{{"layer_norm", "rms_norm", "layer_norm_quantized", "rms_norm_quantized"}},
    Op<NormBackwardParams>{{"layer_norm_backward", "rms_norm_backward"}},
    Op<SampleParams>{{"sample"}},
    Op<CrossEntropyParams>{{"cross_entropy"}},
    Op<CrossEntropyBackwardParams>{{"cross_entropy_backward"}},
    Op<LinearCrossEntropyParams>{{"linear_cross_entropy", "linear_selected_log_prob"}},
    Op<LinearCrossEntropyBackwardParams>{{"linear_cross_entropy_backward", "linear_selected_log_prob_backward"}},
    Op<KvAppendParams>{{"kv_append"}},
    Op<KvReadParams>{{"kv_read"}},
    Op<KvCopyParams>{{"kv_copy_pages"}},
    Op<FindBadPageParams>{{"check_block_table"}},
    Op<DecodeStepParams>{{"decode_step"}},
};

}  // namespace flashkernel
