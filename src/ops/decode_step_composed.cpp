// decode_step as the ops that it stands for, one after the other, each by its own best kernel: the row
// `decode_step/cpu/composed`. The threads of the pool stay awake from the first op to the last one.
#include <cstring>

#include "core/awake_threads.hpp"
#include "flashkernel/attention.hpp"
#include "flashkernel/elementwise.hpp"
#include "flashkernel/kv_ops.hpp"
#include "flashkernel/linear.hpp"
#include "flashkernel/norm.hpp"
#include "ops/decode_step_params.hpp"

namespace flashkernel {
namespace {

/// Where the results of the ops lie in the workspace, in bytes.
struct Places {
  std::size_t residual, normed, qkv, attended, gate_up, sum, bytes = 0;

  explicit Places(const DecodeStepParams& p) {
    const auto take = [&](std::int64_t columns) {
      constexpr std::size_t kAlignment = 256;
      const std::size_t at = bytes;
      const auto own = static_cast<std::size_t>(p.rows * columns) * static_cast<std::size_t>(dtype_bytes(p.dtype));
      bytes += (own + kAlignment - 1) / kAlignment * kAlignment;
      return at;
    };
    residual = take(p.hidden), normed = take(p.hidden);
    qkv = take((p.heads_q + 2 * p.heads_kv) * p.head_dim), attended = take(p.heads_q * p.head_dim);
    gate_up = take(2 * p.inner), sum = take(p.hidden);
  }
};

class Step {
 public:
  Step(const DecodeStepParams& p, void* workspace, const ExecutionContext& context) : p_(p), context_(context) {
    const Places at(p);
    const auto place = [&](std::size_t offset, std::int64_t columns) {
      return rows_of(static_cast<char*>(workspace) + offset, columns, columns);
    };
    residual_ = place(at.residual, p.hidden), normed_ = place(at.normed, p.hidden), sum_ = place(at.sum, p.hidden);
    qkv_ = place(at.qkv, (p.heads_q + 2 * p.heads_kv) * p.head_dim);
    attended_ = place(at.attended, p.heads_q * p.head_dim);
    gate_ = rows_of(static_cast<char*>(workspace) + at.gate_up, p.inner, 2 * p.inner);
    up_ = part(gate_, p.inner, p.inner), gate_up_ = part(gate_, 0, 2 * p.inner);
  }

  void run() const {
    take_embeddings();
    rms_norm(residual_, {}, norm_weight(0), normed_, {}, p_.eps, context_);
    for (std::int64_t layer = 0; layer < p_.layers; ++layer) {
      multiply(normed_, p_.qkv, layer, qkv_);
      append(layer);
      attend(layer);
      multiply(attended_, p_.out, layer, sum_);
      join(2 * layer + 1);
      multiply(normed_, p_.gate_up, layer, gate_up_);
      swiglu(gate_, up_, gate_, context_);
      multiply(gate_, p_.down, layer, sum_);
      join(2 * layer + 2);
    }
    multiply(normed_, p_.head, 0, rows_of(p_.logits, p_.outputs, p_.stride_logits_row));
  }

 private:
  TensorView rows_of(void* data, std::int64_t columns, std::int64_t stride) const {
    return {data, p_.dtype, {p_.rows, columns}, {stride, 1}, p_.device};
  }
  /// Some columns of rows, from one on.
  TensorView part(const TensorView& rows, std::int64_t from, std::int64_t columns) const {
    return rows_of(element(rows.data, from), columns, rows.strides[0]);
  }
  void* element(const void* data, std::int64_t i) const {
    return const_cast<char*>(static_cast<const char*>(data) + i * dtype_bytes(p_.dtype));
  }
  TensorView indices(const IndexArray& array) const {
    return {const_cast<void*>(array.data), array.is_int64 ? DType::kInt64 : DType::kInt32, {p_.rows}, p_.device};
  }

  void take_embeddings() const {
    for (std::int64_t row = 0; row < p_.rows; ++row)
      std::memcpy(element(residual_.data, row * p_.hidden),
                  element(p_.embedding, p_.tokens[row] * p_.stride_embedding_row),
                  static_cast<std::size_t>(p_.hidden) * static_cast<std::size_t>(dtype_bytes(p_.dtype)));
  }
  TensorView norm_weight(std::int64_t which) const {
    return {element(p_.norms, which * p_.stride_norms_row), p_.dtype, {p_.hidden}, p_.device};
  }
  void multiply(const TensorView& x, const LayerMatrices& matrices, std::int64_t layer, const TensorView& out) const {
    const TensorView weight(element(matrices.data, layer * matrices.stride_layer), p_.dtype, {out.shape[1], x.shape[1]},
                            {matrices.stride_row, 1}, p_.device);
    linear(x, weight, {}, out, {}, Activation::kNone, context_);
  }
  /// What a layer gives is added to the residual, whose norm is what the next matrix multiplies.
  void join(std::int64_t norm) const {
    NormSaved saved;
    saved.residual_out = residual_;
    rms_norm(sum_, residual_, norm_weight(norm), normed_, saved, p_.eps, context_);
  }

  /// `heads` heads of q, k and v from one on: [rows, heads, head_dim].
  TensorView heads(std::int64_t first, std::int64_t count) const {
    return {element(qkv_.data, first * p_.head_dim),
            p_.dtype,
            {p_.rows, count, p_.head_dim},
            {qkv_.strides[0], p_.head_dim, 1},
            p_.device};
  }
  /// A layer's pages of keys or values: [pages, page_size, heads_kv, head_dim].
  TensorView pages(const void* data, std::int64_t first, std::int64_t page, std::int64_t slot,
                   std::int64_t head) const {
    return {element(data, first),
            p_.dtype,
            {p_.num_pages, p_.page_size, p_.heads_kv, p_.head_dim},
            {page, slot, head, 1},
            p_.device};
  }
  TensorView k_pages(std::int64_t layer) const {
    return pages(p_.k_pages, layer * p_.stride_k_layer, p_.stride_k_page, p_.stride_k_slot, p_.stride_k_head);
  }
  TensorView v_pages(std::int64_t layer) const {
    return pages(p_.v_pages, layer * p_.stride_v_layer, p_.stride_v_page, p_.stride_v_slot, p_.stride_v_head);
  }
  /// Turns q where it lies, and k on its way to its page.
  void append(std::int64_t layer) const {
    KvAppendRope rope;
    rope.positions = indices(p_.positions);
    rope.options.inv_freq = TensorView(const_cast<float*>(p_.inv_freq), DType::kFloat32, {p_.head_dim / 2}, p_.device);
    rope.q = rope.q_out = heads(0, p_.heads_q);
    kv_append(heads(p_.heads_q, p_.heads_kv), heads(p_.heads_q + p_.heads_kv, p_.heads_kv), k_pages(layer),
              v_pages(layer), indices(p_.slots), rope, context_);
  }
  void attend(std::int64_t layer) const {
    const auto one_query = [&](const TensorView& rows) {
      return TensorView(rows.data, p_.dtype, {p_.rows, p_.heads_q, 1, p_.head_dim},
                        {rows.strides[0], p_.head_dim, rows.strides[0], 1}, p_.device);
    };
    const TensorView table(const_cast<std::int32_t*>(p_.block_table), DType::kInt32, {p_.rows, p_.max_pages},
                           {p_.stride_block_table, 1}, p_.device);
    AttentionOptions options;
    options.causal = true;
    options.scale = p_.scale;
    attention_paged(one_query(qkv_), k_pages(layer), v_pages(layer), table, indices(p_.seq_lens), {}, 1,
                    one_query(attended_), {}, options, context_);
  }

  const DecodeStepParams& p_;
  const ExecutionContext& context_;
  TensorView residual_, normed_, qkv_, attended_, gate_, up_, gate_up_, sum_;
};

}  // namespace

Plan plan_composed_decode_step(const DecodeStepParams& p, const DeviceFacts& facts) {
  return Plan::of(facts.invariant, Places(p).bytes);
}

void composed_decode_step(const DecodeStepParams& p, const Plan& plan, void* workspace, Stream stream) {
  ExecutionContext context;
  context.stream = stream;
  context.invariant = plan.as<bool>();
  const AwakeThreads awake;
  Step(p, workspace, context).run();
}

}  // namespace flashkernel
