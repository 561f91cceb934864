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
#else
#define FK_FAST_ROWS(id, function, supports, workspace)
#endif
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
template <class Params>
constexpr KernelEntry<Params> scalar_row(const char* name, void (*launch)(const Params&, void*, Stream),
                                         std::size_t (*workspace_bytes)(const Params&) = nullptr) {
  return {name, DeviceType::kCpu, 0, 0, 0, 0, accept_all<Params>, workspace_bytes, launch};
}

}  // namespace

template <>
KernelTable<AttentionParams> cpu_kernels<AttentionParams>() {
  static constexpr KernelEntry<AttentionParams> kRows[] = {
#if defined(FK_CPU_AMX)
    cpu::fast_row("attention_fwd/cpu/amx_fp16", cpu::Isa::kAmxFp16, cpu::amx::attention_fwd_fp16,
                  cpu::amx_fp16_attention_supports, cpu::amx::attention_fwd_fp16_workspace),
    cpu::fast_row("attention_fwd/cpu/amx", cpu::Isa::kAmx, cpu::amx::attention_fwd, cpu::amx_attention_supports,
                  cpu::amx::attention_fwd_workspace),
#endif
#if defined(FK_CPU_AVX512)
    cpu::fast_row("attention_fwd/cpu/avx512", cpu::Isa::kAvx512, cpu::avx512::attention_fwd,
                  cpu::takes_all<AttentionParams>, cpu::avx512::attention_fwd_workspace),
#endif
#if defined(FK_CPU_AVX2)
    cpu::fast_row("attention_fwd/cpu/avx2", cpu::Isa::kAvx2, cpu::avx2::attention_fwd, cpu::takes_all<AttentionParams>,
                  cpu::avx2::attention_fwd_workspace),
#endif
    scalar_row<AttentionParams>("attention_fwd/cpu/scalar", cpu_scalar::attention_fwd),
  };
  return table(kRows);
}

template <>
KernelTable<AttentionBackwardParams> cpu_kernels<AttentionBackwardParams>() {
  static constexpr KernelEntry<AttentionBackwardParams> kRows[] = {
#if defined(FK_CPU_AVX512)
    cpu::fast_row("attention_bwd/cpu/avx512", cpu::Isa::kAvx512, cpu::avx512::attention_bwd,
                  cpu::takes_all<AttentionBackwardParams>, cpu::avx512::attention_bwd_workspace),
#endif
#if defined(FK_CPU_AVX2)
    cpu::fast_row("attention_bwd/cpu/avx2", cpu::Isa::kAvx2, cpu::avx2::attention_bwd,
                  cpu::takes_all<AttentionBackwardParams>, cpu::avx2::attention_bwd_workspace),
#endif
    scalar_row<AttentionBackwardParams>("attention_bwd/cpu/scalar", cpu_scalar::attention_bwd),
  };
  return table(kRows);
}

template <>
KernelTable<MergeStatesParams> cpu_kernels<MergeStatesParams>() {
  static constexpr KernelEntry<MergeStatesParams> kRows[] = {
      scalar_row<MergeStatesParams>("merge_states/cpu/scalar", cpu_scalar::merge_states),
  };
  return table(kRows);
}

template <>
KernelTable<RopeParams> cpu_kernels<RopeParams>() {
  static constexpr KernelEntry<RopeParams> kRows[] = {
      FK_FAST_ROWS("rope", rope, rope_supports, nullptr) scalar_row<RopeParams>("rope/cpu/scalar", cpu_scalar::rope),
  };
  return table(kRows);
}

template <>
KernelTable<LinearParams> cpu_kernels<LinearParams>() {
  static constexpr KernelEntry<LinearParams> kRows[] = {
#if defined(FK_CPU_AMX)
    cpu::fast_row("linear/cpu/amx_fp16", cpu::Isa::kAmxFp16, cpu::amx::linear_fp16, cpu::amx_fp16_linear_supports,
                  cpu::linear_workspace<cpu::Isa::kAmxFp16>),
    cpu::fast_row("linear/cpu/amx", cpu::Isa::kAmx, cpu::amx::linear, cpu::amx_linear_supports,
                  cpu::linear_workspace<cpu::Isa::kAmx>),
#endif
#if defined(FK_CPU_AVX512)
    cpu::fast_row("linear/cpu/avx512", cpu::Isa::kAvx512, cpu::avx512::linear, cpu::takes_all<LinearParams>,
                  cpu::linear_workspace<cpu::Isa::kAvx512>),
#endif
#if defined(FK_CPU_AVX2)
    cpu::fast_row("linear/cpu/avx2", cpu::Isa::kAvx2, cpu::avx2::linear, cpu::takes_all<LinearParams>,
                  cpu::linear_workspace<cpu::Isa::kAvx2>),
#endif
    scalar_row<LinearParams>("linear/cpu/scalar", cpu_scalar::linear),
  };
  return table(kRows);
}

template <>
KernelTable<LinearBackwardParams> cpu_kernels<LinearBackwardParams>() {
  static constexpr KernelEntry<LinearBackwardParams> kRows[] = {
#if defined(FK_CPU_AMX)
    cpu::fast_row("linear_bwd/cpu/amx_fp16", cpu::Isa::kAmxFp16, cpu::amx::linear_backward_fp16,
                  cpu::amx_fp16_linear_backward_supports, cpu::linear_backward_workspace<cpu::Isa::kAmxFp16>),
    cpu::fast_row("linear_bwd/cpu/amx", cpu::Isa::kAmx, cpu::amx::linear_backward, cpu::takes_all<LinearBackwardParams>,
                  cpu::linear_backward_workspace<cpu::Isa::kAmx>),
#endif
#if defined(FK_CPU_AVX512)
    cpu::fast_row("linear_bwd/cpu/avx512", cpu::Isa::kAvx512, cpu::avx512::linear_backward,
                  cpu::takes_all<LinearBackwardParams>, cpu::linear_backward_workspace<cpu::Isa::kAvx512>),
#endif
#if defined(FK_CPU_AVX2)
    cpu::fast_row("linear_bwd/cpu/avx2", cpu::Isa::kAvx2, cpu::avx2::linear_backward,
                  cpu::takes_all<LinearBackwardParams>, cpu::linear_backward_workspace<cpu::Isa::kAvx2>),
#endif
    scalar_row<LinearBackwardParams>("linear_bwd/cpu/scalar", cpu_scalar::linear_backward,
                                     cpu_scalar::linear_backward_workspace),
  };
  return table(kRows);
}

template <>
KernelTable<AddParams> cpu_kernels<AddParams>() {
  static constexpr KernelEntry<AddParams> kRows[] = {
      FK_FAST_ROWS("add", add, add_supports, nullptr) scalar_row<AddParams>("add/cpu/scalar", cpu_scalar::add),
  };
  return table(kRows);
}

template <>
KernelTable<SwigluParams> cpu_kernels<SwigluParams>() {
  static constexpr KernelEntry<SwigluParams> kRows[] = {
      FK_FAST_ROWS("swiglu", swiglu, swiglu_supports, nullptr)
          scalar_row<SwigluParams>("swiglu/cpu/scalar", cpu_scalar::swiglu),
  };
  return table(kRows);
}

template <>
KernelTable<SwigluBackwardParams> cpu_kernels<SwigluBackwardParams>() {
  static constexpr KernelEntry<SwigluBackwardParams> kRows[] = {
      FK_FAST_ROWS("swiglu_bwd", swiglu_backward, swiglu_backward_supports, nullptr)
          scalar_row<SwigluBackwardParams>("swiglu_bwd/cpu/scalar", cpu_scalar::swiglu_backward),
  };
  return table(kRows);
}

template <>
KernelTable<ReduceParams> cpu_kernels<ReduceParams>() {
  static constexpr KernelEntry<ReduceParams> kRows[] = {
      FK_FAST_ROWS("reduce", reduce, reduce_supports, cpu::reduce_workspace)
          scalar_row<ReduceParams>("reduce/cpu/scalar", cpu_scalar::reduce),
  };
  return table(kRows);
}

template <>
KernelTable<SoftmaxParams> cpu_kernels<SoftmaxParams>() {
  static constexpr KernelEntry<SoftmaxParams> kRows[] = {
      FK_FAST_ROWS("softmax", softmax, softmax_supports, nullptr)
          scalar_row<SoftmaxParams>("softmax/cpu/scalar", cpu_scalar::softmax),
  };
  return table(kRows);
}

template <>
KernelTable<SoftmaxBackwardParams> cpu_kernels<SoftmaxBackwardParams>() {
  static constexpr KernelEntry<SoftmaxBackwardParams> kRows[] = {
      FK_FAST_ROWS("softmax_bwd", softmax_backward, softmax_backward_supports, nullptr)
          scalar_row<SoftmaxBackwardParams>("softmax_bwd/cpu/scalar", cpu_scalar::softmax_backward),
  };
  return table(kRows);
}

template <>
KernelTable<NormParams> cpu_kernels<NormParams>() {
  static constexpr KernelEntry<NormParams> kRows[] = {
      FK_FAST_ROWS("norm", norm, takes_all<NormParams>, nullptr)
          scalar_row<NormParams>("norm/cpu/scalar", cpu_scalar::norm),
  };
  return table(kRows);
}

template <>
KernelTable<NormBackwardParams> cpu_kernels<NormBackwardParams>() {
  static constexpr KernelEntry<NormBackwardParams> kRows[] = {
      FK_FAST_ROWS("norm_bwd", norm_backward, takes_all<NormBackwardParams>, cpu::norm_backward_workspace)
          scalar_row<NormBackwardParams>("norm_bwd/cpu/scalar", cpu_scalar::norm_backward),
  };
  return table(kRows);
}

template <>
KernelTable<CrossEntropyParams> cpu_kernels<CrossEntropyParams>() {
  static constexpr KernelEntry<CrossEntropyParams> kRows[] = {
      FK_FAST_ROWS("cross_entropy", cross_entropy, takes_all<CrossEntropyParams>, cpu_scalar::cross_entropy_workspace)
          scalar_row<CrossEntropyParams>("cross_entropy/cpu/scalar", cpu_scalar::cross_entropy,
                                         cpu_scalar::cross_entropy_workspace),
  };
  return table(kRows);
}

template <>
KernelTable<CrossEntropyBackwardParams> cpu_kernels<CrossEntropyBackwardParams>() {
  static constexpr KernelEntry<CrossEntropyBackwardParams> kRows[] = {
      FK_FAST_ROWS("cross_entropy_bwd", cross_entropy_backward, takes_all<CrossEntropyBackwardParams>, nullptr)
          scalar_row<CrossEntropyBackwardParams>("cross_entropy_bwd/cpu/scalar", cpu_scalar::cross_entropy_backward),
  };
  return table(kRows);
}

template <>
KernelTable<KvAppendParams> cpu_kernels<KvAppendParams>() {
  static constexpr KernelEntry<KvAppendParams> kRows[] = {
      FK_FAST_ROWS("kv_append", kv_append, kv_append_supports, nullptr)
          scalar_row<KvAppendParams>("kv_append/cpu/scalar", cpu_scalar::kv_append),
  };
  return table(kRows);
}

template <>
KernelTable<KvReadParams> cpu_kernels<KvReadParams>() {
  static constexpr KernelEntry<KvReadParams> kRows[] = {
      scalar_row<KvReadParams>("kv_read/cpu/scalar", cpu_scalar::kv_read),
  };
  return table(kRows);
}

template <>
KernelTable<KvCopyParams> cpu_kernels<KvCopyParams>() {
  static constexpr KernelEntry<KvCopyParams> kRows[] = {
      scalar_row<KvCopyParams>("kv_copy_pages/cpu/scalar", cpu_scalar::kv_copy_pages),
  };
  return table(kRows);
}

template <>
KernelTable<FindBadPageParams> cpu_kernels<FindBadPageParams>() {
  static constexpr KernelEntry<FindBadPageParams> kRows[] = {
      scalar_row<FindBadPageParams>("find_bad_page/cpu/scalar", cpu_scalar::find_bad_page),
  };
  return table(kRows);
}

}  // namespace flashkernel
