// Cases of attention_fwd called by attention_cascade: groups of sequences over prefixes of any length, which a kernel
// takes as one sequence of many queries each; own keys round pages; NaN in every place that nobody looks at.
#include <algorithm>
#include <numeric>

#include "conformance/attention_spec.hpp"
#include "flashkernel/attention_cascade.hpp"

namespace flashkernel::conformance {
namespace {

struct CascadeSpec {
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> prefixes = {70};  // tokens of each group's prefix
  std::vector<std::int64_t> group_of = {};  // of each sequence, never decreasing; empty: one group, and no cu_prefix_q
  std::vector<std::int64_t> lengths = {5, 0, 33};  // own keys of each sequence
  std::vector<std::int64_t> lengths_q = {};        // not empty: queries side by side
  std::int64_t heads_q = 4, heads_kv = 2, seq_q = 1, head_dim = 64, page_size = 16;
  bool causal = false, sinks = false, lse = true, check_pages = false;
  float softcap = 0;
  DType index_dtype = DType::kInt32, pages_dtype = DType::kFloat32;  // pages: 8-bit, or else not used
  double factor = 1;
};

std::int64_t longest(const std::vector<std::int64_t>& values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}

void build(Call& call, const CascadeSpec& s) {
  const auto batch = static_cast<std::int64_t>(s.lengths.size()), groups = static_cast<std::int64_t>(s.prefixes.size());
  const std::int64_t size = s.page_size;
  const auto pages_of = [&](std::int64_t length) { return (length + size - 1) / size; };
  std::int64_t num_pages = 2;  // two belong to nobody
  for (const auto* lengths : {&s.prefixes, &s.lengths})
    for (const std::int64_t length : *lengths) num_pages += pages_of(length);
  const bool varlen = !s.lengths_q.empty(), quantized = s.pages_dtype != DType::kFloat32;
  std::vector<std::int64_t> cu_q(static_cast<std::size_t>(batch) + 1, 0);
  for (std::int64_t b = 0; b < batch; ++b) {
    const auto at = static_cast<std::size_t>(b);
    cu_q[at + 1] = cu_q[at] + (varlen ? s.lengths_q[at] : s.seq_q);
  }
  // [batch, seq, heads, head_dim], as projections give it: rows lie at one stride.
  const Layout tokens_first = {{}, {0, 2, 1, 3}};
  TestTensor& q = varlen ? call.input("q", s.dtype, {cu_q.back(), s.heads_q, s.head_dim})
                         : call.input("q", s.dtype, {batch, s.heads_q, s.seq_q, s.head_dim}, tokens_first);
  const DType pages_dtype = quantized ? s.pages_dtype : s.dtype;
  TestTensor& k = call.input("k_pages", pages_dtype, {num_pages, size, s.heads_kv, s.head_dim});
  TestTensor& v = call.input("v_pages", pages_dtype, {num_pages, size, s.heads_kv, s.head_dim});

  // Pages in random order; columns past a row's last page lead nowhere.
  std::vector<std::int64_t> free_pages(static_cast<std::size_t>(num_pages));
  std::iota(free_pages.begin(), free_pages.end(), 0);
  call.random.shuffle(free_pages);
  std::vector<std::int64_t> owned(static_cast<std::size_t>(num_pages), 0);
  const auto table_of = [&](const char* name, const std::vector<std::int64_t>& lengths) {
    const auto count = static_cast<std::int64_t>(lengths.size());
    const std::int64_t columns = pages_of(longest(lengths)) + 1;
    std::vector<std::int64_t> table(static_cast<std::size_t>(count * columns), 0x7f000000);
    for (std::int64_t row = 0; row < count; ++row) {
      const std::int64_t length = lengths[static_cast<std::size_t>(row)];
      for (std::int64_t column = 0; column < pages_of(length); ++column) {
        const std::int64_t page = free_pages.back();
        free_pages.pop_back();
        table[static_cast<std::size_t>(row * columns + column)] = page;
        owned[static_cast<std::size_t>(page)] = std::min(size, length - column * size);
      }
    }
    return call.indices(name, DType::kInt32, {count, columns}, table, {{}, {}, 3, 0, {}}).view();
  };
  const TensorView prefix_table = table_of("prefix_table", s.prefixes),
                   block_table = table_of("block_table", s.lengths);
  if (!k.blank() && !quantized)
    for (std::int64_t page = 0; page < num_pages; ++page)  // what no row owns
      for (std::int64_t token = owned[static_cast<std::size_t>(page)]; token < size; ++token)
        for (std::int64_t h = 0; h < s.heads_kv; ++h)
          for (std::int64_t d = 0; d < s.head_dim; ++d) {
            k.set_at({page, token, h, d}, page % 2 ? kInfinity : kNan);
            v.set_at({page, token, h, d}, page % 2 ? kNan : kInfinity);
          }
  const TensorView prefix_lens = call.indices("prefix_lens", s.index_dtype, {groups}, s.prefixes).view();
  const TensorView seq_lens = call.indices("seq_lens", s.index_dtype, {batch}, s.lengths).view();
  TensorView starts_q, groups_q;
  if (varlen) starts_q = call.indices("cu_seqlens_q", s.index_dtype, {batch + 1}, cu_q).view();
  if (!s.group_of.empty()) {
    std::vector<std::int64_t> starts(static_cast<std::size_t>(groups) + 1, 0);
    for (std::int64_t b = 0; b < batch; ++b) {
      const auto at = static_cast<std::size_t>(b);
      starts[static_cast<std::size_t>(s.group_of[at]) + 1] += cu_q[at + 1] - cu_q[at];
    }
    std::partial_sum(starts.begin(), starts.end(), starts.begin());
    groups_q = call.indices("cu_prefix_q", s.index_dtype, {groups + 1}, starts).view();
  }
  AttentionOptions options;
  options.causal = s.causal;
  options.softcap = s.softcap;
  options.check_pages = s.check_pages;
  if (s.sinks) options.sinks = call.input("sinks", DType::kFloat32, {s.heads_q}).view();
  if (quantized) {
    TestTensor& k_scales = call.input("k_scales", DType::kFloat32, {s.heads_kv});
    TestTensor& v_scales = call.input("v_scales", DType::kFloat32, {s.heads_kv});
    for (TestTensor* scales : {&k_scales, &v_scales}) scales->fill([&] { return 0.01 + 0.02 * call.random.uniform(); });
    options.kv_scales = {k_scales.view(), v_scales.view()};
  }
  const Shape out_shape =
      varlen ? Shape{cu_q.back(), s.heads_q, s.head_dim} : Shape{batch, s.heads_q, s.seq_q, s.head_dim};
  const Shape lse_shape = varlen ? Shape{s.heads_q, cu_q.back()} : Shape{batch, s.heads_q, s.seq_q};
  // Each part is rounded to the dtype before they are merged.
  TestTensor& out = call.output("out", s.dtype, out_shape, {}, 2 * s.factor);
  TestTensor* const lse = s.lse ? &call.output("lse", DType::kFloat32, lse_shape, {}, s.factor) : nullptr;
  const std::int64_t max_q = varlen ? longest(s.lengths_q) : s.seq_q;
  call.run = [=, &q, &k, &v, &out](const ExecutionContext& context) {
    attention_cascade(q.view(), k.view(), v.view(), prefix_table, prefix_lens, groups_q, block_table, seq_lens,
                      starts_q, max_q, out.view(), lse ? lse->view() : TensorView(), options, context);
  };
}

void cases(CaseList& list) {
  for (const DType dtype : kFloatTypes) {
    const auto add = [&](const std::string& name, CascadeSpec spec) {
      spec.dtype = dtype;
      list.add("cascade_" + name + "_" + short_name(dtype), [=](Call& call) { build(call, spec); });
    };
    CascadeSpec spec;
    add("one_group", spec);
    spec.lse = false;
    add("no_lse", spec);
    spec = {};
    spec.prefixes = {200};
    spec.lengths = {1, 64, 17, 0, 3, 90, 16, 2};
    spec.heads_q = 8, spec.heads_kv = 1, spec.head_dim = 128, spec.page_size = 64;
    spec.index_dtype = DType::kInt64;
    add("8_of_8_heads", spec);
    spec.prefixes = {1100};
    spec.check_pages = true;
    add("long_prefix", spec);
    spec = {};
    spec.prefixes = {40, 0, 130};
    spec.group_of = {0, 0, 1, 2, 2, 2};
    spec.lengths = {9, 33, 20, 0, 16, 5};
    add("three_groups", spec);
    spec.lengths_q = {1, 3, 2, 0, 4, 1};
    spec.lengths[3] = 7;
    spec.causal = true;
    add("three_groups_side_by_side", spec);
    spec.group_of = {0, 0, 0, 2, 2, 2};  // group 1 has nobody
    spec.prefixes[1] = 16;
    spec.softcap = 3, spec.sinks = true;
    add("features", spec);
    spec = {};
    spec.seq_q = 4, spec.causal = true;
    spec.lengths = {4, 20, 37};
    add("four_queries", spec);
    spec = {};
    spec.prefixes = {0};
    add("no_prefix", spec);
    spec.lengths = {0, 0};
    add("no_keys", spec);
    spec.lengths = {};
    add("no_sequences", spec);
    spec = {};
    spec.pages_dtype = DType::kInt8;
    spec.factor = 2;
    if (dtype != DType::kFloat32) add("int8_pages", spec);
  }
}

const OpCases registration("attention_fwd", cases);

}  // namespace
}  // namespace flashkernel::conformance
