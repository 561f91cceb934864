// A module of TVM-FFI: the ops as functions that write into given tensors. One file with the whole library inside
// serves torch, JAX (jax_tvm_ffi), CuPy, NumPy and whatever else speaks TVM-FFI:
//
//   module = tvm_ffi.load_module("flashkernel_tvm_ffi.so")
//   module.attention(q, k, v, out, None, True, -1, -1, 0.0, None, None, None, None)
//
// Shapes, dtypes and errors are those of the C++ headers that the functions are named in. A function takes its tensors,
// those that it writes behind those that it reads, and then its options; an absent tensor or default is None. It works
// on the caller's current stream.
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <cmath>
#include <optional>

#include "flashkernel/attention.hpp"
#include "flashkernel/elementwise.hpp"
#include "flashkernel/kv_ops.hpp"
#include "flashkernel/linear.hpp"
#include "flashkernel/loss.hpp"
#include "flashkernel/norm.hpp"
#include "flashkernel/reduce.hpp"
#include "flashkernel/rope.hpp"
#include "tensors.hpp"

namespace flashkernel::tvm_ffi {
namespace {

using Number = ffi::Optional<double>;
using Int = std::int64_t;

AttentionOptions attention_options(bool causal, Int left, Int right, double softcap, const Number& scale,
                                   const MaybeTensor& slopes, const MaybeTensor& sinks) {
  AttentionOptions options;
  options.causal = causal;
  options.window_left = left;
  options.window_right = right;
  options.softcap = static_cast<float>(softcap);
  if (scale.has_value()) options.scale = static_cast<float>(*scale);
  options.alibi_slopes = view(slopes);
  options.sinks = view(sinks);
  return options;
}

// --- attention.hpp

void attention_op(Tensor q, Tensor k, Tensor v, Tensor out, MaybeTensor lse, bool causal, Int left, Int right,
                  double softcap, Number scale, MaybeTensor bias, MaybeTensor slopes, MaybeTensor sinks) {
  AttentionOptions options = attention_options(causal, left, right, softcap, scale, slopes, sinks);
  options.bias = view(bias);
  const TensorView x = view(q);
  run([&] { attention(x, view(k), view(v), view(out), view(lse), options, context_of(x)); });
}

void attention_varlen_op(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor out,
                         MaybeTensor lse, Int max_seqlen_q, Int max_seqlen_k, bool causal, Int left, Int right,
                         double softcap, Number scale, MaybeTensor slopes, MaybeTensor sinks) {
  const AttentionOptions options = attention_options(causal, left, right, softcap, scale, slopes, sinks);
  const TensorView x = view(q);
  run([&] {
    attention_varlen(x, view(k), view(v), view(cu_seqlens_q), view(cu_seqlens_k), max_seqlen_q, max_seqlen_k, view(out),
                     view(lse), options, context_of(x));
  });
}

void attention_paged_op(Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor seq_lens,
                        MaybeTensor cu_seqlens_q, MaybeTensor k_scales, MaybeTensor v_scales, Tensor out,
                        MaybeTensor lse, Int max_seqlen_q, bool causal, Int left, Int right, double softcap,
                        Number scale, MaybeTensor slopes, MaybeTensor sinks) {
  AttentionOptions options = attention_options(causal, left, right, softcap, scale, slopes, sinks);
  options.kv_scales = {view(k_scales), view(v_scales)};
  const TensorView x = view(q);
  run([&] {
    attention_paged(x, view(k_pages), view(v_pages), view(block_table), view(seq_lens), view(cu_seqlens_q),
                    max_seqlen_q, view(out), view(lse), options, context_of(x));
  });
}

void attention_backward_op(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, MaybeTensor grad_lse,
                           MaybeTensor grad_q, MaybeTensor grad_k, MaybeTensor grad_v, MaybeTensor grad_bias,
                           MaybeTensor grad_sinks, bool deterministic, bool causal, Int left, Int right, double softcap,
                           Number scale, MaybeTensor bias, MaybeTensor slopes, MaybeTensor sinks) {
  AttentionOptions options = attention_options(causal, left, right, softcap, scale, slopes, sinks);
  options.bias = view(bias);
  const AttentionGradients gradients{view(grad_q), view(grad_k), view(grad_v), view(grad_bias), view(grad_sinks)};
  const TensorView x = view(q);
  run([&] {
    attention_backward(view(grad_out), x, view(k), view(v), view(out), view(lse), view(grad_lse), gradients, options,
                       deterministic, context_of(x));
  });
}

void attention_varlen_backward_op(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,
                                  MaybeTensor grad_lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k, MaybeTensor grad_q,
                                  MaybeTensor grad_k, MaybeTensor grad_v, MaybeTensor grad_sinks, Int max_seqlen_q,
                                  Int max_seqlen_k, bool deterministic, bool causal, Int left, Int right,
                                  double softcap, Number scale, MaybeTensor slopes, MaybeTensor sinks) {
  const AttentionOptions options = attention_options(causal, left, right, softcap, scale, slopes, sinks);
  const AttentionGradients gradients{view(grad_q), view(grad_k), view(grad_v), {}, view(grad_sinks)};
  const TensorView x = view(q);
  run([&] {
    attention_varlen_backward(view(grad_out), x, view(k), view(v), view(out), view(lse), view(grad_lse),
                              view(cu_seqlens_q), view(cu_seqlens_k), max_seqlen_q, max_seqlen_k, gradients, options,
                              deterministic, context_of(x));
  });
}

void merge_states_op(Tensor out_a, Tensor lse_a, MaybeTensor out_b, MaybeTensor lse_b, Tensor out, Tensor lse) {
  const TensorView x = view(out_a);
  run([&] { merge_states(x, view(lse_a), view(out_b), view(lse_b), view(out), view(lse), context_of(x)); });
}

// --- rope.hpp and kv_ops.hpp

RopeOptions rope_options(double theta, Int rotary_dim, bool interleaved, bool inverse, const MaybeTensor& inv_freq) {
  RopeOptions options;
  options.theta = theta;
  options.rotary_dim = rotary_dim;
  options.interleaved = interleaved;
  options.inverse = inverse;
  options.inv_freq = view(inv_freq);
  return options;
}

void rope_op(Tensor q, MaybeTensor k, Tensor positions, Tensor q_out, MaybeTensor k_out, double theta, Int rotary_dim,
             bool interleaved, bool inverse, MaybeTensor inv_freq) {
  const RopeOptions options = rope_options(theta, rotary_dim, interleaved, inverse, inv_freq);
  const TensorView x = view(q);
  run([&] { rope(x, view(k), view(positions), view(q_out), view(k_out), options, context_of(x)); });
}

void kv_append_op(Tensor k, Tensor v, Tensor k_pages, Tensor v_pages, Tensor slots, MaybeTensor k_scales,
                  MaybeTensor v_scales) {
  const TensorView x = view(k), pages = view(k_pages);
  run([&] {
    if (k_scales.has_value() || v_scales.has_value())
      kv_append(x, view(v), pages, view(v_pages), KvScales{view(k_scales), view(v_scales)}, view(slots), std::nullopt,
                context_of(x));
    else
      kv_append(x, view(v), pages, view(v_pages), view(slots), std::nullopt, context_of(x));
  });
}

void kv_copy_pages_op(Tensor k_pages, Tensor v_pages, Tensor src, Tensor dst) {
  const TensorView x = view(k_pages);
  run([&] { kv_copy_pages(x, view(v_pages), view(src), view(dst), context_of(x)); });
}

// --- linear.hpp and elementwise.hpp

Activation activation_of(const ffi::String& name) {
  if (name == "none") return Activation::kNone;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "gelu") return Activation::kGelu;
  if (name == "silu") return Activation::kSilu;
  TVM_FFI_THROW(ValueError) << "flashkernel: activation='" << name << "'; none, gelu_tanh, gelu or silu is needed";
}

void linear_op(Tensor x, Tensor weight, MaybeTensor bias, Tensor out, MaybeTensor preactivation,
               ffi::String activation) {
  const TensorView input = view(x);
  const Activation kind = activation_of(activation);
  run([&] { linear(input, view(weight), view(bias), view(out), view(preactivation), kind, context_of(input)); });
}

void linear_backward_op(Tensor grad_out, Tensor x, Tensor weight, MaybeTensor preactivation, MaybeTensor grad_x,
                        MaybeTensor grad_weight, MaybeTensor grad_bias, ffi::String activation) {
  const TensorView input = view(x);
  const Activation kind = activation_of(activation);
  const LinearGradients gradients{view(grad_x), view(grad_weight), view(grad_bias)};
  run([&] {
    linear_backward(view(grad_out), input, view(weight), view(preactivation), gradients, kind, context_of(input));
  });
}

void add_op(Tensor a, Tensor b, Tensor out) {
  const TensorView x = view(a);
  run([&] { add(x, view(b), view(out), context_of(x)); });
}

void swiglu_op(Tensor gate, Tensor up, Tensor out) {
  const TensorView x = view(gate);
  run([&] { swiglu(x, view(up), view(out), context_of(x)); });
}

void swiglu_backward_op(Tensor grad_out, Tensor gate, Tensor up, Tensor grad_gate, Tensor grad_up) {
  const TensorView x = view(gate);
  run([&] { swiglu_backward(view(grad_out), x, view(up), view(grad_gate), view(grad_up), context_of(x)); });
}

// --- norm.hpp

void layer_norm_op(Tensor x, MaybeTensor residual, MaybeTensor weight, MaybeTensor bias, Tensor out,
                   MaybeTensor residual_out, MaybeTensor mean, MaybeTensor rstd, double eps) {
  const TensorView input = view(x);
  const NormSaved saved{view(residual_out), view(mean), view(rstd)};
  run([&] {
    layer_norm(input, view(residual), view(weight), view(bias), view(out), saved, static_cast<float>(eps),
               context_of(input));
  });
}

void rms_norm_op(Tensor x, MaybeTensor residual, MaybeTensor weight, Tensor out, MaybeTensor residual_out,
                 MaybeTensor rstd, double eps) {
  const TensorView input = view(x);
  const NormSaved saved{view(residual_out), {}, view(rstd)};
  run([&] {
    rms_norm(input, view(residual), view(weight), view(out), saved, static_cast<float>(eps), context_of(input));
  });
}

void layer_norm_backward_op(Tensor grad_out, Tensor h, MaybeTensor weight, Tensor mean, Tensor rstd,
                            MaybeTensor grad_residual_out, Tensor grad_x, MaybeTensor grad_weight,
                            MaybeTensor grad_bias) {
  const TensorView input = view(h);
  const NormGradients gradients{view(grad_x), view(grad_weight), view(grad_bias)};
  run([&] {
    layer_norm_backward(view(grad_out), input, view(weight), view(mean), view(rstd), view(grad_residual_out), gradients,
                        context_of(input));
  });
}

void rms_norm_backward_op(Tensor grad_out, Tensor h, MaybeTensor weight, Tensor rstd, MaybeTensor grad_residual_out,
                          Tensor grad_x, MaybeTensor grad_weight) {
  const TensorView input = view(h);
  const NormGradients gradients{view(grad_x), view(grad_weight), {}};
  run([&] {
    rms_norm_backward(view(grad_out), input, view(weight), view(rstd), view(grad_residual_out), gradients,
                      context_of(input));
  });
}

// --- loss.hpp and reduce.hpp

CrossEntropyOptions loss_options(Int ignore_index, double label_smoothing, const ffi::String& reduction) {
  CrossEntropyOptions options;
  options.ignore_index = ignore_index;
  options.label_smoothing = static_cast<float>(label_smoothing);
  if (reduction == "none")
    options.reduction = Reduction::kNone;
  else if (reduction == "sum")
    options.reduction = Reduction::kSum;
  else if (reduction == "mean")
    options.reduction = Reduction::kMean;
  else
    TVM_FFI_THROW(ValueError) << "flashkernel: reduction='" << reduction << "'; none, sum or mean is needed";
  return options;
}

void cross_entropy_op(Tensor logits, Tensor targets, Tensor loss, MaybeTensor lse, Int ignore_index,
                      double label_smoothing, ffi::String reduction) {
  const TensorView x = view(logits);
  const CrossEntropyOptions options = loss_options(ignore_index, label_smoothing, reduction);
  run([&] { cross_entropy(x, view(targets), view(loss), view(lse), options, context_of(x)); });
}

void cross_entropy_backward_op(Tensor grad_loss, Tensor logits, Tensor targets, Tensor lse, Tensor grad_logits,
                               Int ignore_index, double label_smoothing, ffi::String reduction) {
  const TensorView x = view(logits);
  const CrossEntropyOptions options = loss_options(ignore_index, label_smoothing, reduction);
  run([&] {
    cross_entropy_backward(view(grad_loss), x, view(targets), view(lse), view(grad_logits), options, context_of(x));
  });
}

void softmax_op(Tensor x, Tensor out, Int axis) {
  const TensorView input = view(x);
  run([&] { softmax(input, view(out), static_cast<int>(axis), context_of(input)); });
}

void log_softmax_op(Tensor x, Tensor out, Int axis) {
  const TensorView input = view(x);
  run([&] { log_softmax(input, view(out), static_cast<int>(axis), context_of(input)); });
}

}  // namespace
}  // namespace flashkernel::tvm_ffi

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention, flashkernel::tvm_ffi::attention_op)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention_varlen, flashkernel::tvm_ffi::attention_varlen_op)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention_paged, flashkernel::tvm_ffi::attention_paged_op)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention_backward, flashkernel::tvm_ffi::attention_backward_op)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention_varlen_backward, flashkernel::tvm_ffi::attention_varlen_backward_op)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(merge_states, flashkernel::tvm_ffi::merge_states_op)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rope, flashkernel::tvm_ffi::rope_op)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kv_append, flashkernel::tvm_ffi::kv_append_op)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kv_copy_pages, flashkernel::tvm_ffi::kv_copy_pages_op)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear, flashkernel::tvm_ffi::linear_op)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear_backward, flashkernel::tvm_ffi::linear_backward_op)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(add, flashkernel::tvm_ffi::add_op)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(swiglu, flashkernel::tvm_ffi::swiglu_op)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(swiglu_backward, flashkernel::tvm_ffi::swiglu_backward_op)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layer_norm, flashkernel::tvm_ffi::layer_norm_op)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm, flashkernel::tvm_ffi::rms_norm_op)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layer_norm_backward, flashkernel::tvm_ffi::layer_norm_backward_op)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm_backward, flashkernel::tvm_ffi::rms_norm_backward_op)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cross_entropy, flashkernel::tvm_ffi::cross_entropy_op)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cross_entropy_backward, flashkernel::tvm_ffi::cross_entropy_backward_op)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(softmax, flashkernel::tvm_ffi::softmax_op)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(log_softmax, flashkernel::tvm_ffi::log_softmax_op)
