// A whole decode step of a decoder as one op.
#pragma once

#include "flashkernel/execution.hpp"
#include "flashkernel/tensor_view.hpp"

namespace flashkernel {

/// One new token for each of `rows` sequences through a dense decoder of Llama's kind. It computes the embedding; in
/// each layer RMSNorm, q, k and v, RoPE (the halves of a head turn together), the append to the pages, attention over
/// them, the output matrix with the residual, RMSNorm, gate and up with SwiGLU, and down with the residual; then the
/// last norm and the logits.
///
/// Everything is of one dtype: float32, float16 or bfloat16. Sums are fp32, and what goes from one matrix to the next
/// is rounded to the dtype, as by the single ops. Weights must not change while the step runs.
/// - tokens int32 or int64 [rows]: ids. One that the embedding does not have: InvalidArgument where tokens are on the
///   host, NaN logits on a GPU
/// - positions [rows]: for RoPE
/// - slots [rows]: page * page_size + offset of the token. Negative: its key and value are not written
/// - block_table int32 [rows, max_pages], seq_lens [rows]: the tokens that the row sees, the new one included; 0: none,
///   and attention gives zeros. A page or length that cannot be: InvalidArgument on the host; on a GPU NaN logits of
///   the row, and a slot past the last page is skipped
/// - embedding [vocab, hidden]
/// - norms [2 layers + 1, hidden]: of each layer the norm before attention and the one before the MLP, then the last
///   one
/// - qkv_weight [layers, (heads_q + 2 heads_kv) head_dim, hidden], out_weight [layers, hidden, heads_q head_dim]
/// - gate_up_weight [layers, 2 inner, hidden], down_weight [layers, hidden, inner], head_weight [outputs, hidden]. Rows
///   of all weights are contiguous
/// - inv_freq float32 [head_dim / 2]: RoPE's frequencies
/// - k_pages, v_pages [layers, num_pages, page_size, heads_kv, head_dim]: the new tokens' rows are written
/// - logits [rows, outputs]: written
/// - timeline int64 [blocks, 5 layers + 1, 4] or absent: written by kernels for CUDA alone. For each block and phase
///   (q, k, v; attention; output matrix; gate and up; down; at last the head) it gets the device's clock in nanoseconds
///   at four events: the block comes to the phase, what it reads is there, it has read it, it is done. Events that did
///   not happen are left as they are
FK_API void decode_step(const TensorView& tokens, const TensorView& positions, const TensorView& slots,
                        const TensorView& block_table, const TensorView& seq_lens, const TensorView& embedding,
                        const TensorView& norms, const TensorView& qkv_weight, const TensorView& out_weight,
                        const TensorView& gate_up_weight, const TensorView& down_weight, const TensorView& head_weight,
                        const TensorView& inv_freq, const TensorView& k_pages, const TensorView& v_pages,
                        const TensorView& logits, float eps, float scale, const TensorView& timeline = {},
                        const ExecutionContext& context = {});

}  // namespace flashkernel
