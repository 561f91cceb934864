// Cases of attention's block masks, forward and backward: blocks of other sizes than tiles, lengths that no block
// divides, rows and keys that see nothing, NaN behind hidden blocks, packed masks in some blocks; beside every other
// option.
#include "conformance/attention_spec.hpp"

namespace flashkernel::conformance {
namespace {

using Add = std::function<void(const std::string&, const AttentionSpec&)>;

int scattered(std::int64_t b, std::int64_t h, std::int64_t row, std::int64_t column) {
  return ((b * 7 + h * 5 + row * 3 + column * 11 + 1) * 2654435761u >> 9) % 5 < 2 ? 1 : 0;
}

void block_cases(const Add& add, DType dtype, const std::vector<std::int64_t>& head_dims) {
  for (const std::int64_t head_dim : head_dims) {
    const std::string suffix = "_d" + std::to_string(head_dim);
    AttentionSpec spec;
    spec.dtype = dtype;
    spec.batch = 1;
    spec.heads_q = 2;
    spec.seq_q = 270;
    spec.seq_k = 330;
    spec.head_dim = head_dim;
    // Every second block of a row: no tile of two blocks is whole.
    spec.blocks = BlocksSpec{1, 1, 64, 64, [](auto, auto, auto row, auto column) { return (row + column) % 2; }};
    add("checkered" + suffix, spec);
    // Blocks in which a packed mask counts, others that are shown whole, and the rest.
    spec.bits = BitsSpec{{1, 270}, [](auto, auto, auto i, auto j) { return (i * 5 + j * 3) % 7 > 1; }};
    spec.blocks->entry = [](auto, auto, auto row, auto column) { return static_cast<int>((row + 2 * column) % 3); };
    spec.blocks->size_q = 128;
    add("partial" + suffix, spec);
    if (head_dim > 128) continue;
    spec.bits.reset();
    // Documents, with queries of 128 and keys of 256; the last block of queries sees nothing.
    spec.blocks =
        BlocksSpec{1, 1, 128, 256, [](auto, auto, auto row, auto column) { return row == column && row < 2 ? 1 : 0; }};
    spec.sinks = true;
    add("documents" + suffix, spec);
    spec.sinks = false;
    add("no_key" + suffix, spec);
    // Heads of their own, groups of heads, transposed memory; a band that hides NaN in keys and values.
    spec.heads_q = 4;
    spec.heads_kv = 2;
    spec.batch = 2;
    spec.seq_q = 200;
    spec.blocks = BlocksSpec{2, 4, 64, 128, [](auto b, auto h, auto row, auto column) {
                               return column != 1 ? scattered(b, h, row, column) : 0;
                             }};
    spec.blocks->layout = {{}, {0, 1, 3, 2}};
    spec.adjust = [head_dim](AttentionTensors& t) {
      for (std::int64_t j = 128; j < 256; j += 37)
        for (std::int64_t c = 0; c < head_dim; ++c) {
          t.k->set_at({1, 0, j, c}, kNan);
          t.v->set_at({1, 1, j, c}, kInfinity);
        }
    };
    add("heads_hide_nan" + suffix, spec);
    spec.adjust = {};
    spec.mask = kCausal;
    spec.grad_lse = true;
    add("causal" + suffix, spec);
    // A NaN that the rows of some blocks see, others of the same tile do not.
    spec.mask = kFull;
    spec.batch = 1;
    spec.heads_kv = 1;
    spec.blocks = BlocksSpec{1, 1, 64, 64, [](auto, auto, auto row, auto column) { return (row + column) % 2; }};
    spec.adjust = [](AttentionTensors& t) { t.v->set_at({0, 0, 70, 3}, kNan); };
    spec.grad_lse = false;
    add("shows_nan" + suffix, spec);
    spec.adjust = {};
    spec.heads_kv = 2;
    spec.mask = {"left100_right40", false, 100, 40};
    add("window" + suffix, spec);
    if (head_dim != head_dims.front()) continue;
    spec.softcap = 2;
    spec.alibi_dims = 2;
    spec.sinks = true;
    spec.bias = BiasSpec{{1, 4, 200, 330}, dtype};
    add("everything" + suffix, spec);
  }
  if (dtype == DType::kFloat16) {  // many tiles of keys add to a tile of queries, and others between them do not
    AttentionSpec spec;
    spec.dtype = dtype;
    spec.batch = 1;
    spec.heads_kv = 1;
    spec.seq_q = 520;
    spec.seq_k = 900;
    spec.head_dim = 64;
    spec.blocks = BlocksSpec{1, 2, 64, 64, [](auto, auto h, auto row, auto column) {
                               return (h * 5 + row * 3 + column * 7) % 11 < 3 ? 1 : 0;
                             }};
    add("many_tiles", spec);
    spec.repeats = 1;
    spec.any_order = true;
    add("many_tiles_any_order", spec);
  }
  for (const auto& [q, k] : {std::pair{1, 200}, {3, 64}, {70, 65}}) {
    AttentionSpec spec;
    spec.dtype = dtype;
    spec.batch = 1;
    spec.seq_q = q;
    spec.seq_k = k;
    spec.head_dim = 40;
    spec.blocks =
        BlocksSpec{1, 1, 64, 64, [](auto, auto, auto row, auto column) { return row == 0 && column != 1 ? 2 : 1; }};
    add("small_q" + std::to_string(q) + "_k" + std::to_string(k), spec);
  }
}

void forward_cases(CaseList& list) {
  for (const DType dtype : kFloatTypes)
    block_cases(
        [&](const std::string& name, const AttentionSpec& spec) {
          list.add("block_mask_" + name + "_" + short_name(dtype), [spec](Call& call) { build_attention(call, spec); });
        },
        dtype, dtype == DType::kFloat32 ? std::vector<std::int64_t>{64} : std::vector<std::int64_t>{64, 128, 192});
}

void backward_cases(CaseList& list) {
  for (const DType dtype : kFloatTypes)
    block_cases(
        [&](const std::string& name, const AttentionSpec& spec) {
          list.add("block_mask_" + name + "_" + short_name(dtype),
                   [spec](Call& call) { build_attention_backward(call, spec); });
        },
        dtype, dtype == DType::kFloat32 ? std::vector<std::int64_t>{64} : std::vector<std::int64_t>{64, 128});
}

const OpCases forward("attention_fwd", forward_cases), backward("attention_bwd", backward_cases);

}  // namespace
}  // namespace flashkernel::conformance
