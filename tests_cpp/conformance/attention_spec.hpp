// What one attention call of the conformance test is made of; forward and backward cases are written in these words.
#pragma once

#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "conformance/conformance.hpp"
#include "flashkernel/attention.hpp"

namespace flashkernel::conformance {

constexpr std::int64_t kAll = -1;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Mask {
  const char* name;
  bool causal;
  std::int64_t left, right;
};

struct BiasSpec {
  Shape shape;
  DType dtype = DType::kFloat32;
  Layout layout = {};
  std::function<void(TestTensor&)> adjust = {};
};

/// A packed boolean mask: its dims over batch, heads and queries (each 1 or the full extent), and what is seen.
struct BitsSpec {
  Shape rows;  // aligned right, like the mask
  std::function<bool(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j)> shows;
  Layout layout = {};
};

/// A block mask: its first dims (each 1 or the full extent), the size of a block, and what is said of a block.
struct BlocksSpec {
  std::int64_t batch, heads;
  std::int64_t size_q, size_k;
  std::function<int(std::int64_t b, std::int64_t h, std::int64_t q_block, std::int64_t k_block)> entry;
  Layout layout = {};
};

/// The tensors of a built call, for adjustments: NaN here, a huge value there.
struct AttentionTensors {
  TestTensor* q = nullptr;
  TestTensor* k = nullptr;
  TestTensor* v = nullptr;
  TestTensor* grad_out = nullptr;
  TestTensor* k_scales = nullptr;  // of 8-bit pages
  TestTensor* v_scales = nullptr;
};

struct AttentionSpec {
  DType dtype = DType::kFloat32;
  std::int64_t batch = 2, heads_q = 2, heads_kv = 2, seq_q = 33, seq_k = 33, head_dim = 32;
  std::int64_t head_dim_v = 0;  // 0: head_dim
  Mask mask = {"full", false, kAll, kAll};
  float softcap = 0;
  std::optional<float> scale = {};
  std::optional<BiasSpec> bias = {};
  std::optional<BitsSpec> bits = {};
  std::optional<BlocksSpec> blocks = {};
  int alibi_dims = 0;  // 1: [heads_q], 2: [batch, heads_q]
  Alibi alibi = Alibi::kDistance;
  bool sinks = false;
  bool lse = true;
  double factor = 1;
  int repeats = 2;
  Layout layout_q = {}, layout_k = {}, layout_v = {}, layout_out = {}, layout_lse = {};
  std::function<void(AttentionTensors&)> adjust = {};

  // Backward only.
  bool grad_lse = false;
  bool any_order = false;  // deterministic = false
  bool want_q = true, want_k = true, want_v = true, want_bias = true, want_sinks = true;
  DType grad_bias_dtype = DType::kFloat32;
  Layout layout_grad_out = {}, layout_grad_q = {}, layout_grad_k = {}, layout_grad_v = {};

  std::int64_t dim_v() const { return head_dim_v ? head_dim_v : head_dim; }
};

/// Lengths of sequences side by side.
struct VarlenSpec {
  AttentionSpec common;  // batch, seq_q, seq_k follow from the lengths
  std::vector<std::int64_t> lengths_q, lengths_k;
  std::vector<std::int64_t> used_q, used_k;  // not empty: how many tokens of each sequence count
  std::int64_t slack = 0;                    // max_seqlen beyond the longest
  DType index_dtype = DType::kInt32;
};

struct PagedSpec {
  AttentionSpec common;                 // seq_k follows from the lengths
  std::vector<std::int64_t> lengths;    // keys of each sequence
  std::vector<std::int64_t> lengths_q;  // not empty: queries side by side
  std::vector<std::int64_t> starts;     // not empty: the first key of each sequence that is seen
  std::int64_t page_size = 16;
  std::int64_t spare_columns = 1;  // columns of the table past the longest sequence: ids that no kernel may follow
  bool shared_first_page = false;
  DType index_dtype = DType::kInt32;
  std::int64_t first_page = 0;  // ids start here: past a million, offsets pass 2^31
  Layout layout_pages = {};
  DType pages_dtype = DType::kFloat32;  // 8-bit pages: theirs; else not used
  bool token_scales = false;
  Layout layout_scales = {};
  bool check_pages = false;
};

void build_attention(Call& call, const AttentionSpec& spec);
void build_attention_varlen(Call& call, const VarlenSpec& spec);
void build_attention_paged(Call& call, const PagedSpec& spec);
void build_attention_backward(Call& call, const AttentionSpec& spec);
void build_attention_varlen_backward(Call& call, const VarlenSpec& spec);

/// What every kernel over pages can get wrong, whatever its elements are: `queries` under each kind of mask, lengths
/// that leave blocks a piece of a sequence or many sequences, all modifiers at once, scores of any sign and size.
void paged_variants(const PagedSpec& base, const std::vector<std::int64_t>& queries,
                    const std::function<void(const std::string&, const PagedSpec&)>& add);

inline constexpr Mask kMasks[] = {{"full", false, kAll, kAll},       {"causal", true, kAll, kAll},
                                  {"left5_right0", false, 5, 0},     {"left7_right3", false, 7, 3},
                                  {"causal_left16", true, 16, kAll}, {"left_all_right2", false, kAll, 2},
                                  {"left0_right0", false, 0, 0},     {"right9_left_none", false, 0, 9}};

inline constexpr Mask kFull = kMasks[0], kCausal = kMasks[1];

/// Every way a bias broadcasts to [3, 2, 17, 39].
inline const struct {
  const char* name;
  Shape shape;
} kBiasShapes[] = {{"scalar", {}},
                   {"key", {39}},
                   {"query_key", {17, 39}},
                   {"head", {2, 1, 1}},
                   {"batch_key", {3, 1, 1, 39}},
                   {"batch_query", {3, 1, 17, 1}},
                   {"head_query_key", {1, 2, 17, 39}},
                   {"all", {3, 2, 17, 39}}};

/// A bias [2, 2, 17, 39] of which minus infinity masks single keys, a whole row, and all rows of one head.
inline void hide_by_bias(TestTensor& bias) {
  for (std::int64_t i = 0; i < 17; ++i)
    for (std::int64_t j = 0; j < 39; ++j) {
      if ((i + j) % 3 == 0 || i == 4) bias.set_at({0, 0, i, j}, -kInfinity);
      bias.set_at({1, 1, i, j}, -kInfinity);
    }
}

/// What masks are made of where -inf is not: rows of a [queries, keys] bias that hold only a dtype's lowest number,
/// that number beside -inf, -2.4e38 (times log2(e) it passes fp32), -1e9, the highest number; and rows with a visible
/// key.
inline std::function<void(TestTensor&)> hide_by_lowest(DType dtype) {
  return [dtype](TestTensor& bias) {
    const bool half = dtype == DType::kFloat16;
    const double lowest = half ? -65504.0 : dtype == DType::kBFloat16 ? -3.3895313892515355e38 : -3.4028234663852886e38;
    for (std::int64_t i = 0; i < bias.shape()[0]; ++i)
      for (std::int64_t j = 0; j < bias.shape()[1]; ++j) {
        const auto set = [&](double value) { bias.set_at({i, j}, value); };
        switch (i % 8) {
          case 0: set(lowest); break;
          case 1: set(j % 3 == 1 ? -kInfinity : lowest); break;
          case 2: set(half ? -40000.0 : -2.4e38); break;
          case 3: set(-kInfinity); break;
          case 4: set(j == i ? 0.0 : lowest); break;
          case 5: set(half ? -20000.0 : -1e9); break;
          case 6: set(j % 2 == 0 ? -lowest : 0.0); break;
          default: break;  // an ordinary row
        }
      }
  };
}

/// Logits of about +-1e5.
inline void make_logits_huge(AttentionTensors& t) {
  for (std::int64_t i = 0; i < t.q->numel(); ++i) t.q->set(i, 320 * t.q->get(i));
  for (std::int64_t i = 0; i < t.k->numel(); ++i) t.k->set(i, 320 * t.k->get(i));
}

/// No two tensors of the call alike.
inline void mix_layouts(AttentionSpec& spec) {
  spec.layout_q = {{}, {0, 2, 1, 3}, 3};       // [batch, seq, heads, head_dim], rows head_dim + 3 apart
  spec.layout_k = {{}, {2, 0, 1, 3}, 1, 1};    // seq outermost, offset by one element
  spec.layout_v = {{}, {1, 2, 0, 3}, 6, 5};    // heads outermost
  spec.layout_out = {{}, {2, 1, 0, 3}, 9, 7};  // reversed
  spec.layout_lse = {{}, {2, 0, 1}, 2, 3};
}

inline const char* short_name(DType dtype) {
  return dtype == DType::kFloat32 ? "fp32" : dtype == DType::kFloat16 ? "fp16" : "bf16";
}
inline constexpr DType kFloatTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

}  // namespace flashkernel::conformance
