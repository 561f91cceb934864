// The ops of the C API: kernels on borrowed tensors, forward and backward. Made by tools/c_api.py.
//
// Shapes, dtypes and edge cases are those of the C++ functions with the same names. A tensor that may be absent is
// NULL, and so are options and a context that are the defaults. Each function returns FK_INVALID_ARGUMENT for
// arguments that do not fit, FK_UNSUPPORTED where no kernel serves them on their device, FK_OUT_OF_MEMORY where there
// is no workspace, FK_CUDA_ERROR where CUDA fails; nothing is written then, but for what CUDA had begun. Work on a GPU
// is queued on context->stream: the call does not wait for it.
#pragma once

#include "flashkernel/flashkernel_types.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- Attention: softmax(scale * Q K^T) V and its gradient; dense, variable-length and paged.
//
// Order of operations on a score s = scale * <q_i, k_j>: softcap (c * tanh(s / c)), then bias and ALiBi (-slope * |i
// + seq_k - seq_q - j|, or as AttentionOptions::alibi says), then masks; attention sinks join the softmax's
// denominator only. `causal` and `window` are aligned bottom-right: query i stands at position i + seq_k - seq_q.
// Softmax runs in fp32. LSE is the natural logarithm of the denominator, sink included. A row that sees no key gives
// output 0, LSE -inf (with a sink: LSE = sink) and gradient 0.

// Dense attention. q [batch, heads_q, seq_q, head_dim], k [batch, heads_kv, seq_k, head_dim], v [batch, heads_kv,
// seq_k, head_dim_v], out [batch, heads_q, seq_q, head_dim_v] (written in place), lse fp32 [batch, heads_q, seq_q]
// (written; may be absent). heads_q % heads_kv == 0, head dims 1..512, last dims contiguous.
FK_API fk_status fk_attention(const fk_tensor* q, const fk_tensor* k, const fk_tensor* v, const fk_tensor* out,
    const fk_tensor* lse, const fk_attention_options* options, const fk_context* context);

// Sequences of various lengths side by side. q [total_q, heads_q, head_dim], k [total_k, heads_kv, head_dim], v
// [total_k, heads_kv, head_dim_v], cu_seqlens int32 or int64 [batch + 1] (0 first, never decreasing, total last), out
// [total_q, heads_q, head_dim_v], lse fp32 [heads_q, total_q] (may be absent). `max_seqlen_*` bound each length.
FK_API fk_status fk_attention_varlen(const fk_tensor* q, const fk_tensor* k, const fk_tensor* v,
    const fk_tensor* cu_seqlens_q, const fk_tensor* cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
    const fk_tensor* out, const fk_tensor* lse, const fk_attention_options* options, const fk_context* context);

// Keys and values in pages. k_pages [num_pages, page_size, heads_kv, head_dim], v_pages [num_pages, page_size,
// heads_kv, head_dim_v] (q's dtype, or of 8 or 4 bits with `options->kv_scales`), block_table int32 [batch,
// max_pages], seq_lens int32 or int64 [batch] (keys of each sequence, the new ones included). q and out are [batch,
// heads_q, seq_q, *] with lse [batch, heads_q, seq_q], or, with `cu_seqlens_q` [batch + 1], [total_q, heads_q, *]
// with lse [heads_q, total_q] and `max_seqlen_q`. Table entries past a sequence's last page, and of pages wholly
// before the window of its first query, are not used: any value is allowed there. Kernels may read them, so a row is
// memory of max_pages entries. On a GPU both are read while the call runs, by many blocks: another stream that writes
// them waits for it.
FK_API fk_status fk_attention_paged(const fk_tensor* q, const fk_tensor* k_pages, const fk_tensor* v_pages,
    const fk_tensor* block_table, const fk_tensor* seq_lens, const fk_tensor* cu_seqlens_q,
    int64_t max_seqlen_q, const fk_tensor* out, const fk_tensor* lse, const fk_attention_options* options,
    const fk_context* context);

// ---- Attention of sequences that begin with the same tokens: the pages of a common prefix are read once for all of them.

// attention_paged of sequences in groups, each of which has one prefix in common. Every query sees all keys of its
// group's prefix, then those of its own sequence: softmax over both together. q, k_pages, v_pages, cu_seqlens_q,
// max_seqlen_q, out and lse as in attention_paged; block_table and seq_lens describe what follows the prefix, the new
// keys among it. prefix_table int32 [groups, max_prefix_pages], prefix_lens int32 or int64 [groups] (tokens; any
// number, 0 too), cu_prefix_q int32 or int64 [groups + 1]: which rows of q (batch * seq_q, or total_q of them, in
// order) each group has: 0 first, never decreasing, the number of rows last. It may be absent where there is one
// group. A sequence's queries belong to one group. Of the options causal, softcap, scale, sinks, check_pages and
// kv_scales are taken. With `causal` a sequence has at least as many keys of its own as queries. q's rows lie at one
// stride: of q [batch, heads_q, seq_q, head_dim] with more than one query, seq lies next to batch in memory.
// `explain` tells of the part over the prefixes; a kernel is a candidate if it takes both parts.
FK_API fk_status fk_attention_cascade(const fk_tensor* q, const fk_tensor* k_pages, const fk_tensor* v_pages,
    const fk_tensor* prefix_table, const fk_tensor* prefix_lens, const fk_tensor* cu_prefix_q,
    const fk_tensor* block_table, const fk_tensor* seq_lens, const fk_tensor* cu_seqlens_q,
    int64_t max_seqlen_q, const fk_tensor* out, const fk_tensor* lse, const fk_attention_options* options,
    const fk_context* context);

// ---- Attention: softmax(scale * Q K^T) V and its gradient; dense, variable-length and paged.
//
// Order of operations on a score s = scale * <q_i, k_j>: softcap (c * tanh(s / c)), then bias and ALiBi (-slope * |i
// + seq_k - seq_q - j|, or as AttentionOptions::alibi says), then masks; attention sinks join the softmax's
// denominator only. `causal` and `window` are aligned bottom-right: query i stands at position i + seq_k - seq_q.
// Softmax runs in fp32. LSE is the natural logarithm of the denominator, sink included. A row that sees no key gives
// output 0, LSE -inf (with a sink: LSE = sink) and gradient 0.

// Gradients of fk_attention, recomputed from q, k, v, out and lse (all as the forward pass took and gave them).
// `grad_lse` fp32, shape of lse, may be absent. `deterministic`: bit for bit the same on every run; false allows
// atomics.
FK_API fk_status fk_attention_backward(const fk_tensor* grad_out, const fk_tensor* q, const fk_tensor* k,
    const fk_tensor* v, const fk_tensor* out, const fk_tensor* lse, const fk_tensor* grad_lse,
    const fk_attention_gradients* gradients, const fk_attention_options* options, int32_t deterministic,
    const fk_context* context);

// Gradients of fk_attention_varlen; lse and grad_lse [heads_q, total_q].
FK_API fk_status fk_attention_varlen_backward(const fk_tensor* grad_out, const fk_tensor* q, const fk_tensor* k,
    const fk_tensor* v, const fk_tensor* out, const fk_tensor* lse, const fk_tensor* grad_lse,
    const fk_tensor* cu_seqlens_q, const fk_tensor* cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
    const fk_attention_gradients* gradients, const fk_attention_options* options, int32_t deterministic,
    const fk_context* context);

// ---- Multi-head latent attention (MLA): all query heads attend to one latent row a token, whose first columns are its
// value too.

// softmax(scale * q L^T) L[:, :head_dim_v] over a cache of latent rows in pages. q [batch, heads_q, seq_q, head_dim]
// (float32, float16 or bfloat16; head_dim 1..576), latent_pages [num_pages, page_size, head_dim] (q's dtype, or of 8
// bits as below), block_table int32 [batch, max_pages], seq_lens int32 or int64 [batch] (keys of each sequence, those
// of the queries included), out [batch, heads_q, seq_q, head_dim_v] (q's dtype; head_dim_v 1..512 and at most
// head_dim), lse fp32 [batch, heads_q, seq_q] (may be absent). `scale` multiplies scores; it has no default, because
// it follows from the head dim before the latent. `causal`: query i stands at position i + seq_lens[b] - seq_q. A row
// that sees no key gives output 0 and LSE -inf. `check_pages`, and what is allowed in table entries that are not
// used: as in attention_paged. Last dims are contiguous.  Latent rows of 8 bits (uint8 or float8_e4m3fn) are numbers
// in float32, element times scale, rounded to q's dtype. They come in two forms, which their last dim tells. Of
// head_dim_v + 4 * groups + 2 * (head_dim - head_dim_v) bytes: a row is head_dim_v float8_e4m3fn elements, a float32
// scale for each 128 of them (the last group may be shorter), and the other columns in bfloat16; 656 bytes for 512
// and 576. head_dim_v is a multiple of 4, and rows begin at multiples of 4 bytes. Of head_dim bytes: float8_e4m3fn
// elements with one scale, `latent_scale`: float32, one number on q's device or on the host; absent: 1.
FK_API fk_status fk_attention_mla_decode(const fk_tensor* q, const fk_tensor* latent_pages,
    const fk_tensor* block_table, const fk_tensor* seq_lens, const fk_tensor* latent_scale,
    const fk_tensor* out, const fk_tensor* lse, float scale, int32_t causal, int32_t check_pages,
    const fk_context* context);

// Rounds latent rows to 8 bits on their way into the pages of attention_mla_decode, of either form: latent [tokens,
// rank] and key [tokens, turned] (float32, float16 or bfloat16, one dtype; last dims contiguous; rank 1..512, both
// together 1..576) go to slot slots[t] = page * page_size + offset (int32 or int64 [tokens]); a negative slot is
// skipped. latent_pages [num_pages, page_size, rank + 4 * groups + 2 * turned] (uint8 or float8_e4m3fn): a group's
// scale is its largest magnitude over 448, at least 2^-126, and the key is rounded to bfloat16. latent_pages
// [num_pages, page_size, rank + turned]: `latent_scale` is read. An element is x / scale, rounded to nearest even and
// bounded to +-448; NaN stays NaN and leaves the scale alone. A slot past the last page: FK_INVALID_ARGUMENT where
// slots are on the host, skipped on a GPU.
FK_API fk_status fk_latent_append(const fk_tensor* latent, const fk_tensor* key, const fk_tensor* latent_pages,
    const fk_tensor* slots, const fk_tensor* latent_scale, const fk_context* context);

// ---- Attention of 8-bit floating point queries, keys and values with scales beside them, and a 16-bit output.

// softmax(scale * Q K^T) V where Q, K and V are float8_e4m3fn elements times a scale. Dense without cu_seqlens: q
// [batch, heads_q, seq_q, head_dim], k and v [batch, heads_kv, seq_k, *], out as q with v's head dim, lse fp32
// [batch, heads_q, seq_q] (may be absent); 2 to 4 dims. With cu_seqlens_q and cu_seqlens_k (both): layouts and
// lengths of fk_attention_varlen. out is float16 or bfloat16.  q_scale, k_scale and v_scale are fp32, each absent
// (1), one number (0 dims or one element; on q's device, or on the host, where it is read during the call), or
// broadcastable to [batch, heads_kv]: a query head has the scale of its kv head. Options: causal, window, softcap,
// scale, ALiBi, sinks, seqused. There is no gradient.  Kernels on 8-bit tensor cores round the weights of keys to
// e4m3 before the second product (docs/low_precision.md).
FK_API fk_status fk_attention_fp8(const fk_tensor* q, const fk_tensor* k, const fk_tensor* v, const fk_tensor* q_scale,
    const fk_tensor* k_scale, const fk_tensor* v_scale, const fk_tensor* cu_seqlens_q,
    const fk_tensor* cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, const fk_tensor* out,
    const fk_tensor* lse, const fk_attention_options* options, const fk_context* context);

// ---- Attention: softmax(scale * Q K^T) V and its gradient; dense, variable-length and paged.
//
// Order of operations on a score s = scale * <q_i, k_j>: softcap (c * tanh(s / c)), then bias and ALiBi (-slope * |i
// + seq_k - seq_q - j|, or as AttentionOptions::alibi says), then masks; attention sinks join the softmax's
// denominator only. `causal` and `window` are aligned bottom-right: query i stands at position i + seq_k - seq_q.
// Softmax runs in fp32. LSE is the natural logarithm of the denominator, sink included. A row that sees no key gives
// output 0, LSE -inf (with a sink: LSE = sink) and gradient 0.

// Attention over the union of two disjoint sets of keys, from the results over each. out_* [..., head_dim] (up to 4
// dims), lse_* fp32 with out's shape less the last dim. A part with LSE -inf counts nothing. `out` has out_a's dtype,
// or any of the three where the parts are float32. `out` and `lse` may alias part a. Without out_b and lse_b, out_a
// [parts, ..., head_dim] and lse_a [parts, ...] hold any number of parts, and `out` and `lse` alias nothing; no part
// gives 0 and LSE -inf.
FK_API fk_status fk_merge_states(const fk_tensor* out_a, const fk_tensor* lse_a, const fk_tensor* out_b,
    const fk_tensor* lse_b, const fk_tensor* out, const fk_tensor* lse, const fk_context* context);

// A boolean mask as `AttentionOptions::mask` wants it. mask uint8 of 1 to 4 dims (a boolean tensor's bytes: not 0 is
// seen), any strides, dims of stride 0 included; out int32, mask's shape but for its last dim, which is
// (mask.shape[last] + 31) / 32 and contiguous. Bit j % 32 of word j / 32 is key j; bits behind the last key are 0.
FK_API fk_status fk_pack_mask(const fk_tensor* mask, const fk_tensor* out, const fk_context* context);

// ---- Rotary position embedding (Su et al., 2021): rotates pairs of a head's first `rotary_dim` elements by position *
// frequency.

// In-kernel sin and cos. q [batch, heads_q, seq, head_dim], k [batch, heads_kv, seq, head_dim] or absent, positions
// int32 or int64 [seq], [1, seq] or [batch, seq] (absent: 0, 1, 2, ...). q_out and k_out have the shapes of q and k
// and may be the same tensors. Angles are exact to 1e-6 at any position that int32 holds; another one is
// FK_INVALID_ARGUMENT where positions are on the host and NaN where they are on a GPU.
FK_API fk_status fk_rope(const fk_tensor* q, const fk_tensor* k, const fk_tensor* positions, const fk_tensor* q_out,
    const fk_tensor* k_out, const fk_rope_options* options, const fk_context* context);

// The same from tables. cos, sin: fp32, fp16 or bf16, whatever q is: [max_positions, rotary_dim / 2] looked up by
// position, or [batch or 1, seq, rotary_dim / 2] used as they are (then `positions` must be absent). `theta`,
// `inv_freq` are not used and rotary_dim comes from the table. A position outside the table is FK_INVALID_ARGUMENT
// where positions are on the host.
FK_API fk_status fk_rope_table(const fk_tensor* q, const fk_tensor* k, const fk_tensor* cos, const fk_tensor* sin,
    const fk_tensor* positions, const fk_tensor* q_out, const fk_tensor* k_out, const fk_rope_options* options,
    const fk_context* context);

// ---- activation(x W^T + b) in one kernel, and its gradient.

// x [..., in_features] (up to 8 dims), weight [out_features, in_features] (either of its two dims contiguous: a
// transposed view of GPT-2's [in, out] weight is taken as it is), bias [out_features] or absent (x's dtype or fp32),
// out [..., out_features], preactivation (x W^T + b, shape and dtype of out) or absent. Accumulates in fp32; the
// activation is applied before rounding. Outputs need memory of their own.
FK_API fk_status fk_linear(const fk_tensor* x, const fk_tensor* weight, const fk_tensor* bias, const fk_tensor* out,
    const fk_tensor* preactivation, fk_activation activation, const fk_context* context);

// Gradients of fk_linear. `preactivation` is needed when `activation` is not FK_ACTIVATION_NONE; where it is
// infinite, the activation's derivative is its limit (0 or 1). Gradients of weight and bias sum over all rows, so
// they need leading dims that fold into rows with one stride.
FK_API fk_status fk_linear_backward(const fk_tensor* grad_out, const fk_tensor* x, const fk_tensor* weight,
    const fk_tensor* preactivation, const fk_linear_gradients* gradients, fk_activation activation,
    const fk_context* context);

// ---- activation(x W^T + b) with weights of 4 or 8 bits and a scale for each block of them.

// x [..., in_features] (up to 8 dims; float32, float16 or bfloat16), out [..., out_features] (x's dtype), bias
// [out_features] (x's dtype or fp32) or absent. `format` says what weight [out_features, bytes of a row] holds: int4
// and int8 take scales and, where given, zeros [out_features, groups] (fp32, fp16 or bf16, one dtype for both), and
// an element is scale * (q - zero); without zeros an int4 has the zero 8 and an int8 the zero 0. A group is
// in_features / groups neighbours of a row: a multiple of 32, or one group for the whole row of int8. The formats of
// GGUF files hold their scales in their blocks; scales and zeros are absent there. Sums are fp32. Last dims are
// contiguous. Outputs need memory of their own.  On the CPU a weight in GGUF's formats may be tiles [out_features /
// 16, in_features / 32, bytes of 16 blocks], each the blocks of 16 rows side by side: their numbers of 2 bytes, the
// first of each row, the second of each row, then 4 bytes of each row's elements at a time. AVX512-VNNI and AMX read
// them fastest. AVX512-VNNI takes x as integers of 24 bits (fp32) or 16 bits (fp16, bf16) with one scale for 32
// neighbours: docs/low_precision.md.
FK_API fk_status fk_quantized_linear(const fk_tensor* x, const fk_tensor* weight, const fk_tensor* scales,
    const fk_tensor* zeros, const fk_tensor* bias, const fk_tensor* out, fk_weight_format format,
    fk_activation activation, const fk_context* context);

// ---- activation(x W^T + b) of x and W in float8_e4m3fn with scales, and what makes such an x.

// x [..., in_features] (up to 8 dims) and weight [out_features, in_features] are float8_e4m3fn, last dims contiguous;
// an element times its scale is the number. Scales are float32, of any strides. x_scale: [..., ceil(in_features /
// 128)], one for 128 neighbours of a row; [..., 1], one a row; or one number (0 dims, or [1]). weight_scale:
// [ceil(out_features / 128), ceil(in_features / 128)], one for a block of 128 x 128; [out_features, ceil(in_features
// / 128)], one for 128 neighbours of a row; [out_features, 1] or [out_features], one a row; or one number. bias
// [out_features] (out's dtype or float32) or absent. out [..., out_features]: float32, float16 or bfloat16. Sums are
// float32; on tensor cores, whose sums of 8-bit numbers are shorter, over 128 of in_features at a time. The
// activation is applied before rounding. Outputs need memory of their own.  x may be float32, float16 or bfloat16
// with x_scale absent: it is rounded as quantize_fp8_blocks does, into workspace.
FK_API fk_status fk_linear_fp8(const fk_tensor* x, const fk_tensor* weight, const fk_tensor* x_scale,
    const fk_tensor* weight_scale, const fk_tensor* bias, const fk_tensor* out, fk_activation activation,
    const fk_context* context);

// x [..., features] (up to 8 dims; float32, float16 or bfloat16, last dim contiguous) in 8 bits with a scale for each
// 128 neighbours of a row: scales [..., ceil(features / 128)] float32 (any strides) get the largest magnitude of 128
// over 448, at least 2^-100, and out (float8_e4m3fn, x's shape, last dim contiguous) the elements over it, rounded to
// nearest even. Infinities become 448 and -448, NaN stays. Outputs need memory of their own.
FK_API fk_status fk_quantize_fp8_blocks(const fk_tensor* x, const fk_tensor* out, const fk_tensor* scales,
    const fk_context* context);

// ---- A linear with the norm before it and with what follows it, for decode steps.

// out = activation(norm(x) W^T + bias) + residual; with `gated`, out = activation(gate) * up + residual, where gate
// and up are the first and the last out_features of norm(x) W^T + bias. x [..., in_features] (up to 8 dims), weight
// [out_features, in_features] (with `gated` [2 out_features, in_features]; either dim contiguous), bias one for each
// row of weight or absent (x's dtype or fp32). norm_weight [in_features] (any floating dtype) asks for a norm of x:
// RMSNorm, with `centred` LayerNorm, whose norm_bias may be given; absent: there is none. residual: out's shape or
// absent. out [..., out_features], which may be the same tensor as residual. `gated` needs activation kSilu (SwiGLU).
// The norm is rounded to x's dtype, as fk_rms_norm and fk_layer_norm give it; sums are fp32. A kernel may round what
// stands before the residual or the gate to x's dtype, as the ops by themselves do. constant_weights: a promise that
// no work which is still under way on the stream writes weight, bias, norm_weight or norm_bias. A kernel may then
// read them while the kernel in front of it still runs. Work that ended before a kernel which is not launched early
// (of any other library) keeps the promise.
FK_API fk_status fk_fused_linear(const fk_tensor* x, const fk_tensor* weight, const fk_tensor* bias,
    const fk_tensor* norm_weight, const fk_tensor* norm_bias, const fk_tensor* residual, const fk_tensor* out,
    fk_activation activation, int32_t gated, int32_t centred, float eps, int32_t constant_weights,
    const fk_context* context);

// ---- The projection of queries, keys and values of a decode step, with the norm before it, RoPE, and keys and values
// into their pages.

// Heads of norm(x) W^T + bias: those of q are turned and written to q_out, those of k are turned and go with those of
// v to the pages' slots, as fk_kv_append puts them. x [tokens, in_features], weight [(heads_q + 2 heads_kv) head_dim,
// in_features] (either dim contiguous): heads of q, then of k, then of v. bias, norm_weight, norm_bias, centred, eps
// and constant_weights as in fk_fused_linear. k_pages, v_pages [num_pages, page_size, heads_kv, head_dim] of x's
// dtype, slots int32 or int64 [tokens]. rope: without q and q_out; absent: nothing is turned. q_out [tokens, heads_q,
// head_dim], heads side by side. Sums are fp32; a kernel may round them to x's dtype before they are turned.
FK_API fk_status fk_qkv_append(const fk_tensor* x, const fk_tensor* weight, const fk_tensor* bias,
    const fk_tensor* norm_weight, const fk_tensor* norm_bias, const fk_tensor* k_pages,
    const fk_tensor* v_pages, const fk_tensor* slots, const fk_kv_append_rope* rope, const fk_tensor* q_out,
    int32_t centred, float eps, int32_t constant_weights, const fk_context* context);

// ---- Elementwise kernels of the block: residual add and the gated unit.

// out = a + b, same shape and dtype (float32, float16, bfloat16), any strides; out may alias a or b.
FK_API fk_status fk_add(const fk_tensor* a, const fk_tensor* b, const fk_tensor* out, const fk_context* context);

// SwiGLU (Shazeer, 2020): out = silu(gate) * up, computed in fp32; same shape and dtype; out may alias gate or up.
FK_API fk_status fk_swiglu(const fk_tensor* gate, const fk_tensor* up, const fk_tensor* out, const fk_context* context);

// Gradients of fk_swiglu; an absent gradient is not computed.
FK_API fk_status fk_swiglu_backward(const fk_tensor* grad_out, const fk_tensor* gate, const fk_tensor* up,
    const fk_tensor* grad_gate, const fk_tensor* grad_up, const fk_context* context);

// ---- Reductions over any set of axes, and softmax over one.

// x float32, float16 or bfloat16 with any strides; out: x's shape with the reduced dims of size 1 (kept) or left out,
// x's dtype or fp32. Accumulates in fp32, in an order that does not depend on the number of threads. Sum over nothing
// is 0.
FK_API fk_status fk_reduce_sum(const fk_tensor* x, const fk_tensor* out, uint32_t axes, const fk_context* context);

// As fk_reduce_sum, divided by the number of elements reduced; over nothing: NaN.
FK_API fk_status fk_reduce_mean(const fk_tensor* x, const fk_tensor* out, uint32_t axes, const fk_context* context);

// A NaN wins. Over nothing: FK_INVALID_ARGUMENT.
FK_API fk_status fk_reduce_max(const fk_tensor* x, const fk_tensor* out, uint32_t axes, const fk_context* context);

// out int64: row-major index, within the reduced dims, of the first maximum (the first NaN if there is one).
FK_API fk_status fk_argmax(const fk_tensor* x, const fk_tensor* out, uint32_t axes, const fk_context* context);

// softmax or log-softmax along `axis` (negative counts from the end); out has x's shape and dtype and may alias x. A
// row of -inf only gives 0 (log-softmax: -inf), never NaN; a NaN in a row makes that row NaN.
FK_API fk_status fk_softmax(const fk_tensor* x, const fk_tensor* out, int32_t axis, const fk_context* context);

// As fk_softmax.
FK_API fk_status fk_log_softmax(const fk_tensor* x, const fk_tensor* out, int32_t axis, const fk_context* context);

// Gradients from the forward pass's output.
FK_API fk_status fk_softmax_backward(const fk_tensor* grad_out, const fk_tensor* out, const fk_tensor* grad_x,
    int32_t axis, const fk_context* context);

// As fk_softmax_backward.
FK_API fk_status fk_log_softmax_backward(const fk_tensor* grad_out, const fk_tensor* out, const fk_tensor* grad_x,
    int32_t axis, const fk_context* context);

// ---- LayerNorm and RMSNorm over the last dim, with an optional fused residual add, and their gradients.

// h = x + residual, rounded to x's dtype as residual_out stores it (or h = x); out = (h - mean(h)) / sqrt(var(h) +
// eps) * weight + bias. x [..., features]; weight and bias [features], each float32, float16 or bfloat16 whatever x
// is, may be absent. Statistics in fp32, two passes (no E[x^2] - E[x]^2). Last dims are contiguous, mean and rstd
// wholly so. out and residual_out may each be the same tensor as x or residual, but not as each other.
FK_API fk_status fk_layer_norm(const fk_tensor* x, const fk_tensor* residual, const fk_tensor* weight,
    const fk_tensor* bias, const fk_tensor* out, const fk_norm_saved* saved, float eps,
    const fk_context* context);

// h = x + residual (or x); out = h / sqrt(mean(h^2) + eps) * weight (Zhang and Sennrich, 2019).
FK_API fk_status fk_rms_norm(const fk_tensor* x, const fk_tensor* residual, const fk_tensor* weight,
    const fk_tensor* out, const fk_norm_saved* saved, float eps, const fk_context* context);

// As layer_norm, with an output in 8 bits: element * scale is the number. out: float8_e4m3fn or int8, x's shape, last
// dim contiguous; it shares no memory with x or residual. Either `scale` is given, one float32 number (0 or 1 dims)
// that is read on the device, or `scales` is written: float32, x's shape less the last dim, contiguous, each the
// largest magnitude of its row over 448 or 127, at least 2^-100. The norm is not rounded to x's dtype on the way.
// Elements are rounded to nearest even and saturated to +-448 or +-127 (infinities too); float8_e4m3fn keeps NaN,
// int8 stores 0 for it, and a scale of its own becomes NaN.
FK_API fk_status fk_layer_norm_quantized(const fk_tensor* x, const fk_tensor* residual, const fk_tensor* weight,
    const fk_tensor* bias, const fk_tensor* scale, const fk_tensor* out, const fk_tensor* scales,
    const fk_norm_saved* saved, float eps, const fk_context* context);

// As rms_norm, with an output in 8 bits: as layer_norm_quantized has it.
FK_API fk_status fk_rms_norm_quantized(const fk_tensor* x, const fk_tensor* residual, const fk_tensor* weight,
    const fk_tensor* scale, const fk_tensor* out, const fk_tensor* scales, const fk_norm_saved* saved,
    float eps, const fk_context* context);

// `h` is what was normalised (x, or residual_out). `grad_residual_out` is added to the gradient of h; may be absent.
// Where gradients of weight or bias are wanted, the leading dims must fold into rows with one stride.
FK_API fk_status fk_layer_norm_backward(const fk_tensor* grad_out, const fk_tensor* h, const fk_tensor* weight,
    const fk_tensor* mean, const fk_tensor* rstd, const fk_tensor* grad_residual_out,
    const fk_norm_gradients* gradients, const fk_context* context);

// As fk_layer_norm_backward.
FK_API fk_status fk_rms_norm_backward(const fk_tensor* grad_out, const fk_tensor* h, const fk_tensor* weight,
    const fk_tensor* rstd, const fk_tensor* grad_residual_out, const fk_norm_gradients* gradients,
    const fk_context* context);

// ---- Sampling: the next token of each row of logits.

// out[r] = a token drawn from logits [rows, vocab] (float32, float16 or bfloat16; contiguous last dim; at most 2^23
// tokens). out: int32 or int64 [rows], contiguous. All parameters of rows are contiguous [rows], and absent ones
// change nothing; they are read on the device, so that a captured graph replays with other numbers.  In this order,
// as Hugging Face has it: `bias` float32 [rows, vocab] is added; `repetition_penalty` divides positive logits and
// multiplies negative ones of tokens whose `history` is not 0; `frequency_penalty` is subtracted once for each time
// that the row has generated the token, `presence_penalty` once if it has. history: int32 [rows, vocab]: 2 * (times
// generated), plus 1 for a token of the prompt; needed with a penalty. Then a row with `temperature` 0 (or top_k 1,
// or without `temperature`) takes the first of its best tokens. The others divide by temperature, keep the top_k best
// (int32 or int64; all that equal the last of them; 0: no limit), of these the fewest best whose probability reaches
// top_p, equal ones by their ids (1: no limit), of these all that have at least min_p times the probability of the
// best (0: no limit; above 1 as 1), and draw in the order of ids by a number from Philox4x32-10 with key `seed`
// [rows] and counter `offset` [rows] (int64, 0 where absent).  The result is the same on every device, bit for bit:
// distances from the best logit, in float32, become multiples of 2^-24 (in units of ln 2), those become integer
// weights of 2^-40 of the best one's, and all sums are of integers. Tokens of the same distance count as equal; below
// 2^-40 of the best one's probability none is drawn.  A row with a NaN or +inf, or without any number above -inf,
// gets -1 - (the id of that logit): a kernel can't return, and whoever reads the tokens sees it. logprob: float32
// [rows], or absent: the natural logarithm of the token's probability under the logits as they came (NaN for such a
// row).
FK_API fk_status fk_sample(const fk_tensor* logits, const fk_tensor* temperature, const fk_tensor* top_k,
    const fk_tensor* top_p, const fk_tensor* min_p, const fk_tensor* bias, const fk_tensor* history,
    const fk_tensor* repetition_penalty, const fk_tensor* frequency_penalty, const fk_tensor* presence_penalty,
    const fk_tensor* seed, const fk_tensor* offset, const fk_tensor* out, const fk_tensor* logprob,
    const fk_context* context);

// ---- Cross-entropy over the last dim, without writing the probabilities; fused with the product before it, without
// writing the logits.

// loss_r = lse(logits_r) - logits_r[target_r] (smoothed by label_smoothing). logits [rows, classes], targets int32 or
// int64 [rows]; loss fp32 [rows] for FK_REDUCTION_NONE, else a scalar (shape [] or [1]); lse fp32 [rows] (written,
// may be absent). FK_REDUCTION_MEAN over no counted rows is NaN, as in PyTorch. A target outside [0, classes) that is
// not ignore_index: FK_INVALID_ARGUMENT on the host, NaN loss on a GPU.
FK_API fk_status fk_cross_entropy(const fk_tensor* logits, const fk_tensor* targets, const fk_tensor* loss,
    const fk_tensor* lse, const fk_cross_entropy_options* options, const fk_context* context);

// grad_loss has loss's shape, by any stride; grad_logits has logits' shape and dtype and may alias logits.
FK_API fk_status fk_cross_entropy_backward(const fk_tensor* grad_loss, const fk_tensor* logits,
    const fk_tensor* targets, const fk_tensor* lse, const fk_tensor* grad_logits,
    const fk_cross_entropy_options* options, const fk_context* context);

// The cross-entropy of the logits x weight^T + bias, of which a chunk at a time is held. x [tokens, features], last
// dim contiguous; weight [classes, features] in x's dtype (either dim contiguous); bias [classes] in x's dtype or
// fp32, or absent; targets int32 or int64 [tokens]; class_weights fp32 [classes] or absent. With w = class_weights (1
// where absent), s = label_smoothing and log p = log_softmax(logits), a row's loss is (1 - s) w_t (-log p_t) + s /
// classes sum_c w_c (-log p_c), plus its z-loss. loss fp32 [tokens] for FK_REDUCTION_NONE, else a scalar (shape [] or
// [1]): a mean divides the sum of cross-entropies by the sum of the counted targets' weights, and that of z-losses by
// the number of counted rows. z_loss (loss's shape) and lse (fp32 [tokens], of the capped logits) are written where
// present. Targets out of range: as for fk_cross_entropy. Logits are rounded to x's dtype, as fk_linear writes them.
FK_API fk_status fk_linear_cross_entropy(const fk_tensor* x, const fk_tensor* weight, const fk_tensor* bias,
    const fk_tensor* targets, const fk_tensor* class_weights, const fk_tensor* loss, const fk_tensor* z_loss,
    const fk_tensor* lse, const fk_linear_cross_entropy_options* options, const fk_context* context);

// log_softmax(softcap(x weight^T + bias) / temperature) at each row's target, without writing the logits: log_prob
// and lse (of what the softmax saw; may be absent) fp32 [tokens]. x, weight, bias and targets as in
// fk_linear_cross_entropy; softcap of 0: none; temperature above 0. Rows with the target ignore_index have 0.
FK_API fk_status fk_linear_selected_log_prob(const fk_tensor* x, const fk_tensor* weight, const fk_tensor* bias,
    const fk_tensor* targets, const fk_tensor* log_prob, const fk_tensor* lse, float softcap, float temperature,
    int64_t ignore_index, const fk_context* context);

// Gradients of fk_linear_cross_entropy, from its lse; the logits are computed again. grad_loss has loss's shape, by
// any stride. gradients.weight may be fp32 where x is not: it is then a sum in fp32 that is not rounded.
FK_API fk_status fk_linear_cross_entropy_backward(const fk_tensor* grad_loss, const fk_tensor* x,
    const fk_tensor* weight, const fk_tensor* bias, const fk_tensor* targets, const fk_tensor* class_weights,
    const fk_tensor* lse, const fk_linear_gradients* gradients, const fk_linear_cross_entropy_options* options,
    const fk_context* context);

// Gradients of fk_linear_selected_log_prob: grad_log_prob fp32 [tokens], by any stride; gradients as in
// fk_linear_cross_entropy_backward.
FK_API fk_status fk_linear_selected_log_prob_backward(const fk_tensor* grad_log_prob, const fk_tensor* x,
    const fk_tensor* weight, const fk_tensor* bias, const fk_tensor* targets, const fk_tensor* lse,
    const fk_linear_gradients* gradients, float softcap, float temperature, int64_t ignore_index,
    const fk_context* context);

// ---- The kernels that move keys and values into and out of pages.

// Writes token t of k and v to slot `slots[t]` = page * page_size + offset; a negative slot is skipped. k [tokens,
// heads_kv, head_dim], v [tokens, heads_kv, head_dim_v], k_pages [num_pages, page_size, heads_kv, head_dim], v_pages
// [num_pages, page_size, heads_kv, head_dim_v], slots int32 or int64 [tokens]. A slot past the last page:
// FK_INVALID_ARGUMENT where slots are on the host, skipped on a GPU. The same into pages of float8_e4m3fn or int8: k,
// v and q are float32, float16 or bfloat16, and what is stored is x / scale, rounded to nearest even and saturated to
// 448 or 127 (infinities too). Scales [heads_kv] are read; scales [num_pages, heads_kv, page_size] are written: the
// largest magnitude of the token's head over 448 or 127. NaN stays NaN in float8_e4m3fn; int8 has none: there a scale
// of its own becomes NaN (and with it the token's whole head), while under a scale [heads_kv] a NaN is stored as 0. k
// and v are rotated in float32 and not rounded to their dtype first. Pages of int4 [num_pages, page_size, heads_kv,
// head_dim / 2] in bytes: zero, the least of a group of 32, and scale, a fifteenth of its range, are written as
// float16; an element is (x - zero) / scale, rounded to nearest even and bounded to 0 to 15. Numbers are bounded to
// +-65024 first, and a group with a NaN becomes NaN.
FK_API fk_status fk_kv_append(const fk_tensor* k, const fk_tensor* v, const fk_tensor* k_pages,
    const fk_tensor* v_pages, const fk_kv_scales* scales, const fk_tensor* slots, const fk_kv_append_rope* rope,
    const fk_context* context);

// Gathers sequences back: k_out [batch, max_seq, heads_kv, head_dim], v_out [batch, max_seq, heads_kv, head_dim_v];
// tokens past seq_lens[b] are written as 0. block_table int32 [batch, max_pages], seq_lens int32 or int64 [batch].
// Table entries past a sequence's last page are not used: any value is allowed there. The same from pages of 8 and 4
// bits: their numbers, rounded to the dtype of k_out and v_out (float32, float16 or bfloat16).
FK_API fk_status fk_kv_read(const fk_tensor* k_pages, const fk_tensor* v_pages, const fk_kv_scales* scales,
    const fk_tensor* block_table, const fk_tensor* seq_lens, const fk_tensor* k_out, const fk_tensor* v_out,
    const fk_context* context);

// Copies page src[i] to page dst[i] in both k_pages and v_pages; src, dst int32 or int64 [n]; no page may be in both.
// The same for pages of 8 and 4 bits; scales of tokens and of groups go along.
FK_API fk_status fk_kv_copy_pages(const fk_tensor* k_pages, const fk_tensor* v_pages, const fk_kv_scales* scales,
    const fk_tensor* src, const fk_tensor* dst, const fk_context* context);

// Returns FK_BAD_BLOCK_TABLE with what fk_find_bad_page finds. On a GPU it waits for `context->stream`: for
// debugging, and for tables from elsewhere. FK_UNSUPPORTED while that stream is being captured.
FK_API fk_status fk_check_block_table(const fk_tensor* block_table, const fk_tensor* seq_lens, int64_t num_pages,
    int64_t page_size, const fk_context* context);

// ---- A whole decode step of a decoder as one op.

// One new token for each of `rows` sequences through a dense decoder of Llama's kind: embedding, and a layer after
// another RMSNorm, q, k and v, RoPE (halves of a head turn together), append to the pages, attention over them, the
// output matrix, the residual, RMSNorm, SwiGLU, down, the residual; then the last norm and the logits. Everything is
// of one dtype, float32, float16 or bfloat16; sums are fp32, and what goes from one matrix to the next is rounded to
// the dtype, as by the ops one by one. Weights must not change while the step runs.  tokens [rows]: ids, int32 or
// int64. One that the embedding does not have: FK_INVALID_ARGUMENT where tokens are on the host, NaN logits on a GPU.
// positions [rows]: for RoPE. slots [rows]: page * page_size + offset of the token; negative: its key and value are
// not written. block_table int32 [rows, max_pages], seq_lens [rows]: the tokens that the row sees, the new one
// included; 0: none, and attention gives zeros. A page or length that can't be: FK_INVALID_ARGUMENT on the host, NaN
// logits of the row on a GPU, which skips a slot past the last page. embedding [vocab, hidden]; norms [2 layers + 1,
// hidden]: of each layer the norm before attention and the one before the MLP, then the last one. qkv_weight [layers,
// (heads_q + 2 heads_kv) head_dim, hidden], out_weight [layers, hidden, heads_q head_dim], gate_up_weight [layers, 2
// inner, hidden], down_weight [layers, hidden, inner], head_weight [outputs, hidden]. Rows are contiguous. inv_freq
// float32 [head_dim / 2]: RoPE's frequencies. k_pages, v_pages [layers, num_pages, page_size, heads_kv, head_dim]:
// the new tokens' are written. logits [rows, outputs]: written. timeline int64 [blocks, 5 layers + 1, 4] or absent:
// of each block's part of each phase (q, k, v; attention; output matrix; gate and up; down; at last the head) the
// device's clock in nanoseconds when the block came to it, when what it reads was there, when it had it, and when it
// was done. Only kernels for CUDA write it, and only what happened.
FK_API fk_status fk_decode_step(const fk_tensor* tokens, const fk_tensor* positions, const fk_tensor* slots,
    const fk_tensor* block_table, const fk_tensor* seq_lens, const fk_tensor* embedding, const fk_tensor* norms,
    const fk_tensor* qkv_weight, const fk_tensor* out_weight, const fk_tensor* gate_up_weight,
    const fk_tensor* down_weight, const fk_tensor* head_weight, const fk_tensor* inv_freq,
    const fk_tensor* k_pages, const fk_tensor* v_pages, const fk_tensor* logits, float eps, float scale,
    const fk_tensor* timeline, const fk_context* context);

// ---- The kernels that move keys and values into and out of pages.

// fk_kv_append of tokens that follow those of their sequences: the kernel works out slots and positions of RoPE, so
// that rope.positions must be absent. It needs at least one token. A token past the end of block_table, or a page id
// outside the pool: FK_INVALID_ARGUMENT on the host, skipped on a GPU.
FK_API fk_status fk_kv_append_to_sequences(const fk_tensor* k, const fk_tensor* v, const fk_tensor* k_pages,
    const fk_tensor* v_pages, const fk_kv_scales* scales, const fk_kv_append_places* places,
    const fk_kv_append_rope* rope, const fk_context* context);

// Finds the first entry of a page table that leads out of a pool of `num_pages` pages: int64 [3] `fault` gets its
// sequence, slot and page id, or {-1, -1, -1} when there is none. Looked at are the pages that a sequence's length
// needs; a length below 0 or past the table gives {sequence, -1, length}. block_table int32 [batch, max_pages],
// seq_lens int32 or int64 [batch]. Asynchronous like every op, and legal in CUDA graph capture.
FK_API fk_status fk_find_bad_page(const fk_tensor* block_table, const fk_tensor* seq_lens, int64_t num_pages,
    int64_t page_size, const fk_tensor* fault, const fk_context* context);

#ifdef __cplusplus
}
#endif
