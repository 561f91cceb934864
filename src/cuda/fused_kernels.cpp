// The CUDA backend's tables of ops that stand for several others, fused_linear, qkv_append and decode_step, as
// kernels.cpp has those of the others; and how their rows are made.
#include "cuda/decode_step/sm90a/plan.hpp"
#include "cuda/linear/fused/sm80/append.hpp"
#include "cuda/linear/fused/sm80/few_rows.hpp"
#include "cuda/rows.hpp"

namespace flashkernel {

using namespace cuda_rows;

namespace {

/// By the ops that they stand for: any call.
template <class Params>
Verdict accept_all(const Params&) {
  return Verdict::ok();
}

float composed_cost_us(const FusedLinearParams& p, const DeviceFacts& facts) {
  return cuda::linear_cost_us<rates::kFusedComposed, FusedLinearParams>(p, facts);
}
/// One kernel, outside of its range later than the ops one after the other.
float few_rows_cost_us(const FusedLinearParams& p, const DeviceFacts& facts) {
  const float us = cuda::linear_cost_us<rates::kFusedFewRowsSm80, FusedLinearParams>(p, facts);
  return cuda::sm80::is_fused_best(p) ? us : static_cast<float>(cuda::kOutsideItsRange * us);
}
template <float (*kCost)(const FusedLinearParams&, const DeviceFacts&)>
float append_cost_us(const QkvAppendParams& p, const DeviceFacts& facts) {
  return kCost(p.linear, facts);
}

template <DType kDtype>
constexpr KernelEntry<FusedLinearParams> few_rows(const char* name) {
  return row<FusedLinearParams>(name, kAmpere, arithmetic::kFusedSm80, cuda::sm80::fused_few_rows_supports<kDtype>,
                                few_rows_cost_us, cuda::sm80::plan_of_fused_few_rows, cuda::sm80::fused_few_rows);
}
template <DType kDtype>
constexpr KernelEntry<QkvAppendParams> append_few_rows(const char* name) {
  return row<QkvAppendParams>(name, kAmpere, arithmetic::kFusedSm80, cuda::sm80::append_few_rows_supports<kDtype>,
                              append_cost_us<few_rows_cost_us>, cuda::sm80::plan_of_append_few_rows,
                              cuda::sm80::append_few_rows);
}

/// A decode step, in one launch or in a launch a phase of the same lists.
template <DType kDtype, bool kChained>
constexpr KernelEntry<DecodeStepParams> one_launch(const char* name) {
  return row<DecodeStepParams>(name, kHopper, arithmetic::kDecodeStep, cuda::decode_step::supports<kDtype>,
                               cuda::cost_us < DecodeStepParams, kChained ? rates::kDecodeStep : rates::kDecodePhases >,
                               cuda::decode_step::plan, cuda::decode_step::launch<kDtype, kChained>);
}

}  // namespace

template <>
KernelTable<FusedLinearParams> cuda_kernels() {
  static constexpr KernelEntry<FusedLinearParams> rows[] = {
      few_rows<DType::kFloat16>("fused_linear/cuda/sm80/f16/few_rows"),
      few_rows<DType::kBFloat16>("fused_linear/cuda/sm80/bf16/few_rows"),
      invariant(row<FusedLinearParams>("fused_linear/cuda/generic", kEvery, arithmetic::kComposed,
                                       accept_all<FusedLinearParams>, composed_cost_us, plan_composed_fused_linear,
                                       composed_fused_linear))};
  return table(rows);
}

template <>
KernelTable<QkvAppendParams> cuda_kernels() {
  static constexpr KernelEntry<QkvAppendParams> rows[] = {
      append_few_rows<DType::kFloat16>("qkv_append/cuda/sm80/f16/few_rows"),
      append_few_rows<DType::kBFloat16>("qkv_append/cuda/sm80/bf16/few_rows"),
      invariant(row<QkvAppendParams>("qkv_append/cuda/generic", kEvery, arithmetic::kComposed,
                                     accept_all<QkvAppendParams>, append_cost_us<composed_cost_us>,
                                     plan_composed_qkv_append, composed_qkv_append))};
  return table(rows);
}

template <>
KernelTable<DecodeStepParams> cuda_kernels() {
#if FK_WITH_SM90A
  static constexpr KernelEntry<DecodeStepParams> rows[] = {
      one_launch<DType::kFloat16, true>("decode_step/cuda/sm90a/f16/persistent"),
      one_launch<DType::kBFloat16, true>("decode_step/cuda/sm90a/bf16/persistent"),
      one_launch<DType::kFloat16, false>("decode_step/cuda/sm90a/f16/phases"),
      one_launch<DType::kBFloat16, false>("decode_step/cuda/sm90a/bf16/phases")};
  return table(rows);
#else
  return {};
#endif
}

}  // namespace flashkernel
