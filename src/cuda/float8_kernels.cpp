// The CUDA backend's table of attention_fp8, as kernels.cpp has those of other ops; and how its rows are made.
#include "cuda/attention/forward/sm90a/float8.hpp"
#include "cuda/attention/widened/float8.hpp"
#include "cuda/rows.hpp"

namespace flashkernel {

using namespace cuda_rows;

namespace {

/// 8-bit queries, keys and values on tensor cores of 8 bits.
template <const cuda::Rates& kRates>
float float8_cost_us(const Float8AttentionParams& p, const DeviceFacts& facts) {
  return static_cast<float>(cuda::attention_cost_us<kRates>(p.attention, facts) + cuda::kLaunchUs);
}
template <DType kOut, int kDim>
float hopper_float8_cost_us(const Float8AttentionParams& p, const DeviceFacts& facts) {
  const float us = float8_cost_us<rates::kForwardFloat8Sm90a>(p, facts);
  const bool fits =
      cuda::is_smallest(cuda::kFloat8HeadDims, {kDim, kDim}, p.attention.head_dim, p.attention.head_dim_v);
  return fits ? us : static_cast<float>(cuda::kOutsideItsRange * us);
}
template <DType kOut, int kDim>
constexpr KernelEntry<Float8AttentionParams> hopper_float8(const char* name) {
  return plain<Float8AttentionParams, cuda::sm90a::attention_fp8<kOut, kDim>,
               cuda::sm90a::attention_fp8_workspace<kDim>>(
      name, kHopper, arithmetic::of_head_dims<arithmetic::kTiledSm90a, kDim, kDim>,
      cuda::sm90a::attention_fp8_supports<kOut, kDim>, hopper_float8_cost_us<kOut, kDim>);
}
/// 8-bit queries, keys and values: they are widened for a kernel of the output's dtype.
template <DType kDtype, int kQkDim, int kVDim, const cuda::Rates& kRates, Verdict (*kSupports)(const AttentionParams&),
          void (*kLaunch)(const AttentionParams&, void*, Stream)>
constexpr KernelEntry<Float8AttentionParams> float8_widened(const char* name, Devices devices, const char* arithmetic) {
  return plain<Float8AttentionParams, cuda::attention_fp8_widened<kLaunch>, cuda::attention_fp8_widened_workspace>(
      name, devices, arithmetic, cuda::attention_fp8_widened_supports<kDtype, kSupports>,
      cuda::attention_fp8_widened_cost_us<cuda::cost_us_of_head_dims<AttentionParams, cuda::attention_cost_us<kRates>,
                                                                     cuda::kFloat8WidenedHeadDims, kQkDim, kVDim>>);
}
template <DType kDtype, int kQkDim, int kVDim = kQkDim>
constexpr KernelEntry<Float8AttentionParams> hopper_float8_widened(const char* name) {
  return float8_widened<kDtype, kQkDim, kVDim, rates::kForwardSm90a,
                        cuda::sm90a::attention_fwd_supports<kDtype, kQkDim, kVDim>,
                        hopper_forward_in_order<kDtype, kQkDim, kVDim>>(
      name, kHopper, arithmetic::of_head_dims<arithmetic::kWidenedSm90a, kQkDim, kVDim>);
}
template <DType kDtype, int kQkDim, int kVDim = kQkDim>
constexpr KernelEntry<Float8AttentionParams> ampere_float8_widened(const char* name) {
  return float8_widened<kDtype, kQkDim, kVDim, rates::kForwardSm80,
                        cuda::sm80::attention_fwd_supports<kDtype, kQkDim, kVDim>,
                        cuda::sm80::attention_fwd<kDtype, kQkDim, kVDim>>(
      name, kAmpere, arithmetic::of_head_dims<arithmetic::kWidenedSm80, kQkDim, kVDim>);
}
template <int kQkDim, int kVDim = kQkDim>
constexpr KernelEntry<Float8AttentionParams> turing_float8_widened(const char* name) {
  return float8_widened<DType::kFloat16, kQkDim, kVDim, rates::kForwardSm75,
                        cuda::sm75::attention_fwd_supports<DType::kFloat16, kQkDim, kVDim>,
                        cuda::sm75::attention_fwd<DType::kFloat16, kQkDim, kVDim>>(
      name, kEvery, arithmetic::of_head_dims<arithmetic::kWidenedSm75, kQkDim, kVDim>);
}

}  // namespace

template <>
KernelTable<Float8AttentionParams> cuda_kernels() {
  static constexpr KernelEntry<Float8AttentionParams> rows[] = {
#if FK_WITH_SM90A
    hopper_float8<DType::kFloat16, 64>("attention_fp8/cuda/sm90a/f16/d64"),
    hopper_float8<DType::kBFloat16, 64>("attention_fp8/cuda/sm90a/bf16/d64"),
    hopper_float8<DType::kFloat16, 128>("attention_fp8/cuda/sm90a/f16/d128"),
    hopper_float8<DType::kBFloat16, 128>("attention_fp8/cuda/sm90a/bf16/d128"),
    hopper_float8<DType::kFloat16, 256>("attention_fp8/cuda/sm90a/f16/d256"),
    hopper_float8<DType::kBFloat16, 256>("attention_fp8/cuda/sm90a/bf16/d256"),
    hopper_float8_widened<DType::kFloat16, 64>("attention_fp8/cuda/sm90a/widened/f16/d64"),
    hopper_float8_widened<DType::kBFloat16, 64>("attention_fp8/cuda/sm90a/widened/bf16/d64"),
    hopper_float8_widened<DType::kFloat16, 128>("attention_fp8/cuda/sm90a/widened/f16/d128"),
    hopper_float8_widened<DType::kBFloat16, 128>("attention_fp8/cuda/sm90a/widened/bf16/d128"),
    hopper_float8_widened<DType::kFloat16, 256>("attention_fp8/cuda/sm90a/widened/f16/d256"),
    hopper_float8_widened<DType::kBFloat16, 256>("attention_fp8/cuda/sm90a/widened/bf16/d256"),
#endif
    ampere_float8_widened<DType::kFloat16, 64>("attention_fp8/cuda/sm80/widened/f16/d64"),
    ampere_float8_widened<DType::kBFloat16, 64>("attention_fp8/cuda/sm80/widened/bf16/d64"),
    ampere_float8_widened<DType::kFloat16, 128>("attention_fp8/cuda/sm80/widened/f16/d128"),
    ampere_float8_widened<DType::kBFloat16, 128>("attention_fp8/cuda/sm80/widened/bf16/d128"),
    ampere_float8_widened<DType::kFloat16, 256>("attention_fp8/cuda/sm80/widened/f16/d256"),
    ampere_float8_widened<DType::kBFloat16, 256>("attention_fp8/cuda/sm80/widened/bf16/d256"),
#if FK_WITH_SM75
    turing_float8_widened<64>("attention_fp8/cuda/sm75/widened/f16/d64"),
    turing_float8_widened<128>("attention_fp8/cuda/sm75/widened/f16/d128"),
    turing_float8_widened<256>("attention_fp8/cuda/sm75/widened/f16/d256"),
#endif
    invariant(plain<Float8AttentionParams, cuda::attention_fp8_widened<cuda::attention_fwd_tiled>,
                    cuda::attention_fp8_widened_workspace>(
        "attention_fp8/cuda/generic", kEvery, arithmetic::kGeneric,
        cuda::attention_fp8_widened_supports<DType::kFloat32, cuda::attention_fwd_tiled_supports>,
        cuda::attention_fp8_widened_cost_us<cuda::attention_cost_us<rates::kTiled>>)),
  };
  return table(rows);
}

}  // namespace flashkernel
