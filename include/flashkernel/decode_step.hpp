// A whole decode step of a decoder as one op.
#pragma once

#include "flashkernel/execution.hpp"
#include "flashkernel/tensor_view.hpp"

namespace flashkernel {

/// One new token for each of `rows` sequences through a dense decoder of Llama's kind: embedding, and a layer after
/// another RMSNorm, q, k and v, RoPE (halves of a head turn together), append to the pages, attention over them, the
/// output matrix, the residual, RMSNorm, SwiGLU, down, the residual; then the last norm and the logits. Everything is
/// of one dtype, float32, float16 or bfloat16; sums are fp32, and what goes from one matrix to the next is rounded to
/// the dtype, as by the ops one by one. Weights must not change while the step runs.
///
/// tokens [rows]: ids, int32 or int64. One that the embedding does not have: InvalidArgument where tokens are on the
///   host, NaN logits on a GPU.
/// positions [rows]: for RoPE. slots [rows]: page * page_size + offset of the token; negative: its key and value are
/// not
///   written. block_table int32 [rows, max_pages], seq_lens [rows]: the tokens that the row sees, the new one included;
///   0: none, and attention gives zeros. A page or length that can't be: InvalidArgument on the host, NaN logits of the
///   row on a GPU, which skips a slot past the last page.
/// embedding [vocab, hidden]; norms [2 layers + 1, hidden]: of each layer the norm before attention and the one before
///   the MLP, then the last one.
/// qkv_weight [layers, (heads_q + 2 heads_kv) head_dim, hidden], out_weight [layers, hidden, heads_q head_dim],
/// gate_up_weight [layers, 2 inner, hidden], down_weight [layers, hidden, inner], head_weight [outputs, hidden]. Rows
///   are contiguous.
/// inv_freq float32 [head_dim / 2]: RoPE's frequencies.
/// k_pages, v_pages [layers, num_pages, page_size, heads_kv, head_dim]: the new tokens' are written.
/// logits [rows, outputs]: written.
/// timeline int64 [blocks, 5 layers + 1, 4] or absent: of each block's part of each phase (q, k, v; attention; output
///   matrix; gate and up; down; at last the head) the device's clock in nanoseconds when the block came to it, when
///   what it reads was there, when it had it, and when it was done. Only kernels for CUDA write it, and only what
///   happened.
FK_API void decode_step(const TensorView& tokens, const TensorView& positions, const TensorView& slots,
                        const TensorView& block_table, const TensorView& seq_lens, const TensorView& embedding,
                        const TensorView& norms, const TensorView& qkv_weight, const TensorView& out_weight,
                        const TensorView& gate_up_weight, const TensorView& down_weight, const TensorView& head_weight,
                        const TensorView& inv_freq, const TensorView& k_pages, const TensorView& v_pages,
                        const TensorView& logits, float eps, float scale, const TensorView& timeline = {},
                        const ExecutionContext& context = {});

}  // namespace flashkernel
