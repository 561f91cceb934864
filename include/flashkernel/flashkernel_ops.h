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
// + seq_k - seq_q - j|, or as fk_attention_options.alibi says), then masks; attention sinks join the softmax's
// denominator only. `causal` and `window` are aligned bottom-right: query i stands at position i + seq_k - seq_q.
// Softmax runs in fp32. LSE is the natural logarithm of the denominator, sink included. A row that sees no key gives
// output 0, LSE -inf (with a sink: LSE = sink) and gradient 0.

// Dense attention: out = softmax(scale * Q K^T) V.
// - q [batch, heads_q, seq_q, head_dim]
// - k [batch, heads_kv, seq_k, head_dim], v [batch, heads_kv, seq_k, head_dim_v]; heads_q is a multiple of heads_kv
// - out [batch, heads_q, seq_q, head_dim_v]: written
// - lse fp32 [batch, heads_q, seq_q]: written; may be absent
//
// Head dims are 1 to 512. Last dims are contiguous, the others have any strides.
FK_API fk_status fk_attention(const fk_tensor* q, const fk_tensor* k, const fk_tensor* v, const fk_tensor* out,
    const fk_tensor* lse, const fk_attention_options* options, const fk_context* context);

// Attention of sequences of various lengths, which lie side by side.
// - q [total_q, heads_q, head_dim], k [total_k, heads_kv, head_dim], v [total_k, heads_kv, head_dim_v]
// - cu_seqlens_q, cu_seqlens_k int32 or int64 [batch + 1]: where each sequence begins: 0 first, never decreasing,
//   total last
// - max_seqlen_q, max_seqlen_k: bounds of the lengths
// - out [total_q, heads_q, head_dim_v]: written
// - lse fp32 [heads_q, total_q]: written; may be absent
FK_API fk_status fk_attention_varlen(const fk_tensor* q, const fk_tensor* k, const fk_tensor* v,
    const fk_tensor* cu_seqlens_q, const fk_tensor* cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
    const fk_tensor* out, const fk_tensor* lse, const fk_attention_options* options, const fk_context* context);

// Attention over keys and values in pages.
// - q and out [batch, heads_q, seq_q, *] with lse fp32 [batch, heads_q, seq_q]; or, with cu_seqlens_q and
//   max_seqlen_q, [total_q, heads_q, *] with lse [heads_q, total_q]
// - k_pages [num_pages, page_size, heads_kv, head_dim], v_pages [num_pages, page_size, heads_kv, head_dim_v]: of q's
//   dtype, or of 8 or 4 bits with `options->kv_scales`
// - block_table int32 [batch, max_pages]: the pages of each sequence, in order
// - seq_lens int32 or int64 [batch]: keys of each sequence, the new ones included
// - cu_seqlens_q int32 or int64 [batch + 1]: where the queries of each sequence begin; may be absent
//
// A table entry is not used if it lies past a sequence's last page, or if its page lies wholly before the window of
// the sequence's first query. Any value is allowed there. Kernels may read such entries, so each row must be memory
// of max_pages entries.
//
// On a GPU many blocks read the table and the lengths while the call runs. Another stream that writes them must wait
// for it.
FK_API fk_status fk_attention_paged(const fk_tensor* q, const fk_tensor* k_pages, const fk_tensor* v_pages,
    const fk_tensor* block_table, const fk_tensor* seq_lens, const fk_tensor* cu_seqlens_q,
    int64_t max_seqlen_q, const fk_tensor* out, const fk_tensor* lse, const fk_attention_options* options,
    const fk_context* context);

// ---- Attention of sequences that begin with the same tokens: the pages of a common prefix are read once for all of them.

// Attention over pages of sequences in groups, each of which has one prefix in common. Every query sees all keys of
// its group's prefix, then those of its own sequence: one softmax over both.
// - q, k_pages, v_pages, cu_seqlens_q, max_seqlen_q, out, lse: as in fk_attention_paged. Rows of q lie at one stride:
//   of q [batch, heads_q, seq_q, head_dim] with more than one query, seq lies next to batch in memory
// - prefix_table int32 [groups, max_prefix_pages]: pages of each prefix
// - prefix_lens int32 or int64 [groups]: tokens of each prefix; any number, 0 too
// - cu_prefix_q int32 or int64 [groups + 1]: which rows of q (batch * seq_q, or total_q of them, in order) each group
//   has: 0 first, never decreasing, the number of rows last; may be absent where there is one group. The queries of a
//   sequence belong to one group
// - block_table, seq_lens: as in fk_attention_paged, of what follows the prefix, the new keys included
// - options: causal, softcap, scale, sinks, check_pages and kv_scales are taken. With `causal` a sequence has at
//   least as many keys of its own as queries
//
// `explain` tells of the part over the prefixes. A kernel is a candidate if it takes both parts.
FK_API fk_status fk_attention_cascade(const fk_tensor* q, const fk_tensor* k_pages, const fk_tensor* v_pages,
    const fk_tensor* prefix_table, const fk_tensor* prefix_lens, const fk_tensor* cu_prefix_q,
    const fk_tensor* block_table, const fk_tensor* seq_lens, const fk_tensor* cu_seqlens_q,
    int64_t max_seqlen_q, const fk_tensor* out, const fk_tensor* lse, const fk_attention_options* options,
    const fk_context* context);

// ---- Attention: softmax(scale * Q K^T) V and its gradient; dense, variable-length and paged.
//
// Order of operations on a score s = scale * <q_i, k_j>: softcap (c * tanh(s / c)), then bias and ALiBi (-slope * |i
// + seq_k - seq_q - j|, or as fk_attention_options.alibi says), then masks; attention sinks join the softmax's
// denominator only. `causal` and `window` are aligned bottom-right: query i stands at position i + seq_k - seq_q.
// Softmax runs in fp32. LSE is the natural logarithm of the denominator, sink included. A row that sees no key gives
// output 0, LSE -inf (with a sink: LSE = sink) and gradient 0.

// Gradients of fk_attention, recomputed from q, k, v, out and lse, all as the forward pass took and gave them.
// - grad_lse fp32, shape of lse; may be absent
// - deterministic: gradients are the same bits in every run; false allows atomics
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

// Attention over a cache of latent rows in pages: softmax(scale * q L^T) L[:, :head_dim_v].
// - q [batch, heads_q, seq_q, head_dim]: float32, float16 or bfloat16; head_dim 1..576
// - latent_pages [num_pages, page_size, head_dim] of q's dtype, or of 8 bits (below)
// - block_table int32 [batch, max_pages], seq_lens int32 or int64 [batch]: as in fk_attention_paged, with what is
//   allowed in entries that are not used
// - latent_scale: of rows of 8 bits with one scale (below); else absent
// - out [batch, heads_q, seq_q, head_dim_v] of q's dtype: written; head_dim_v is 1..512 and at most head_dim
// - lse fp32 [batch, heads_q, seq_q]: written; may be absent
// - scale: the factor of scores. It has no default, because it follows from the head dim before the latent
// - causal: query i stands at position i + seq_lens[b] - seq_q
// - check_pages: as in fk_attention_paged
//
// A row that sees no key gives output 0 and LSE -inf. Last dims are contiguous.
//
// Latent rows of 8 bits (uint8 or float8_e4m3fn) stand for element times scale in float32, rounded to q's dtype. The
// last dim of latent_pages tells which of two forms they have:
// - head_dim_v + 4 * groups + 2 * (head_dim - head_dim_v) bytes: a row is head_dim_v float8_e4m3fn elements, a
//   float32 scale for each 128 of them (the last group may be shorter), and the other columns in bfloat16: 656 bytes
//   for 512 and 576. head_dim_v is a multiple of 4, and rows begin at multiples of 4 bytes
// - head_dim bytes: float8_e4m3fn elements with one scale, `latent_scale`: one float32 number on q's device or on the
//   host; absent: 1
FK_API fk_status fk_attention_mla_decode(const fk_tensor* q, const fk_tensor* latent_pages,
    const fk_tensor* block_table, const fk_tensor* seq_lens, const fk_tensor* latent_scale,
    const fk_tensor* out, const fk_tensor* lse, float scale, int32_t causal, int32_t check_pages,
    const fk_context* context);

// Rounds latent rows to 8 bits and writes them into the pages of fk_attention_mla_decode, in either form.
// - latent [tokens, rank], key [tokens, turned]: float32, float16 or bfloat16, one dtype; last dims contiguous; rank
//   1..512, both together 1..576. The key has been rotated by the caller
// - latent_pages uint8 or float8_e4m3fn: [num_pages, page_size, rank + 4 * groups + 2 * turned], where a group's
//   scale is its largest magnitude over 448, at least 2^-126, and the key is rounded to bfloat16; or [num_pages,
//   page_size, rank + turned], where `latent_scale` is read
// - slots int32 or int64 [tokens]: row t goes to slot slots[t] = page * page_size + offset; a negative slot is
//   skipped
// - latent_scale: as in fk_attention_mla_decode
//
// An element is x / scale, rounded to nearest even and bounded to +-448. NaN stays NaN and leaves the scale alone. A
// slot past the last page: FK_INVALID_ARGUMENT where slots are on the host, skipped on a GPU.
FK_API fk_status fk_latent_append(const fk_tensor* latent, const fk_tensor* key, const fk_tensor* latent_pages,
    const fk_tensor* slots, const fk_tensor* latent_scale, const fk_context* context);

// ---- Attention of 8-bit floating point queries, keys and values with scales beside them, and a 16-bit output.

// softmax(scale * Q K^T) V where Q, K and V are float8_e4m3fn elements times a scale.
// - q, k, v, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: without cu_seqlens the layouts of
//   fk_attention (2 to 4 dims), with both of them those of fk_attention_varlen
// - q_scale, k_scale, v_scale fp32: absent (1), one number (0 dims or one element; on q's device, or on the host,
//   where it is read during the call), or broadcastable to [batch, heads_kv]: a query head has the scale of its kv
//   head
// - out float16 or bfloat16, shape of q with v's head dim: written
// - options: causal, window, softcap, scale, ALiBi, sinks, seqused_q and seqused_k are taken
//
// There is no gradient. Kernels on 8-bit tensor cores, which run only where they are forced, round the weights of
// keys to e4m3 before the second product (docs/low_precision.md).
FK_API fk_status fk_attention_fp8(const fk_tensor* q, const fk_tensor* k, const fk_tensor* v, const fk_tensor* q_scale,
    const fk_tensor* k_scale, const fk_tensor* v_scale, const fk_tensor* cu_seqlens_q,
    const fk_tensor* cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, const fk_tensor* out,
    const fk_tensor* lse, const fk_attention_options* options, const fk_context* context);

// ---- Attention: softmax(scale * Q K^T) V and its gradient; dense, variable-length and paged.
//
// Order of operations on a score s = scale * <q_i, k_j>: softcap (c * tanh(s / c)), then bias and ALiBi (-slope * |i
// + seq_k - seq_q - j|, or as fk_attention_options.alibi says), then masks; attention sinks join the softmax's
// denominator only. `causal` and `window` are aligned bottom-right: query i stands at position i + seq_k - seq_q.
// Softmax runs in fp32. LSE is the natural logarithm of the denominator, sink included. A row that sees no key gives
// output 0, LSE -inf (with a sink: LSE = sink) and gradient 0.

// Attention over the union of disjoint sets of keys, from the results over each.
// - out_a, out_b [..., head_dim] (up to 4 dims), lse_a, lse_b fp32, shape of out_a without the last dim: two parts.
//   Or, without out_b and lse_b, out_a [parts, ..., head_dim] and lse_a [parts, ...]: any number of parts
// - out: written; out_a's dtype, or any of the three floating dtypes where the parts are float32
// - lse fp32: written
//
// A part whose LSE is -inf counts nothing; no part at all gives 0 and LSE -inf. Of two parts, out and lse may be
// out_a and lse_a; of any number, they need memory of their own.
FK_API fk_status fk_merge_states(const fk_tensor* out_a, const fk_tensor* lse_a, const fk_tensor* out_b,
    const fk_tensor* lse_b, const fk_tensor* out, const fk_tensor* lse, const fk_context* context);

// Packs a boolean mask to the bits that `fk_attention_options.mask` wants: bit j % 32 of word j / 32 is key j; bits
// behind the last key are 0.
// - mask uint8 of 1 to 4 dims, a boolean tensor's bytes: what is not 0 is seen; any strides, 0 included
// - out int32, mask's shape but for its last dim, which is (mask.shape[last] + 31) / 32 and contiguous: written
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

// out = activation(x W^T + b).
// - x [..., in_features] (up to 8 dims)
// - weight [out_features, in_features], either dim contiguous: a transposed view of GPT-2's [in, out] weight is taken
//   as it is
// - bias [out_features], x's dtype or fp32; or absent
// - out [..., out_features]: written
// - preactivation: gets x W^T + b in out's shape and dtype; or absent
//
// Sums are fp32, and the activation is applied before rounding. Outputs need memory of their own.
FK_API fk_status fk_linear(const fk_tensor* x, const fk_tensor* weight, const fk_tensor* bias, const fk_tensor* out,
    const fk_tensor* preactivation, fk_activation activation, const fk_context* context);

// Gradients of fk_linear. `preactivation` is needed when `activation` is not FK_ACTIVATION_NONE; where it is
// infinite, the activation's derivative is its limit (0 or 1). Gradients of weight and bias sum over all rows, so
// they need leading dims that fold into rows with one stride.
FK_API fk_status fk_linear_backward(const fk_tensor* grad_out, const fk_tensor* x, const fk_tensor* weight,
    const fk_tensor* preactivation, const fk_linear_gradients* gradients, fk_activation activation,
    const fk_context* context);

// ---- activation(x W^T + b) with weights of 4 or 8 bits and a scale for each block of them.

// out = activation(x W^T + bias) of a weight with 4 or 8 bits an element.
// - x [..., in_features] (up to 8 dims): float32, float16 or bfloat16, last dim contiguous
// - weight [out_features, bytes of a row]: `format` says what it holds
// - scales, zeros [out_features, groups] fp32, fp16 or bf16, one dtype for both: of int4 and int8, where an element
//   is scale * (q - zero). Without zeros the zero of int4 is 8 and that of int8 is 0. A group is in_features / groups
//   neighbours of a row: a multiple of 32, or of int8 also the whole row. The formats of GGUF files hold their scales
//   in their blocks; scales and zeros are absent there
// - bias [out_features], x's dtype or fp32; or absent
// - out [..., out_features] of x's dtype: written; it needs memory of its own
//
// Sums are fp32.
//
// On the CPU a weight in GGUF's formats may be tiles [out_features / 16, in_features / 32, bytes of 16 blocks]. A
// tile has the blocks of 16 rows side by side: first the first 2-byte number of each row, then the second one of each
// row, then 4 bytes of each row's elements at a time. AVX512-VNNI and AMX read tiles fastest. AVX512-VNNI takes x as
// integers of 24 bits (fp32) or 16 bits (fp16, bf16) with one scale for 32 neighbours (docs/low_precision.md).
FK_API fk_status fk_quantized_linear(const fk_tensor* x, const fk_tensor* weight, const fk_tensor* scales,
    const fk_tensor* zeros, const fk_tensor* bias, const fk_tensor* out, fk_weight_format format,
    fk_activation activation, const fk_context* context);

// ---- activation(x W^T + b) of x and W in float8_e4m3fn with scales, and what makes such an x.

// out = activation(x W^T + b) of float8_e4m3fn elements: an element times its scale is the number.
// - x [..., in_features] (up to 8 dims), last dim contiguous; or float32, float16 or bfloat16 with x_scale absent: it
//   is then rounded into workspace as fk_quantize_fp8_blocks does
// - weight [out_features, in_features], last dim contiguous
// - x_scale float32, any strides: [..., ceil(in_features / 128)], one for 128 neighbours of a row; [..., 1], one a
//   row; or one number (0 dims, or [1])
// - weight_scale float32, any strides: [ceil(out_features / 128), ceil(in_features / 128)], one for a block of 128 x
//   128; [out_features, ceil(in_features / 128)], one for 128 neighbours of a row; [out_features, 1] or
//   [out_features], one a row; or one number
// - bias [out_features], out's dtype or float32; or absent
// - out [..., out_features] float32, float16 or bfloat16: written
//
// Sums are float32. On tensor cores, whose sums of 8-bit numbers are shorter, they are float32 over parts of 128 of
// in_features. The activation is applied before rounding. Outputs need memory of their own.
FK_API fk_status fk_linear_fp8(const fk_tensor* x, const fk_tensor* weight, const fk_tensor* x_scale,
    const fk_tensor* weight_scale, const fk_tensor* bias, const fk_tensor* out, fk_activation activation,
    const fk_context* context);

// Rounds x to 8 bits with a scale for each 128 neighbours of a row.
// - x [..., features] (up to 8 dims): float32, float16 or bfloat16, last dim contiguous
// - out float8_e4m3fn, x's shape, last dim contiguous: written
// - scales float32 [..., ceil(features / 128)], any strides: written: the largest magnitude of the 128 over 448, at
//   least 2^-100
//
// An element is x / scale, rounded to nearest even. Infinities become 448 and -448, NaN stays. Outputs need memory of
// their own.
FK_API fk_status fk_quantize_fp8_blocks(const fk_tensor* x, const fk_tensor* out, const fk_tensor* scales,
    const fk_context* context);

// ---- A linear with the norm before it and with what follows it, for decode steps.

// out = activation(norm(x) W^T + bias) + residual. With `gated`, out = activation(gate) * up + residual, where gate
// and up are the first and the last out_features of norm(x) W^T + bias.
// - x [..., in_features] (up to 8 dims)
// - weight [out_features, in_features], with `gated` [2 out_features, in_features]; either dim contiguous
// - bias: one for each row of weight, x's dtype or fp32; or absent
// - norm_weight [in_features] (any floating dtype) asks for a norm of x; absent: there is none. The norm is RMSNorm,
//   with `centred` LayerNorm, whose norm_bias may be given
// - residual: out's shape, or absent
// - out [..., out_features]: written; may be the same tensor as residual
// - activation: with `gated` kSilu (SwiGLU) alone
// - constant_weights: a promise that no work which is still under way on the stream writes weight, bias, norm_weight
//   or norm_bias. A kernel may then read them while the kernel in front of it still runs. Work that writes them
//   counts as over once a kernel behind it was not launched early (programmatic dependent launch), as kernels of
//   other libraries are not
//
// The norm is rounded to x's dtype, as fk_rms_norm and fk_layer_norm give it. Sums are fp32. A kernel may round what
// stands before the residual or the gate to x's dtype, as the single ops do.
FK_API fk_status fk_fused_linear(const fk_tensor* x, const fk_tensor* weight, const fk_tensor* bias,
    const fk_tensor* norm_weight, const fk_tensor* norm_bias, const fk_tensor* residual, const fk_tensor* out,
    fk_activation activation, int32_t gated, int32_t centred, float eps, int32_t constant_weights,
    const fk_context* context);

// ---- The projection of queries, keys and values of a decode step, with the norm before it, RoPE, and keys and values
// into their pages.

// The projection to queries, keys and values with what follows it: norm(x) W^T + bias, RoPE of q and k, and
// fk_kv_append of k and v. Queries are written to q_out.
// - x [tokens, in_features]
// - weight [(heads_q + 2 heads_kv) head_dim, in_features] (either dim contiguous): heads of q, then of k, then of v
// - bias, norm_weight, norm_bias, centred, eps, constant_weights: as in fk_fused_linear
// - k_pages, v_pages [num_pages, page_size, heads_kv, head_dim] of x's dtype
// - slots int32 or int64 [tokens]
// - rope: without q and q_out; absent: nothing is rotated
// - q_out [tokens, heads_q, head_dim], heads side by side: written
//
// Sums are fp32; a kernel may round them to x's dtype before it rotates them.
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

// LayerNorm of h = x + residual: out = (h - mean(h)) / sqrt(var(h) + eps) * weight + bias. h is rounded to x's dtype,
// as residual_out stores it; without a residual it is x.
// - x [..., features], residual of x's shape or absent; last dims contiguous
// - weight, bias [features], each float32, float16 or bfloat16 whatever x is; may be absent
// - out of x's shape and dtype: written
// - saved: what else is written; mean and rstd are contiguous
//
// Statistics are fp32 in two passes, not E[x^2] - E[x]^2. out and residual_out may each be the same tensor as x or
// residual, but not as each other.
FK_API fk_status fk_layer_norm(const fk_tensor* x, const fk_tensor* residual, const fk_tensor* weight,
    const fk_tensor* bias, const fk_tensor* out, const fk_norm_saved* saved, float eps,
    const fk_context* context);

// RMSNorm of h = x + residual (or x): out = h / sqrt(mean(h^2) + eps) * weight (Zhang and Sennrich, 2019). Arguments
// as in fk_layer_norm.
FK_API fk_status fk_rms_norm(const fk_tensor* x, const fk_tensor* residual, const fk_tensor* weight,
    const fk_tensor* out, const fk_norm_saved* saved, float eps, const fk_context* context);

// fk_layer_norm with an output of 8 bits: element * scale is the number.
// - out float8_e4m3fn or int8, x's shape, last dim contiguous: written; it shares no memory with x or residual
// - scale: one float32 number (0 or 1 dims), read on the device. Or absent, and scales float32, x's shape without the
//   last dim, contiguous, is written: the largest magnitude of each row over 448 or 127, at least 2^-100
//
// The norm is not rounded to x's dtype on the way. Elements are rounded to nearest even and saturated to +-448 or
// +-127 (infinities too). float8_e4m3fn keeps NaN; int8 stores 0 for it, and a scale that is written becomes NaN.
FK_API fk_status fk_layer_norm_quantized(const fk_tensor* x, const fk_tensor* residual, const fk_tensor* weight,
    const fk_tensor* bias, const fk_tensor* scale, const fk_tensor* out, const fk_tensor* scales,
    const fk_norm_saved* saved, float eps, const fk_context* context);

// fk_rms_norm with an output of 8 bits, as in fk_layer_norm_quantized.
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

// Draws the next token of each row of logits.
// - logits [rows, vocab] float32, float16 or bfloat16; last dim contiguous; vocab at most 2^23
// - out int32 or int64 [rows], contiguous: written
// - logprob float32 [rows], or absent: gets the natural logarithm of the token's probability under the logits as they
//   came
// - all others: parameters of rows, contiguous [rows] where nothing else is said. An absent one changes nothing. They
//   are read on the device, so that a captured graph replays with other numbers
//
// In this order, as in Hugging Face Transformers:
// - `bias` float32 [rows, vocab] is added.
// - `repetition_penalty` divides positive logits, and multiplies negative ones, of tokens whose `history` is not 0.
//   history int32 [rows, vocab] is 2 * (times generated), plus 1 for a token of the prompt; it is needed with a
//   penalty.
// - `frequency_penalty` is subtracted once for each time that the row has generated the token, `presence_penalty`
//   once if it has.
// - A row with `temperature` 0, with top_k 1, or without `temperature` takes the first of its best tokens. The others
//   divide by temperature and go on.
// - `top_k` (int32 or int64; 0: no limit) keeps the best, and all that equal the last of them.
// - `top_p` (1: no limit) keeps of these the fewest best whose probability reaches it, equal ones by their ids.
// - `min_p` (0: no limit; above 1 as 1) keeps of these all that have at least min_p times the probability of the
//   best.
// - A token is drawn in the order of ids by a number from Philox4x32-10 with key `seed` and counter `offset` (int64,
//   0 where absent).
//
// The result is the same on every device, bit for bit. Distances from the best logit, in float32, become multiples of
// 2^-24 (in units of ln 2). Those become integer weights of 2^-40 of the best one's, and all sums are of integers.
// Tokens of the same distance count as equal. Below 2^-40 of the best one's probability none is drawn.
//
// A row with a NaN or +inf, or without any number above -inf, gets -1 - (the id of that logit), and a logprob of NaN:
// a kernel cannot raise an error, so whoever reads the tokens has to look.
FK_API fk_status fk_sample(const fk_tensor* logits, const fk_tensor* temperature, const fk_tensor* top_k,
    const fk_tensor* top_p, const fk_tensor* min_p, const fk_tensor* bias, const fk_tensor* history,
    const fk_tensor* repetition_penalty, const fk_tensor* frequency_penalty, const fk_tensor* presence_penalty,
    const fk_tensor* seed, const fk_tensor* offset, const fk_tensor* out, const fk_tensor* logprob,
    const fk_context* context);

// ---- Cross-entropy over the last dim, without writing the probabilities; fused with the product before it, without
// writing the logits.

// Cross-entropy: loss_r = lse(logits_r) - logits_r[target_r], smoothed by label_smoothing.
// - logits [rows, classes]
// - targets int32 or int64 [rows]. One outside [0, classes) that is not ignore_index: FK_INVALID_ARGUMENT on the
//   host, a NaN loss on a GPU
// - loss fp32: written: [rows] for FK_REDUCTION_NONE, else a scalar (shape [] or [1]). FK_REDUCTION_MEAN over no
//   counted rows is NaN, as in PyTorch
// - lse fp32 [rows]: written; may be absent
FK_API fk_status fk_cross_entropy(const fk_tensor* logits, const fk_tensor* targets, const fk_tensor* loss,
    const fk_tensor* lse, const fk_cross_entropy_options* options, const fk_context* context);

// grad_loss has loss's shape, by any stride; grad_logits has logits' shape and dtype and may alias logits.
FK_API fk_status fk_cross_entropy_backward(const fk_tensor* grad_loss, const fk_tensor* logits,
    const fk_tensor* targets, const fk_tensor* lse, const fk_tensor* grad_logits,
    const fk_cross_entropy_options* options, const fk_context* context);

// The cross-entropy of the logits x weight^T + bias, without writing them: a chunk at a time is held. Logits are
// rounded to x's dtype, as fk_linear writes them.
// - x [tokens, features], last dim contiguous
// - weight [classes, features] in x's dtype, either dim contiguous
// - bias [classes] in x's dtype or fp32; or absent
// - targets int32 or int64 [tokens]; out of range: as for fk_cross_entropy
// - class_weights fp32 [classes], or absent
// - loss fp32: written: [tokens] for FK_REDUCTION_NONE, else a scalar (shape [] or [1])
// - z_loss (loss's shape), lse (fp32 [tokens], of the capped logits): written; may be absent
//
// With w = class_weights (1 where absent), s = label_smoothing and log p = log_softmax(logits), a row's loss is (1 -
// s) w_t (-log p_t) + s / classes sum_c w_c (-log p_c), plus its z-loss. A mean divides the sum of cross-entropies by
// the sum of the counted targets' weights, and that of z-losses by the number of counted rows.
FK_API fk_status fk_linear_cross_entropy(const fk_tensor* x, const fk_tensor* weight, const fk_tensor* bias,
    const fk_tensor* targets, const fk_tensor* class_weights, const fk_tensor* loss, const fk_tensor* z_loss,
    const fk_tensor* lse, const fk_linear_cross_entropy_options* options, const fk_context* context);

// log_softmax(softcap(x weight^T + bias) / temperature) at each row's target, without writing the logits.
// - x, weight, bias, targets: as in fk_linear_cross_entropy
// - log_prob fp32 [tokens]: written; 0 for rows whose target is ignore_index
// - lse fp32 [tokens], of what the softmax saw: written; may be absent
// - softcap: 0: none. temperature: above 0
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

// Writes the keys and values of new tokens into pages, with RoPE and RMSNorm of heads on the way if fk_rope asks for
// them.
// - k [tokens, heads_kv, head_dim], v [tokens, heads_kv, head_dim_v]
// - k_pages [num_pages, page_size, heads_kv, head_dim], v_pages [num_pages, page_size, heads_kv, head_dim_v]: written
// - slots int32 or int64 [tokens]: token t goes to slot slots[t] = page * page_size + offset; a negative slot is
//   skipped. A slot past the last page: FK_INVALID_ARGUMENT where slots are on the host, skipped on a GPU
//
// The same into pages of 8 or 4 bits, whose scales are `scales`. k, v and q are float32, float16 or bfloat16; k and v
// are rotated in float32 and not rounded to their dtype first.
// - Pages of float8_e4m3fn or int8 get x / scale, rounded to nearest even and saturated to 448 or 127 (infinities
//   too). Scales [heads_kv] are read. Scales [num_pages, heads_kv, page_size] are written: the largest magnitude of
//   the token's head over 448 or 127
// - NaN stays NaN in float8_e4m3fn. int8 has none: a scale of the token's own becomes NaN, and with it the token's
//   whole head; under a scale [heads_kv] a NaN is stored as 0
// - Pages of int4 [num_pages, page_size, heads_kv, head_dim / 2] in bytes get (x - zero) / scale, rounded to nearest
//   even and bounded to 0 to 15. zero, the least of a group of 32, and scale, a fifteenth of its range, are written
//   as float16. Numbers are bounded to +-65024 first, and a group with a NaN becomes NaN
FK_API fk_status fk_kv_append(const fk_tensor* k, const fk_tensor* v, const fk_tensor* k_pages,
    const fk_tensor* v_pages, const fk_kv_scales* scales, const fk_tensor* slots, const fk_kv_append_rope* rope,
    const fk_context* context);

// Gathers sequences back: k_out [batch, max_seq, heads_kv, head_dim], v_out [batch, max_seq, heads_kv, head_dim_v];
// tokens past seq_lens[b] are written as 0. block_table int32 [batch, max_pages], seq_lens int32 or int64 [batch].
// Table entries past a sequence's last page are not used: any value is allowed there.
//
// The same from pages of 8 and 4 bits: their numbers, rounded to the dtype of k_out and v_out (float32, float16 or
// bfloat16).
FK_API fk_status fk_kv_read(const fk_tensor* k_pages, const fk_tensor* v_pages, const fk_kv_scales* scales,
    const fk_tensor* block_table, const fk_tensor* seq_lens, const fk_tensor* k_out, const fk_tensor* v_out,
    const fk_context* context);

// Copies page src[i] to page dst[i] in both k_pages and v_pages; src, dst int32 or int64 [n]; no page may be in both.
//
// The same for pages of 8 and 4 bits; scales of tokens and of groups go along.
FK_API fk_status fk_kv_copy_pages(const fk_tensor* k_pages, const fk_tensor* v_pages, const fk_kv_scales* scales,
    const fk_tensor* src, const fk_tensor* dst, const fk_context* context);

// Returns FK_BAD_BLOCK_TABLE with what fk_find_bad_page finds. On a GPU it waits for `context->stream`: for
// debugging, and for tables from elsewhere. FK_UNSUPPORTED while that stream is being captured.
FK_API fk_status fk_check_block_table(const fk_tensor* block_table, const fk_tensor* seq_lens, int64_t num_pages,
    int64_t page_size, const fk_context* context);

// ---- A whole decode step of a decoder as one op.

// One new token for each of `rows` sequences through a dense decoder of Llama's kind. It computes the embedding; in
// each layer RMSNorm, q, k and v, RoPE (the halves of a head turn together), the append to the pages, attention over
// them, the output matrix with the residual, RMSNorm, gate and up with SwiGLU, and down with the residual; then the
// last norm and the logits.
//
// Everything is of one dtype: float32, float16 or bfloat16. Sums are fp32, and what goes from one matrix to the next
// is rounded to the dtype, as by the single ops. Weights must not change while the step runs.
// - tokens int32 or int64 [rows]: ids. One that the embedding does not have: FK_INVALID_ARGUMENT where tokens are on
//   the host, NaN logits on a GPU
// - positions [rows]: for RoPE
// - slots [rows]: page * page_size + offset of the token. Negative: its key and value are not written
// - block_table int32 [rows, max_pages], seq_lens [rows]: the tokens that the row sees, the new one included; 0:
//   none, and attention gives zeros. A page or length that cannot be: FK_INVALID_ARGUMENT on the host; on a GPU NaN
//   logits of the row, and a slot past the last page is skipped
// - embedding [vocab, hidden]
// - norms [2 layers + 1, hidden]: of each layer the norm before attention and the one before the MLP, then the last
//   one
// - qkv_weight [layers, (heads_q + 2 heads_kv) head_dim, hidden], out_weight [layers, hidden, heads_q head_dim]
// - gate_up_weight [layers, 2 inner, hidden], down_weight [layers, hidden, inner], head_weight [outputs, hidden].
//   Rows of all weights are contiguous
// - inv_freq float32 [head_dim / 2]: RoPE's frequencies
// - k_pages, v_pages [layers, num_pages, page_size, heads_kv, head_dim]: the new tokens' rows are written
// - logits [rows, outputs]: written
// - timeline int64 [blocks, 5 layers + 1, 4] or absent: written by kernels for CUDA alone. For each block and phase
//   (q, k, v; attention; output matrix; gate and up; down; at last the head) it gets the device's clock in
//   nanoseconds at four events: the block comes to the phase, what it reads is there, it has read it, it is done.
//   Events that did not happen are left as they are
FK_API fk_status fk_decode_step(const fk_tensor* tokens, const fk_tensor* positions, const fk_tensor* slots,
    const fk_tensor* block_table, const fk_tensor* seq_lens, const fk_tensor* embedding, const fk_tensor* norms,
    const fk_tensor* qkv_weight, const fk_tensor* out_weight, const fk_tensor* gate_up_weight,
    const fk_tensor* down_weight, const fk_tensor* head_weight, const fk_tensor* inv_freq,
    const fk_tensor* k_pages, const fk_tensor* v_pages, const fk_tensor* logits, float eps, float scale,
    const fk_tensor* timeline, const fk_context* context);

// ---- The kernels that move keys and values into and out of pages.

// fk_kv_append of tokens that follow those of their sequences. The kernel works out slots and positions of RoPE from
// `places`, so rope.positions must be absent. There is at least one token.
//
// A token past the end of block_table, or a page id outside the pool: FK_INVALID_ARGUMENT on the host, skipped on a
// GPU.
FK_API fk_status fk_kv_append_to_sequences(const fk_tensor* k, const fk_tensor* v, const fk_tensor* k_pages,
    const fk_tensor* v_pages, const fk_kv_scales* scales, const fk_kv_append_places* places,
    const fk_kv_append_rope* rope, const fk_context* context);

// Finds the first entry of a page table that leads out of a pool of `num_pages` pages.
// - block_table int32 [batch, max_pages], seq_lens int32 or int64 [batch]: the entries that a sequence's length needs
//   are looked at
// - fault int64 [3]: written: sequence, slot and page id of the entry, or {-1, -1, -1} if there is none. A length
//   below 0 or past the table gives {sequence, -1, length}
//
// It is asynchronous like every op, and legal while a CUDA graph is captured.
FK_API fk_status fk_find_bad_page(const fk_tensor* block_table, const fk_tensor* seq_lens, int64_t num_pages,
    int64_t page_size, const fk_tensor* fault, const fk_context* context);

#ifdef __cplusplus
}
#endif
