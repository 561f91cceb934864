// The CUDA backend's table: one row per kernel, one section per op. cc_min..cc_max are the devices a row serves.
#include "core/cpu_features.hpp"
#include "cuda/attention/generic.hpp"
#include "cuda/elementwise/elementwise.hpp"
#include "cuda/kv/kv.hpp"
#include "cuda/linear/generic/linear.hpp"
#include "cuda/linear/gradient.hpp"
#include "cuda/loss/cross_entropy.hpp"
#include "cuda/norm/norm.hpp"
#include "cuda/reduce/reduce.hpp"
#include "cuda/rope/rope.hpp"
#include "cuda/softmax/softmax.hpp"
#include "cuda/attention/backward/sm75/variant.hpp"
#include "cuda/attention/forward/sm75/variant.hpp"
#include "cuda/linear/tiles/sm75/linear.hpp"
#include "cuda/attention/backward/sm80/variant.hpp"
#include "cuda/attention/backward/sm80/variant_f32.hpp"
#include "cuda/attention/decode/sm80/variant.hpp"
#include "cuda/attention/forward/sm80/variant.hpp"
#include "cuda/linear/tiles/sm80/linear.hpp"
#include "cuda/attention/backward/sm90a/variant.hpp"
#include "cuda/attention/decode/sm90a/variant.hpp"
#include "cuda/attention/forward/sm90a/variant.hpp"
#include "cuda/linear/tiles/sm90a/linear.hpp"
#include "cuda/softmax/sm90a/long_rows.hpp"
#include "cuda/norm/sm90a/norm_bwd_rows.hpp"
#include "cuda/norm/sm90a/norm_long_rows.hpp"

namespace flashkernel {
namespace {

constexpr int kOldest = 75;   // T4
constexpr int kNewest = 999;  // what comes next runs from PTX
constexpr int kGeneric = 10;  // priority of the generic rows; tensor-core rows stand above
constexpr int kTuring = 15;   // mma.sync m16n8k8
constexpr int kAmpere = 20;   // mma.sync m16n8k16
constexpr int kHopper = 30;   // wgmma and TMA, on 9.0 alone
constexpr int kDecode = 40;   // split-KV: for a few queries it is ahead of any kernel that walks the keys in one block

template <class Params, std::size_t N>
constexpr KernelTable<Params> table(const KernelEntry<Params> (&rows)[N]) {
  return {rows, N};
}

// A row of each arch's usual devices and priority.
template <class Params>
constexpr KernelEntry<Params> generic(const char* name, Verdict (*supports)(const Params&),
                                      std::size_t (*workspace)(const Params&),
                                      void (*launch)(const Params&, void*, Stream), int priority = kGeneric) {
  return {name, DeviceType::kCuda, kOldest, kNewest, kCpuAny, priority, supports, workspace, launch};
}
template <class Params>
constexpr KernelEntry<Params> turing(const char* name, Verdict (*supports)(const Params&),
                                     std::size_t (*workspace)(const Params&),
                                     void (*launch)(const Params&, void*, Stream)) {
  return {name, DeviceType::kCuda, kOldest, kNewest, kCpuAny, kTuring, supports, workspace, launch};
}
template <class Params>
constexpr KernelEntry<Params> ampere(const char* name, Verdict (*supports)(const Params&),
                                     std::size_t (*workspace)(const Params&),
                                     void (*launch)(const Params&, void*, Stream), int priority = kAmpere) {
  return {name, DeviceType::kCuda, 80, kNewest, kCpuAny, priority, supports, workspace, launch};
}
template <class Params>
constexpr KernelEntry<Params> hopper(const char* name, Verdict (*supports)(const Params&),
                                     std::size_t (*workspace)(const Params&),
                                     void (*launch)(const Params&, void*, Stream), int priority = kHopper) {
  return {name, DeviceType::kCuda, 90, 90, kCpuAny, priority, supports, workspace, launch};
}

// The workspace of an arch's backward kernels: their own, then that of the search for large rows (calls with a bias).
template <std::size_t (*own)(const AttentionBackwardParams&)>
std::size_t with_large_rows(const AttentionBackwardParams& p) {
  return own(p) + cuda::large_rows_workspace(p);
}
// The call with an LSE in which large rows say so; the search's answer stands behind the kernel's own workspace.
AttentionBackwardParams without_large_rows(const AttentionBackwardParams& p, const cuda::LargeRows& large) {
  AttentionBackwardParams others = p;
  if (!large.lse) return others;
  AttentionParams& f = others.forward;
  f.lse = const_cast<float*>(large.lse);  // read only: the forward pass's parameters serve both passes
  f.stride_lse_batch = f.heads_q * f.seq_q;
  f.stride_lse_head = f.seq_q;
  f.stride_lse_token = 1;
  return others;
}

// A backward kernel that leaves the gradients of sinks and bias to the generic one, and all of them where a large row
// has some; they use the workspace one after the other. `pitch`: of a head in -D, with which the workspace begins.
template <std::size_t (*own)(const AttentionBackwardParams&), std::int64_t (*pitch)(const AttentionParams&),
          void (*kernel)(const AttentionBackwardParams&, void*, Stream)>
void after_sinks(const AttentionBackwardParams& p, void* workspace, Stream stream) {
  if (p.grad_sinks || p.grad_bias) {
    AttentionBackwardParams rest = p;
    rest.grad_q = rest.grad_k = rest.grad_v = nullptr;
    cuda::attention_bwd(rest, workspace, stream);
  }
  if (!p.grad_q && !p.grad_k && !p.grad_v) return;
  const cuda::LargeRows large = cuda::find_large_rows(p, static_cast<char*>(workspace) + own(p), false, stream);
  kernel(without_large_rows(p, large), workspace, stream);
  if (!large.found) return;
  AttentionBackwardParams again = p;
  again.grad_bias = nullptr;  // it is right already
  cuda::attention_bwd_repair(again, static_cast<const float*>(workspace), pitch(p.forward), large.found,
                             large.num_found, large.rest, stream);
}
// Unused where a build has no code for 7.5.
[[maybe_unused]] std::int64_t turing_pitch(const AttentionParams& f) { return cuda::sm75::BackwardWorkspace(f).pitch; }
std::int64_t dense_pitch(const AttentionParams& f) { return f.seq_q; }

// The sinks' gradient by the generic kernel, then an arch's kernels, then the generic ones again where those have found
// a gradient that is not finite (a large row's never is). Workspace: the arch's layout, which begins with -D.
template <class Workspace, int kDim, void (*kernel)(const AttentionBackwardParams&, void*, Stream)>
void with_repair(const AttentionBackwardParams& p, void* workspace, Stream stream) {
  if (p.grad_sinks) {
    AttentionBackwardParams rest = p;
    rest.grad_q = rest.grad_k = rest.grad_v = rest.grad_bias = nullptr;
    cuda::attention_bwd(rest, workspace, stream);
  }
  if (!p.grad_q && !p.grad_k && !p.grad_v && !p.grad_bias) return;
  char* const bytes = static_cast<char*>(workspace);
  const Workspace layout(p, kDim);
  const cuda::LargeRows large = cuda::find_large_rows(p, bytes + layout.bytes, true, stream);
  kernel(without_large_rows(p, large), workspace, stream);
  cuda::attention_bwd_repair(p, reinterpret_cast<const float*>(bytes), p.forward.seq_q,
                             reinterpret_cast<const int*>(bytes + layout.not_finite), 1, large.rest, stream);
}

// Rows of attention's instances.
template <DType kDtype, int kDim>
constexpr KernelEntry<AttentionParams> hopper_forward(const char* name) {
  return hopper<AttentionParams>(name, cuda::sm90a::attention_fwd_supports<kDtype, kDim>, nullptr,
                                 cuda::sm90a::attention_fwd<kDtype, kDim>);
}
template <DType kDtype, int kDim>
constexpr KernelEntry<AttentionParams> ampere_forward(const char* name) {
  return ampere<AttentionParams>(name, cuda::sm80::attention_fwd_supports<kDtype, kDim>, nullptr,
                                 cuda::sm80::attention_fwd<kDtype, kDim>);
}
template <int kDim>
constexpr KernelEntry<AttentionParams> ampere_forward_f32(const char* name) {
  return ampere<AttentionParams>(name, cuda::sm80::attention_fwd_supports<DType::kFloat32, kDim>, nullptr,
                                 cuda::sm80::attention_fwd_f32<kDim>);
}
template <DType kDtype, int kDim>
constexpr KernelEntry<AttentionParams> turing_forward(const char* name) {
  return turing<AttentionParams>(name, cuda::sm75::attention_fwd_supports<kDtype, kDim>, nullptr,
                                 cuda::sm75::attention_fwd<kDtype, kDim>);
}
template <DType kDtype, int kDim>
constexpr KernelEntry<AttentionParams> ampere_decode(const char* name) {
  return ampere<AttentionParams>(name, cuda::sm80::attention_decode_supports<kDtype, kDim>,
                                 cuda::sm80::attention_decode_workspace<kDim>,
                                 cuda::sm80::attention_decode<kDtype, kDim>, kDecode + 1);
}
template <DType kDtype, int kDim>
constexpr KernelEntry<AttentionParams> ampere_decode_quantized(const char* name) {
  return ampere<AttentionParams>(name, cuda::sm80::attention_decode_quantized_supports<kDtype, kDim>,
                                 cuda::sm80::attention_decode_quantized_workspace<kDim>,
                                 cuda::sm80::attention_decode_quantized<kDtype, kDim>, kDecode + 1);
}
template <DType kDtype, int kDim>
constexpr KernelEntry<AttentionParams> hopper_decode(const char* name) {
  return hopper<AttentionParams>(name, cuda::sm90a::attention_decode_supports<kDtype, kDim>,
                                 cuda::sm90a::attention_decode_workspace<kDim>,
                                 cuda::sm90a::attention_decode<kDtype, kDim>, kDecode + 2);
}
template <DType kDtype, int kDim>
constexpr KernelEntry<AttentionBackwardParams> hopper_backward(const char* name) {
  return hopper<AttentionBackwardParams>(
      name, cuda::sm90a::attention_bwd_supports<kDtype, kDim>, cuda::sm90a::attention_bwd_workspace<kDim>,
      with_repair<cuda::sm90a::BackwardWorkspace, kDim, cuda::sm90a::attention_bwd<kDtype, kDim>>);
}
template <DType kDtype, int kDim>
constexpr KernelEntry<AttentionBackwardParams> ampere_backward(const char* name) {
  return ampere<AttentionBackwardParams>(
      name, cuda::sm80::attention_bwd_supports<kDtype, kDim>,
      with_large_rows<cuda::sm80::attention_bwd_workspace<kDim>>,
      with_repair<cuda::sm80::BackwardWorkspace, kDim, cuda::sm80::attention_bwd<kDtype, kDim>>);
}
template <DType kDtype, int kDim>
constexpr KernelEntry<AttentionBackwardParams> turing_backward(const char* name) {
  return turing<AttentionBackwardParams>(
      name, cuda::sm75::attention_bwd_supports<kDtype, kDim>,
      with_large_rows<cuda::sm75::attention_bwd_workspace<kDim>>,
      after_sinks<cuda::sm75::attention_bwd_workspace<kDim>, turing_pitch, cuda::sm75::attention_bwd<kDtype, kDim>>);
}
template <int kDim>
constexpr KernelEntry<AttentionBackwardParams> ampere_backward_f32(const char* name) {
  return ampere<AttentionBackwardParams>(
      name, cuda::sm80::attention_bwd_f32_supports<kDim>, with_large_rows<cuda::sm80::attention_bwd_f32_workspace>,
      after_sinks<cuda::sm80::attention_bwd_f32_workspace, dense_pitch, cuda::sm80::attention_bwd_f32<kDim>>);
}

// A tensor-core kernel of the two products of linear's gradient, after the generic step that makes the pre-activation's
// gradient (which stays in the front of the workspace) and the bias's.
template <std::size_t (*products_workspace)(const LinearBackwardParams&)>
std::size_t linear_bwd_workspace(const LinearBackwardParams& p) {
  return cuda::linear_gradient_workspace(p) + products_workspace(p);
}
template <void (*products)(const LinearBackwardParams&, void*, Stream)>
void linear_bwd(const LinearBackwardParams& p, void* workspace, Stream stream) {
  const LinearBackwardParams rest = cuda::linear_gradient(p, workspace, stream);
  products(rest, static_cast<char*>(workspace) + cuda::linear_gradient_workspace(p), stream);
}

}  // namespace

template <>
KernelTable<AddParams> cuda_kernels() {
  static constexpr KernelEntry<AddParams> rows[] = {
      generic<AddParams>("add/cuda/generic", cuda::add_supports, nullptr, cuda::add)};
  return table(rows);
}

template <>
KernelTable<SwigluParams> cuda_kernels() {
  static constexpr KernelEntry<SwigluParams> rows[] = {
      generic<SwigluParams>("swiglu/cuda/generic", cuda::swiglu_supports, nullptr, cuda::swiglu)};
  return table(rows);
}

template <>
KernelTable<SwigluBackwardParams> cuda_kernels() {
  static constexpr KernelEntry<SwigluBackwardParams> rows[] = {
      generic<SwigluBackwardParams>("swiglu_bwd/cuda/generic", cuda::swiglu_bwd_supports, nullptr, cuda::swiglu_bwd)};
  return table(rows);
}

template <>
KernelTable<LinearParams> cuda_kernels() {
  using cuda::sm80::linear_few_rows_supports;
  using cuda::sm80::linear_supports;
  static constexpr KernelEntry<LinearParams> rows[] = {
#if FK_WITH_SM90A
    hopper<LinearParams>("linear/cuda/sm90a/f16/few_rows", cuda::sm90a::linear_few_rows_supports<DType::kFloat16>,
                         nullptr, cuda::sm90a::linear_few_rows, kDecode + 1),
    hopper<LinearParams>("linear/cuda/sm90a/f16/large", cuda::sm90a::linear_supports<DType::kFloat16>,
                         cuda::sm90a::linear_workspace, cuda::sm90a::linear),
    hopper<LinearParams>("linear/cuda/sm90a/bf16/few_rows", cuda::sm90a::linear_few_rows_supports<DType::kBFloat16>,
                         nullptr, cuda::sm90a::linear_few_rows, kDecode + 1),
    hopper<LinearParams>("linear/cuda/sm90a/bf16/large", cuda::sm90a::linear_supports<DType::kBFloat16>,
                         cuda::sm90a::linear_workspace, cuda::sm90a::linear),
#endif
    ampere<LinearParams>("linear/cuda/sm80/f16/few_rows", linear_few_rows_supports<DType::kFloat16>, nullptr,
                         cuda::sm80::linear_few_rows_f16, kDecode),
    ampere<LinearParams>("linear/cuda/sm80/bf16/few_rows", linear_few_rows_supports<DType::kBFloat16>, nullptr,
                         cuda::sm80::linear_few_rows_bf16, kDecode),
    ampere<LinearParams>("linear/cuda/sm80/f16/tiles", linear_supports<DType::kFloat16>, cuda::sm80::linear_workspace,
                         cuda::sm80::linear),
    ampere<LinearParams>("linear/cuda/sm80/bf16/tiles", linear_supports<DType::kBFloat16>, cuda::sm80::linear_workspace,
                         cuda::sm80::linear),
    ampere<LinearParams>("linear/cuda/sm80/f32", linear_supports<DType::kFloat32>, cuda::sm80::linear_workspace,
                         cuda::sm80::linear),
    turing<LinearParams>("linear/cuda/sm75/f16", cuda::sm75::linear_supports<LinearParams>, nullptr,
                         cuda::sm75::linear),
    generic<LinearParams>("linear/cuda/generic/few_rows", cuda::linear_few_rows_supports, nullptr, cuda::linear,
                          kAmpere + 1),
    generic<LinearParams>("linear/cuda/generic/tiles", cuda::linear_supports, nullptr, cuda::linear)
  };
  return table(rows);
}

template <>
KernelTable<LinearBackwardParams> cuda_kernels() {
  using cuda::sm80::linear_bwd_supports;
  static constexpr KernelEntry<LinearBackwardParams> rows[] = {
#if FK_WITH_SM90A
    hopper<LinearBackwardParams>("linear_bwd/cuda/sm90a/f16", cuda::sm90a::linear_bwd_supports<DType::kFloat16>,
                                 linear_bwd_workspace<cuda::sm90a::linear_bwd_workspace>,
                                 linear_bwd<cuda::sm90a::linear_bwd>),
    hopper<LinearBackwardParams>("linear_bwd/cuda/sm90a/bf16", cuda::sm90a::linear_bwd_supports<DType::kBFloat16>,
                                 linear_bwd_workspace<cuda::sm90a::linear_bwd_workspace>,
                                 linear_bwd<cuda::sm90a::linear_bwd>),
#endif
    ampere<LinearBackwardParams>("linear_bwd/cuda/sm80/f16", linear_bwd_supports<DType::kFloat16>,
                                 linear_bwd_workspace<cuda::sm80::linear_bwd_workspace>,
                                 linear_bwd<cuda::sm80::linear_bwd>),
    ampere<LinearBackwardParams>("linear_bwd/cuda/sm80/bf16", linear_bwd_supports<DType::kBFloat16>,
                                 linear_bwd_workspace<cuda::sm80::linear_bwd_workspace>,
                                 linear_bwd<cuda::sm80::linear_bwd>),
    ampere<LinearBackwardParams>("linear_bwd/cuda/sm80/f32", linear_bwd_supports<DType::kFloat32>,
                                 linear_bwd_workspace<cuda::sm80::linear_bwd_workspace>,
                                 linear_bwd<cuda::sm80::linear_bwd>),
    turing<LinearBackwardParams>("linear_bwd/cuda/sm75/f16", cuda::sm75::linear_supports<LinearBackwardParams>,
                                 linear_bwd_workspace<cuda::sm75::linear_bwd_workspace>,
                                 linear_bwd<cuda::sm75::linear_bwd>),
    generic<LinearBackwardParams>("linear_bwd/cuda/generic", cuda::linear_bwd_supports, nullptr, cuda::linear_bwd)
  };
  return table(rows);
}

template <>
KernelTable<NormParams> cuda_kernels() {
  static constexpr KernelEntry<NormParams> rows[] = {
#if FK_WITH_SM90A
    hopper<NormParams>("norm/cuda/sm90a/long_rows", cuda::sm90a::norm_long_rows_supports, nullptr,
                       cuda::sm90a::norm_long_rows),
#endif
    generic<NormParams>("norm/cuda/generic", cuda::norm_fwd_supports, nullptr, cuda::norm_fwd)
  };
  return table(rows);
}

template <>
KernelTable<NormBackwardParams> cuda_kernels() {
  static constexpr KernelEntry<NormBackwardParams> rows[] = {
#if FK_WITH_SM90A
    hopper<NormBackwardParams>("norm_bwd/cuda/sm90a/rows", cuda::sm90a::norm_bwd_rows_supports,
                               cuda::sm90a::norm_bwd_rows_workspace, cuda::sm90a::norm_bwd_rows),
#endif
    generic<NormBackwardParams>("norm_bwd/cuda/generic", cuda::norm_bwd_supports, cuda::norm_bwd_workspace,
                                cuda::norm_bwd)
  };
  return table(rows);
}

template <>
KernelTable<ReduceParams> cuda_kernels() {
  static constexpr KernelEntry<ReduceParams> rows[] = {
      generic<ReduceParams>("reduce/cuda/generic", cuda::reduce_supports, cuda::reduce_workspace, cuda::reduce)};
  return table(rows);
}

template <>
KernelTable<SoftmaxParams> cuda_kernels() {
  static constexpr KernelEntry<SoftmaxParams> rows[] = {
#if FK_WITH_SM90A
    hopper<SoftmaxParams>("softmax/cuda/sm90a/long_rows", cuda::sm90a::softmax_long_rows_supports, nullptr,
                          cuda::sm90a::softmax_long_rows),
#endif
    generic<SoftmaxParams>("softmax/cuda/generic", cuda::softmax_supports, nullptr, cuda::softmax)
  };
  return table(rows);
}

template <>
KernelTable<SoftmaxBackwardParams> cuda_kernels() {
  static constexpr KernelEntry<SoftmaxBackwardParams> rows[] = {
#if FK_WITH_SM90A
    hopper<SoftmaxBackwardParams>("softmax_bwd/cuda/sm90a/long_rows", cuda::sm90a::softmax_bwd_long_rows_supports,
                                  nullptr, cuda::sm90a::softmax_bwd_long_rows),
#endif
    generic<SoftmaxBackwardParams>("softmax_bwd/cuda/generic", cuda::softmax_bwd_supports, nullptr, cuda::softmax_bwd)
  };
  return table(rows);
}

template <>
KernelTable<CrossEntropyParams> cuda_kernels() {
  static constexpr KernelEntry<CrossEntropyParams> rows[] = {generic<CrossEntropyParams>(
      "cross_entropy/cuda/generic", cuda::cross_entropy_supports, cuda::cross_entropy_workspace, cuda::cross_entropy)};
  return table(rows);
}

template <>
KernelTable<CrossEntropyBackwardParams> cuda_kernels() {
  static constexpr KernelEntry<CrossEntropyBackwardParams> rows[] = {
      generic<CrossEntropyBackwardParams>("cross_entropy_bwd/cuda/generic", cuda::cross_entropy_bwd_supports,
                                          cuda::cross_entropy_bwd_workspace, cuda::cross_entropy_bwd)};
  return table(rows);
}

template <>
KernelTable<RopeParams> cuda_kernels() {
  static constexpr KernelEntry<RopeParams> rows[] = {
      generic<RopeParams>("rope/cuda/generic", cuda::rope_supports, nullptr, cuda::rope)};
  return table(rows);
}

template <>
KernelTable<KvAppendParams> cuda_kernels() {
  static constexpr KernelEntry<KvAppendParams> rows[] = {
      generic<KvAppendParams>("kv_append/cuda/generic", cuda::kv_append_supports, nullptr, cuda::kv_append)};
  return table(rows);
}

template <>
KernelTable<KvReadParams> cuda_kernels() {
  static constexpr KernelEntry<KvReadParams> rows[] = {
      generic<KvReadParams>("kv_read/cuda/generic", cuda::kv_read_supports, nullptr, cuda::kv_read)};
  return table(rows);
}

template <>
KernelTable<KvCopyParams> cuda_kernels() {
  static constexpr KernelEntry<KvCopyParams> rows[] = {
      generic<KvCopyParams>("kv_copy_pages/cuda/generic", cuda::kv_copy_supports, nullptr, cuda::kv_copy)};
  return table(rows);
}

template <>
KernelTable<FindBadPageParams> cuda_kernels() {
  static constexpr KernelEntry<FindBadPageParams> rows[] = {generic<FindBadPageParams>(
      "find_bad_page/cuda/generic", cuda::find_bad_page_supports, cuda::find_bad_page_workspace, cuda::find_bad_page)};
  return table(rows);
}

template <>
KernelTable<AttentionParams> cuda_kernels() {
  static constexpr KernelEntry<AttentionParams> rows[] = {
#if FK_WITH_SM90A
    hopper_forward<DType::kFloat16, 64>("attention_fwd/cuda/sm90a/f16/d64"),
    hopper_forward<DType::kBFloat16, 64>("attention_fwd/cuda/sm90a/bf16/d64"),
    hopper_forward<DType::kFloat16, 96>("attention_fwd/cuda/sm90a/f16/d96"),
    hopper_forward<DType::kBFloat16, 96>("attention_fwd/cuda/sm90a/bf16/d96"),
    hopper_forward<DType::kFloat16, 128>("attention_fwd/cuda/sm90a/f16/d128"),
    hopper_forward<DType::kBFloat16, 128>("attention_fwd/cuda/sm90a/bf16/d128"),
    hopper_forward<DType::kFloat16, 192>("attention_fwd/cuda/sm90a/f16/d192"),
    hopper_forward<DType::kBFloat16, 192>("attention_fwd/cuda/sm90a/bf16/d192"),
    hopper_forward<DType::kFloat16, 256>("attention_fwd/cuda/sm90a/f16/d256"),
    hopper_forward<DType::kBFloat16, 256>("attention_fwd/cuda/sm90a/bf16/d256"),
#endif
    ampere_forward_f32<32>("attention_fwd/cuda/sm80/f32/d32"),
    ampere_forward_f32<64>("attention_fwd/cuda/sm80/f32/d64"),
    ampere_forward_f32<96>("attention_fwd/cuda/sm80/f32/d96"),
    ampere_forward_f32<128>("attention_fwd/cuda/sm80/f32/d128"),
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
    ampere_forward<DType::kFloat16, 192>("attention_fwd/cuda/sm80/f16/d192"),
    ampere_forward<DType::kBFloat16, 192>("attention_fwd/cuda/sm80/bf16/d192"),
    ampere_forward<DType::kFloat16, 256>("attention_fwd/cuda/sm80/f16/d256"),
    ampere_forward<DType::kBFloat16, 256>("attention_fwd/cuda/sm80/bf16/d256"),
#if FK_WITH_SM75
    turing_forward<DType::kFloat16, 32>("attention_fwd/cuda/sm75/f16/d32"),
    turing_forward<DType::kFloat16, 64>("attention_fwd/cuda/sm75/f16/d64"),
    turing_forward<DType::kFloat16, 96>("attention_fwd/cuda/sm75/f16/d96"),
    turing_forward<DType::kFloat16, 128>("attention_fwd/cuda/sm75/f16/d128"),
    turing_forward<DType::kFloat16, 192>("attention_fwd/cuda/sm75/f16/d192"),
    turing_forward<DType::kFloat16, 256>("attention_fwd/cuda/sm75/f16/d256"),
#endif
    ampere_decode<DType::kFloat16, 64>("attention_fwd/cuda/sm80/decode/f16/d64"),
    ampere_decode<DType::kBFloat16, 64>("attention_fwd/cuda/sm80/decode/bf16/d64"),
    ampere_decode<DType::kFloat16, 128>("attention_fwd/cuda/sm80/decode/f16/d128"),
    ampere_decode<DType::kBFloat16, 128>("attention_fwd/cuda/sm80/decode/bf16/d128"),
    ampere_decode<DType::kFloat16, 192>("attention_fwd/cuda/sm80/decode/f16/d192"),
    ampere_decode<DType::kBFloat16, 192>("attention_fwd/cuda/sm80/decode/bf16/d192"),
    ampere_decode<DType::kFloat16, 256>("attention_fwd/cuda/sm80/decode/f16/d256"),
    ampere_decode<DType::kBFloat16, 256>("attention_fwd/cuda/sm80/decode/bf16/d256"),
    ampere_decode_quantized<DType::kFloat16, 64>("attention_fwd/cuda/sm80/decode_quantized/f16/d64"),
    ampere_decode_quantized<DType::kBFloat16, 64>("attention_fwd/cuda/sm80/decode_quantized/bf16/d64"),
    ampere_decode_quantized<DType::kFloat16, 128>("attention_fwd/cuda/sm80/decode_quantized/f16/d128"),
    ampere_decode_quantized<DType::kBFloat16, 128>("attention_fwd/cuda/sm80/decode_quantized/bf16/d128"),
    ampere_decode_quantized<DType::kFloat16, 256>("attention_fwd/cuda/sm80/decode_quantized/f16/d256"),
    ampere_decode_quantized<DType::kBFloat16, 256>("attention_fwd/cuda/sm80/decode_quantized/bf16/d256"),
#if FK_WITH_SM90A
    hopper_decode<DType::kFloat16, 64>("attention_fwd/cuda/sm90a/decode/f16/d64"),
    hopper_decode<DType::kBFloat16, 64>("attention_fwd/cuda/sm90a/decode/bf16/d64"),
    hopper_decode<DType::kFloat16, 128>("attention_fwd/cuda/sm90a/decode/f16/d128"),
    hopper_decode<DType::kBFloat16, 128>("attention_fwd/cuda/sm90a/decode/bf16/d128"),
#endif
    generic<AttentionParams>("attention_fwd/cuda/generic/decode", cuda::attention_fwd_decode_supports,
                             cuda::attention_fwd_decode_workspace, cuda::attention_fwd_decode, kDecode),
    generic<AttentionParams>("attention_fwd/cuda/generic/tiled", cuda::attention_fwd_tiled_supports, nullptr,
                             cuda::attention_fwd_tiled, kGeneric + 1),
    generic<AttentionParams>("attention_fwd/cuda/generic/naive", cuda::attention_fwd_naive_supports,
                             cuda::attention_fwd_naive_workspace, cuda::attention_fwd_naive)
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
#endif
    ampere_backward<DType::kFloat16, 32>("attention_bwd/cuda/sm80/f16/d32"),
    ampere_backward<DType::kBFloat16, 32>("attention_bwd/cuda/sm80/bf16/d32"),
    ampere_backward<DType::kFloat16, 64>("attention_bwd/cuda/sm80/f16/d64"),
    ampere_backward<DType::kBFloat16, 64>("attention_bwd/cuda/sm80/bf16/d64"),
    ampere_backward<DType::kFloat16, 96>("attention_bwd/cuda/sm80/f16/d96"),
    ampere_backward<DType::kBFloat16, 96>("attention_bwd/cuda/sm80/bf16/d96"),
    ampere_backward<DType::kFloat16, 128>("attention_bwd/cuda/sm80/f16/d128"),
    ampere_backward<DType::kBFloat16, 128>("attention_bwd/cuda/sm80/bf16/d128"),
    ampere_backward<DType::kFloat16, 192>("attention_bwd/cuda/sm80/f16/d192"),
    ampere_backward<DType::kBFloat16, 192>("attention_bwd/cuda/sm80/bf16/d192"),
    ampere_backward<DType::kFloat16, 256>("attention_bwd/cuda/sm80/f16/d256"),
    ampere_backward<DType::kBFloat16, 256>("attention_bwd/cuda/sm80/bf16/d256"),
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
    generic<AttentionBackwardParams>("attention_bwd/cuda/generic", cuda::attention_bwd_supports,
                                     cuda::attention_bwd_workspace, cuda::attention_bwd)
  };
  return table(rows);
}

template <>
KernelTable<MergeStatesParams> cuda_kernels() {
  static constexpr KernelEntry<MergeStatesParams> rows[] = {generic<MergeStatesParams>(
      "merge_states/cuda/generic", cuda::merge_states_supports, nullptr, cuda::merge_states)};
  return table(rows);
}

}  // namespace flashkernel
