// What the kernels of decode_step get: a decoder of Llama's kind, its cache, and one new token a row. Filled by
// ops/decode_step.cpp.
#pragma once

#include "core/device_facts.hpp"
#include "flashkernel/stream.hpp"
#include "ops/params_common.hpp"
#include "ops/plan.hpp"

namespace flashkernel {

/// Matrices of every layer: [layers, rows, columns], rows contiguous.
struct LayerMatrices {
  const void* data = nullptr;
  std::int64_t stride_layer = 0, stride_row = 0;
};

struct DecodeStepParams {
  static constexpr const char* kOp = "decode_step";

  DType dtype = DType::kFloat32;
  Device device{};
  std::int64_t rows = 0, layers = 0, hidden = 0, heads_q = 0, heads_kv = 0, head_dim = 0, inner = 0;
  std::int64_t vocab = 0;    // rows of the embedding
  std::int64_t outputs = 0;  // rows of the head, columns of the logits
  float eps = 0, scale = 0;

  const void* embedding = nullptr;  // [vocab, hidden]
  const void* norms = nullptr;      // [2 layers + 1, hidden]: before attention, before the MLP; the last one
  std::int64_t stride_embedding_row = 0, stride_norms_row = 0;
  LayerMatrices qkv;                // [(heads_q + 2 heads_kv) head_dim, hidden]
  LayerMatrices out;                // [hidden, heads_q head_dim]
  LayerMatrices gate_up;            // [2 inner, hidden]
  LayerMatrices down;               // [hidden, inner]
  LayerMatrices head;               // [outputs, hidden]; stride_layer 0
  const float* inv_freq = nullptr;  // [head_dim / 2]

  void* k_pages = nullptr;  // [layers, num_pages, page_size, heads_kv, head_dim]
  void* v_pages = nullptr;
  std::int64_t num_pages = 0, page_size = 0;
  std::int64_t stride_k_layer = 0, stride_k_page = 0, stride_k_slot = 0, stride_k_head = 0;
  std::int64_t stride_v_layer = 0, stride_v_page = 0, stride_v_slot = 0, stride_v_head = 0;

  IndexArray tokens;     // [rows]
  IndexArray positions;  // [rows]
  IndexArray slots;      // [rows] page * page_size + offset of the new token; negative: nothing is written
  IndexArray seq_lens;   // [rows] the new token included
  const std::int32_t* block_table = nullptr;  // [rows, max_pages]
  std::int64_t stride_block_table = 0, max_pages = 0;

  void* logits = nullptr;  // [rows, outputs]
  std::int64_t stride_logits_row = 0;
  std::int64_t* timeline = nullptr;  // [timeline_blocks, 5 layers + 1, 4] or null
  std::int64_t timeline_blocks = 0;
};

/// What a call has to do (params_common.hpp): products with the weights.
inline double work_of(const DecodeStepParams& p) {
  const double layer = work::product(p.hidden, (2 * p.heads_q + 2 * p.heads_kv) * p.head_dim + 3 * p.inner);
  return static_cast<double>(p.rows) * (static_cast<double>(p.layers) * layer + work::product(p.hidden, p.outputs));
}

/// The row of the CPU that composes the call of other ops (ops/decode_step_composed.cpp). It needs columns in every
/// matrix, and heads that attention takes.
Plan plan_composed_decode_step(const DecodeStepParams&, const DeviceFacts&);
void composed_decode_step(const DecodeStepParams&, const Plan&, void* workspace, Stream);

}  // namespace flashkernel
