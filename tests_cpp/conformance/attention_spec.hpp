// What one attention call of the conformance test is made of; forward and backward cases are written in these words.
#pragma once

#include <optional>

#include "conformance/conformance.hpp"
#include "flashkernel/attention.hpp"

namespace flashkernel::conformance {

constexpr std::int64_t kAll = -1;

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

/// The tensors of a built call, for adjustments: NaN here, a huge value there.
struct AttentionTensors {
  TestTensor* q = nullptr;
  TestTensor* k = nullptr;
  TestTensor* v = nullptr;
  TestTensor* grad_out = nullptr;
};

struct AttentionSpec {
  DType dtype = DType::kFloat32;
  std::int64_t batch = 2, heads_q = 2, heads_kv = 2, seq_q = 33, seq_k = 33, head_dim = 32;
  std::int64_t head_dim_v = 0;  // 0: head_dim
  Mask mask = {"full", false, kAll, kAll};
  float softcap = 0;
  std::optional<float> scale = {};
  std::optional<BiasSpec> bias = {};
  int alibi_dims = 0;  // 1: [heads_q], 2: [batch, heads_q]
  bool sinks = false;
  bool lse = true;
  double factor = 1;
  int repeats = 2;
  Layout layout_q = {}, layout_k = {}, layout_v = {}, layout_out = {}, layout_lse = {};
  std::function<void(AttentionTensors&)> adjust = {};

  // Backward only.
  bool grad_lse = false;
  bool want_q = true, want_k = true, want_v = true, want_bias = true, want_sinks = true;
  DType grad_bias_dtype = DType::kFloat32;
  Layout layout_grad_out = {}, layout_grad_q = {}, layout_grad_k = {}, layout_grad_v = {};

  std::int64_t dim_v() const { return head_dim_v ? head_dim_v : head_dim; }
};

/// Lengths of sequences side by side.
struct VarlenSpec {
  AttentionSpec common;  // batch, seq_q, seq_k follow from the lengths
  std::vector<std::int64_t> lengths_q, lengths_k;
  std::int64_t slack = 0;  // max_seqlen beyond the longest
  DType index_dtype = DType::kInt32;
};

struct PagedSpec {
  AttentionSpec common;                 // seq_k follows from the lengths
  std::vector<std::int64_t> lengths;    // keys of each sequence
  std::vector<std::int64_t> lengths_q;  // not empty: queries side by side
  std::int64_t page_size = 16;
  std::int64_t spare_columns = 1;  // columns of the table past the longest sequence: ids that no kernel may follow
  bool shared_first_page = false;
  DType index_dtype = DType::kInt32;
  std::int64_t first_page = 0;  // ids start here: past a million, offsets pass 2^31
  Layout layout_pages = {};
};

void build_attention(Call& call, const AttentionSpec& spec);
void build_attention_varlen(Call& call, const VarlenSpec& spec);
void build_attention_paged(Call& call, const PagedSpec& spec);
void build_attention_backward(Call& call, const AttentionSpec& spec);
void build_attention_varlen_backward(Call& call, const VarlenSpec& spec);

inline constexpr Mask kMasks[] = {{"full", false, kAll, kAll},       {"causal", true, kAll, kAll},
                                  {"left5_right0", false, 5, 0},     {"left7_right3", false, 7, 3},
                                  {"causal_left16", true, 16, kAll}, {"left_all_right2", false, kAll, 2},
                                  {"left0_right0", false, 0, 0},     {"right9_left_none", false, 0, 9}};

inline const char* short_name(DType dtype) {
  return dtype == DType::kFloat32 ? "fp32" : dtype == DType::kFloat16 ? "fp16" : "bf16";
}
inline constexpr DType kFloatTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

}  // namespace flashkernel::conformance
