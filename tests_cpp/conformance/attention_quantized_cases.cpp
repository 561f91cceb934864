// Cases of attention_fwd over pages of 8-bit elements: both dtypes, both kinds of scales, every dtype of queries; what
// 16-bit pages do not have is NaN in a scale, and scales that lie apart.
#include <cmath>

#include "conformance/attention_spec.hpp"

namespace flashkernel::conformance {
namespace {

/// add(name, spec): a case of that name, with the prefix before it and the dtype of the numbers behind it.
auto adder(CaseList& list, const std::string& prefix, const PagedSpec& base) {
  return [&list, prefix, suffix = std::string("_") + short_name(base.common.dtype)](const std::string& name,
                                                                                    const PagedSpec& spec) {
    list.add(prefix + name + suffix, [spec](Call& call) { build_attention_paged(call, spec); });
  };
}

void cases_of(CaseList& list, const std::string& prefix, const PagedSpec& base) {
  const auto add = adder(list, prefix, base);
  // One query, and some, for each head dim; the value's may differ.
  for (const std::int64_t dim : {16, 64, 80, 128, 192, 256}) {
    PagedSpec spec = base;
    spec.common.head_dim = dim;
    add("dim" + std::to_string(dim), spec);
    spec.common.head_dim_v = dim == 80 ? 112 : dim / 2;
    spec.common.seq_q = 3;
    spec.common.mask = kCausal;
    add("dim" + std::to_string(dim) + "_other_value_dim_causal", spec);
  }
  PagedSpec odd = base;
  odd.common.head_dim = 33, odd.common.head_dim_v = 7, odd.common.seq_q = 2;
  add("dim33", odd);
  for (const std::int64_t group : {1, 3, 12, 20, 32}) {
    PagedSpec spec = base;
    spec.common.heads_q = 2 * group;
    add("group" + std::to_string(group), spec);
  }
  // 70 queries are a prefill: more than a decode kernel takes, over one page and over many.
  paged_variants(base, {2, 4, 8, 70}, add);
  PagedSpec spec = base;
  spec.lengths = {0, 0};
  add("no_keys", spec);
  spec = base;
  spec.page_size = 64;
  spec.shared_first_page = true;
  add("page64", spec);
  spec.page_size = 7;
  add("page7", spec);
  if (base.token_scales && base.pages_dtype == DType::kInt8) {
    spec = base;
    spec.common.seq_q = 40;
    spec.common.mask = kCausal;
    spec.lengths = {33, 300};
    spec.spare_columns = 10000;  // by the table each sequence could be long: too much to be widened with its neighbour
    add("wide_table", spec);
  }
  spec = base;
  spec.layout_pages = {{}, {0, 2, 1, 3}, 16};
  spec.layout_scales = {{}, {1, 0, 2}, 4};
  add("heads_outside", spec);
  spec.layout_pages = {{}, {0, 1, 2, 3}, 3, 5};
  spec.layout_scales = {{}, {0, 1, 2}, 1, 1};
  add("unaligned", spec);
  spec = base;
  spec.lengths_q = {1, 0, 2, 1, 2};
  spec.common.mask = kCausal;
  add("lengths_of_queries", spec);

  // Products of probabilities and scales must not overflow 16 bits.
  if (base.common.dtype != DType::kFloat16) {
    spec = base;
    spec.common.adjust = [](AttentionTensors& t) {
      constexpr double kFactor = 2e4;
      for (TestTensor* scales : {t.k_scales, t.v_scales})
        for (std::int64_t i = 0; i < scales->numel(); ++i)
          if (std::isfinite(scales->get(i)))
            scales->set(i, scales->get(i) * (scales == t.v_scales ? kFactor : 1 / kFactor));
      t.q->transform([](double x) { return x * kFactor; });
    };
    add("large_values", spec);
  }
  // NaN that all queries see, that some see, that none sees.
  spec = base;
  spec.lengths = {40, 200, 16};
  spec.common.seq_q = 3;
  spec.common.mask = kCausal;
  const bool e4m3 = base.pages_dtype == DType::kFloat8E4M3, token_scales = base.token_scales;
  spec.page_size = 256;  // a page a sequence, so that places are known: in the order of the table, whatever that is
  spec.common.adjust = [=](AttentionTensors& t) {
    for (std::int64_t page = 0; page < 5; ++page) {
      if (e4m3 && page != 2) t.v->set_at({page, page == 0 ? 39 : 198, 0, 5}, kNan);
      if (e4m3 && page == 2) t.k->set_at({page, 14, 1, 3}, kNan);
      if (token_scales && page != 3) t.v_scales->set_at({page, 1, page == 1 ? 15 : 199}, kNan);
      if (token_scales && page == 3) t.k_scales->set_at({page, 0, 38}, kNan);
    }
  };
  add("nan_seen_by_some", spec);
}

// Pages of 4-bit elements: two of them a byte, scales of groups of a row.
void packed_cases(CaseList& list, const std::string& prefix, const PagedSpec& base) {
  const auto add = adder(list, prefix, base);
  for (const std::int64_t dim : {18, 64, 80, 96, 128, 256}) {
    PagedSpec spec = base;
    spec.common.head_dim = dim;
    add("dim" + std::to_string(dim), spec);
    spec.common.seq_q = 3;
    spec.common.mask = kCausal;
    add("dim" + std::to_string(dim) + "_causal", spec);
    spec.common.head_dim_v = dim == 80 ? 112 : dim / 2 / 2 * 2;
    add("dim" + std::to_string(dim) + "_other_value_dim_causal", spec);
  }
  for (const std::int64_t group : {3, 12, 20, 32}) {
    PagedSpec spec = base;
    spec.common.heads_q = 2 * group;
    add("group" + std::to_string(group), spec);
  }
  paged_variants(base, {4, 70}, add);
  PagedSpec spec = base;
  spec.lengths = {0, 0};
  add("no_keys", spec);
  spec = base;
  spec.page_size = 64;
  spec.shared_first_page = true;
  add("page64", spec);
  spec.page_size = 7;
  add("page7", spec);
  spec = base;
  spec.layout_pages = {{}, {0, 2, 1, 3}, 16};
  if (base.pages_dtype == DType::kInt4x2) spec.layout_scales = {{}, {1, 0, 2, 3, 4}};
  add("heads_outside", spec);
  spec.layout_pages = {{}, {0, 1, 2, 3}, 3, 5};
  if (base.pages_dtype == DType::kInt4x2)
    spec.layout_scales = {{}, {0, 1, 2, 3, 4}, 0, 2};
  else
    spec.layout_scales = {{}, {0, 1, 2, 3}, 1, 1};
  add("unaligned", spec);
  spec = base;
  spec.lengths_q = {1, 0, 2, 1, 2};
  spec.common.mask = kCausal;
  add("lengths_of_queries", spec);
  // NaN that all queries see, that some see, that none sees.
  spec = base;
  spec.lengths = {40, 200, 16};
  spec.common.seq_q = 3;
  spec.common.mask = kCausal;
  spec.page_size = 256;  // a page a sequence
  const bool int4 = base.pages_dtype == DType::kInt4x2;
  spec.common.adjust = [=](AttentionTensors& t) {
    const auto spoil = [&](TestTensor& scales, std::int64_t page, std::int64_t head, std::int64_t token,
                           std::int64_t group, int which) {
      if (int4)
        scales.set_at({page, head, token, group, which}, kNan);
      else
        scales.set_at({page, head, token, group}, kNan);
    };
    for (std::int64_t page = 0; page < 5; ++page) {
      spoil(*t.v_scales, page, 0, page == 0 ? 39 : 198, 1, 0);
      spoil(*t.v_scales, page, 1, page == 1 ? 15 : 199, 3, 1);
      if (page == 2) spoil(*t.k_scales, page, 1, 14, 0, 1);
      if (page == 3) spoil(*t.k_scales, page, 0, 38, 2, 0);
    }
  };
  add("nan_seen_by_some", spec);
}

void cases(CaseList& list) {
  for (const DType dtype : kFloatTypes)
    for (const DType pages : {DType::kInt4x2, DType::kFloat4E2M1x2}) {
      PagedSpec base;
      base.common.dtype = dtype;
      base.common.heads_q = 8;
      base.common.heads_kv = 2;
      base.common.head_dim = 128;
      base.common.seq_q = 1;
      base.lengths = {1, 300, 0, 33, 131};
      base.pages_dtype = pages;
      packed_cases(list, pages == DType::kInt4x2 ? "int4_" : "nvfp4_", base);
    }
  for (const DType dtype : kFloatTypes)
    for (const DType pages : {DType::kFloat8E4M3, DType::kInt8})
      for (const bool token_scales : {false, true}) {
        PagedSpec base;
        base.common.dtype = dtype;
        base.common.heads_q = 8;
        base.common.heads_kv = 2;
        base.common.head_dim = 128;
        base.common.seq_q = 1;
        base.lengths = {1, 300, 0, 33, 131};
        base.pages_dtype = pages;
        base.token_scales = token_scales;
        cases_of(list, std::string(pages == DType::kInt8 ? "int8_" : "e4m3_") + (token_scales ? "token_" : "head_"),
                 base);
      }
}

const OpCases registration("attention_fwd", cases);

}  // namespace
}  // namespace flashkernel::conformance
