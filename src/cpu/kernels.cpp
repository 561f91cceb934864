// The CPU backend's table: one row per kernel, one section per op.
// A row here is dispatch, forcing, `flashkernel kernels`, bench and conformance test at once. Scalar rows accept any
// shape.
#if defined(FK_CPU_AMX)
#include "cpu/amx/attention_fwd.hpp"
#endif
#if defined(FK_CPU_AVX512)
#include "cpu/avx512/attention_bwd.hpp"
#include "cpu/avx512/attention_fwd.hpp"
#endif
#if defined(FK_CPU_AVX2)
#include "cpu/avx2/attention_bwd.hpp"
#include "cpu/avx2/attention_fwd.hpp"
#include "cpu/fast_support.hpp"
#include "cpu/latent.hpp"
#include "cpu/widened.hpp"
#else
#define FK_FAST_ROWS(Params, id, function, supports, plan)
#endif
#include "core/cpu_features.hpp"
#include "cpu/attention_fp8.hpp"
#include "cpu/costs.hpp"
#include "cpu/scalar/kernels.hpp"
#include "ops/op_list.hpp"
#include "ops/kernel_entry.hpp"

namespace flashkernel {
namespace {

template <class Params, std::size_t N>
constexpr KernelTable<Params> table(const KernelEntry<Params> (&rows)[N]) {
  return {rows, N};
}

template <class Params>
Verdict accept_all(const Params&) {
  return Verdict::ok();
}

// The row that takes every call on every processor.
template <class Params, typename RowFunctions<Params>::PlainLaunch kLaunch>
constexpr KernelEntry<Params> scalar_row(const char* name, typename RowFunctions<Params>::MakePlan plan = nullptr) {
  return {name,
          DeviceType::kCpu,
          0,
          0,
          kCpuAny,
          cpu::arithmetic::kScalar,
          accept_all<Params>,
          cpu::cost_us<Params, cpu::rates::kScalar>,
          plan,
          launch_plain<Params, kLaunch>,
          nullptr,
          every_call<Params>};
}

// MLA is attention over pages whose values are the first columns of their keys, which the vector kernels take as it is.
template <RowFunctions<AttentionParams>::PlainLaunch kLaunch>
void over_latent(const MlaDecodeParams& p, void* workspace, Stream stream) {
  kLaunch(p.attention, workspace, stream);
}
template <RowFunctions<AttentionParams>::WorkspaceBytes kBytes>
std::size_t latent_bytes(const MlaDecodeParams& p) {
  return kBytes(p.attention);
}

// What the ops of a decode step take.
Verdict composed_step_supports(const DecodeStepParams& p) {
  if (p.head_dim > kMaxHeadDim) return "takes heads of up to 512 elements";
  return p.hidden > 0 && p.inner > 0 ? Verdict::ok() : Verdict("needs columns in every matrix");
}
bool takes_composed_step(const DecodeStepParams& p) { return static_cast<bool>(composed_step_supports(p)); }

}  // namespace

template <>
KernelTable<AttentionParams> cpu_kernels<AttentionParams>() {
  static constexpr KernelEntry<AttentionParams> kRows[] = {
#if defined(FK_CPU_AMX)
    cpu::one_of_two_orders(cpu::fast_row<AttentionParams, cpu::Isa::kAmxFp16, cpu::amx::attention_fwd_fp16>(
        "attention_fwd/cpu/amx_fp16", cpu::amx_fp16_attention_supports,
        plan_workspace<AttentionParams, cpu::amx::attention_fwd_fp16_workspace>)),
    invariant(cpu::packed_row<AttentionParams, cpu::Isa::kAmxFp16, cpu::amx::attention_fwd_fp16_packed>(
                  "attention_fwd/cpu/amx_fp16_packed", cpu::amx_fp16_attention_supports,
                  plan_workspace<AttentionParams, cpu::amx::attention_fwd_fp16_packed_workspace>),
              cpu::takes<AttentionParams, cpu::amx_fp16_attention_supports>),
    cpu::one_of_two_orders(cpu::fast_row<AttentionParams, cpu::Isa::kAmx, cpu::amx::attention_fwd>(
        "attention_fwd/cpu/amx", cpu::amx_attention_supports,
        plan_workspace<AttentionParams, cpu::amx::attention_fwd_workspace>)),
    invariant(cpu::packed_row<AttentionParams, cpu::Isa::kAmx, cpu::amx::attention_fwd_packed>(
                  "attention_fwd/cpu/amx_packed", cpu::amx_attention_supports,
                  plan_workspace<AttentionParams, cpu::amx::attention_fwd_packed_workspace>),
              cpu::takes<AttentionParams, cpu::amx_attention_supports>),
    cpu::one_of_two_orders(
        cpu::fast_row<AttentionParams, cpu::Isa::kAmx, cpu::attention_widened<cpu::amx::attention_fwd>>(
            "attention_fwd/cpu/amx_widened", cpu::widened_supports,
            plan_workspace<AttentionParams, cpu::widened_workspace<cpu::amx::attention_fwd_workspace>>)),
    invariant(cpu::packed_row<AttentionParams, cpu::Isa::kAmx, cpu::attention_widened<cpu::amx::attention_fwd_packed>>(
                  "attention_fwd/cpu/amx_widened_packed", cpu::widened_supports,
                  plan_workspace<AttentionParams, cpu::widened_workspace<cpu::amx::attention_fwd_packed_workspace>>),
              cpu::takes<AttentionParams, cpu::widened_supports>),
#endif
#if defined(FK_CPU_AVX512)
    cpu::one_of_two_orders(cpu::fast_row<AttentionParams, cpu::Isa::kAvx512, cpu::avx512::attention_fwd>(
        "attention_fwd/cpu/avx512", cpu::attention_supports,
        plan_workspace<AttentionParams, cpu::avx512::attention_fwd_workspace>)),
    cpu::packed_row<AttentionParams, cpu::Isa::kAvx512, cpu::avx512::attention_fwd_packed>(
        "attention_fwd/cpu/avx512_packed", cpu::attention_supports,
        plan_workspace<AttentionParams, cpu::avx512::attention_fwd_packed_workspace>),
    cpu::one_of_two_orders(
        cpu::fast_row<AttentionParams, cpu::Isa::kAvx512, cpu::attention_widened<cpu::avx512::attention_fwd>>(
            "attention_fwd/cpu/avx512_widened", cpu::widened_supports,
            plan_workspace<AttentionParams, cpu::widened_workspace<cpu::avx512::attention_fwd_workspace>>)),
    invariant(
        cpu::packed_row<AttentionParams, cpu::Isa::kAvx512, cpu::attention_widened<cpu::avx512::attention_fwd_packed>>(
            "attention_fwd/cpu/avx512_widened_packed", cpu::widened_supports,
            plan_workspace<AttentionParams, cpu::widened_workspace<cpu::avx512::attention_fwd_packed_workspace>>),
        cpu::takes<AttentionParams, cpu::widened_supports>),
#endif
#if defined(FK_CPU_AVX2)
    cpu::one_of_two_orders(cpu::fast_row<AttentionParams, cpu::Isa::kAvx2, cpu::avx2::attention_fwd>(
        "attention_fwd/cpu/avx2", cpu::attention_supports,
        plan_workspace<AttentionParams, cpu::avx2::attention_fwd_workspace>)),
    cpu::packed_row<AttentionParams, cpu::Isa::kAvx2, cpu::avx2::attention_fwd_packed>(
        "attention_fwd/cpu/avx2_packed", cpu::attention_supports,
        plan_workspace<AttentionParams, cpu::avx2::attention_fwd_packed_workspace>),
    cpu::one_of_two_orders(
        cpu::fast_row<AttentionParams, cpu::Isa::kAvx2, cpu::attention_widened<cpu::avx2::attention_fwd>>(
            "attention_fwd/cpu/avx2_widened", cpu::widened_supports,
            plan_workspace<AttentionParams, cpu::widened_workspace<cpu::avx2::attention_fwd_workspace>>)),
    invariant(
        cpu::packed_row<AttentionParams, cpu::Isa::kAvx2, cpu::attention_widened<cpu::avx2::attention_fwd_packed>>(
            "attention_fwd/cpu/avx2_widened_packed", cpu::widened_supports,
            plan_workspace<AttentionParams, cpu::widened_workspace<cpu::avx2::attention_fwd_packed_workspace>>),
        cpu::takes<AttentionParams, cpu::widened_supports>),
#endif
    scalar_row<AttentionParams, cpu_scalar::attention_fwd>("attention_fwd/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<AttentionBackwardParams> cpu_kernels<AttentionBackwardParams>() {
  static constexpr KernelEntry<AttentionBackwardParams> kRows[] = {
#if defined(FK_CPU_AVX512)
    cpu::fast_row<AttentionBackwardParams, cpu::Isa::kAvx512, cpu::avx512::attention_bwd>(
        "attention_bwd/cpu/avx512", cpu::takes_all<AttentionBackwardParams>,
        plan_workspace<AttentionBackwardParams, cpu::avx512::attention_bwd_workspace>),
#endif
#if defined(FK_CPU_AVX2)
    cpu::fast_row<AttentionBackwardParams, cpu::Isa::kAvx2, cpu::avx2::attention_bwd>(
        "attention_bwd/cpu/avx2", cpu::takes_all<AttentionBackwardParams>,
        plan_workspace<AttentionBackwardParams, cpu::avx2::attention_bwd_workspace>),
#endif
    scalar_row<AttentionBackwardParams, cpu_scalar::attention_bwd>("attention_bwd/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<MlaDecodeParams> cpu_kernels<MlaDecodeParams>() {
  static constexpr KernelEntry<MlaDecodeParams> kRows[] = {
#if defined(FK_CPU_AVX512)
    cpu::one_of_two_orders(cpu::fast_row<MlaDecodeParams, cpu::Isa::kAvx512, over_latent<cpu::avx512::attention_fwd>>(
        "attention_mla_decode/cpu/avx512", cpu::plain_latent_supports,
        plan_workspace<MlaDecodeParams, latent_bytes<cpu::avx512::attention_fwd_workspace>>)),
    invariant(cpu::packed_row<MlaDecodeParams, cpu::Isa::kAvx512, over_latent<cpu::avx512::attention_fwd_packed>>(
                  "attention_mla_decode/cpu/avx512_packed", cpu::plain_latent_supports,
                  plan_workspace<MlaDecodeParams, latent_bytes<cpu::avx512::attention_fwd_packed_workspace>>),
              cpu::takes<MlaDecodeParams, cpu::plain_latent_supports>),
    cpu::one_of_two_orders(
        cpu::fast_row<MlaDecodeParams, cpu::Isa::kAvx512, cpu::latent_widened<cpu::avx512::attention_fwd>>(
            "attention_mla_decode/cpu/avx512_widened", cpu::widened_latent_supports,
            plan_workspace<MlaDecodeParams, cpu::widened_latent_workspace<cpu::avx512::attention_fwd_workspace>>)),
    invariant(
        cpu::packed_row<MlaDecodeParams, cpu::Isa::kAvx512, cpu::latent_widened<cpu::avx512::attention_fwd_packed>>(
            "attention_mla_decode/cpu/avx512_widened_packed", cpu::widened_latent_supports,
            plan_workspace<MlaDecodeParams,
                           cpu::widened_latent_workspace<cpu::avx512::attention_fwd_packed_workspace>>),
        cpu::takes<MlaDecodeParams, cpu::widened_latent_supports>),
#endif
#if defined(FK_CPU_AVX2)
    cpu::one_of_two_orders(cpu::fast_row<MlaDecodeParams, cpu::Isa::kAvx2, over_latent<cpu::avx2::attention_fwd>>(
        "attention_mla_decode/cpu/avx2", cpu::plain_latent_supports,
        plan_workspace<MlaDecodeParams, latent_bytes<cpu::avx2::attention_fwd_workspace>>)),
    invariant(cpu::packed_row<MlaDecodeParams, cpu::Isa::kAvx2, over_latent<cpu::avx2::attention_fwd_packed>>(
                  "attention_mla_decode/cpu/avx2_packed", cpu::plain_latent_supports,
                  plan_workspace<MlaDecodeParams, latent_bytes<cpu::avx2::attention_fwd_packed_workspace>>),
              cpu::takes<MlaDecodeParams, cpu::plain_latent_supports>),
    cpu::one_of_two_orders(
        cpu::fast_row<MlaDecodeParams, cpu::Isa::kAvx2, cpu::latent_widened<cpu::avx2::attention_fwd>>(
            "attention_mla_decode/cpu/avx2_widened", cpu::widened_latent_supports,
            plan_workspace<MlaDecodeParams, cpu::widened_latent_workspace<cpu::avx2::attention_fwd_workspace>>)),
    invariant(
        cpu::packed_row<MlaDecodeParams, cpu::Isa::kAvx2, cpu::latent_widened<cpu::avx2::attention_fwd_packed>>(
            "attention_mla_decode/cpu/avx2_widened_packed", cpu::widened_latent_supports,
            plan_workspace<MlaDecodeParams, cpu::widened_latent_workspace<cpu::avx2::attention_fwd_packed_workspace>>),
        cpu::takes<MlaDecodeParams, cpu::widened_latent_supports>),
#endif
    scalar_row<MlaDecodeParams, cpu_scalar::attention_mla_decode>("attention_mla_decode/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<LatentAppendParams> cpu_kernels<LatentAppendParams>() {
  static constexpr KernelEntry<LatentAppendParams> kRows[] = {
      scalar_row<LatentAppendParams, cpu_scalar::latent_append>("latent_append/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<Float8AttentionParams> cpu_kernels<Float8AttentionParams>() {
  static constexpr KernelEntry<Float8AttentionParams> kRows[] = {
#if defined(FK_CPU_AVX512)
    cpu::fast_row<Float8AttentionParams, cpu::Isa::kAvx512, cpu::attention_fp8<cpu::avx512::attention_fwd_packed>>(
        "attention_fp8/cpu/avx512", cpu::takes_all<Float8AttentionParams>,
        plan_workspace<Float8AttentionParams,
                       cpu::attention_fp8_workspace<cpu::avx512::attention_fwd_packed_workspace>>),
#endif
#if defined(FK_CPU_AVX2)
    cpu::fast_row<Float8AttentionParams, cpu::Isa::kAvx2, cpu::attention_fp8<cpu::avx2::attention_fwd_packed>>(
        "attention_fp8/cpu/avx2", cpu::takes_all<Float8AttentionParams>,
        plan_workspace<Float8AttentionParams, cpu::attention_fp8_workspace<cpu::avx2::attention_fwd_packed_workspace>>),
#endif
    scalar_row<Float8AttentionParams, cpu_scalar::attention_fp8>("attention_fp8/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<MergeStatesParams> cpu_kernels<MergeStatesParams>() {
  static constexpr KernelEntry<MergeStatesParams> kRows[] = {
      scalar_row<MergeStatesParams, cpu_scalar::merge_states>("merge_states/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<RopeParams> cpu_kernels<RopeParams>() {
  static constexpr KernelEntry<RopeParams> kRows[] = {
      FK_FAST_ROWS(RopeParams, "rope", rope, rope_supports, nullptr)
          scalar_row<RopeParams, cpu_scalar::rope>("rope/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<LinearParams> cpu_kernels<LinearParams>() {
  static constexpr KernelEntry<LinearParams> kRows[] = {
#if defined(FK_CPU_AMX)
    invariant(
        cpu::fast_row<LinearParams, cpu::Isa::kAmxFp16, cpu::amx::linear_fp16>(
            "linear/cpu/amx_fp16", cpu::amx_fp16_linear_supports,
            plan_workspace<LinearParams, cpu::linear_workspace<cpu::Isa::kAmxFp16>>, cpu::amx_linear_cost_us<true>),
        cpu::takes<LinearParams, cpu::amx_fp16_linear_supports>),
    invariant(cpu::fast_row<LinearParams, cpu::Isa::kAmx, cpu::amx::linear_stream>(
                  "linear/cpu/amx_stream", cpu::amx_stream_supports,
                  plan_workspace<LinearParams, cpu::amx_stream_workspace>, cpu::amx_stream_cost_us),
              cpu::takes<LinearParams, cpu::amx_stream_supports>),
    cpu::fast_row<LinearParams, cpu::Isa::kAmx, cpu::amx::linear>(
        "linear/cpu/amx", cpu::takes_all<LinearParams>,
        plan_workspace<LinearParams, cpu::linear_workspace<cpu::Isa::kAmx>>, cpu::amx_linear_cost_us<false>),
#endif
#if defined(FK_CPU_AVX512)
    cpu::one_of_two_orders(cpu::fast_row<LinearParams, cpu::Isa::kAvx512, cpu::avx512::linear>(
        "linear/cpu/avx512", cpu::takes_all<LinearParams>,
        plan_workspace<LinearParams, cpu::linear_workspace<cpu::Isa::kAvx512>>)),
    cpu::packed_row<LinearParams, cpu::Isa::kAvx512, cpu::avx512::linear_packed>(
        "linear/cpu/avx512_packed", cpu::takes_all<LinearParams>,
        plan_workspace<LinearParams, cpu::linear_packed_workspace<cpu::Isa::kAvx512>>),
#endif
#if defined(FK_CPU_AVX2)
    cpu::one_of_two_orders(cpu::fast_row<LinearParams, cpu::Isa::kAvx2, cpu::avx2::linear>(
        "linear/cpu/avx2", cpu::takes_all<LinearParams>,
        plan_workspace<LinearParams, cpu::linear_workspace<cpu::Isa::kAvx2>>)),
    cpu::packed_row<LinearParams, cpu::Isa::kAvx2, cpu::avx2::linear_packed>(
        "linear/cpu/avx2_packed", cpu::takes_all<LinearParams>,
        plan_workspace<LinearParams, cpu::linear_packed_workspace<cpu::Isa::kAvx2>>),
#endif
    scalar_row<LinearParams, cpu_scalar::linear>("linear/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<LinearBackwardParams> cpu_kernels<LinearBackwardParams>() {
  static constexpr KernelEntry<LinearBackwardParams> kRows[] = {
#if defined(FK_CPU_AMX)
    invariant(cpu::fast_row<LinearBackwardParams, cpu::Isa::kAmxFp16, cpu::amx::linear_backward_fp16>(
                  "linear_bwd/cpu/amx_fp16", cpu::amx_fp16_linear_backward_supports,
                  plan_workspace<LinearBackwardParams, cpu::linear_backward_workspace<cpu::Isa::kAmxFp16>>),
              cpu::takes<LinearBackwardParams, cpu::amx_fp16_linear_backward_supports>),
    cpu::fast_row<LinearBackwardParams, cpu::Isa::kAmx, cpu::amx::linear_backward>(
        "linear_bwd/cpu/amx", cpu::takes_all<LinearBackwardParams>,
        plan_workspace<LinearBackwardParams, cpu::linear_backward_workspace<cpu::Isa::kAmx>>),
#endif
#if defined(FK_CPU_AVX512)
    cpu::fast_row<LinearBackwardParams, cpu::Isa::kAvx512, cpu::avx512::linear_backward>(
        "linear_bwd/cpu/avx512", cpu::takes_all<LinearBackwardParams>,
        plan_workspace<LinearBackwardParams, cpu::linear_backward_workspace<cpu::Isa::kAvx512>>),
#endif
#if defined(FK_CPU_AVX2)
    cpu::fast_row<LinearBackwardParams, cpu::Isa::kAvx2, cpu::avx2::linear_backward>(
        "linear_bwd/cpu/avx2", cpu::takes_all<LinearBackwardParams>,
        plan_workspace<LinearBackwardParams, cpu::linear_backward_workspace<cpu::Isa::kAvx2>>),
#endif
    scalar_row<LinearBackwardParams, cpu_scalar::linear_backward>(
        "linear_bwd/cpu/scalar", plan_workspace<LinearBackwardParams, cpu_scalar::linear_backward_workspace>),
  };
  return table(kRows);
}

template <>
KernelTable<FusedLinearParams> cpu_kernels<FusedLinearParams>() {
  static constexpr KernelEntry<FusedLinearParams> kRows[] = {
      {"fused_linear/cpu/composed", DeviceType::kCpu, 0, 0, kCpuAny, cpu::arithmetic::kComposed,
       accept_all<FusedLinearParams>, cpu::cost_us<FusedLinearParams, cpu::rates::kAvx2>, plan_composed_fused_linear,
       composed_fused_linear, nullptr, every_call<FusedLinearParams>},
      scalar_row<FusedLinearParams, cpu_scalar::fused_linear>("fused_linear/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<QkvAppendParams> cpu_kernels<QkvAppendParams>() {
  static constexpr KernelEntry<QkvAppendParams> kRows[] = {
      {"qkv_append/cpu/composed", DeviceType::kCpu, 0, 0, kCpuAny, cpu::arithmetic::kComposed,
       accept_all<QkvAppendParams>, cpu::cost_us<QkvAppendParams, cpu::rates::kAvx2>, plan_composed_qkv_append,
       composed_qkv_append, nullptr, every_call<QkvAppendParams>},
      scalar_row<QkvAppendParams, cpu_scalar::qkv_append>("qkv_append/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<QuantizedLinearParams> cpu_kernels<QuantizedLinearParams>() {
  static constexpr KernelEntry<QuantizedLinearParams> kRows[] = {
#if defined(FK_CPU_AMX)
    cpu::one_of_two_orders(cpu::fast_row<QuantizedLinearParams, cpu::Isa::kAmx, cpu::amx::quantized_linear_tiles>(
        "quantized_linear/cpu/amx", cpu::tiles_of_rows, plan_workspace<QuantizedLinearParams, cpu::amx_tiles_workspace>,
        cpu::amx_tiles_cost_us)),
#endif
#if defined(FK_CPU_AVX512_VNNI)
    invariant(cpu::fast_row<QuantizedLinearParams, cpu::Isa::kAvx512Vnni, cpu::avx512_vnni::quantized_linear_tiles>(
                  "quantized_linear/cpu/avx512_vnni", cpu::tiles_of_rows,
                  plan_workspace<QuantizedLinearParams, cpu::vnni_tiles_workspace>),
              cpu::takes<QuantizedLinearParams, cpu::tiles_of_rows>),
#endif
#if defined(FK_CPU_AVX512)
    cpu::one_of_two_orders(cpu::fast_row<QuantizedLinearParams, cpu::Isa::kAvx512, cpu::avx512::quantized_linear>(
        "quantized_linear/cpu/avx512", cpu::rows_of_blocks,
        plan_workspace<QuantizedLinearParams, cpu::quantized_linear_workspace<cpu::Isa::kAvx512>>)),
    cpu::packed_row<QuantizedLinearParams, cpu::Isa::kAvx512, cpu::avx512::quantized_linear_packed>(
        "quantized_linear/cpu/avx512_packed", cpu::rows_of_blocks,
        plan_workspace<QuantizedLinearParams, cpu::quantized_linear_packed_workspace<cpu::Isa::kAvx512>>),
#endif
#if defined(FK_CPU_AVX2)
    cpu::one_of_two_orders(cpu::fast_row<QuantizedLinearParams, cpu::Isa::kAvx2, cpu::avx2::quantized_linear>(
        "quantized_linear/cpu/avx2", cpu::rows_of_blocks,
        plan_workspace<QuantizedLinearParams, cpu::quantized_linear_workspace<cpu::Isa::kAvx2>>)),
    cpu::packed_row<QuantizedLinearParams, cpu::Isa::kAvx2, cpu::avx2::quantized_linear_packed>(
        "quantized_linear/cpu/avx2_packed", cpu::rows_of_blocks,
        plan_workspace<QuantizedLinearParams, cpu::quantized_linear_packed_workspace<cpu::Isa::kAvx2>>),
#endif
    scalar_row<QuantizedLinearParams, cpu_scalar::quantized_linear>("quantized_linear/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<LinearFp8Params> cpu_kernels<LinearFp8Params>() {
  static constexpr KernelEntry<LinearFp8Params> kRows[] = {
#if defined(FK_CPU_AVX512)
    cpu::fast_row<LinearFp8Params, cpu::Isa::kAvx512, cpu::avx512::linear_fp8>(
        "linear_fp8/cpu/avx512", cpu::takes_all<LinearFp8Params>,
        plan_workspace<LinearFp8Params, cpu::linear_fp8_workspace<cpu::Isa::kAvx512>>),
#endif
#if defined(FK_CPU_AVX2)
    cpu::fast_row<LinearFp8Params, cpu::Isa::kAvx2, cpu::avx2::linear_fp8>(
        "linear_fp8/cpu/avx2", cpu::takes_all<LinearFp8Params>,
        plan_workspace<LinearFp8Params, cpu::linear_fp8_workspace<cpu::Isa::kAvx2>>),
#endif
    scalar_row<LinearFp8Params, cpu_scalar::linear_fp8>("linear_fp8/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<QuantizeFp8Params> cpu_kernels<QuantizeFp8Params>() {
  static constexpr KernelEntry<QuantizeFp8Params> kRows[] = {
      scalar_row<QuantizeFp8Params, cpu_scalar::quantize_fp8_blocks>("quantize_fp8_blocks/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<AddParams> cpu_kernels<AddParams>() {
  static constexpr KernelEntry<AddParams> kRows[] = {
      FK_FAST_ROWS(AddParams, "add", add, add_supports, nullptr)
          scalar_row<AddParams, cpu_scalar::add>("add/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<SwigluParams> cpu_kernels<SwigluParams>() {
  static constexpr KernelEntry<SwigluParams> kRows[] = {
      FK_FAST_ROWS(SwigluParams, "swiglu", swiglu, swiglu_supports, nullptr)
          scalar_row<SwigluParams, cpu_scalar::swiglu>("swiglu/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<SwigluBackwardParams> cpu_kernels<SwigluBackwardParams>() {
  static constexpr KernelEntry<SwigluBackwardParams> kRows[] = {
      FK_FAST_ROWS(SwigluBackwardParams, "swiglu_bwd", swiglu_backward, swiglu_backward_supports, nullptr)
          scalar_row<SwigluBackwardParams, cpu_scalar::swiglu_backward>("swiglu_bwd/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<ReduceParams> cpu_kernels<ReduceParams>() {
  static constexpr KernelEntry<ReduceParams> kRows[] = {
      FK_FAST_ROWS(ReduceParams, "reduce", reduce, reduce_supports,
                   (plan_workspace<ReduceParams, cpu::reduce_workspace>))
          scalar_row<ReduceParams, cpu_scalar::reduce>("reduce/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<SoftmaxParams> cpu_kernels<SoftmaxParams>() {
  static constexpr KernelEntry<SoftmaxParams> kRows[] = {
      FK_FAST_ROWS(SoftmaxParams, "softmax", softmax, softmax_supports, nullptr)
          scalar_row<SoftmaxParams, cpu_scalar::softmax>("softmax/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<SoftmaxBackwardParams> cpu_kernels<SoftmaxBackwardParams>() {
  static constexpr KernelEntry<SoftmaxBackwardParams> kRows[] = {
      FK_FAST_ROWS(SoftmaxBackwardParams, "softmax_bwd", softmax_backward, softmax_backward_supports, nullptr)
          scalar_row<SoftmaxBackwardParams, cpu_scalar::softmax_backward>("softmax_bwd/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<NormParams> cpu_kernels<NormParams>() {
  static constexpr KernelEntry<NormParams> kRows[] = {
      FK_FAST_ROWS(NormParams, "norm", norm, takes_all<NormParams>, nullptr)
          scalar_row<NormParams, cpu_scalar::norm>("norm/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<NormBackwardParams> cpu_kernels<NormBackwardParams>() {
  static constexpr KernelEntry<NormBackwardParams> kRows[] = {
      FK_FAST_ROWS(NormBackwardParams, "norm_bwd", norm_backward, takes_all<NormBackwardParams>,
                   (plan_workspace<NormBackwardParams, cpu::norm_backward_workspace>))
          scalar_row<NormBackwardParams, cpu_scalar::norm_backward>("norm_bwd/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<SampleParams> cpu_kernels<SampleParams>() {
  static constexpr KernelEntry<SampleParams> kRows[] = {
      scalar_row<SampleParams, cpu_scalar::sample>("sample/cpu/scalar",
                                                   plan_workspace<SampleParams, cpu_scalar::sample_workspace>),
  };
  return table(kRows);
}

template <>
KernelTable<CrossEntropyParams> cpu_kernels<CrossEntropyParams>() {
  static constexpr KernelEntry<CrossEntropyParams> kRows[] = {
      FK_FAST_ROWS(CrossEntropyParams, "cross_entropy", cross_entropy, takes_all<CrossEntropyParams>,
                   (plan_workspace<CrossEntropyParams, cpu_scalar::cross_entropy_workspace>))
          scalar_row<CrossEntropyParams, cpu_scalar::cross_entropy>(
              "cross_entropy/cpu/scalar", plan_workspace<CrossEntropyParams, cpu_scalar::cross_entropy_workspace>),
  };
  return table(kRows);
}

template <>
KernelTable<CrossEntropyBackwardParams> cpu_kernels<CrossEntropyBackwardParams>() {
  static constexpr KernelEntry<CrossEntropyBackwardParams> kRows[] = {
      FK_FAST_ROWS(CrossEntropyBackwardParams, "cross_entropy_bwd", cross_entropy_backward,
                   takes_all<CrossEntropyBackwardParams>, nullptr)
          scalar_row<CrossEntropyBackwardParams, cpu_scalar::cross_entropy_backward>("cross_entropy_bwd/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<LinearCrossEntropyParams> cpu_kernels<LinearCrossEntropyParams>() {
  static constexpr KernelEntry<LinearCrossEntropyParams> kRows[] = {
      FK_FAST_ROWS(LinearCrossEntropyParams, "linear_cross_entropy", linear_cross_entropy,
                   takes_all<LinearCrossEntropyParams>, nullptr)
          scalar_row<LinearCrossEntropyParams, cpu_scalar::linear_cross_entropy>("linear_cross_entropy/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<LinearCrossEntropyBackwardParams> cpu_kernels<LinearCrossEntropyBackwardParams>() {
  static constexpr KernelEntry<LinearCrossEntropyBackwardParams> kRows[] = {
      FK_FAST_ROWS(LinearCrossEntropyBackwardParams, "linear_cross_entropy_bwd", linear_cross_entropy_backward,
                   takes_all<LinearCrossEntropyBackwardParams>, nullptr)
          scalar_row<LinearCrossEntropyBackwardParams, cpu_scalar::linear_cross_entropy_backward>(
              "linear_cross_entropy_bwd/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<KvAppendParams> cpu_kernels<KvAppendParams>() {
  static constexpr KernelEntry<KvAppendParams> kRows[] = {
      FK_FAST_ROWS(KvAppendParams, "kv_append", kv_append, kv_append_supports, nullptr)
          scalar_row<KvAppendParams, cpu_scalar::kv_append>("kv_append/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<KvReadParams> cpu_kernels<KvReadParams>() {
  static constexpr KernelEntry<KvReadParams> kRows[] = {
      scalar_row<KvReadParams, cpu_scalar::kv_read>("kv_read/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<KvCopyParams> cpu_kernels<KvCopyParams>() {
  static constexpr KernelEntry<KvCopyParams> kRows[] = {
      scalar_row<KvCopyParams, cpu_scalar::kv_copy_pages>("kv_copy_pages/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<PackMaskParams> cpu_kernels<PackMaskParams>() {
  static constexpr KernelEntry<PackMaskParams> kRows[] = {
      scalar_row<PackMaskParams, cpu_scalar::pack_mask>("pack_mask/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<FindBadPageParams> cpu_kernels<FindBadPageParams>() {
  static constexpr KernelEntry<FindBadPageParams> kRows[] = {
      scalar_row<FindBadPageParams, cpu_scalar::find_bad_page>("find_bad_page/cpu/scalar"),
  };
  return table(kRows);
}

template <>
KernelTable<DecodeStepParams> cpu_kernels<DecodeStepParams>() {
  static constexpr KernelEntry<DecodeStepParams> kRows[] = {
      {"decode_step/cpu/composed", DeviceType::kCpu, 0, 0, kCpuAny, cpu::arithmetic::kComposed, composed_step_supports,
       cpu::cost_us<DecodeStepParams, cpu::rates::kAvx2>, plan_composed_decode_step, composed_decode_step, nullptr,
       takes_composed_step},
      scalar_row<DecodeStepParams, cpu_scalar::decode_step>(
          "decode_step/cpu/scalar", plan_workspace<DecodeStepParams, cpu_scalar::decode_step_workspace>),
  };
  return table(kRows);
}

}  // namespace flashkernel
