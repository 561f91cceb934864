// The types of the C API: status, tensors, options and handles. C99 and C++. docs/c_api.md is the guide.
//
// Every struct that a later version may extend begins with `size`: what the caller was compiled with. Its init function
// fills in the defaults; a library that knows more fields takes the defaults for those that the caller lacks.
// fk_device, fk_tensor and fk_sequence (flashkernel.h) never change.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "flashkernel/export.hpp"

#ifdef __cplusplus
extern "C" {
#endif

// What a call returns. On anything but FK_OK the message of this thread says what was given and what is needed.
typedef int32_t fk_status;
enum {
  FK_OK = 0,
  FK_INVALID_ARGUMENT = 1,  // a value that no backend could accept
  FK_BAD_BLOCK_TABLE = 2,   // a page table that leads out of the pool; see fk_error_details
  FK_UNSUPPORTED = 3,       // no kernel of this build serves the call on this device
  FK_OUT_OF_MEMORY = 4,     // nothing has changed
  FK_OUT_OF_PAGES = 5,      // the page pool ran dry; nothing has changed
  FK_CUDA_ERROR = 6,        // a CUDA runtime call failed
  FK_INTERNAL_ERROR = 7     // an error that the library did not expect
};

typedef int32_t fk_dtype;
enum {
  FK_FLOAT32 = 0,
  FK_FLOAT16 = 1,
  FK_BFLOAT16 = 2,
  FK_INT32 = 3,
  FK_INT64 = 4,
  FK_UINT8 = 5,
  FK_FLOAT8_E4M3 = 6,   // OCP E4M3FN; pages of an 8-bit KV-cache alone
  FK_INT8 = 7,          // pages of an 8-bit KV-cache alone
  FK_INT4X2 = 8,        // bytes of two elements, the first in the low bits; pages of a 4-bit KV-cache alone
  FK_FLOAT4_E2M1X2 = 9  // NVFP4: the same, with scales of FK_FLOAT8_E4M3; pages alone, which are read and copied
};

typedef int32_t fk_device_type;
enum { FK_CPU = 0, FK_CUDA = 1 };

typedef int32_t fk_activation;
enum { FK_ACTIVATION_NONE = 0, FK_ACTIVATION_GELU_TANH = 1, FK_ACTIVATION_GELU = 2, FK_ACTIVATION_SILU = 3 };

// How a row of weights in few bits lies in memory (WeightFormat of types.hpp).
typedef int32_t fk_weight_format;
enum { FK_WEIGHT_INT4 = 0, FK_WEIGHT_INT8 = 1, FK_WEIGHT_Q4_0 = 2, FK_WEIGHT_Q4_1 = 3, FK_WEIGHT_Q8_0 = 4 };

// What ALiBi adds to a score, d being the distance from a key to the query's position: -slope * |d|, -slope * d, or
// -slope * sqrt(d) for keys before the position and 0 for others.
typedef int32_t fk_alibi;
enum { FK_ALIBI_DISTANCE = 0, FK_ALIBI_SIGNED = 1, FK_ALIBI_SQRT = 2 };

typedef int32_t fk_reduction;
enum { FK_REDUCTION_NONE = 0, FK_REDUCTION_SUM = 1, FK_REDUCTION_MEAN = 2 };

enum { FK_MAX_DIMS = 8 };

// Where a tensor lives: the host (index 0), or one CUDA device.
typedef struct fk_device {
  fk_device_type type;
  int32_t index;
} fk_device;

// A borrowed, strided tensor. The library reads the struct during the call and keeps no pointer to it. Strides count
// elements and may be 0 (broadcast) or negative. A NULL `const fk_tensor*` stands for an absent tensor.
typedef struct fk_tensor {
  void* data;  // NULL only where there are no elements
  fk_dtype dtype;
  int32_t ndim;  // 0 to FK_MAX_DIMS
  fk_device device;
  int64_t shape[8];
  int64_t strides[8];
} fk_tensor;

// Handles. Each is made by a function `..._create` and given back by `..._destroy`, which takes NULL. A handle keeps
// what it was made from alive, so the order in which handles are destroyed does not matter.
typedef struct fk_memory fk_memory;              // where memory comes from
typedef struct fk_explanation fk_explanation;    // which kernel a call would take, and why
typedef struct fk_kernel_list fk_kernel_list;    // every kernel of this build
typedef struct fk_kv_page_pool fk_kv_page_pool;  // pages of keys and values
typedef struct fk_kv_cache fk_kv_cache;          // sequences on top of a page pool

// What travels beside the tensors of an op; NULL stands for its defaults.
typedef struct fk_context {
  size_t size;
  void* stream;             // cudaStream_t, borrowed; NULL: the default stream, and on the CPU
  fk_memory* workspace;     // NULL: the device's default memory
  fk_explanation* explain;  // not NULL: check and choose a kernel, but run nothing and write nothing
} fk_context;

// Scales of an 8-bit KV-cache: number = element * scale. Both float32 and of one kind: [heads_kv], or [num_pages,
// heads_kv, page_size], which fk_kv_append writes. Of 4-bit pages: float16 [num_pages, heads_kv, page_size, groups, 2],
// scale and zero of 32 elements (FK_INT4X2), or FK_FLOAT8_E4M3 [num_pages, heads_kv, page_size, groups] of 16
// (FK_FLOAT4_E2M1X2). NULL: pages hold float32, float16 or bfloat16.
typedef struct fk_kv_scales {
  size_t size;
  const fk_tensor* k;
  const fk_tensor* v;
  float k_tensor;  // the scales of the whole tensors where pages are FK_FLOAT4_E2M1X2; 0: 1
  float v_tensor;
} fk_kv_scales;

typedef struct fk_attention_options {
  size_t size;
  int32_t causal;                 // 0 or 1; aligned bottom-right: query i stands at position i + seq_k - seq_q
  int32_t check_pages;            // 0 or 1: paged attention on a GPU looks at the page table first and waits
  int64_t window_left;            // keys seen to the left of the query's position; -1: all
  int64_t window_right;           // keys seen to the right; -1: all (causal: none)
  float softcap;                  // c > 0: c * tanh(score / c); 0: off
  float scale;                    // factor of q k^T, used where has_scale is 1
  int32_t has_scale;              // 0: the factor is 1 / sqrt(head_dim)
  const fk_tensor* bias;          // float32 or q's dtype, broadcastable to [batch, heads_q, seq_q, seq_k]; dense only
  const fk_tensor* alibi_slopes;  // float32 [heads_q] or [batch, heads_q]
  const fk_tensor* sinks;         // float32 [heads_q]: logits of a key without a value
  const fk_kv_scales* kv_scales;  // of 8-bit pages; paged attention only
  const fk_tensor* mask;          // int32 bits of fk_pack_mask, broadcastable but for its last dim; dense and paged
  fk_alibi alibi;                 // what alibi_slopes are multiplied with
  const fk_tensor* k_starts;      // int32 or int64 [batch]: the first key of each sequence that is seen; paged only
  const fk_tensor* seqused_q;     // int32 or int64 [batch]: how many tokens of each sequence count; variable-length
  const fk_tensor* seqused_k;     // only. Rows of out, lse and gradients past them are not written
  const fk_tensor* block_mask;  // uint8 [batch or 1, heads_q or 1, blocks of queries, blocks of keys]: 0 hides a block,
                                // 1 shows what mask shows, 2 shows all of it; dense only
  int64_t block_size_q;         // tokens of a block, a power of two from 64 on; default 128
  int64_t block_size_k;
} fk_attention_options;

// What the backward pass of attention writes; a NULL gradient is not computed.
typedef struct fk_attention_gradients {
  size_t size;
  const fk_tensor* q;      // shape and dtype of q
  const fk_tensor* k;      // shape and dtype of k
  const fk_tensor* v;      // shape and dtype of v
  const fk_tensor* bias;   // shape of the bias (broadcast dims are summed), its dtype or float32
  const fk_tensor* sinks;  // float32 [heads_q]
} fk_attention_gradients;

typedef struct fk_rope_options {
  size_t size;
  double theta;               // frequency of pair p is theta^(-2p / rotary_dim); default 10000
  int64_t rotary_dim;         // even, at most head_dim; -1: head_dim. The rest passes through
  int32_t interleaved;        // 0: pairs (p, p + rotary_dim / 2) (NeoX); 1: pairs (2p, 2p + 1) (GPT-J)
  int32_t inverse;            // 1: rotate back, which is also the gradient
  const fk_tensor* inv_freq;  // float32 [rotary_dim / 2], replaces theta's frequencies; or NULL
} fk_rope_options;

// RoPE fused into fk_kv_append: rotates k, and q if given, on the way.
typedef struct fk_kv_append_rope {
  size_t size;
  const fk_tensor* positions;      // int32 or int64 [tokens]
  const fk_rope_options* options;  // NULL: the defaults
  const fk_tensor* q;              // [tokens, heads_q, head_dim], or NULL: only k is rotated
  const fk_tensor* q_out;          // shape and dtype of q; NULL with q
  const fk_tensor* cos;            // [max_positions, rotary_dim / 2], with sin in place of theta; or NULL
  const fk_tensor* sin;            // as cos
  const fk_tensor* q_norm;         // [head_dim], weights of RMSNorm of q's heads before they are rotated; or NULL
  const fk_tensor* k_norm;         // the same of k's
  float norm_eps;                  // default 1e-6
} fk_kv_append_rope;

// Sequences that get tokens: token n of those for sequence b goes to position seq_lens[b] + n of it.
typedef struct fk_kv_append_places {
  size_t size;
  const fk_tensor* block_table;  // int32 [batch, max_pages]
  const fk_tensor* seq_lens;     // int32 or int64 [batch]: how many tokens each sequence has before the call
  const fk_tensor* cu_seqlens;  // int32 or int64 [batch + 1]: where each sequence's tokens begin; NULL: all get as many
  const fk_tensor* positions;   // int32 or int64 [batch]: RoPE's, of the first token of each; NULL: seq_lens
  const fk_tensor* seq_lens_after;  // int32 [batch], written: how many tokens each has after the call; or NULL
} fk_kv_append_places;

// What a norm writes beside its output, and what it adds to its weight; a NULL tensor is not written.
typedef struct fk_norm_saved {
  size_t size;
  const fk_tensor* residual_out;  // x + residual, shape and dtype of x (needed when residual is given)
  const fk_tensor* mean;          // float32, x's shape less the last dim (LayerNorm only)
  const fk_tensor* rstd;          // float32, x's shape less the last dim
  float weight_offset;            // h is scaled by weight + weight_offset; default 0
} fk_norm_saved;

typedef struct fk_norm_gradients {
  size_t size;
  const fk_tensor* x;       // gradient of x and of residual (they are equal); shape and dtype of x
  const fk_tensor* weight;  // shape of weight, any floating dtype; NULL: not computed
  const fk_tensor* bias;    // the same for the bias
  float weight_offset;      // as given to the norm; default 0
} fk_norm_gradients;

typedef struct fk_linear_gradients {
  size_t size;
  const fk_tensor* x;  // shapes of x, weight and bias; NULL: not computed
  const fk_tensor* weight;
  const fk_tensor* bias;
} fk_linear_gradients;

typedef struct fk_cross_entropy_options {
  size_t size;
  int64_t ignore_index;    // rows with this target count nothing; default -100
  float label_smoothing;   // in [0, 1]
  fk_reduction reduction;  // default FK_REDUCTION_MEAN
} fk_cross_entropy_options;

typedef struct fk_linear_cross_entropy_options {
  size_t size;
  int64_t ignore_index;    // rows with this target count nothing; default -100
  float label_smoothing;   // in [0, 1]
  float z_loss;            // at least 0: z_loss * lse^2 is added to the loss of each counted row
  float softcap;           // above 0: logits become softcap * tanh(logits / softcap)
  fk_reduction reduction;  // default FK_REDUCTION_MEAN
} fk_linear_cross_entropy_options;

// Defaults. `size` is sizeof(*struct), which becomes its first field. FK_INVALID_ARGUMENT: NULL, or a size that is no
// version of the struct that this library knows.
FK_API fk_status fk_context_init(fk_context* context, size_t size);
FK_API fk_status fk_kv_scales_init(fk_kv_scales* scales, size_t size);
FK_API fk_status fk_attention_options_init(fk_attention_options* options, size_t size);
FK_API fk_status fk_attention_gradients_init(fk_attention_gradients* gradients, size_t size);
FK_API fk_status fk_rope_options_init(fk_rope_options* options, size_t size);
FK_API fk_status fk_kv_append_rope_init(fk_kv_append_rope* rope, size_t size);
FK_API fk_status fk_kv_append_places_init(fk_kv_append_places* places, size_t size);
FK_API fk_status fk_norm_saved_init(fk_norm_saved* saved, size_t size);
FK_API fk_status fk_norm_gradients_init(fk_norm_gradients* gradients, size_t size);
FK_API fk_status fk_linear_gradients_init(fk_linear_gradients* gradients, size_t size);
FK_API fk_status fk_cross_entropy_options_init(fk_cross_entropy_options* options, size_t size);
FK_API fk_status fk_linear_cross_entropy_options_init(fk_linear_cross_entropy_options* options, size_t size);

// Fills in a contiguous (row-major) tensor: shape has `ndim` entries. FK_INVALID_ARGUMENT: a dtype or device that does
// not exist, more than FK_MAX_DIMS dims, a negative one, more than 2^63 - 1 elements.
FK_API fk_status fk_tensor_init(fk_tensor* tensor, void* data, fk_dtype dtype, fk_device device, int32_t ndim,
                                const int64_t* shape);

#ifdef __cplusplus
}
#endif
