// The C API as Rust sees it: flashkernel.h, line by line. Made by tools/c_api.py.

pub type fk_status = i32;
pub type fk_dtype = i32;
pub type fk_device_type = i32;
pub type fk_activation = i32;
pub type fk_weight_format = i32;
pub type fk_alibi = i32;
pub type fk_reduction = i32;

pub const FK_OK: fk_status = 0;
pub const FK_INVALID_ARGUMENT: fk_status = 1;
pub const FK_BAD_BLOCK_TABLE: fk_status = 2;
pub const FK_UNSUPPORTED: fk_status = 3;
pub const FK_OUT_OF_MEMORY: fk_status = 4;
pub const FK_OUT_OF_PAGES: fk_status = 5;
pub const FK_CUDA_ERROR: fk_status = 6;
pub const FK_INTERNAL_ERROR: fk_status = 7;
pub const FK_FLOAT32: fk_dtype = 0;
pub const FK_FLOAT16: fk_dtype = 1;
pub const FK_BFLOAT16: fk_dtype = 2;
pub const FK_INT32: fk_dtype = 3;
pub const FK_INT64: fk_dtype = 4;
pub const FK_UINT8: fk_dtype = 5;
pub const FK_FLOAT8_E4M3: fk_dtype = 6;
pub const FK_INT8: fk_dtype = 7;
pub const FK_INT4X2: fk_dtype = 8;
pub const FK_FLOAT4_E2M1X2: fk_dtype = 9;
pub const FK_CPU: fk_device_type = 0;
pub const FK_CUDA: fk_device_type = 1;
pub const FK_ACTIVATION_NONE: fk_activation = 0;
pub const FK_ACTIVATION_GELU_TANH: fk_activation = 1;
pub const FK_ACTIVATION_GELU: fk_activation = 2;
pub const FK_ACTIVATION_SILU: fk_activation = 3;
pub const FK_WEIGHT_INT4: fk_weight_format = 0;
pub const FK_WEIGHT_INT8: fk_weight_format = 1;
pub const FK_WEIGHT_Q4_0: fk_weight_format = 2;
pub const FK_WEIGHT_Q4_1: fk_weight_format = 3;
pub const FK_WEIGHT_Q8_0: fk_weight_format = 4;
pub const FK_ALIBI_DISTANCE: fk_alibi = 0;
pub const FK_ALIBI_SIGNED: fk_alibi = 1;
pub const FK_ALIBI_SQRT: fk_alibi = 2;
pub const FK_REDUCTION_NONE: fk_reduction = 0;
pub const FK_REDUCTION_SUM: fk_reduction = 1;
pub const FK_REDUCTION_MEAN: fk_reduction = 2;
pub const FK_MAX_DIMS: i32 = 8;
pub const FK_ABI_VERSION: i32 = 1;

#[repr(C)]
pub struct fk_memory {
    _private: [u8; 0],
    _not_send: PhantomData<*mut c_void>,
}

#[repr(C)]
pub struct fk_explanation {
    _private: [u8; 0],
    _not_send: PhantomData<*mut c_void>,
}

#[repr(C)]
pub struct fk_kernel_list {
    _private: [u8; 0],
    _not_send: PhantomData<*mut c_void>,
}

#[repr(C)]
pub struct fk_kv_page_pool {
    _private: [u8; 0],
    _not_send: PhantomData<*mut c_void>,
}

#[repr(C)]
pub struct fk_kv_cache {
    _private: [u8; 0],
    _not_send: PhantomData<*mut c_void>,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct fk_device {
    pub type_: fk_device_type,
    pub index: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fk_tensor {
    pub data: *mut c_void,
    pub dtype: fk_dtype,
    pub ndim: i32,
    pub device: fk_device,
    pub shape: [i64; 8],
    pub strides: [i64; 8],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fk_context {
    pub size: usize,
    pub stream: *mut c_void,
    pub workspace: *mut fk_memory,
    pub explain: *mut fk_explanation,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fk_kv_scales {
    pub size: usize,
    pub k: *const fk_tensor,
    pub v: *const fk_tensor,
    pub k_tensor: f32,
    pub v_tensor: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fk_attention_options {
    pub size: usize,
    pub causal: i32,
    pub check_pages: i32,
    pub window_left: i64,
    pub window_right: i64,
    pub softcap: f32,
    pub scale: f32,
    pub has_scale: i32,
    pub bias: *const fk_tensor,
    pub alibi_slopes: *const fk_tensor,
    pub sinks: *const fk_tensor,
    pub kv_scales: *const fk_kv_scales,
    pub mask: *const fk_tensor,
    pub alibi: fk_alibi,
    pub k_starts: *const fk_tensor,
    pub seqused_q: *const fk_tensor,
    pub seqused_k: *const fk_tensor,
    pub block_mask: *const fk_tensor,
    pub block_size_q: i64,
    pub block_size_k: i64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fk_attention_gradients {
    pub size: usize,
    pub q: *const fk_tensor,
    pub k: *const fk_tensor,
    pub v: *const fk_tensor,
    pub bias: *const fk_tensor,
    pub sinks: *const fk_tensor,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fk_rope_options {
    pub size: usize,
    pub theta: f64,
    pub rotary_dim: i64,
    pub interleaved: i32,
    pub inverse: i32,
    pub inv_freq: *const fk_tensor,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fk_kv_append_rope {
    pub size: usize,
    pub positions: *const fk_tensor,
    pub options: *const fk_rope_options,
    pub q: *const fk_tensor,
    pub q_out: *const fk_tensor,
    pub cos: *const fk_tensor,
    pub sin: *const fk_tensor,
    pub q_norm: *const fk_tensor,
    pub k_norm: *const fk_tensor,
    pub norm_eps: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fk_kv_append_places {
    pub size: usize,
    pub block_table: *const fk_tensor,
    pub seq_lens: *const fk_tensor,
    pub cu_seqlens: *const fk_tensor,
    pub positions: *const fk_tensor,
    pub seq_lens_after: *const fk_tensor,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fk_norm_saved {
    pub size: usize,
    pub residual_out: *const fk_tensor,
    pub mean: *const fk_tensor,
    pub rstd: *const fk_tensor,
    pub weight_offset: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fk_norm_gradients {
    pub size: usize,
    pub x: *const fk_tensor,
    pub weight: *const fk_tensor,
    pub bias: *const fk_tensor,
    pub weight_offset: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fk_linear_gradients {
    pub size: usize,
    pub x: *const fk_tensor,
    pub weight: *const fk_tensor,
    pub bias: *const fk_tensor,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fk_cross_entropy_options {
    pub size: usize,
    pub ignore_index: i64,
    pub label_smoothing: f32,
    pub reduction: fk_reduction,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fk_linear_cross_entropy_options {
    pub size: usize,
    pub ignore_index: i64,
    pub label_smoothing: f32,
    pub z_loss: f32,
    pub softcap: f32,
    pub reduction: fk_reduction,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fk_error_details {
    pub size: usize,
    pub status: fk_status,
    pub cuda_code: i32,
    pub sequence: i64,
    pub slot: i64,
    pub page: i64,
    pub requested_bytes: u64,
    pub free_bytes: u64,
    pub peak_bytes: u64,
    pub requested_pages: u64,
    pub free_pages: u64,
    pub num_pages: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fk_kernel_info {
    pub size: usize,
    pub id: *const c_char,
    pub op: *const c_char,
    pub cpu_features: *const c_char,
    pub arithmetic: *const c_char,
    pub device: fk_device_type,
    pub cc_min: i32,
    pub cc_max: i32,
    pub available: i32,
    pub calls: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fk_candidate {
    pub size: usize,
    pub kernel: *const c_char,
    pub reason: *const c_char,
    pub accepted: i32,
    pub modelled_us: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fk_memory_stats {
    pub size: usize,
    pub allocated_bytes: u64,
    pub reserved_bytes: u64,
    pub peak_allocated_bytes: u64,
    pub peak_reserved_bytes: u64,
    pub num_allocations: u64,
    pub num_deallocations: u64,
    pub num_upstream_allocations: u64,
    pub num_invalid_frees: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fk_memory_callbacks {
    pub size: usize,
    pub user: *mut c_void,
    pub device: fk_device,
    pub allocate: Option<unsafe extern "C" fn(user: *mut c_void, bytes: usize, alignment: usize, stream: *mut c_void) -> *mut c_void>,
    pub deallocate: Option<unsafe extern "C" fn(user: *mut c_void, pointer: *mut c_void, bytes: usize, alignment: usize, stream: *mut c_void)>,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fk_kv_page_pool_options {
    pub size: usize,
    pub num_pages: i64,
    pub heads_kv: i64,
    pub head_dim: i64,
    pub head_dim_v: i64,
    pub page_size: i64,
    pub num_layers: i64,
    pub dtype: fk_dtype,
    pub token_scales: i32,
    pub device: fk_device,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct fk_sequence {
    pub slot: u32,
    pub generation: u32,
    pub cache: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fk_kv_cache_stats {
    pub size: usize,
    pub num_sequences: i64,
    pub num_pages_used: i64,
    pub num_pages_shared: i64,
    pub num_pages_cached: i64,
    pub num_pages_free: i64,
    pub num_prefix_hits: u64,
    pub num_copies_on_write: u64,
    pub num_evictions: u64,
}

extern "C" {
    pub fn fk_context_init(context: *mut fk_context, size: usize) -> fk_status;
    pub fn fk_kv_scales_init(scales: *mut fk_kv_scales, size: usize) -> fk_status;
    pub fn fk_attention_options_init(options: *mut fk_attention_options, size: usize) -> fk_status;
    pub fn fk_attention_gradients_init(gradients: *mut fk_attention_gradients, size: usize) -> fk_status;
    pub fn fk_rope_options_init(options: *mut fk_rope_options, size: usize) -> fk_status;
    pub fn fk_kv_append_rope_init(rope: *mut fk_kv_append_rope, size: usize) -> fk_status;
    pub fn fk_kv_append_places_init(places: *mut fk_kv_append_places, size: usize) -> fk_status;
    pub fn fk_norm_saved_init(saved: *mut fk_norm_saved, size: usize) -> fk_status;
    pub fn fk_norm_gradients_init(gradients: *mut fk_norm_gradients, size: usize) -> fk_status;
    pub fn fk_linear_gradients_init(gradients: *mut fk_linear_gradients, size: usize) -> fk_status;
    pub fn fk_cross_entropy_options_init(options: *mut fk_cross_entropy_options, size: usize) -> fk_status;
    pub fn fk_linear_cross_entropy_options_init(options: *mut fk_linear_cross_entropy_options, size: usize) -> fk_status;
    pub fn fk_tensor_init(tensor: *mut fk_tensor, data: *mut c_void, dtype: fk_dtype, device: fk_device, ndim: i32, shape: *const i64) -> fk_status;
    pub fn fk_attention(q: *const fk_tensor, k: *const fk_tensor, v: *const fk_tensor, out: *const fk_tensor, lse: *const fk_tensor, options: *const fk_attention_options, context: *const fk_context) -> fk_status;
    pub fn fk_attention_varlen(q: *const fk_tensor, k: *const fk_tensor, v: *const fk_tensor, cu_seqlens_q: *const fk_tensor, cu_seqlens_k: *const fk_tensor, max_seqlen_q: i64, max_seqlen_k: i64, out: *const fk_tensor, lse: *const fk_tensor, options: *const fk_attention_options, context: *const fk_context) -> fk_status;
    pub fn fk_attention_paged(q: *const fk_tensor, k_pages: *const fk_tensor, v_pages: *const fk_tensor, block_table: *const fk_tensor, seq_lens: *const fk_tensor, cu_seqlens_q: *const fk_tensor, max_seqlen_q: i64, out: *const fk_tensor, lse: *const fk_tensor, options: *const fk_attention_options, context: *const fk_context) -> fk_status;
    pub fn fk_attention_cascade(q: *const fk_tensor, k_pages: *const fk_tensor, v_pages: *const fk_tensor, prefix_table: *const fk_tensor, prefix_lens: *const fk_tensor, cu_prefix_q: *const fk_tensor, block_table: *const fk_tensor, seq_lens: *const fk_tensor, cu_seqlens_q: *const fk_tensor, max_seqlen_q: i64, out: *const fk_tensor, lse: *const fk_tensor, options: *const fk_attention_options, context: *const fk_context) -> fk_status;
    pub fn fk_attention_backward(grad_out: *const fk_tensor, q: *const fk_tensor, k: *const fk_tensor, v: *const fk_tensor, out: *const fk_tensor, lse: *const fk_tensor, grad_lse: *const fk_tensor, gradients: *const fk_attention_gradients, options: *const fk_attention_options, deterministic: i32, context: *const fk_context) -> fk_status;
    pub fn fk_attention_varlen_backward(grad_out: *const fk_tensor, q: *const fk_tensor, k: *const fk_tensor, v: *const fk_tensor, out: *const fk_tensor, lse: *const fk_tensor, grad_lse: *const fk_tensor, cu_seqlens_q: *const fk_tensor, cu_seqlens_k: *const fk_tensor, max_seqlen_q: i64, max_seqlen_k: i64, gradients: *const fk_attention_gradients, options: *const fk_attention_options, deterministic: i32, context: *const fk_context) -> fk_status;
    pub fn fk_attention_mla_decode(q: *const fk_tensor, latent_pages: *const fk_tensor, block_table: *const fk_tensor, seq_lens: *const fk_tensor, latent_scale: *const fk_tensor, out: *const fk_tensor, lse: *const fk_tensor, scale: f32, causal: i32, check_pages: i32, context: *const fk_context) -> fk_status;
    pub fn fk_latent_append(latent: *const fk_tensor, key: *const fk_tensor, latent_pages: *const fk_tensor, slots: *const fk_tensor, latent_scale: *const fk_tensor, context: *const fk_context) -> fk_status;
    pub fn fk_attention_fp8(q: *const fk_tensor, k: *const fk_tensor, v: *const fk_tensor, q_scale: *const fk_tensor, k_scale: *const fk_tensor, v_scale: *const fk_tensor, cu_seqlens_q: *const fk_tensor, cu_seqlens_k: *const fk_tensor, max_seqlen_q: i64, max_seqlen_k: i64, out: *const fk_tensor, lse: *const fk_tensor, options: *const fk_attention_options, context: *const fk_context) -> fk_status;
    pub fn fk_merge_states(out_a: *const fk_tensor, lse_a: *const fk_tensor, out_b: *const fk_tensor, lse_b: *const fk_tensor, out: *const fk_tensor, lse: *const fk_tensor, context: *const fk_context) -> fk_status;
    pub fn fk_pack_mask(mask: *const fk_tensor, out: *const fk_tensor, context: *const fk_context) -> fk_status;
    pub fn fk_rope(q: *const fk_tensor, k: *const fk_tensor, positions: *const fk_tensor, q_out: *const fk_tensor, k_out: *const fk_tensor, options: *const fk_rope_options, context: *const fk_context) -> fk_status;
    pub fn fk_rope_table(q: *const fk_tensor, k: *const fk_tensor, cos: *const fk_tensor, sin: *const fk_tensor, positions: *const fk_tensor, q_out: *const fk_tensor, k_out: *const fk_tensor, options: *const fk_rope_options, context: *const fk_context) -> fk_status;
    pub fn fk_linear(x: *const fk_tensor, weight: *const fk_tensor, bias: *const fk_tensor, out: *const fk_tensor, preactivation: *const fk_tensor, activation: fk_activation, context: *const fk_context) -> fk_status;
    pub fn fk_linear_backward(grad_out: *const fk_tensor, x: *const fk_tensor, weight: *const fk_tensor, preactivation: *const fk_tensor, gradients: *const fk_linear_gradients, activation: fk_activation, context: *const fk_context) -> fk_status;
    pub fn fk_quantized_linear(x: *const fk_tensor, weight: *const fk_tensor, scales: *const fk_tensor, zeros: *const fk_tensor, bias: *const fk_tensor, out: *const fk_tensor, format: fk_weight_format, activation: fk_activation, context: *const fk_context) -> fk_status;
    pub fn fk_linear_fp8(x: *const fk_tensor, weight: *const fk_tensor, x_scale: *const fk_tensor, weight_scale: *const fk_tensor, bias: *const fk_tensor, out: *const fk_tensor, activation: fk_activation, context: *const fk_context) -> fk_status;
    pub fn fk_quantize_fp8_blocks(x: *const fk_tensor, out: *const fk_tensor, scales: *const fk_tensor, context: *const fk_context) -> fk_status;
    pub fn fk_fused_linear(x: *const fk_tensor, weight: *const fk_tensor, bias: *const fk_tensor, norm_weight: *const fk_tensor, norm_bias: *const fk_tensor, residual: *const fk_tensor, out: *const fk_tensor, activation: fk_activation, gated: i32, centred: i32, eps: f32, constant_weights: i32, context: *const fk_context) -> fk_status;
    pub fn fk_qkv_append(x: *const fk_tensor, weight: *const fk_tensor, bias: *const fk_tensor, norm_weight: *const fk_tensor, norm_bias: *const fk_tensor, k_pages: *const fk_tensor, v_pages: *const fk_tensor, slots: *const fk_tensor, rope: *const fk_kv_append_rope, q_out: *const fk_tensor, centred: i32, eps: f32, constant_weights: i32, context: *const fk_context) -> fk_status;
    pub fn fk_add(a: *const fk_tensor, b: *const fk_tensor, out: *const fk_tensor, context: *const fk_context) -> fk_status;
    pub fn fk_swiglu(gate: *const fk_tensor, up: *const fk_tensor, out: *const fk_tensor, context: *const fk_context) -> fk_status;
    pub fn fk_swiglu_backward(grad_out: *const fk_tensor, gate: *const fk_tensor, up: *const fk_tensor, grad_gate: *const fk_tensor, grad_up: *const fk_tensor, context: *const fk_context) -> fk_status;
    pub fn fk_reduce_sum(x: *const fk_tensor, out: *const fk_tensor, axes: u32, context: *const fk_context) -> fk_status;
    pub fn fk_reduce_mean(x: *const fk_tensor, out: *const fk_tensor, axes: u32, context: *const fk_context) -> fk_status;
    pub fn fk_reduce_max(x: *const fk_tensor, out: *const fk_tensor, axes: u32, context: *const fk_context) -> fk_status;
    pub fn fk_argmax(x: *const fk_tensor, out: *const fk_tensor, axes: u32, context: *const fk_context) -> fk_status;
    pub fn fk_softmax(x: *const fk_tensor, out: *const fk_tensor, axis: i32, context: *const fk_context) -> fk_status;
    pub fn fk_log_softmax(x: *const fk_tensor, out: *const fk_tensor, axis: i32, context: *const fk_context) -> fk_status;
    pub fn fk_softmax_backward(grad_out: *const fk_tensor, out: *const fk_tensor, grad_x: *const fk_tensor, axis: i32, context: *const fk_context) -> fk_status;
    pub fn fk_log_softmax_backward(grad_out: *const fk_tensor, out: *const fk_tensor, grad_x: *const fk_tensor, axis: i32, context: *const fk_context) -> fk_status;
    pub fn fk_layer_norm(x: *const fk_tensor, residual: *const fk_tensor, weight: *const fk_tensor, bias: *const fk_tensor, out: *const fk_tensor, saved: *const fk_norm_saved, eps: f32, context: *const fk_context) -> fk_status;
    pub fn fk_rms_norm(x: *const fk_tensor, residual: *const fk_tensor, weight: *const fk_tensor, out: *const fk_tensor, saved: *const fk_norm_saved, eps: f32, context: *const fk_context) -> fk_status;
    pub fn fk_layer_norm_quantized(x: *const fk_tensor, residual: *const fk_tensor, weight: *const fk_tensor, bias: *const fk_tensor, scale: *const fk_tensor, out: *const fk_tensor, scales: *const fk_tensor, saved: *const fk_norm_saved, eps: f32, context: *const fk_context) -> fk_status;
    pub fn fk_rms_norm_quantized(x: *const fk_tensor, residual: *const fk_tensor, weight: *const fk_tensor, scale: *const fk_tensor, out: *const fk_tensor, scales: *const fk_tensor, saved: *const fk_norm_saved, eps: f32, context: *const fk_context) -> fk_status;
    pub fn fk_layer_norm_backward(grad_out: *const fk_tensor, h: *const fk_tensor, weight: *const fk_tensor, mean: *const fk_tensor, rstd: *const fk_tensor, grad_residual_out: *const fk_tensor, gradients: *const fk_norm_gradients, context: *const fk_context) -> fk_status;
    pub fn fk_rms_norm_backward(grad_out: *const fk_tensor, h: *const fk_tensor, weight: *const fk_tensor, rstd: *const fk_tensor, grad_residual_out: *const fk_tensor, gradients: *const fk_norm_gradients, context: *const fk_context) -> fk_status;
    pub fn fk_sample(logits: *const fk_tensor, temperature: *const fk_tensor, top_k: *const fk_tensor, top_p: *const fk_tensor, min_p: *const fk_tensor, bias: *const fk_tensor, history: *const fk_tensor, repetition_penalty: *const fk_tensor, frequency_penalty: *const fk_tensor, presence_penalty: *const fk_tensor, seed: *const fk_tensor, offset: *const fk_tensor, out: *const fk_tensor, logprob: *const fk_tensor, context: *const fk_context) -> fk_status;
    pub fn fk_cross_entropy(logits: *const fk_tensor, targets: *const fk_tensor, loss: *const fk_tensor, lse: *const fk_tensor, options: *const fk_cross_entropy_options, context: *const fk_context) -> fk_status;
    pub fn fk_cross_entropy_backward(grad_loss: *const fk_tensor, logits: *const fk_tensor, targets: *const fk_tensor, lse: *const fk_tensor, grad_logits: *const fk_tensor, options: *const fk_cross_entropy_options, context: *const fk_context) -> fk_status;
    pub fn fk_linear_cross_entropy(x: *const fk_tensor, weight: *const fk_tensor, bias: *const fk_tensor, targets: *const fk_tensor, class_weights: *const fk_tensor, loss: *const fk_tensor, z_loss: *const fk_tensor, lse: *const fk_tensor, options: *const fk_linear_cross_entropy_options, context: *const fk_context) -> fk_status;
    pub fn fk_linear_selected_log_prob(x: *const fk_tensor, weight: *const fk_tensor, bias: *const fk_tensor, targets: *const fk_tensor, log_prob: *const fk_tensor, lse: *const fk_tensor, softcap: f32, temperature: f32, ignore_index: i64, context: *const fk_context) -> fk_status;
    pub fn fk_linear_cross_entropy_backward(grad_loss: *const fk_tensor, x: *const fk_tensor, weight: *const fk_tensor, bias: *const fk_tensor, targets: *const fk_tensor, class_weights: *const fk_tensor, lse: *const fk_tensor, gradients: *const fk_linear_gradients, options: *const fk_linear_cross_entropy_options, context: *const fk_context) -> fk_status;
    pub fn fk_linear_selected_log_prob_backward(grad_log_prob: *const fk_tensor, x: *const fk_tensor, weight: *const fk_tensor, bias: *const fk_tensor, targets: *const fk_tensor, lse: *const fk_tensor, gradients: *const fk_linear_gradients, softcap: f32, temperature: f32, ignore_index: i64, context: *const fk_context) -> fk_status;
    pub fn fk_kv_append(k: *const fk_tensor, v: *const fk_tensor, k_pages: *const fk_tensor, v_pages: *const fk_tensor, scales: *const fk_kv_scales, slots: *const fk_tensor, rope: *const fk_kv_append_rope, context: *const fk_context) -> fk_status;
    pub fn fk_kv_read(k_pages: *const fk_tensor, v_pages: *const fk_tensor, scales: *const fk_kv_scales, block_table: *const fk_tensor, seq_lens: *const fk_tensor, k_out: *const fk_tensor, v_out: *const fk_tensor, context: *const fk_context) -> fk_status;
    pub fn fk_kv_copy_pages(k_pages: *const fk_tensor, v_pages: *const fk_tensor, scales: *const fk_kv_scales, src: *const fk_tensor, dst: *const fk_tensor, context: *const fk_context) -> fk_status;
    pub fn fk_check_block_table(block_table: *const fk_tensor, seq_lens: *const fk_tensor, num_pages: i64, page_size: i64, context: *const fk_context) -> fk_status;
    pub fn fk_decode_step(tokens: *const fk_tensor, positions: *const fk_tensor, slots: *const fk_tensor, block_table: *const fk_tensor, seq_lens: *const fk_tensor, embedding: *const fk_tensor, norms: *const fk_tensor, qkv_weight: *const fk_tensor, out_weight: *const fk_tensor, gate_up_weight: *const fk_tensor, down_weight: *const fk_tensor, head_weight: *const fk_tensor, inv_freq: *const fk_tensor, k_pages: *const fk_tensor, v_pages: *const fk_tensor, logits: *const fk_tensor, eps: f32, scale: f32, timeline: *const fk_tensor, context: *const fk_context) -> fk_status;
    pub fn fk_kv_append_to_sequences(k: *const fk_tensor, v: *const fk_tensor, k_pages: *const fk_tensor, v_pages: *const fk_tensor, scales: *const fk_kv_scales, places: *const fk_kv_append_places, rope: *const fk_kv_append_rope, context: *const fk_context) -> fk_status;
    pub fn fk_find_bad_page(block_table: *const fk_tensor, seq_lens: *const fk_tensor, num_pages: i64, page_size: i64, fault: *const fk_tensor, context: *const fk_context) -> fk_status;
    pub fn fk_abi_version() -> i32;
    pub fn fk_version() -> *const c_char;
    pub fn fk_status_name(status: fk_status) -> *const c_char;
    pub fn fk_last_error_message() -> *const c_char;
    pub fn fk_last_error_details(details: *mut fk_error_details, size: usize) -> fk_status;
    pub fn fk_num_cuda_devices() -> i32;
    pub fn fk_num_threads() -> i32;
    pub fn fk_set_num_threads(count: i32) -> fk_status;
    pub fn fk_cpu_features() -> *const c_char;
    pub fn fk_op_name(index: i64) -> *const c_char;
    pub fn fk_kernel_list_create(list: *mut *mut fk_kernel_list) -> fk_status;
    pub fn fk_kernel_list_destroy(list: *mut fk_kernel_list);
    pub fn fk_kernel_list_count(list: *const fk_kernel_list) -> i64;
    pub fn fk_kernel_list_get(list: *const fk_kernel_list, index: i64, info: *mut fk_kernel_info, size: usize) -> fk_status;
    pub fn fk_force_kernels(patterns: *const c_char) -> fk_status;
    pub fn fk_forced_kernels() -> *const c_char;
    pub fn fk_explanation_create(explanation: *mut *mut fk_explanation) -> fk_status;
    pub fn fk_explanation_destroy(explanation: *mut fk_explanation);
    pub fn fk_explanation_kernel(explanation: *const fk_explanation) -> *const c_char;
    pub fn fk_explanation_workspace_bytes(explanation: *const fk_explanation) -> u64;
    pub fn fk_explanation_num_candidates(explanation: *const fk_explanation) -> i64;
    pub fn fk_explanation_candidate(explanation: *const fk_explanation, index: i64, candidate: *mut fk_candidate, size: usize) -> fk_status;
    pub fn fk_memory_default_create(device: fk_device, memory: *mut *mut fk_memory) -> fk_status;
    pub fn fk_memory_host_create(limit_bytes: u64, memory: *mut *mut fk_memory) -> fk_status;
    pub fn fk_memory_caching_create(upstream: *mut fk_memory, limit_bytes: u64, memory: *mut *mut fk_memory) -> fk_status;
    pub fn fk_memory_custom_create(callbacks: *const fk_memory_callbacks, memory: *mut *mut fk_memory) -> fk_status;
    pub fn fk_memory_destroy(memory: *mut fk_memory);
    pub fn fk_memory_allocate(memory: *mut fk_memory, bytes: usize, alignment: usize, stream: *mut c_void, pointer: *mut *mut c_void) -> fk_status;
    pub fn fk_memory_deallocate(memory: *mut fk_memory, pointer: *mut c_void, bytes: usize, alignment: usize, stream: *mut c_void) -> fk_status;
    pub fn fk_memory_get_stats(memory: *const fk_memory, stats: *mut fk_memory_stats, size: usize) -> fk_status;
    pub fn fk_memory_trim(memory: *mut fk_memory, bytes: *mut u64) -> fk_status;
    pub fn fk_kv_page_pool_options_init(options: *mut fk_kv_page_pool_options, size: usize) -> fk_status;
    pub fn fk_kv_page_pool_create(options: *const fk_kv_page_pool_options, memory: *mut fk_memory, pool: *mut *mut fk_kv_page_pool) -> fk_status;
    pub fn fk_kv_page_pool_destroy(pool: *mut fk_kv_page_pool);
    pub fn fk_kv_page_pool_page_bytes(pool: *const fk_kv_page_pool) -> u64;
    pub fn fk_kv_page_pool_num_free(pool: *const fk_kv_page_pool) -> i64;
    pub fn fk_kv_page_pool_num_used(pool: *const fk_kv_page_pool) -> i64;
    pub fn fk_kv_page_pool_take(pool: *mut fk_kv_page_pool, count: i64, pages: *mut i32) -> fk_status;
    pub fn fk_kv_page_pool_retain(pool: *mut fk_kv_page_pool, count: i64, pages: *const i32) -> fk_status;
    pub fn fk_kv_page_pool_give_back(pool: *mut fk_kv_page_pool, count: i64, pages: *const i32) -> fk_status;
    pub fn fk_kv_page_pool_num_references(pool: *const fk_kv_page_pool, page: i32, count: *mut i32) -> fk_status;
    pub fn fk_kv_page_pool_k_pages(pool: *const fk_kv_page_pool, layer: i64, k_pages: *mut fk_tensor) -> fk_status;
    pub fn fk_kv_page_pool_v_pages(pool: *const fk_kv_page_pool, layer: i64, v_pages: *mut fk_tensor) -> fk_status;
    pub fn fk_kv_page_pool_scales(pool: *const fk_kv_page_pool, layer: i64, k: *mut fk_tensor, v: *mut fk_tensor) -> fk_status;
    pub fn fk_kv_cache_create(pool: *mut fk_kv_page_pool, cache: *mut *mut fk_kv_cache) -> fk_status;
    pub fn fk_kv_cache_destroy(cache: *mut fk_kv_cache);
    pub fn fk_kv_cache_create_sequence(cache: *mut fk_kv_cache, tokens: *const i32, num_tokens: i64, sequence: *mut fk_sequence, num_cached: *mut i64) -> fk_status;
    pub fn fk_kv_cache_publish(cache: *mut fk_kv_cache, sequence: fk_sequence, tokens: *const i32, num_tokens: i64) -> fk_status;
    pub fn fk_kv_cache_fork(cache: *mut fk_kv_cache, sequence: fk_sequence, fork: *mut fk_sequence) -> fk_status;
    pub fn fk_kv_cache_truncate(cache: *mut fk_kv_cache, sequence: fk_sequence, length: i64) -> fk_status;
    pub fn fk_kv_cache_drop_before(cache: *mut fk_kv_cache, sequence: fk_sequence, position: i64, num_pages: *mut i64) -> fk_status;
    pub fn fk_kv_cache_free_sequence(cache: *mut fk_kv_cache, sequence: fk_sequence) -> fk_status;
    pub fn fk_kv_cache_append(cache: *mut fk_kv_cache, sequence: fk_sequence, num_tokens: i64, stream: *mut c_void, slots: *mut i64) -> fk_status;
    pub fn fk_kv_cache_length(cache: *const fk_kv_cache, sequence: fk_sequence, length: *mut i64) -> fk_status;
    pub fn fk_kv_cache_num_pages(cache: *const fk_kv_cache, sequence: fk_sequence, num_pages: *mut i64) -> fk_status;
    pub fn fk_kv_cache_pages(cache: *const fk_kv_cache, sequence: fk_sequence, capacity: i64, pages: *mut i32, num_pages: *mut i64) -> fk_status;
    pub fn fk_kv_cache_block_table(cache: *const fk_kv_cache, sequences: *const fk_sequence, count: i64, max_pages: i64, table: *mut i32, lengths: *mut i32) -> fk_status;
    pub fn fk_kv_cache_drop_cached(cache: *mut fk_kv_cache, num_pages: *mut i64) -> fk_status;
    pub fn fk_kv_cache_get_stats(cache: *const fk_kv_cache, stats: *mut fk_kv_cache_stats, size: usize) -> fk_status;
}
