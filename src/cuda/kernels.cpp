// The CUDA backend's table: one row per kernel variant, one section per op. Of rows of equal cost the first one runs.
#include "cuda/elementwise/elementwise.hpp"
#include "cuda/kv/kv.hpp"
#include "cuda/kv/latent_append.hpp"
#include "cuda/mask/pack_mask.hpp"
#include "cuda/loss/cross_entropy.hpp"
#include "cuda/loss/linear_loss.hpp"
#include "cuda/norm/norm.hpp"
#include "cuda/norm/sm90a/norm_bwd_rows.hpp"
#include "cuda/norm/sm90a/norm_long_rows.hpp"
#include "cuda/reduce/reduce.hpp"
#include "cuda/rope/rope.hpp"
#include "cuda/rows.hpp"
#include "cuda/sampling/sample.hpp"
#include "cuda/sampling/sm90a/sample.hpp"
#include "cuda/softmax/sm90a/long_rows.hpp"
#include "cuda/softmax/softmax.hpp"
#include "ops/op_list.hpp"

namespace flashkernel {

using namespace cuda_rows;

template <>
KernelTable<AddParams> cuda_kernels() {
  static constexpr KernelEntry<AddParams> rows[] = {
      generic<AddParams, cuda::add>("add/cuda/generic", cuda::add_supports)};
  return table(rows);
}

template <>
KernelTable<SwigluParams> cuda_kernels() {
  static constexpr KernelEntry<SwigluParams> rows[] = {
      generic<SwigluParams, cuda::swiglu>("swiglu/cuda/generic", cuda::swiglu_supports)};
  return table(rows);
}

template <>
KernelTable<SwigluBackwardParams> cuda_kernels() {
  static constexpr KernelEntry<SwigluBackwardParams> rows[] = {
      generic<SwigluBackwardParams, cuda::swiglu_bwd>("swiglu_bwd/cuda/generic", cuda::swiglu_bwd_supports)};
  return table(rows);
}

template <>
KernelTable<LinearParams> cuda_kernels() {
  using cuda::sm80::linear_few_rows_supports;
  using cuda::sm90a::FewRowsBlocksInOrderPlan, cuda::sm90a::FewRowsBlocksPlan, cuda::sm90a::FewRowsDirectPlan,
      cuda::sm90a::FewRowsInOrderPlan, cuda::sm90a::FewRowsStreamPlan;
  using cuda::sm90a::GemmWork;
  static constexpr KernelEntry<LinearParams> rows[] = {
#if FK_WITH_SM90A
    hopper_few_rows<FewRowsDirectPlan, DType::kFloat16>("linear/cuda/sm90a/f16/few_rows/direct",
                                                        arithmetic::kDirectSm90a),
    hopper_few_rows<FewRowsStreamPlan, DType::kFloat16>("linear/cuda/sm90a/f16/few_rows/stream",
                                                        arithmetic::kStreamSm90a),
    hopper_few_rows<FewRowsBlocksPlan, DType::kFloat16>("linear/cuda/sm90a/f16/few_rows/blocks",
                                                        arithmetic::kBlocksSm90a),
    hopper_few_rows<FewRowsInOrderPlan, DType::kFloat16>("linear/cuda/sm90a/f16/few_rows/in_order",
                                                         arithmetic::kWholeKSm90a),
    hopper_few_rows<FewRowsBlocksInOrderPlan, DType::kFloat16>("linear/cuda/sm90a/f16/few_rows/blocks_in_order",
                                                               arithmetic::kWholeKSm90a),
    hopper_few_rows<FewRowsDirectPlan, DType::kBFloat16>("linear/cuda/sm90a/bf16/few_rows/direct",
                                                         arithmetic::kDirectSm90a),
    hopper_few_rows<FewRowsStreamPlan, DType::kBFloat16>("linear/cuda/sm90a/bf16/few_rows/stream",
                                                         arithmetic::kStreamSm90a),
    hopper_few_rows<FewRowsBlocksPlan, DType::kBFloat16>("linear/cuda/sm90a/bf16/few_rows/blocks",
                                                         arithmetic::kBlocksSm90a),
    hopper_few_rows<FewRowsInOrderPlan, DType::kBFloat16>("linear/cuda/sm90a/bf16/few_rows/in_order",
                                                          arithmetic::kWholeKSm90a),
    hopper_few_rows<FewRowsBlocksInOrderPlan, DType::kBFloat16>("linear/cuda/sm90a/bf16/few_rows/blocks_in_order",
                                                                arithmetic::kWholeKSm90a),
#endif
    plain<LinearParams, cuda::sm80::linear_few_rows_f16>(
        "linear/cuda/sm80/f16/few_rows", kAmpere, arithmetic::kLanesSm80, linear_few_rows_supports<DType::kFloat16>,
        cuda::linear_cost_us<rates::kLinearFewRowsSm80>),
    plain<LinearParams, cuda::sm80::linear_few_rows_bf16>(
        "linear/cuda/sm80/bf16/few_rows", kAmpere, arithmetic::kLanesSm80, linear_few_rows_supports<DType::kBFloat16>,
        cuda::linear_cost_us<rates::kLinearFewRowsSm80>),
#if FK_WITH_SM90A
    hopper_large<GemmWork::kCooperative, DType::kFloat16>("linear/cuda/sm90a/f16/large/cooperative"),
    hopper_large<GemmWork::kCluster, DType::kFloat16>("linear/cuda/sm90a/f16/large/cluster"),
    hopper_large<GemmWork::kSplitK, DType::kFloat16>("linear/cuda/sm90a/f16/large/split_k"),
    hopper_large<GemmWork::kPingPong, DType::kFloat16>("linear/cuda/sm90a/f16/large/ping_pong"),
    hopper_large<GemmWork::kCooperative, DType::kBFloat16>("linear/cuda/sm90a/bf16/large/cooperative"),
    hopper_large<GemmWork::kCluster, DType::kBFloat16>("linear/cuda/sm90a/bf16/large/cluster"),
    hopper_large<GemmWork::kSplitK, DType::kBFloat16>("linear/cuda/sm90a/bf16/large/split_k"),
    hopper_large<GemmWork::kPingPong, DType::kBFloat16>("linear/cuda/sm90a/bf16/large/ping_pong"),
#endif
    plain<LinearParams, cuda::linear_few_rows>("linear/cuda/generic/few_rows", kEvery, arithmetic::kLanes,
                                               cuda::linear_few_rows_supports,
                                               cuda::linear_cost_us<rates::kLinearFewRows>),
    ampere_tiles<DType::kFloat16>("linear/cuda/sm80/f16/tiles", arithmetic::kTilesSm80),
    ampere_tiles<DType::kBFloat16>("linear/cuda/sm80/bf16/tiles", arithmetic::kTilesSm80),
    ampere_tiles<DType::kFloat32>("linear/cuda/sm80/f32", arithmetic::kTilesSm80F32),
    invariant(plain<LinearParams, cuda::sm75::linear>("linear/cuda/sm75/f16", kEvery, arithmetic::kTilesSm75,
                                                      cuda::sm75::linear_supports<LinearParams>,
                                                      cuda::linear_cost_us<rates::kLinearSm75>),
              is_of<DType::kFloat16, LinearParams>),
    invariant(plain<LinearParams, cuda::linear_tiles>("linear/cuda/generic/tiles", kEvery, arithmetic::kTiled,
                                                      cuda::linear_supports, cuda::linear_cost_us<rates::kLinearTiles>))
  };
  return table(rows);
}

template <>
KernelTable<QuantizedLinearParams> cuda_kernels() {
  static constexpr KernelEntry<QuantizedLinearParams> rows[] = {
      quantized_few_rows<DType::kFloat16>("quantized_linear/cuda/sm80/f16/few_rows"),
      quantized_few_rows<DType::kBFloat16>("quantized_linear/cuda/sm80/bf16/few_rows"),
      invariant(plain<QuantizedLinearParams, cuda::quantized_linear>(
          "quantized_linear/cuda/generic", kEvery, arithmetic::kTiled, cuda::quantized_linear_supports,
          cuda::linear_cost_us<rates::kLinearTiles, QuantizedLinearParams>))};
  return table(rows);
}

template <>
KernelTable<LinearFp8Params> cuda_kernels() {
  static constexpr KernelEntry<LinearFp8Params> rows[] = {
#if FK_WITH_SM90A
    row<LinearFp8Params>("linear_fp8/cuda/sm90a/few_rows", kHopper, arithmetic::kFp8PartsSm90a,
                         cuda::sm90a::linear_fp8_few_rows_supports, cuda::sm90a::linear_fp8_few_rows_cost_us,
                         cuda::sm90a::plan_linear_fp8_few_rows, cuda::sm90a::linear_fp8_few_rows),
    invariant(row<LinearFp8Params>("linear_fp8/cuda/sm90a/tiles", kHopper, arithmetic::kFp8Sm90a,
                                   cuda::sm90a::linear_fp8_tiles_supports, cuda::sm90a::linear_fp8_tiles_cost_us,
                                   cuda::sm90a::plan_linear_fp8_tiles, cuda::sm90a::linear_fp8_tiles),
              cuda::sm90a::linear_fp8_tiles_is_invariant),
#endif
    invariant(plain<LinearFp8Params, cuda::linear_fp8>("linear_fp8/cuda/generic", kEvery, arithmetic::kTiled,
                                                       cuda::linear_fp8_supports,
                                                       cuda::linear_cost_us<rates::kLinearTiles, LinearFp8Params>))
  };
  return table(rows);
}

template <>
KernelTable<QuantizeFp8Params> cuda_kernels() {
  static constexpr KernelEntry<QuantizeFp8Params> rows[] = {generic<QuantizeFp8Params, cuda::quantize_fp8_blocks>(
      "quantize_fp8_blocks/cuda/generic", cuda::quantize_fp8_supports)};
  return table(rows);
}

template <>
KernelTable<LinearBackwardParams> cuda_kernels() {
  static constexpr KernelEntry<LinearBackwardParams> rows[] = {
#if FK_WITH_SM90A
    hopper_gradient<DType::kFloat16>("linear_bwd/cuda/sm90a/f16"),
    hopper_gradient<DType::kBFloat16>("linear_bwd/cuda/sm90a/bf16"),
#endif
    ampere_gradient<DType::kFloat16>("linear_bwd/cuda/sm80/f16", arithmetic::kTilesSm80),
    ampere_gradient<DType::kBFloat16>("linear_bwd/cuda/sm80/bf16", arithmetic::kTilesSm80),
    ampere_gradient<DType::kFloat32>("linear_bwd/cuda/sm80/f32", arithmetic::kTilesSm80F32),
    linear_gradient<cuda::sm75::linear_bwd, cuda::sm75::linear_bwd_workspace, rates::kGradientSm75, DType::kFloat16>(
        "linear_bwd/cuda/sm75/f16", kEvery, arithmetic::kTilesSm75, cuda::sm75::linear_supports<LinearBackwardParams>),
    invariant(plain<LinearBackwardParams, cuda::linear_bwd>(
        "linear_bwd/cuda/generic", kEvery, arithmetic::kTiled, cuda::linear_bwd_supports,
        cuda::cost_us<LinearBackwardParams, rates::kGradientGeneric>))
  };
  return table(rows);
}

template <>
KernelTable<NormParams> cuda_kernels() {
  static constexpr KernelEntry<NormParams> rows[] = {
#if FK_WITH_SM90A
    in_clusters<NormParams>("norm/cuda/sm90a/long_rows", cuda::sm90a::norm_long_rows_supports,
                            cuda::sm90a::plan_norm_long_rows, cuda::sm90a::norm_long_rows),
#endif
    planned_rows<NormParams, 1>("norm/cuda/generic/held", cuda::norm_held_supports, cuda::plan_norm_held,
                                cuda::norm_fwd),
    planned_rows<NormParams, 2>("norm/cuda/generic/walked", cuda::norm_walked_supports, cuda::plan_norm_walked,
                                cuda::norm_fwd, cuda::norm_walks_alike),
    planned_rows<NormParams, 1>("norm/cuda/generic/quantized_held", cuda::norm_quantized_held_supports,
                                cuda::plan_norm_quantized_held, cuda::norm_fwd),
    planned_rows<NormParams, 2>("norm/cuda/generic/quantized_walked", cuda::norm_quantized_walked_supports,
                                cuda::plan_norm_quantized_walked, cuda::norm_fwd, cuda::norm_walks_alike)
  };
  return table(rows);
}

template <>
KernelTable<NormBackwardParams> cuda_kernels() {
  static constexpr KernelEntry<NormBackwardParams> rows[] = {
#if FK_WITH_SM90A
    in_clusters<NormBackwardParams>("norm_bwd/cuda/sm90a/rows", cuda::sm90a::norm_bwd_rows_supports,
                                    cuda::sm90a::plan_norm_bwd_rows, cuda::sm90a::norm_bwd_rows),
#endif
    read_rows<NormBackwardParams, 1, cuda::norm_bwd_held, cuda::norm_bwd_workspace>("norm_bwd/cuda/generic/held",
                                                                                    cuda::norm_bwd_held_supports),
    read_rows<NormBackwardParams, 2, cuda::norm_bwd_walked, cuda::norm_bwd_walked_workspace>(
        "norm_bwd/cuda/generic/walked", cuda::norm_bwd_walked_supports),
    invariant(plain<NormBackwardParams, cuda::norm_bwd, cuda::norm_bwd_workspace>(
        "norm_bwd/cuda/generic/elements", kEvery, arithmetic::kGeneric, cuda::norm_bwd_supports,
        cuda::cost_us<NormBackwardParams, rates::kRowsByElement>))
  };
  return table(rows);
}

template <>
KernelTable<ReduceParams> cuda_kernels() {
  static constexpr KernelEntry<ReduceParams> rows[] = {
      invariant(by_mode<ReduceParams, cuda::reduce, cuda::reduce_workspace>(
          "reduce/cuda/generic", kEvery, arithmetic::kGeneric, cuda::reduce_supports,
          cuda::cost_us<ReduceParams, rates::kRowsGeneric>))};
  return table(rows);
}

template <>
KernelTable<SoftmaxParams> cuda_kernels() {
  static constexpr KernelEntry<SoftmaxParams> rows[] = {
#if FK_WITH_SM90A
    in_clusters<SoftmaxParams>("softmax/cuda/sm90a/long_rows", cuda::sm90a::softmax_long_rows_supports,
                               cuda::sm90a::plan_softmax_long_rows, cuda::sm90a::softmax_long_rows,
                               cuda::sm90a::softmax_long_rows_are_invariant),
#endif
    planned_rows<SoftmaxParams, 1>("softmax/cuda/generic/held", cuda::softmax_held_supports, cuda::plan_softmax_held,
                                   cuda::softmax),
    planned_rows<SoftmaxParams, 2>("softmax/cuda/generic/walked", cuda::softmax_walked_supports,
                                   cuda::plan_softmax_walked, cuda::softmax, cuda::softmax_walks_alike)
  };
  return table(rows);
}

template <>
KernelTable<SoftmaxBackwardParams> cuda_kernels() {
  static constexpr KernelEntry<SoftmaxBackwardParams> rows[] = {
#if FK_WITH_SM90A
    in_clusters<SoftmaxBackwardParams>("softmax_bwd/cuda/sm90a/long_rows", cuda::sm90a::softmax_bwd_long_rows_supports,
                                       cuda::sm90a::plan_softmax_bwd_long_rows, cuda::sm90a::softmax_bwd_long_rows,
                                       cuda::sm90a::softmax_bwd_long_rows_are_invariant),
#endif
    planned_rows<SoftmaxBackwardParams, 1>("softmax_bwd/cuda/generic/held", cuda::softmax_bwd_held_supports,
                                           cuda::plan_softmax_bwd_held, cuda::softmax_bwd),
    planned_rows<SoftmaxBackwardParams, 2>("softmax_bwd/cuda/generic/walked", cuda::softmax_bwd_walked_supports,
                                           cuda::plan_softmax_bwd_walked, cuda::softmax_bwd,
                                           cuda::softmax_bwd_walks_alike)
  };
  return table(rows);
}

template <>
KernelTable<SampleParams> cuda_kernels() {
  static constexpr KernelEntry<SampleParams> rows[] = {
#if FK_WITH_SM90A
    invariant(row<SampleParams>("sample/cuda/sm90a", kHopper, arithmetic::kIntegers, cuda::sm90a::sample_supports,
                                cuda::cost_us<SampleParams, rates::kRowsInClusters>, cuda::sm90a::plan_sample,
                                cuda::sm90a::sample)),
#endif
    invariant(plain<SampleParams, cuda::sample>("sample/cuda/generic", kEvery, arithmetic::kIntegers,
                                                cuda::sample_supports,
                                                cuda::cost_us<SampleParams, rates::kRowsByElement>))
  };
  return table(rows);
}

template <>
KernelTable<CrossEntropyParams> cuda_kernels() {
  static constexpr KernelEntry<CrossEntropyParams> rows[] = {invariant(row<CrossEntropyParams>(
      "cross_entropy/cuda/generic", kEvery, arithmetic::kGeneric, cuda::cross_entropy_supports,
      cuda::cost_us<CrossEntropyParams, rates::kRowsGeneric>, cuda::plan_cross_entropy, cuda::cross_entropy))};
  return table(rows);
}

template <>
KernelTable<CrossEntropyBackwardParams> cuda_kernels() {
  static constexpr KernelEntry<CrossEntropyBackwardParams> rows[] = {
      generic<CrossEntropyBackwardParams, cuda::cross_entropy_bwd, cuda::cross_entropy_bwd_workspace>(
          "cross_entropy_bwd/cuda/generic", cuda::cross_entropy_bwd_supports)};
  return table(rows);
}

template <>
KernelTable<LinearCrossEntropyParams> cuda_kernels() {
  static constexpr KernelEntry<LinearCrossEntropyParams> rows[] = {
      generic<LinearCrossEntropyParams, cuda::linear_cross_entropy>("linear_cross_entropy/cuda/generic",
                                                                    cuda::linear_cross_entropy_supports)};
  return table(rows);
}

template <>
KernelTable<LinearCrossEntropyBackwardParams> cuda_kernels() {
  static constexpr KernelEntry<LinearCrossEntropyBackwardParams> rows[] = {
      generic<LinearCrossEntropyBackwardParams, cuda::linear_cross_entropy_bwd>(
          "linear_cross_entropy_bwd/cuda/generic", cuda::linear_cross_entropy_bwd_supports)};
  return table(rows);
}

template <>
KernelTable<RopeParams> cuda_kernels() {
  static constexpr KernelEntry<RopeParams> rows[] = {
      generic<RopeParams, cuda::rope>("rope/cuda/generic", cuda::rope_supports)};
  return table(rows);
}

template <>
KernelTable<KvAppendParams> cuda_kernels() {
  static constexpr KernelEntry<KvAppendParams> rows[] = {
      generic<KvAppendParams, cuda::kv_append>("kv_append/cuda/generic", cuda::kv_append_supports)};
  return table(rows);
}

template <>
KernelTable<LatentAppendParams> cuda_kernels() {
  static constexpr KernelEntry<LatentAppendParams> rows[] = {
      generic<LatentAppendParams, cuda::latent_append>("latent_append/cuda/generic", cuda::latent_append_supports)};
  return table(rows);
}

template <>
KernelTable<KvReadParams> cuda_kernels() {
  static constexpr KernelEntry<KvReadParams> rows[] = {
      generic<KvReadParams, cuda::kv_read>("kv_read/cuda/generic", cuda::kv_read_supports)};
  return table(rows);
}

template <>
KernelTable<KvCopyParams> cuda_kernels() {
  static constexpr KernelEntry<KvCopyParams> rows[] = {
      generic<KvCopyParams, cuda::kv_copy>("kv_copy_pages/cuda/generic", cuda::kv_copy_supports)};
  return table(rows);
}

template <>
KernelTable<FindBadPageParams> cuda_kernels() {
  static constexpr KernelEntry<FindBadPageParams> rows[] = {
      generic<FindBadPageParams, cuda::find_bad_page, cuda::find_bad_page_workspace>("find_bad_page/cuda/generic",
                                                                                     cuda::find_bad_page_supports)};
  return table(rows);
}

template <>
KernelTable<PackMaskParams> cuda_kernels() {
  static constexpr KernelEntry<PackMaskParams> rows[] = {
      generic<PackMaskParams, cuda::pack_mask>("pack_mask/cuda/generic", cuda::pack_mask_supports)};
  return table(rows);
}

template <>
KernelTable<AttentionParams> cuda_kernels() {
  static constexpr KernelEntry<AttentionParams> rows[] = {
#if FK_WITH_SM90A
    hopper_decode_group<DType::kFloat16, 64>("attention_fwd/cuda/sm90a/decode/f16/d64/group"),
    hopper_decode_clusters<DType::kFloat16, 64>("attention_fwd/cuda/sm90a/decode/f16/d64/clusters"),
    hopper_decode_group<DType::kBFloat16, 64>("attention_fwd/cuda/sm90a/decode/bf16/d64/group"),
    hopper_decode_clusters<DType::kBFloat16, 64>("attention_fwd/cuda/sm90a/decode/bf16/d64/clusters"),
    hopper_decode_group<DType::kFloat16, 128>("attention_fwd/cuda/sm90a/decode/f16/d128/group"),
    hopper_decode_clusters<DType::kFloat16, 128>("attention_fwd/cuda/sm90a/decode/f16/d128/clusters"),
    hopper_decode_group<DType::kBFloat16, 128>("attention_fwd/cuda/sm90a/decode/bf16/d128/group"),
    hopper_decode_clusters<DType::kBFloat16, 128>("attention_fwd/cuda/sm90a/decode/bf16/d128/clusters"),
#endif
    ampere_decode<DType::kFloat16, 64, kApart>("attention_fwd/cuda/sm80/decode/f16/d64/apart"),
    ampere_decode<DType::kFloat16, 64, kWithin>("attention_fwd/cuda/sm80/decode/f16/d64/within"),
    ampere_decode<DType::kBFloat16, 64, kApart>("attention_fwd/cuda/sm80/decode/bf16/d64/apart"),
    ampere_decode<DType::kBFloat16, 64, kWithin>("attention_fwd/cuda/sm80/decode/bf16/d64/within"),
    ampere_decode<DType::kFloat16, 128, kApart>("attention_fwd/cuda/sm80/decode/f16/d128/apart"),
    ampere_decode<DType::kFloat16, 128, kWithin>("attention_fwd/cuda/sm80/decode/f16/d128/within"),
    ampere_decode<DType::kBFloat16, 128, kApart>("attention_fwd/cuda/sm80/decode/bf16/d128/apart"),
    ampere_decode<DType::kBFloat16, 128, kWithin>("attention_fwd/cuda/sm80/decode/bf16/d128/within"),
    ampere_decode<DType::kFloat16, 192, kApart>("attention_fwd/cuda/sm80/decode/f16/d192/apart"),
    ampere_decode<DType::kFloat16, 192, kWithin>("attention_fwd/cuda/sm80/decode/f16/d192/within"),
    ampere_decode<DType::kBFloat16, 192, kApart>("attention_fwd/cuda/sm80/decode/bf16/d192/apart"),
    ampere_decode<DType::kBFloat16, 192, kWithin>("attention_fwd/cuda/sm80/decode/bf16/d192/within"),
    ampere_decode<DType::kFloat16, 256, kApart>("attention_fwd/cuda/sm80/decode/f16/d256/apart"),
    ampere_decode<DType::kFloat16, 256, kWithin>("attention_fwd/cuda/sm80/decode/f16/d256/within"),
    ampere_decode<DType::kBFloat16, 256, kApart>("attention_fwd/cuda/sm80/decode/bf16/d256/apart"),
    ampere_decode<DType::kBFloat16, 256, kWithin>("attention_fwd/cuda/sm80/decode/bf16/d256/within"),
    ampere_decode<DType::kFloat16, 512, kApart>("attention_fwd/cuda/sm80/decode/f16/d512/apart"),
    ampere_decode<DType::kFloat16, 512, kWithin>("attention_fwd/cuda/sm80/decode/f16/d512/within"),
    ampere_decode<DType::kBFloat16, 512, kApart>("attention_fwd/cuda/sm80/decode/bf16/d512/apart"),
    ampere_decode<DType::kBFloat16, 512, kWithin>("attention_fwd/cuda/sm80/decode/bf16/d512/within"),
    narrow_decode<DType::kFloat16, 64, kApart, 4>("attention_fwd/cuda/sm80/decode_int4/f16/d64/apart"),
    narrow_decode<DType::kFloat16, 64, kWithin, 4>("attention_fwd/cuda/sm80/decode_int4/f16/d64/within"),
    narrow_decode<DType::kBFloat16, 64, kApart, 4>("attention_fwd/cuda/sm80/decode_int4/bf16/d64/apart"),
    narrow_decode<DType::kBFloat16, 64, kWithin, 4>("attention_fwd/cuda/sm80/decode_int4/bf16/d64/within"),
    narrow_decode<DType::kFloat16, 128, kApart, 4>("attention_fwd/cuda/sm80/decode_int4/f16/d128/apart"),
    narrow_decode<DType::kFloat16, 128, kWithin, 4>("attention_fwd/cuda/sm80/decode_int4/f16/d128/within"),
    narrow_decode<DType::kBFloat16, 128, kApart, 4>("attention_fwd/cuda/sm80/decode_int4/bf16/d128/apart"),
    narrow_decode<DType::kBFloat16, 128, kWithin, 4>("attention_fwd/cuda/sm80/decode_int4/bf16/d128/within"),
    narrow_decode<DType::kFloat16, 256, kApart, 4>("attention_fwd/cuda/sm80/decode_int4/f16/d256/apart"),
    narrow_decode<DType::kFloat16, 256, kWithin, 4>("attention_fwd/cuda/sm80/decode_int4/f16/d256/within"),
    narrow_decode<DType::kBFloat16, 256, kApart, 4>("attention_fwd/cuda/sm80/decode_int4/bf16/d256/apart"),
    narrow_decode<DType::kBFloat16, 256, kWithin, 4>("attention_fwd/cuda/sm80/decode_int4/bf16/d256/within"),
    narrow_decode<DType::kFloat16, 64, kApart>("attention_fwd/cuda/sm80/decode_quantized/f16/d64/apart"),
    narrow_decode<DType::kFloat16, 64, kWithin>("attention_fwd/cuda/sm80/decode_quantized/f16/d64/within"),
    narrow_decode<DType::kBFloat16, 64, kApart>("attention_fwd/cuda/sm80/decode_quantized/bf16/d64/apart"),
    narrow_decode<DType::kBFloat16, 64, kWithin>("attention_fwd/cuda/sm80/decode_quantized/bf16/d64/within"),
    narrow_decode<DType::kFloat16, 128, kApart>("attention_fwd/cuda/sm80/decode_quantized/f16/d128/apart"),
    narrow_decode<DType::kFloat16, 128, kWithin>("attention_fwd/cuda/sm80/decode_quantized/f16/d128/within"),
    narrow_decode<DType::kBFloat16, 128, kApart>("attention_fwd/cuda/sm80/decode_quantized/bf16/d128/apart"),
    narrow_decode<DType::kBFloat16, 128, kWithin>("attention_fwd/cuda/sm80/decode_quantized/bf16/d128/within"),
    narrow_decode<DType::kFloat16, 256, kApart>("attention_fwd/cuda/sm80/decode_quantized/f16/d256/apart"),
    narrow_decode<DType::kFloat16, 256, kWithin>("attention_fwd/cuda/sm80/decode_quantized/f16/d256/within"),
    narrow_decode<DType::kBFloat16, 256, kApart>("attention_fwd/cuda/sm80/decode_quantized/bf16/d256/apart"),
    narrow_decode<DType::kBFloat16, 256, kWithin>("attention_fwd/cuda/sm80/decode_quantized/bf16/d256/within"),
    narrow_decode<DType::kFloat16, 512, kApart>("attention_fwd/cuda/sm80/decode_quantized/f16/d512/apart"),
    narrow_decode<DType::kFloat16, 512, kWithin>("attention_fwd/cuda/sm80/decode_quantized/f16/d512/within"),
    narrow_decode<DType::kBFloat16, 512, kApart>("attention_fwd/cuda/sm80/decode_quantized/bf16/d512/apart"),
    narrow_decode<DType::kBFloat16, 512, kWithin>("attention_fwd/cuda/sm80/decode_quantized/bf16/d512/within"),
    plain<AttentionParams, cuda::attention_fwd_decode, cuda::attention_fwd_decode_workspace>(
        "attention_fwd/cuda/generic/decode", kEvery, arithmetic::kSplit, cuda::attention_fwd_decode_supports,
        cuda::attention_cost_us<rates::kDecode>),
#if FK_WITH_SM90A
    hopper_forward_scored<DType::kFloat16, 64>("attention_fwd/cuda/sm90a/scored/f16/d64"),
    hopper_forward_scored<DType::kBFloat16, 64>("attention_fwd/cuda/sm90a/scored/bf16/d64"),
    hopper_forward_scored<DType::kFloat16, 128>("attention_fwd/cuda/sm90a/scored/f16/d128"),
    hopper_forward_scored<DType::kBFloat16, 128>("attention_fwd/cuda/sm90a/scored/bf16/d128"),
    hopper_forward_sparse<DType::kFloat16, 64>("attention_fwd/cuda/sm90a/sparse/f16/d64"),
    hopper_forward_sparse<DType::kBFloat16, 64>("attention_fwd/cuda/sm90a/sparse/bf16/d64"),
    hopper_forward_sparse<DType::kFloat16, 128>("attention_fwd/cuda/sm90a/sparse/f16/d128"),
    hopper_forward_sparse<DType::kBFloat16, 128>("attention_fwd/cuda/sm90a/sparse/bf16/d128"),
    hopper_few_queries<DType::kFloat16, 64>("attention_fwd/cuda/sm90a/few_queries/f16/d64"),
    hopper_few_queries<DType::kBFloat16, 64>("attention_fwd/cuda/sm90a/few_queries/bf16/d64"),
    hopper_few_queries<DType::kFloat16, 128>("attention_fwd/cuda/sm90a/few_queries/f16/d128"),
    hopper_few_queries<DType::kBFloat16, 128>("attention_fwd/cuda/sm90a/few_queries/bf16/d128"),
    hopper_forward<DType::kFloat16, 64>("attention_fwd/cuda/sm90a/f16/d64"),
    hopper_forward<DType::kBFloat16, 64>("attention_fwd/cuda/sm90a/bf16/d64"),
    hopper_forward<DType::kFloat16, 96>("attention_fwd/cuda/sm90a/f16/d96"),
    hopper_forward<DType::kBFloat16, 96>("attention_fwd/cuda/sm90a/bf16/d96"),
    hopper_forward<DType::kFloat16, 128>("attention_fwd/cuda/sm90a/f16/d128"),
    hopper_forward<DType::kBFloat16, 128>("attention_fwd/cuda/sm90a/bf16/d128"),
    hopper_forward<DType::kFloat16, 192, 128>("attention_fwd/cuda/sm90a/f16/d192_v128"),
    hopper_forward<DType::kBFloat16, 192, 128>("attention_fwd/cuda/sm90a/bf16/d192_v128"),
    hopper_forward<DType::kFloat16, 192>("attention_fwd/cuda/sm90a/f16/d192"),
    hopper_forward<DType::kBFloat16, 192>("attention_fwd/cuda/sm90a/bf16/d192"),
    hopper_forward<DType::kFloat16, 256>("attention_fwd/cuda/sm90a/f16/d256"),
    hopper_forward<DType::kBFloat16, 256>("attention_fwd/cuda/sm90a/bf16/d256"),
    hopper_widened<DType::kFloat16, 64>("attention_fwd/cuda/sm90a/widened/f16/d64"),
    hopper_widened<DType::kBFloat16, 64>("attention_fwd/cuda/sm90a/widened/bf16/d64"),
    hopper_widened<DType::kFloat16, 128>("attention_fwd/cuda/sm90a/widened/f16/d128"),
    hopper_widened<DType::kBFloat16, 128>("attention_fwd/cuda/sm90a/widened/bf16/d128"),
    hopper_widened<DType::kFloat16, 256>("attention_fwd/cuda/sm90a/widened/f16/d256"),
    hopper_widened<DType::kBFloat16, 256>("attention_fwd/cuda/sm90a/widened/bf16/d256"),
    hopper_forward_wide<DType::kFloat16, 512>("attention_fwd/cuda/sm90a/f16/d512"),
    hopper_forward_wide<DType::kBFloat16, 512>("attention_fwd/cuda/sm90a/bf16/d512"),
#endif
    ampere_forward_f32<32>("attention_fwd/cuda/sm80/f32/d32"),
    ampere_forward_f32<64>("attention_fwd/cuda/sm80/f32/d64"),
    ampere_forward_f32<96>("attention_fwd/cuda/sm80/f32/d96"),
    ampere_forward_f32<128>("attention_fwd/cuda/sm80/f32/d128"),
    ampere_forward_f32<192, 128>("attention_fwd/cuda/sm80/f32/d192_v128"),
    ampere_forward_f32<192>("attention_fwd/cuda/sm80/f32/d192"),
    ampere_forward_f32<256>("attention_fwd/cuda/sm80/f32/d256"),
    ampere_forward<DType::kFloat16, 32>("attention_fwd/cuda/sm80/f16/d32"),
    ampere_forward<DType::kBFloat16, 32>("attention_fwd/cuda/sm80/bf16/d32"),
    ampere_forward<DType::kFloat16, 64>("attention_fwd/cuda/sm80/f16/d64"),
    ampere_forward<DType::kBFloat16, 64>("attention_fwd/cuda/sm80/bf16/d64"),
    ampere_forward<DType::kFloat16, 96>("attention_fwd/cuda/sm80/f16/d96"),
    ampere_forward<DType::kBFloat16, 96>("attention_fwd/cuda/sm80/bf16/d96"),
    ampere_forward<DType::kFloat16, 128>("attention_fwd/cuda/sm80/f16/d128"),
    ampere_forward<DType::kBFloat16, 128>("attention_fwd/cuda/sm80/bf16/d128"),
    ampere_forward<DType::kFloat16, 192, 128>("attention_fwd/cuda/sm80/f16/d192_v128"),
    ampere_forward<DType::kBFloat16, 192, 128>("attention_fwd/cuda/sm80/bf16/d192_v128"),
    ampere_forward<DType::kFloat16, 192>("attention_fwd/cuda/sm80/f16/d192"),
    ampere_forward<DType::kBFloat16, 192>("attention_fwd/cuda/sm80/bf16/d192"),
    ampere_forward<DType::kFloat16, 256>("attention_fwd/cuda/sm80/f16/d256"),
    ampere_forward<DType::kBFloat16, 256>("attention_fwd/cuda/sm80/bf16/d256"),
    ampere_forward_short<DType::kFloat16, 32>("attention_fwd/cuda/sm80/short/f16/d32"),
    ampere_forward_short<DType::kBFloat16, 32>("attention_fwd/cuda/sm80/short/bf16/d32"),
    ampere_forward_short<DType::kFloat16, 64>("attention_fwd/cuda/sm80/short/f16/d64"),
    ampere_forward_short<DType::kBFloat16, 64>("attention_fwd/cuda/sm80/short/bf16/d64"),
    ampere_forward_short<DType::kFloat16, 128>("attention_fwd/cuda/sm80/short/f16/d128"),
    ampere_forward_short<DType::kBFloat16, 128>("attention_fwd/cuda/sm80/short/bf16/d128"),
    ampere_widened<DType::kFloat16, 64>("attention_fwd/cuda/sm80/widened/f16/d64"),
    ampere_widened<DType::kBFloat16, 64>("attention_fwd/cuda/sm80/widened/bf16/d64"),
    ampere_widened<DType::kFloat16, 128>("attention_fwd/cuda/sm80/widened/f16/d128"),
    ampere_widened<DType::kBFloat16, 128>("attention_fwd/cuda/sm80/widened/bf16/d128"),
    ampere_widened<DType::kFloat16, 256>("attention_fwd/cuda/sm80/widened/f16/d256"),
    ampere_widened<DType::kBFloat16, 256>("attention_fwd/cuda/sm80/widened/bf16/d256"),
    ampere_widened_f32<64>("attention_fwd/cuda/sm80/widened/f32/d64"),
    ampere_widened_f32<128>("attention_fwd/cuda/sm80/widened/f32/d128"),
    ampere_widened_f32<256>("attention_fwd/cuda/sm80/widened/f32/d256"),
    ampere_forward_wide<DType::kFloat16, 512>("attention_fwd/cuda/sm80/f16/d512"),
    ampere_forward_wide<DType::kBFloat16, 512>("attention_fwd/cuda/sm80/bf16/d512"),
#if FK_WITH_SM75
    turing_forward<DType::kFloat16, 32>("attention_fwd/cuda/sm75/f16/d32"),
    turing_forward<DType::kFloat16, 64>("attention_fwd/cuda/sm75/f16/d64"),
    turing_forward<DType::kFloat16, 96>("attention_fwd/cuda/sm75/f16/d96"),
    turing_forward<DType::kFloat16, 128>("attention_fwd/cuda/sm75/f16/d128"),
    turing_forward<DType::kFloat16, 192, 128>("attention_fwd/cuda/sm75/f16/d192_v128"),
    turing_forward<DType::kFloat16, 192>("attention_fwd/cuda/sm75/f16/d192"),
    turing_forward<DType::kFloat16, 256>("attention_fwd/cuda/sm75/f16/d256"),
    turing_widened<DType::kFloat16, 64>("attention_fwd/cuda/sm75/widened/f16/d64"),
    turing_widened<DType::kFloat16, 128>("attention_fwd/cuda/sm75/widened/f16/d128"),
    turing_widened<DType::kFloat16, 256>("attention_fwd/cuda/sm75/widened/f16/d256"),
#endif
    invariant(plain<AttentionParams, cuda::attention_fwd_tiled>("attention_fwd/cuda/generic/tiled", kEvery,
                                                                arithmetic::kTiled, cuda::attention_fwd_tiled_supports,
                                                                cuda::attention_cost_us<rates::kTiled>)),
    plain<AttentionParams, cuda::attention_fwd_naive, cuda::attention_fwd_naive_workspace>(
        "attention_fwd/cuda/generic/naive", kEvery, arithmetic::kNaive, cuda::attention_fwd_naive_supports,
        cuda::attention_cost_us<rates::kNaive>)
  };
  return table(rows);
}

template <>
KernelTable<AttentionBackwardParams> cuda_kernels() {
  static constexpr KernelEntry<AttentionBackwardParams> rows[] = {
#if FK_WITH_SM90A
    hopper_backward<DType::kFloat16, 64>("attention_bwd/cuda/sm90a/f16/d64"),
    hopper_backward<DType::kBFloat16, 64>("attention_bwd/cuda/sm90a/bf16/d64"),
    hopper_backward<DType::kFloat16, 96>("attention_bwd/cuda/sm90a/f16/d96"),
    hopper_backward<DType::kBFloat16, 96>("attention_bwd/cuda/sm90a/bf16/d96"),
    hopper_backward<DType::kFloat16, 128>("attention_bwd/cuda/sm90a/f16/d128"),
    hopper_backward<DType::kBFloat16, 128>("attention_bwd/cuda/sm90a/bf16/d128"),
    hopper_backward<DType::kFloat16, 192, 128>("attention_bwd/cuda/sm90a/f16/d192_v128"),
    hopper_backward<DType::kBFloat16, 192, 128>("attention_bwd/cuda/sm90a/bf16/d192_v128"),
    hopper_backward<DType::kFloat16, 192>("attention_bwd/cuda/sm90a/f16/d192"),
    hopper_backward<DType::kBFloat16, 192>("attention_bwd/cuda/sm90a/bf16/d192"),
    hopper_backward<DType::kFloat16, 256>("attention_bwd/cuda/sm90a/f16/d256"),
    hopper_backward<DType::kBFloat16, 256>("attention_bwd/cuda/sm90a/bf16/d256"),
#endif
    ampere_backward<DType::kFloat16, 32>("attention_bwd/cuda/sm80/f16/d32"),
    ampere_backward<DType::kBFloat16, 32>("attention_bwd/cuda/sm80/bf16/d32"),
    ampere_backward<DType::kFloat16, 64>("attention_bwd/cuda/sm80/f16/d64"),
    ampere_backward<DType::kBFloat16, 64>("attention_bwd/cuda/sm80/bf16/d64"),
    ampere_backward<DType::kFloat16, 96>("attention_bwd/cuda/sm80/f16/d96"),
    ampere_backward<DType::kBFloat16, 96>("attention_bwd/cuda/sm80/bf16/d96"),
    ampere_backward<DType::kFloat16, 128>("attention_bwd/cuda/sm80/f16/d128"),
    ampere_backward<DType::kBFloat16, 128>("attention_bwd/cuda/sm80/bf16/d128"),
    ampere_backward<DType::kFloat16, 192, 128>("attention_bwd/cuda/sm80/f16/d192_v128"),
    ampere_backward<DType::kBFloat16, 192, 128>("attention_bwd/cuda/sm80/bf16/d192_v128"),
    ampere_backward<DType::kFloat16, 192>("attention_bwd/cuda/sm80/f16/d192"),
    ampere_backward<DType::kBFloat16, 192>("attention_bwd/cuda/sm80/bf16/d192"),
    ampere_backward<DType::kFloat16, 256>("attention_bwd/cuda/sm80/f16/d256"),
    ampere_backward<DType::kBFloat16, 256>("attention_bwd/cuda/sm80/bf16/d256"),
    ampere_backward_wide<DType::kFloat16, 512>("attention_bwd/cuda/sm80/f16/d512"),
    ampere_backward_wide<DType::kBFloat16, 512>("attention_bwd/cuda/sm80/bf16/d512"),
#if FK_WITH_SM75
    turing_backward<DType::kFloat16, 32>("attention_bwd/cuda/sm75/f16/d32"),
    turing_backward<DType::kFloat16, 64>("attention_bwd/cuda/sm75/f16/d64"),
    turing_backward<DType::kFloat16, 96>("attention_bwd/cuda/sm75/f16/d96"),
    turing_backward<DType::kFloat16, 128>("attention_bwd/cuda/sm75/f16/d128"),
#endif
    ampere_backward_f32<32>("attention_bwd/cuda/sm80/f32/d32"),
    ampere_backward_f32<64>("attention_bwd/cuda/sm80/f32/d64"),
    ampere_backward_f32<96>("attention_bwd/cuda/sm80/f32/d96"),
    ampere_backward_f32<128>("attention_bwd/cuda/sm80/f32/d128"),
    invariant(plain<AttentionBackwardParams, cuda::attention_bwd, cuda::attention_bwd_workspace>(
        "attention_bwd/cuda/generic", kEvery, arithmetic::kTiled, cuda::attention_bwd_supports,
        cuda::cost_us<AttentionBackwardParams, rates::kBackwardGeneric>))
  };
  return table(rows);
}

template <>
KernelTable<MlaDecodeParams> cuda_kernels() {
  static constexpr KernelEntry<MlaDecodeParams> rows[] = {
#if FK_WITH_SM90A
    hopper_mla<DType::kFloat16>("attention_mla_decode/cuda/sm90a/f16"),
    hopper_mla<DType::kBFloat16>("attention_mla_decode/cuda/sm90a/bf16"),
    hopper_mla<DType::kFloat16, true>("attention_mla_decode/cuda/sm90a/e4m3/f16"),
    hopper_mla<DType::kBFloat16, true>("attention_mla_decode/cuda/sm90a/e4m3/bf16"),
#endif
    ampere_mla<DType::kFloat16>("attention_mla_decode/cuda/sm80/f16"),
    ampere_mla<DType::kBFloat16>("attention_mla_decode/cuda/sm80/bf16"),
    ampere_mla<DType::kFloat16, true>("attention_mla_decode/cuda/sm80/e4m3/f16"),
    ampere_mla<DType::kBFloat16, true>("attention_mla_decode/cuda/sm80/e4m3/bf16"),
    invariant(by_mode<MlaDecodeParams, cuda::mla_decode, cuda::mla_decode_workspace>(
        "attention_mla_decode/cuda/generic", kEvery, arithmetic::kSplit, cuda::mla_decode_supports,
        cuda::cost_us<MlaDecodeParams, rates::kMlaGeneric>))
  };
  return table(rows);
}

template <>
KernelTable<MergeStatesParams> cuda_kernels() {
  static constexpr KernelEntry<MergeStatesParams> rows[] = {
      generic<MergeStatesParams, cuda::merge_states>("merge_states/cuda/generic", cuda::merge_states_supports)};
  return table(rows);
}

}  // namespace flashkernel
