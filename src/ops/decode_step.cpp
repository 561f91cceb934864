// Front door of decode_step: every shape by the model's sizes, and on the host every index.
#include "flashkernel/decode_step.hpp"

#include <cmath>
#include <limits>
#include <string>

#include "ops/check.hpp"
#include "ops/decode_step_params.hpp"
#include "ops/rope_spec.hpp"
#include "ops/select.hpp"

namespace flashkernel {
namespace {

constexpr std::int64_t kNoLowerBound = std::numeric_limits<std::int64_t>::min();

/// [layers, rows, columns] (or [rows, columns] of one matrix) with contiguous rows.
LayerMatrices matrices(const Checker& check, const char* name, const TensorView& view, DType dtype, bool layered,
                       std::int64_t layers, std::int64_t rows, const char* rows_name, std::int64_t columns,
                       const char* columns_name) {
  const int first = layered ? 1 : 0;
  check.dtype(name, view, dtype);
  check.ndim(name, view, 2 + first, 2 + first);
  check.last_dim_contiguous(name, view);
  if (layered) check.extent(name, view, 0, layers, "qkv_weight.shape[0]");
  check.extent(name, view, first, rows, rows_name);
  check.extent(name, view, first + 1, columns, columns_name);
  return {view.data, layered ? view.strides[0] : 0, view.strides[first]};
}

void set_pages(const Checker& check, const TensorView& k_pages, const TensorView& v_pages, DecodeStepParams& p) {
  check.dtype("k_pages", k_pages, p.dtype);
  check.ndim("k_pages", k_pages, 5, 5);
  check.last_dim_contiguous("k_pages", k_pages);
  check.like("v_pages", v_pages, "k_pages", k_pages);
  check.last_dim_contiguous("v_pages", v_pages);
  check.extent("k_pages", k_pages, 0, p.layers, "qkv_weight.shape[0]");
  if (k_pages.shape[2] == 0) check.fail("k_pages.shape[2]=0; needs a page size of at least 1");
  check.writable("k_pages", k_pages);
  check.writable("v_pages", v_pages);
  check.no_overlap("k_pages", k_pages, "v_pages", v_pages);
  p.num_pages = k_pages.shape[1];
  p.page_size = k_pages.shape[2];
  p.heads_kv = k_pages.shape[3];
  p.head_dim = k_pages.shape[4];
  p.k_pages = k_pages.data;
  p.v_pages = v_pages.data;
  p.stride_k_layer = k_pages.strides[0], p.stride_k_page = k_pages.strides[1];
  p.stride_k_slot = k_pages.strides[2], p.stride_k_head = k_pages.strides[3];
  p.stride_v_layer = v_pages.strides[0], p.stride_v_page = v_pages.strides[1];
  p.stride_v_slot = v_pages.strides[2], p.stride_v_head = v_pages.strides[3];
}

/// Heads from the widths of the matrices.
void set_heads(const Checker& check, const TensorView& qkv_weight, const TensorView& out_weight, DecodeStepParams& p) {
  check.ndim("out_weight", out_weight, 3, 3);
  const std::int64_t width = out_weight.shape[2];
  if (p.head_dim < 2 || p.head_dim % 2 != 0)
    check.fail("k_pages.shape[4]=" + std::to_string(p.head_dim) + "; an even head_dim is needed");
  if (p.heads_kv < 1) check.fail("k_pages.shape[3]=0; needs at least one head");
  p.heads_q = width / p.head_dim;
  if (width % p.head_dim != 0 || p.heads_q < 1 || p.heads_q % p.heads_kv != 0)
    check.fail("out_weight.shape[2]=" + std::to_string(width) +
               "; a multiple of heads_kv * head_dim=" + std::to_string(p.heads_kv * p.head_dim) + " is needed");
  check.extent("qkv_weight", qkv_weight, 1, (p.heads_q + 2 * p.heads_kv) * p.head_dim,
               "(heads_q + 2 heads_kv) head_dim");
}

/// What the host can read: pages that rows see lie in the pool. The kernel gets the copy that is checked here.
void check_table(const Checker& check, IndexCopies& copies, DecodeStepParams& p) {
  if (!p.device.is_cpu()) return;
  const auto pages_of = [&](std::int64_t row) { return (p.seq_lens[row] + p.page_size - 1) / p.page_size; };
  for (std::int64_t row = 0; row < p.rows; ++row) {
    const std::int64_t length = p.seq_lens[row];
    if (length < 0 || pages_of(row) > p.max_pages)
      check.fail("seq_lens[" + std::to_string(row) + "]=" + std::to_string(length) + "; 0 to " +
                 std::to_string(p.max_pages * p.page_size) + " tokens fit the block table");
  }
  const IndexArray table = copies.rows_of({p.block_table, false}, p.rows, p.max_pages, &p.stride_block_table, pages_of);
  p.block_table = static_cast<const std::int32_t*>(table.data);
  for (std::int64_t row = 0; row < p.rows; ++row) {
    for (std::int64_t i = 0; i < pages_of(row); ++i) {
      const std::int64_t page = p.block_table[row * p.stride_block_table + i];
      if (page < 0 || page >= p.num_pages)
        check.fail("block_table[" + std::to_string(row) + ", " + std::to_string(i) + "]=" + std::to_string(page) +
                   "; needs 0.." + std::to_string(p.num_pages - 1));
    }
  }
}

}  // namespace

void decode_step(const TensorView& tokens, const TensorView& positions, const TensorView& slots,
                 const TensorView& block_table, const TensorView& seq_lens, const TensorView& embedding,
                 const TensorView& norms, const TensorView& qkv_weight, const TensorView& out_weight,
                 const TensorView& gate_up_weight, const TensorView& down_weight, const TensorView& head_weight,
                 const TensorView& inv_freq, const TensorView& k_pages, const TensorView& v_pages,
                 const TensorView& logits, float eps, float scale, const TensorView& timeline,
                 const ExecutionContext& context) {
  const Checker check("decode_step", embedding.device);
  DecodeStepParams p;
  p.device = check.device();
  check.floating("embedding", embedding);
  check.ndim("embedding", embedding, 2, 2);
  check.last_dim_contiguous("embedding", embedding);
  p.dtype = embedding.dtype;
  p.vocab = embedding.shape[0], p.hidden = embedding.shape[1];
  p.embedding = embedding.data, p.stride_embedding_row = embedding.strides[0];
  check.dtype("qkv_weight", qkv_weight, p.dtype);
  check.ndim("qkv_weight", qkv_weight, 3, 3);
  p.layers = qkv_weight.shape[0];
  if (p.layers < 1) check.fail("qkv_weight.shape[0]=0; needs at least one layer");
  set_pages(check, k_pages, v_pages, p);
  set_heads(check, qkv_weight, out_weight, p);
  check.ndim("down_weight", down_weight, 3, 3);
  p.inner = down_weight.shape[2];
  check.ndim("head_weight", head_weight, 2, 2);
  p.outputs = head_weight.shape[0];
  const auto all = [&](const char* name, const TensorView& view, std::int64_t rows, const char* rows_name,
                       std::int64_t columns, const char* columns_name) {
    return matrices(check, name, view, p.dtype, true, p.layers, rows, rows_name, columns, columns_name);
  };
  constexpr const char* kHidden = "embedding.shape[1]";
  p.qkv = all("qkv_weight", qkv_weight, qkv_weight.shape[1], "qkv_weight.shape[1]", p.hidden, kHidden);
  p.out = all("out_weight", out_weight, p.hidden, kHidden, p.heads_q * p.head_dim, "heads_q head_dim");
  p.gate_up = all("gate_up_weight", gate_up_weight, 2 * p.inner, "2 down_weight.shape[2]", p.hidden, kHidden);
  p.down = all("down_weight", down_weight, p.hidden, kHidden, p.inner, "down_weight.shape[2]");
  p.head = matrices(check, "head_weight", head_weight, p.dtype, false, 0, p.outputs, "head_weight.shape[0]", p.hidden,
                    kHidden);
  check.dtype("norms", norms, p.dtype);
  check.ndim("norms", norms, 2, 2);
  check.last_dim_contiguous("norms", norms);
  check.extent("norms", norms, 0, 2 * p.layers + 1, "2 layers + 1");
  check.extent("norms", norms, 1, p.hidden, kHidden);
  p.norms = norms.data, p.stride_norms_row = norms.strides[0];
  check.dtype("inv_freq", inv_freq, DType::kFloat32);
  check.ndim("inv_freq", inv_freq, 1, 1);
  check.extent("inv_freq", inv_freq, 0, p.head_dim / 2, "head_dim / 2");
  check.contiguous("inv_freq", inv_freq);
  p.inv_freq = static_cast<const float*>(inv_freq.data);

  check.index("tokens", tokens);
  check.ndim("tokens", tokens, 1, 1);
  p.rows = tokens.shape[0];
  IndexCopies copies(check.device());
  p.tokens = check.index_array("tokens", tokens, p.rows, copies);
  p.positions = check.index_array("positions", positions, p.rows, copies);
  p.slots = check.index_array("slots", slots, p.rows, copies);
  p.seq_lens = check.index_array("seq_lens", seq_lens, p.rows, copies);
  check.indices_in_range("tokens", p.tokens, p.rows, 0, p.vocab, "embedding.shape[0]");
  check_positions(check, "positions", p.positions, p.rows);
  check.indices_in_range("slots", p.slots, p.rows, kNoLowerBound, p.num_pages * p.page_size, "num_pages * page_size");
  check.dtype("block_table", block_table, DType::kInt32);
  check.ndim("block_table", block_table, 2, 2);
  check.extent("block_table", block_table, 0, p.rows, "tokens.shape[0]");
  check.last_dim_contiguous("block_table", block_table);
  p.block_table = static_cast<const std::int32_t*>(block_table.data);
  p.stride_block_table = block_table.strides[0], p.max_pages = block_table.shape[1];
  check_table(check, copies, p);

  check.dtype("logits", logits, p.dtype);
  check.ndim("logits", logits, 2, 2);
  check.extent("logits", logits, 0, p.rows, "tokens.shape[0]");
  check.extent("logits", logits, 1, p.outputs, "head_weight.shape[0]");
  check.last_dim_contiguous("logits", logits);
  check.writable("logits", logits);
  const auto apart = [&](const char* name, const TensorView& written) {
    check.apart(name, written,
                {{"tokens", tokens},
                 {"positions", positions},
                 {"slots", slots},
                 {"block_table", block_table},
                 {"seq_lens", seq_lens},
                 {"embedding", embedding},
                 {"norms", norms},
                 {"qkv_weight", qkv_weight},
                 {"out_weight", out_weight},
                 {"gate_up_weight", gate_up_weight},
                 {"down_weight", down_weight},
                 {"head_weight", head_weight},
                 {"inv_freq", inv_freq}});
  };
  apart("logits", logits), apart("k_pages", k_pages), apart("v_pages", v_pages);
  check.apart("logits", logits, {{"k_pages", k_pages}, {"v_pages", v_pages}});
  p.logits = logits.data, p.stride_logits_row = logits.strides[0];
  if (timeline.defined()) {
    check.dtype("timeline", timeline, DType::kInt64);
    check.ndim("timeline", timeline, 3, 3);
    check.extent("timeline", timeline, 1, 5 * p.layers + 1, "5 layers + 1");
    check.extent("timeline", timeline, 2, 4, "the four times");
    check.contiguous("timeline", timeline);
    apart("timeline", timeline);
    check.apart("timeline", timeline, {{"logits", logits}, {"k_pages", k_pages}, {"v_pages", v_pages}});
    p.timeline = static_cast<std::int64_t*>(timeline.data), p.timeline_blocks = timeline.shape[0];
  }
  if (!(eps >= 0.0f) || std::isinf(eps))
    check.fail("eps=" + std::to_string(eps) + "; needs a finite number, 0 or more");
  if (!std::isfinite(scale)) check.fail("scale=" + std::to_string(scale) + "; needs a finite number");
  p.eps = eps, p.scale = scale;
  if (p.rows == 0 && !context.explain) return;
  dispatch(p, p.device, context);
}

}  // namespace flashkernel
