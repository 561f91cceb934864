// The ops of the C API: arguments become those of the C++ functions, exceptions become status codes.
// Made by tools/c_api.py.
// clang-format off
#include "flashkernel/flashkernel_ops.h"

#include "c/call.hpp"

#include "flashkernel/attention.hpp"
#include "flashkernel/attention_cascade.hpp"
#include "flashkernel/attention_fp8.hpp"
#include "flashkernel/attention_mla.hpp"
#include "flashkernel/decode_step.hpp"
#include "flashkernel/elementwise.hpp"
#include "flashkernel/fused_linear.hpp"
#include "flashkernel/kv_ops.hpp"
#include "flashkernel/linear.hpp"
#include "flashkernel/linear_fp8.hpp"
#include "flashkernel/loss.hpp"
#include "flashkernel/norm.hpp"
#include "flashkernel/qkv_append.hpp"
#include "flashkernel/quantized_linear.hpp"
#include "flashkernel/reduce.hpp"
#include "flashkernel/rope.hpp"
#include "flashkernel/sample.hpp"

using flashkernel::c::Call;
using flashkernel::c::guarded;

fk_status fk_attention(const fk_tensor* q, const fk_tensor* k, const fk_tensor* v, const fk_tensor* out,
    const fk_tensor* lse, const fk_attention_options* options, const fk_context* context) {
  return guarded([&] {
    const Call c("attention");
    flashkernel::attention(c.tensor("q", q), c.tensor("k", k), c.tensor("v", v), c.tensor("out", out),
        c.tensor("lse", lse), c.attention_options("options", options), c.context("context", context));
  });
}

fk_status fk_attention_varlen(const fk_tensor* q, const fk_tensor* k, const fk_tensor* v,
    const fk_tensor* cu_seqlens_q, const fk_tensor* cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
    const fk_tensor* out, const fk_tensor* lse, const fk_attention_options* options, const fk_context* context) {
  return guarded([&] {
    const Call c("attention_varlen");
    flashkernel::attention_varlen(c.tensor("q", q), c.tensor("k", k), c.tensor("v", v),
        c.tensor("cu_seqlens_q", cu_seqlens_q), c.tensor("cu_seqlens_k", cu_seqlens_k), max_seqlen_q, max_seqlen_k,
        c.tensor("out", out), c.tensor("lse", lse), c.attention_options("options", options),
        c.context("context", context));
  });
}

fk_status fk_attention_paged(const fk_tensor* q, const fk_tensor* k_pages, const fk_tensor* v_pages,
    const fk_tensor* block_table, const fk_tensor* seq_lens, const fk_tensor* cu_seqlens_q,
    int64_t max_seqlen_q, const fk_tensor* out, const fk_tensor* lse, const fk_attention_options* options,
    const fk_context* context) {
  return guarded([&] {
    const Call c("attention_paged");
    flashkernel::attention_paged(c.tensor("q", q), c.tensor("k_pages", k_pages), c.tensor("v_pages", v_pages),
        c.tensor("block_table", block_table), c.tensor("seq_lens", seq_lens),
        c.tensor("cu_seqlens_q", cu_seqlens_q), max_seqlen_q, c.tensor("out", out), c.tensor("lse", lse),
        c.attention_options("options", options), c.context("context", context));
  });
}

fk_status fk_attention_cascade(const fk_tensor* q, const fk_tensor* k_pages, const fk_tensor* v_pages,
    const fk_tensor* prefix_table, const fk_tensor* prefix_lens, const fk_tensor* cu_prefix_q,
    const fk_tensor* block_table, const fk_tensor* seq_lens, const fk_tensor* cu_seqlens_q,
    int64_t max_seqlen_q, const fk_tensor* out, const fk_tensor* lse, const fk_attention_options* options,
    const fk_context* context) {
  return guarded([&] {
    const Call c("attention_cascade");
    flashkernel::attention_cascade(c.tensor("q", q), c.tensor("k_pages", k_pages), c.tensor("v_pages", v_pages),
        c.tensor("prefix_table", prefix_table), c.tensor("prefix_lens", prefix_lens),
        c.tensor("cu_prefix_q", cu_prefix_q), c.tensor("block_table", block_table), c.tensor("seq_lens", seq_lens),
        c.tensor("cu_seqlens_q", cu_seqlens_q), max_seqlen_q, c.tensor("out", out), c.tensor("lse", lse),
        c.attention_options("options", options), c.context("context", context));
  });
}

fk_status fk_attention_backward(const fk_tensor* grad_out, const fk_tensor* q, const fk_tensor* k,
    const fk_tensor* v, const fk_tensor* out, const fk_tensor* lse, const fk_tensor* grad_lse,
    const fk_attention_gradients* gradients, const fk_attention_options* options, int32_t deterministic,
    const fk_context* context) {
  return guarded([&] {
    const Call c("attention_backward");
    flashkernel::attention_backward(c.tensor("grad_out", grad_out), c.tensor("q", q), c.tensor("k", k),
        c.tensor("v", v), c.tensor("out", out), c.tensor("lse", lse), c.tensor("grad_lse", grad_lse),
        c.attention_gradients("gradients", gradients), c.attention_options("options", options),
        c.flag("deterministic", deterministic), c.context("context", context));
  });
}

fk_status fk_attention_varlen_backward(const fk_tensor* grad_out, const fk_tensor* q, const fk_tensor* k,
    const fk_tensor* v, const fk_tensor* out, const fk_tensor* lse, const fk_tensor* grad_lse,
    const fk_tensor* cu_seqlens_q, const fk_tensor* cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
    const fk_attention_gradients* gradients, const fk_attention_options* options, int32_t deterministic,
    const fk_context* context) {
  return guarded([&] {
    const Call c("attention_varlen_backward");
    flashkernel::attention_varlen_backward(c.tensor("grad_out", grad_out), c.tensor("q", q), c.tensor("k", k),
        c.tensor("v", v), c.tensor("out", out), c.tensor("lse", lse), c.tensor("grad_lse", grad_lse),
        c.tensor("cu_seqlens_q", cu_seqlens_q), c.tensor("cu_seqlens_k", cu_seqlens_k), max_seqlen_q, max_seqlen_k,
        c.attention_gradients("gradients", gradients), c.attention_options("options", options),
        c.flag("deterministic", deterministic), c.context("context", context));
  });
}

fk_status fk_attention_mla_decode(const fk_tensor* q, const fk_tensor* latent_pages,
    const fk_tensor* block_table, const fk_tensor* seq_lens, const fk_tensor* latent_scale,
    const fk_tensor* out, const fk_tensor* lse, float scale, int32_t causal, int32_t check_pages,
    const fk_context* context) {
  return guarded([&] {
    const Call c("attention_mla_decode");
    flashkernel::attention_mla_decode(c.tensor("q", q), c.tensor("latent_pages", latent_pages),
        c.tensor("block_table", block_table), c.tensor("seq_lens", seq_lens),
        c.tensor("latent_scale", latent_scale), c.tensor("out", out), c.tensor("lse", lse), scale,
        c.flag("causal", causal), c.flag("check_pages", check_pages), c.context("context", context));
  });
}

fk_status fk_latent_append(const fk_tensor* latent, const fk_tensor* key, const fk_tensor* latent_pages,
    const fk_tensor* slots, const fk_tensor* latent_scale, const fk_context* context) {
  return guarded([&] {
    const Call c("latent_append");
    flashkernel::latent_append(c.tensor("latent", latent), c.tensor("key", key),
        c.tensor("latent_pages", latent_pages), c.tensor("slots", slots), c.tensor("latent_scale", latent_scale),
        c.context("context", context));
  });
}

fk_status fk_attention_fp8(const fk_tensor* q, const fk_tensor* k, const fk_tensor* v, const fk_tensor* q_scale,
    const fk_tensor* k_scale, const fk_tensor* v_scale, const fk_tensor* cu_seqlens_q,
    const fk_tensor* cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, const fk_tensor* out,
    const fk_tensor* lse, const fk_attention_options* options, const fk_context* context) {
  return guarded([&] {
    const Call c("attention_fp8");
    flashkernel::attention_fp8(c.tensor("q", q), c.tensor("k", k), c.tensor("v", v), c.tensor("q_scale", q_scale),
        c.tensor("k_scale", k_scale), c.tensor("v_scale", v_scale), c.tensor("cu_seqlens_q", cu_seqlens_q),
        c.tensor("cu_seqlens_k", cu_seqlens_k), max_seqlen_q, max_seqlen_k, c.tensor("out", out),
        c.tensor("lse", lse), c.attention_options("options", options), c.context("context", context));
  });
}

fk_status fk_merge_states(const fk_tensor* out_a, const fk_tensor* lse_a, const fk_tensor* out_b,
    const fk_tensor* lse_b, const fk_tensor* out, const fk_tensor* lse, const fk_context* context) {
  return guarded([&] {
    const Call c("merge_states");
    flashkernel::merge_states(c.tensor("out_a", out_a), c.tensor("lse_a", lse_a), c.tensor("out_b", out_b),
        c.tensor("lse_b", lse_b), c.tensor("out", out), c.tensor("lse", lse), c.context("context", context));
  });
}

fk_status fk_pack_mask(const fk_tensor* mask, const fk_tensor* out, const fk_context* context) {
  return guarded([&] {
    const Call c("pack_mask");
    flashkernel::pack_mask(c.tensor("mask", mask), c.tensor("out", out), c.context("context", context));
  });
}

fk_status fk_rope(const fk_tensor* q, const fk_tensor* k, const fk_tensor* positions, const fk_tensor* q_out,
    const fk_tensor* k_out, const fk_rope_options* options, const fk_context* context) {
  return guarded([&] {
    const Call c("rope");
    flashkernel::rope(c.tensor("q", q), c.tensor("k", k), c.tensor("positions", positions),
        c.tensor("q_out", q_out), c.tensor("k_out", k_out), c.rope_options("options", options),
        c.context("context", context));
  });
}

fk_status fk_rope_table(const fk_tensor* q, const fk_tensor* k, const fk_tensor* cos, const fk_tensor* sin,
    const fk_tensor* positions, const fk_tensor* q_out, const fk_tensor* k_out, const fk_rope_options* options,
    const fk_context* context) {
  return guarded([&] {
    const Call c("rope_table");
    flashkernel::rope_table(c.tensor("q", q), c.tensor("k", k), c.tensor("cos", cos), c.tensor("sin", sin),
        c.tensor("positions", positions), c.tensor("q_out", q_out), c.tensor("k_out", k_out),
        c.rope_options("options", options), c.context("context", context));
  });
}

fk_status fk_linear(const fk_tensor* x, const fk_tensor* weight, const fk_tensor* bias, const fk_tensor* out,
    const fk_tensor* preactivation, fk_activation activation, const fk_context* context) {
  return guarded([&] {
    const Call c("linear");
    flashkernel::linear(c.tensor("x", x), c.tensor("weight", weight), c.tensor("bias", bias), c.tensor("out", out),
        c.tensor("preactivation", preactivation), c.activation("activation", activation),
        c.context("context", context));
  });
}

fk_status fk_linear_backward(const fk_tensor* grad_out, const fk_tensor* x, const fk_tensor* weight,
    const fk_tensor* preactivation, const fk_linear_gradients* gradients, fk_activation activation,
    const fk_context* context) {
  return guarded([&] {
    const Call c("linear_backward");
    flashkernel::linear_backward(c.tensor("grad_out", grad_out), c.tensor("x", x), c.tensor("weight", weight),
        c.tensor("preactivation", preactivation), c.linear_gradients("gradients", gradients),
        c.activation("activation", activation), c.context("context", context));
  });
}

fk_status fk_quantized_linear(const fk_tensor* x, const fk_tensor* weight, const fk_tensor* scales,
    const fk_tensor* zeros, const fk_tensor* bias, const fk_tensor* out, fk_weight_format format,
    fk_activation activation, const fk_context* context) {
  return guarded([&] {
    const Call c("quantized_linear");
    flashkernel::quantized_linear(c.tensor("x", x), c.tensor("weight", weight), c.tensor("scales", scales),
        c.tensor("zeros", zeros), c.tensor("bias", bias), c.tensor("out", out), c.weight_format("format", format),
        c.activation("activation", activation), c.context("context", context));
  });
}

fk_status fk_linear_fp8(const fk_tensor* x, const fk_tensor* weight, const fk_tensor* x_scale,
    const fk_tensor* weight_scale, const fk_tensor* bias, const fk_tensor* out, fk_activation activation,
    const fk_context* context) {
  return guarded([&] {
    const Call c("linear_fp8");
    flashkernel::linear_fp8(c.tensor("x", x), c.tensor("weight", weight), c.tensor("x_scale", x_scale),
        c.tensor("weight_scale", weight_scale), c.tensor("bias", bias), c.tensor("out", out),
        c.activation("activation", activation), c.context("context", context));
  });
}

fk_status fk_quantize_fp8_blocks(const fk_tensor* x, const fk_tensor* out, const fk_tensor* scales,
    const fk_context* context) {
  return guarded([&] {
    const Call c("quantize_fp8_blocks");
    flashkernel::quantize_fp8_blocks(c.tensor("x", x), c.tensor("out", out), c.tensor("scales", scales),
        c.context("context", context));
  });
}

fk_status fk_fused_linear(const fk_tensor* x, const fk_tensor* weight, const fk_tensor* bias,
    const fk_tensor* norm_weight, const fk_tensor* norm_bias, const fk_tensor* residual, const fk_tensor* out,
    fk_activation activation, int32_t gated, int32_t centred, float eps, int32_t constant_weights,
    const fk_context* context) {
  return guarded([&] {
    const Call c("fused_linear");
    flashkernel::fused_linear(c.tensor("x", x), c.tensor("weight", weight), c.tensor("bias", bias),
        c.tensor("norm_weight", norm_weight), c.tensor("norm_bias", norm_bias), c.tensor("residual", residual),
        c.tensor("out", out), c.activation("activation", activation), c.flag("gated", gated),
        c.flag("centred", centred), eps, c.flag("constant_weights", constant_weights), c.context("context", context));
  });
}

fk_status fk_qkv_append(const fk_tensor* x, const fk_tensor* weight, const fk_tensor* bias,
    const fk_tensor* norm_weight, const fk_tensor* norm_bias, const fk_tensor* k_pages,
    const fk_tensor* v_pages, const fk_tensor* slots, const fk_kv_append_rope* rope, const fk_tensor* q_out,
    int32_t centred, float eps, int32_t constant_weights, const fk_context* context) {
  return guarded([&] {
    const Call c("qkv_append");
    flashkernel::qkv_append(c.tensor("x", x), c.tensor("weight", weight), c.tensor("bias", bias),
        c.tensor("norm_weight", norm_weight), c.tensor("norm_bias", norm_bias), c.tensor("k_pages", k_pages),
        c.tensor("v_pages", v_pages), c.tensor("slots", slots), c.kv_append_rope("rope", rope),
        c.tensor("q_out", q_out), c.flag("centred", centred), eps, c.flag("constant_weights", constant_weights),
        c.context("context", context));
  });
}

fk_status fk_add(const fk_tensor* a, const fk_tensor* b, const fk_tensor* out, const fk_context* context) {
  return guarded([&] {
    const Call c("add");
    flashkernel::add(c.tensor("a", a), c.tensor("b", b), c.tensor("out", out), c.context("context", context));
  });
}

fk_status fk_swiglu(const fk_tensor* gate, const fk_tensor* up, const fk_tensor* out, const fk_context* context) {
  return guarded([&] {
    const Call c("swiglu");
    flashkernel::swiglu(c.tensor("gate", gate), c.tensor("up", up), c.tensor("out", out),
        c.context("context", context));
  });
}

fk_status fk_swiglu_backward(const fk_tensor* grad_out, const fk_tensor* gate, const fk_tensor* up,
    const fk_tensor* grad_gate, const fk_tensor* grad_up, const fk_context* context) {
  return guarded([&] {
    const Call c("swiglu_backward");
    flashkernel::swiglu_backward(c.tensor("grad_out", grad_out), c.tensor("gate", gate), c.tensor("up", up),
        c.tensor("grad_gate", grad_gate), c.tensor("grad_up", grad_up), c.context("context", context));
  });
}

fk_status fk_reduce_sum(const fk_tensor* x, const fk_tensor* out, uint32_t axes, const fk_context* context) {
  return guarded([&] {
    const Call c("reduce_sum");
    flashkernel::reduce_sum(c.tensor("x", x), c.tensor("out", out), axes, c.context("context", context));
  });
}

fk_status fk_reduce_mean(const fk_tensor* x, const fk_tensor* out, uint32_t axes, const fk_context* context) {
  return guarded([&] {
    const Call c("reduce_mean");
    flashkernel::reduce_mean(c.tensor("x", x), c.tensor("out", out), axes, c.context("context", context));
  });
}

fk_status fk_reduce_max(const fk_tensor* x, const fk_tensor* out, uint32_t axes, const fk_context* context) {
  return guarded([&] {
    const Call c("reduce_max");
    flashkernel::reduce_max(c.tensor("x", x), c.tensor("out", out), axes, c.context("context", context));
  });
}

fk_status fk_argmax(const fk_tensor* x, const fk_tensor* out, uint32_t axes, const fk_context* context) {
  return guarded([&] {
    const Call c("argmax");
    flashkernel::argmax(c.tensor("x", x), c.tensor("out", out), axes, c.context("context", context));
  });
}

fk_status fk_softmax(const fk_tensor* x, const fk_tensor* out, int32_t axis, const fk_context* context) {
  return guarded([&] {
    const Call c("softmax");
    flashkernel::softmax(c.tensor("x", x), c.tensor("out", out), axis, c.context("context", context));
  });
}

fk_status fk_log_softmax(const fk_tensor* x, const fk_tensor* out, int32_t axis, const fk_context* context) {
  return guarded([&] {
    const Call c("log_softmax");
    flashkernel::log_softmax(c.tensor("x", x), c.tensor("out", out), axis, c.context("context", context));
  });
}

fk_status fk_softmax_backward(const fk_tensor* grad_out, const fk_tensor* out, const fk_tensor* grad_x,
    int32_t axis, const fk_context* context) {
  return guarded([&] {
    const Call c("softmax_backward");
    flashkernel::softmax_backward(c.tensor("grad_out", grad_out), c.tensor("out", out), c.tensor("grad_x", grad_x),
        axis, c.context("context", context));
  });
}

fk_status fk_log_softmax_backward(const fk_tensor* grad_out, const fk_tensor* out, const fk_tensor* grad_x,
    int32_t axis, const fk_context* context) {
  return guarded([&] {
    const Call c("log_softmax_backward");
    flashkernel::log_softmax_backward(c.tensor("grad_out", grad_out), c.tensor("out", out),
        c.tensor("grad_x", grad_x), axis, c.context("context", context));
  });
}

fk_status fk_layer_norm(const fk_tensor* x, const fk_tensor* residual, const fk_tensor* weight,
    const fk_tensor* bias, const fk_tensor* out, const fk_norm_saved* saved, float eps,
    const fk_context* context) {
  return guarded([&] {
    const Call c("layer_norm");
    flashkernel::layer_norm(c.tensor("x", x), c.tensor("residual", residual), c.tensor("weight", weight),
        c.tensor("bias", bias), c.tensor("out", out), c.norm_saved("saved", saved), eps,
        c.context("context", context));
  });
}

fk_status fk_rms_norm(const fk_tensor* x, const fk_tensor* residual, const fk_tensor* weight,
    const fk_tensor* out, const fk_norm_saved* saved, float eps, const fk_context* context) {
  return guarded([&] {
    const Call c("rms_norm");
    flashkernel::rms_norm(c.tensor("x", x), c.tensor("residual", residual), c.tensor("weight", weight),
        c.tensor("out", out), c.norm_saved("saved", saved), eps, c.context("context", context));
  });
}

fk_status fk_layer_norm_quantized(const fk_tensor* x, const fk_tensor* residual, const fk_tensor* weight,
    const fk_tensor* bias, const fk_tensor* scale, const fk_tensor* out, const fk_tensor* scales,
    const fk_norm_saved* saved, float eps, const fk_context* context) {
  return guarded([&] {
    const Call c("layer_norm_quantized");
    flashkernel::layer_norm_quantized(c.tensor("x", x), c.tensor("residual", residual), c.tensor("weight", weight),
        c.tensor("bias", bias), c.tensor("scale", scale), c.tensor("out", out), c.tensor("scales", scales),
        c.norm_saved("saved", saved), eps, c.context("context", context));
  });
}

fk_status fk_rms_norm_quantized(const fk_tensor* x, const fk_tensor* residual, const fk_tensor* weight,
    const fk_tensor* scale, const fk_tensor* out, const fk_tensor* scales, const fk_norm_saved* saved,
    float eps, const fk_context* context) {
  return guarded([&] {
    const Call c("rms_norm_quantized");
    flashkernel::rms_norm_quantized(c.tensor("x", x), c.tensor("residual", residual), c.tensor("weight", weight),
        c.tensor("scale", scale), c.tensor("out", out), c.tensor("scales", scales), c.norm_saved("saved", saved),
        eps, c.context("context", context));
  });
}

fk_status fk_layer_norm_backward(const fk_tensor* grad_out, const fk_tensor* h, const fk_tensor* weight,
    const fk_tensor* mean, const fk_tensor* rstd, const fk_tensor* grad_residual_out,
    const fk_norm_gradients* gradients, const fk_context* context) {
  return guarded([&] {
    const Call c("layer_norm_backward");
    flashkernel::layer_norm_backward(c.tensor("grad_out", grad_out), c.tensor("h", h), c.tensor("weight", weight),
        c.tensor("mean", mean), c.tensor("rstd", rstd), c.tensor("grad_residual_out", grad_residual_out),
        c.norm_gradients("gradients", gradients), c.context("context", context));
  });
}

fk_status fk_rms_norm_backward(const fk_tensor* grad_out, const fk_tensor* h, const fk_tensor* weight,
    const fk_tensor* rstd, const fk_tensor* grad_residual_out, const fk_norm_gradients* gradients,
    const fk_context* context) {
  return guarded([&] {
    const Call c("rms_norm_backward");
    flashkernel::rms_norm_backward(c.tensor("grad_out", grad_out), c.tensor("h", h), c.tensor("weight", weight),
        c.tensor("rstd", rstd), c.tensor("grad_residual_out", grad_residual_out),
        c.norm_gradients("gradients", gradients), c.context("context", context));
  });
}

fk_status fk_sample(const fk_tensor* logits, const fk_tensor* temperature, const fk_tensor* top_k,
    const fk_tensor* top_p, const fk_tensor* min_p, const fk_tensor* bias, const fk_tensor* history,
    const fk_tensor* repetition_penalty, const fk_tensor* frequency_penalty, const fk_tensor* presence_penalty,
    const fk_tensor* seed, const fk_tensor* offset, const fk_tensor* out, const fk_tensor* logprob,
    const fk_context* context) {
  return guarded([&] {
    const Call c("sample");
    flashkernel::sample(c.tensor("logits", logits), c.tensor("temperature", temperature), c.tensor("top_k", top_k),
        c.tensor("top_p", top_p), c.tensor("min_p", min_p), c.tensor("bias", bias), c.tensor("history", history),
        c.tensor("repetition_penalty", repetition_penalty), c.tensor("frequency_penalty", frequency_penalty),
        c.tensor("presence_penalty", presence_penalty), c.tensor("seed", seed), c.tensor("offset", offset),
        c.tensor("out", out), c.tensor("logprob", logprob), c.context("context", context));
  });
}

fk_status fk_cross_entropy(const fk_tensor* logits, const fk_tensor* targets, const fk_tensor* loss,
    const fk_tensor* lse, const fk_cross_entropy_options* options, const fk_context* context) {
  return guarded([&] {
    const Call c("cross_entropy");
    flashkernel::cross_entropy(c.tensor("logits", logits), c.tensor("targets", targets), c.tensor("loss", loss),
        c.tensor("lse", lse), c.cross_entropy_options("options", options), c.context("context", context));
  });
}

fk_status fk_cross_entropy_backward(const fk_tensor* grad_loss, const fk_tensor* logits,
    const fk_tensor* targets, const fk_tensor* lse, const fk_tensor* grad_logits,
    const fk_cross_entropy_options* options, const fk_context* context) {
  return guarded([&] {
    const Call c("cross_entropy_backward");
    flashkernel::cross_entropy_backward(c.tensor("grad_loss", grad_loss), c.tensor("logits", logits),
        c.tensor("targets", targets), c.tensor("lse", lse), c.tensor("grad_logits", grad_logits),
        c.cross_entropy_options("options", options), c.context("context", context));
  });
}

fk_status fk_linear_cross_entropy(const fk_tensor* x, const fk_tensor* weight, const fk_tensor* bias,
    const fk_tensor* targets, const fk_tensor* class_weights, const fk_tensor* loss, const fk_tensor* z_loss,
    const fk_tensor* lse, const fk_linear_cross_entropy_options* options, const fk_context* context) {
  return guarded([&] {
    const Call c("linear_cross_entropy");
    flashkernel::linear_cross_entropy(c.tensor("x", x), c.tensor("weight", weight), c.tensor("bias", bias),
        c.tensor("targets", targets), c.tensor("class_weights", class_weights), c.tensor("loss", loss),
        c.tensor("z_loss", z_loss), c.tensor("lse", lse), c.linear_cross_entropy_options("options", options),
        c.context("context", context));
  });
}

fk_status fk_linear_selected_log_prob(const fk_tensor* x, const fk_tensor* weight, const fk_tensor* bias,
    const fk_tensor* targets, const fk_tensor* log_prob, const fk_tensor* lse, float softcap, float temperature,
    int64_t ignore_index, const fk_context* context) {
  return guarded([&] {
    const Call c("linear_selected_log_prob");
    flashkernel::linear_selected_log_prob(c.tensor("x", x), c.tensor("weight", weight), c.tensor("bias", bias),
        c.tensor("targets", targets), c.tensor("log_prob", log_prob), c.tensor("lse", lse), softcap, temperature,
        ignore_index, c.context("context", context));
  });
}

fk_status fk_linear_cross_entropy_backward(const fk_tensor* grad_loss, const fk_tensor* x,
    const fk_tensor* weight, const fk_tensor* bias, const fk_tensor* targets, const fk_tensor* class_weights,
    const fk_tensor* lse, const fk_linear_gradients* gradients, const fk_linear_cross_entropy_options* options,
    const fk_context* context) {
  return guarded([&] {
    const Call c("linear_cross_entropy_backward");
    flashkernel::linear_cross_entropy_backward(c.tensor("grad_loss", grad_loss), c.tensor("x", x),
        c.tensor("weight", weight), c.tensor("bias", bias), c.tensor("targets", targets),
        c.tensor("class_weights", class_weights), c.tensor("lse", lse), c.linear_gradients("gradients", gradients),
        c.linear_cross_entropy_options("options", options), c.context("context", context));
  });
}

fk_status fk_linear_selected_log_prob_backward(const fk_tensor* grad_log_prob, const fk_tensor* x,
    const fk_tensor* weight, const fk_tensor* bias, const fk_tensor* targets, const fk_tensor* lse,
    const fk_linear_gradients* gradients, float softcap, float temperature, int64_t ignore_index,
    const fk_context* context) {
  return guarded([&] {
    const Call c("linear_selected_log_prob_backward");
    flashkernel::linear_selected_log_prob_backward(c.tensor("grad_log_prob", grad_log_prob), c.tensor("x", x),
        c.tensor("weight", weight), c.tensor("bias", bias), c.tensor("targets", targets), c.tensor("lse", lse),
        c.linear_gradients("gradients", gradients), softcap, temperature, ignore_index,
        c.context("context", context));
  });
}

fk_status fk_kv_append(const fk_tensor* k, const fk_tensor* v, const fk_tensor* k_pages,
    const fk_tensor* v_pages, const fk_kv_scales* scales, const fk_tensor* slots, const fk_kv_append_rope* rope,
    const fk_context* context) {
  return guarded([&] {
    const Call c("kv_append");
    flashkernel::kv_append(c.tensor("k", k), c.tensor("v", v), c.tensor("k_pages", k_pages),
        c.tensor("v_pages", v_pages), c.kv_scales("scales", scales), c.tensor("slots", slots),
        c.kv_append_rope("rope", rope), c.context("context", context));
  });
}

fk_status fk_kv_read(const fk_tensor* k_pages, const fk_tensor* v_pages, const fk_kv_scales* scales,
    const fk_tensor* block_table, const fk_tensor* seq_lens, const fk_tensor* k_out, const fk_tensor* v_out,
    const fk_context* context) {
  return guarded([&] {
    const Call c("kv_read");
    flashkernel::kv_read(c.tensor("k_pages", k_pages), c.tensor("v_pages", v_pages), c.kv_scales("scales", scales),
        c.tensor("block_table", block_table), c.tensor("seq_lens", seq_lens), c.tensor("k_out", k_out),
        c.tensor("v_out", v_out), c.context("context", context));
  });
}

fk_status fk_kv_copy_pages(const fk_tensor* k_pages, const fk_tensor* v_pages, const fk_kv_scales* scales,
    const fk_tensor* src, const fk_tensor* dst, const fk_context* context) {
  return guarded([&] {
    const Call c("kv_copy_pages");
    flashkernel::kv_copy_pages(c.tensor("k_pages", k_pages), c.tensor("v_pages", v_pages),
        c.kv_scales("scales", scales), c.tensor("src", src), c.tensor("dst", dst), c.context("context", context));
  });
}

fk_status fk_check_block_table(const fk_tensor* block_table, const fk_tensor* seq_lens, int64_t num_pages,
    int64_t page_size, const fk_context* context) {
  return guarded([&] {
    const Call c("check_block_table");
    flashkernel::check_block_table(c.tensor("block_table", block_table), c.tensor("seq_lens", seq_lens), num_pages,
        page_size, c.context("context", context));
  });
}

fk_status fk_decode_step(const fk_tensor* tokens, const fk_tensor* positions, const fk_tensor* slots,
    const fk_tensor* block_table, const fk_tensor* seq_lens, const fk_tensor* embedding, const fk_tensor* norms,
    const fk_tensor* qkv_weight, const fk_tensor* out_weight, const fk_tensor* gate_up_weight,
    const fk_tensor* down_weight, const fk_tensor* head_weight, const fk_tensor* inv_freq,
    const fk_tensor* k_pages, const fk_tensor* v_pages, const fk_tensor* logits, float eps, float scale,
    const fk_tensor* timeline, const fk_context* context) {
  return guarded([&] {
    const Call c("decode_step");
    flashkernel::decode_step(c.tensor("tokens", tokens), c.tensor("positions", positions), c.tensor("slots", slots),
        c.tensor("block_table", block_table), c.tensor("seq_lens", seq_lens), c.tensor("embedding", embedding),
        c.tensor("norms", norms), c.tensor("qkv_weight", qkv_weight), c.tensor("out_weight", out_weight),
        c.tensor("gate_up_weight", gate_up_weight), c.tensor("down_weight", down_weight),
        c.tensor("head_weight", head_weight), c.tensor("inv_freq", inv_freq), c.tensor("k_pages", k_pages),
        c.tensor("v_pages", v_pages), c.tensor("logits", logits), eps, scale, c.tensor("timeline", timeline),
        c.context("context", context));
  });
}

fk_status fk_kv_append_to_sequences(const fk_tensor* k, const fk_tensor* v, const fk_tensor* k_pages,
    const fk_tensor* v_pages, const fk_kv_scales* scales, const fk_kv_append_places* places,
    const fk_kv_append_rope* rope, const fk_context* context) {
  return guarded([&] {
    const Call c("kv_append_to_sequences");
    flashkernel::kv_append_to_sequences(c.tensor("k", k), c.tensor("v", v), c.tensor("k_pages", k_pages),
        c.tensor("v_pages", v_pages), c.kv_scales("scales", scales), c.kv_append_places("places", places),
        c.kv_append_rope("rope", rope), c.context("context", context));
  });
}

fk_status fk_find_bad_page(const fk_tensor* block_table, const fk_tensor* seq_lens, int64_t num_pages,
    int64_t page_size, const fk_tensor* fault, const fk_context* context) {
  return guarded([&] {
    const Call c("find_bad_page");
    flashkernel::find_bad_page(c.tensor("block_table", block_table), c.tensor("seq_lens", seq_lens), num_pages,
        page_size, c.tensor("fault", fault), c.context("context", context));
  });
}
