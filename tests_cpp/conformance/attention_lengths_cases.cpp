// Cases of attention_fwd over sequences of various lengths: side by side, and in pages.
#include <algorithm>

#include "conformance/attention_spec.hpp"
#include "conformance/device_memory.hpp"

namespace flashkernel::conformance {
namespace {

struct Lengths {
  const char* name;
  std::vector<std::int64_t> q, k;
};

const std::vector<Lengths>& lengths() {
  static const std::vector<Lengths> all = {
      {"plain", {5, 17, 64, 33}, {5, 17, 64, 33}},
      {"q_shorter_and_longer", {1, 40, 3, 70}, {9, 20, 64, 71}},
      {"zero_first", {0, 13, 20}, {0, 13, 20}},
      {"zero_middle", {13, 0, 20}, {13, 0, 20}},
      {"zero_last", {13, 20, 0}, {13, 20, 0}},
      {"zero_q_only", {13, 0, 20}, {13, 50, 20}},
      {"zero_k_only", {13, 6, 20}, {13, 0, 20}},
      {"zero_k_all", {3, 2}, {0, 0}},
      {"zero_all", {0, 0, 0}, {0, 0, 0}},
      {"decode", {1, 1, 1, 1}, {300, 1, 77, 128}},
      {"one", {150}, {290}},
      {"none", {}, {}},
  };
  return all;
}

void varlen_cases(CaseList& list) {
  for (const DType dtype : kFloatTypes)
    for (const Lengths& each : lengths())
      for (const Mask& mask : {kFull, kCausal, kMasks[3]}) {
        VarlenSpec spec;
        spec.common.dtype = dtype;
        spec.common.heads_q = 4;
        spec.common.head_dim = 40;
        spec.common.head_dim_v = 24;
        spec.common.mask = mask;
        spec.lengths_q = each.q;
        spec.lengths_k = each.k;
        list.add(std::string("varlen_") + each.name + "_" + mask.name + "_" + short_name(dtype),
                 [spec](Call& call) { build_attention_varlen(call, spec); });
      }
  for (const DType dtype : kFloatTypes)
    for (const Lengths& each : {lengths()[1], lengths()[6]}) {
      VarlenSpec spec;
      spec.common.dtype = dtype;
      spec.common.heads_q = 6;
      spec.common.softcap = 2;
      spec.common.alibi_dims = 2;
      spec.common.sinks = true;
      spec.common.mask = kMasks[4];
      spec.common.layout_q = {{}, {1, 0, 2}, 5, 1};
      spec.common.layout_k = {{}, {}, 3, 2};
      spec.common.layout_v = {{}, {1, 0, 2}};
      spec.common.layout_out = {{}, {}, 1};
      spec.common.layout_lse = {{}, {1, 0}, 2};
      spec.lengths_q = each.q;
      spec.lengths_k = each.k;
      spec.slack = 100;  // max_seqlen may be larger than the truth
      spec.index_dtype = DType::kInt64;
      list.add(std::string("varlen_features_") + each.name + "_" + short_name(dtype),
               [spec](Call& call) { build_attention_varlen(call, spec); });
    }
}

// Padding on the left, and tokens in use: bounds of each sequence inside, on and past its own.
void bounds_cases(CaseList& list) {
  for (const DType dtype : kFloatTypes)
    for (const Mask& mask : {kFull, kCausal, kMasks[3]})
      for (const std::int64_t queries : {1, 5, 70}) {
        PagedSpec spec;
        spec.common.dtype = dtype;
        spec.common.heads_q = 6;
        spec.common.heads_kv = 2;
        spec.common.head_dim = 64;
        spec.common.seq_q = queries;
        spec.common.mask = mask;
        spec.lengths = {70, 300, 40, 131, 0, 33};
        spec.starts = {0, 130, 40, 50, 3, 16};
        spec.check_pages = queries == 5;  // which must not look before the first keys either
        list.add("paged_starts_queries" + std::to_string(queries) + "_" + mask.name + "_" + short_name(dtype),
                 [spec](Call& call) { build_attention_paged(call, spec); });
      }
  for (const DType dtype : kFloatTypes)
    for (const Mask& mask : {kFull, kCausal}) {
      VarlenSpec spec;
      spec.common.dtype = dtype;
      spec.common.heads_q = 4;
      spec.common.head_dim = 64;
      spec.common.mask = mask;
      spec.lengths_q = {70, 13, 20, 130};
      spec.lengths_k = {70, 50, 20, 150};
      spec.used_q = {70, 5, 0, 99};
      spec.used_k = {33, 50, 7, 1000};
      list.add(std::string("varlen_used_") + mask.name + "_" + short_name(dtype),
               [spec](Call& call) { build_attention_varlen(call, spec); });
    }
}

// Warpgroups of 64 queries in threes that end with their sequence: the rows before its first one belong to another
// sequence.
void threes_cases(CaseList& list) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16})
    for (const Mask& mask : {kFull, kCausal, kMasks[3]}) {
      VarlenSpec spec;
      spec.common.dtype = dtype;
      spec.common.heads_q = 4;
      spec.common.head_dim = 128;
      spec.common.mask = mask;
      spec.lengths_q = {200, 1, 0, 64, 321, 65, 449, 130};
      spec.lengths_k = {200, 70, 30, 64, 400, 65, 449, 1};
      list.add(std::string("varlen_threes_") + mask.name + "_" + short_name(dtype),
               [spec](Call& call) { build_attention_varlen(call, spec); });
      PagedSpec paged;
      paged.common = spec.common;
      paged.lengths = {200, 0, 321, 500};
      paged.lengths_q = {200, 1, 300, 449};
      list.add(std::string("paged_threes_") + mask.name + "_" + short_name(dtype),
               [paged](Call& call) { build_attention_paged(call, paged); });
    }
}

// Sequences of a tile each, a head for each multiprocessor, so that every thread block has all of them in this order:
// an output on its way when tiles without keys follow, and behind a single block of keys another one; rows that end
// with their sequence in turn with whole ones.
void passing_tiles_cases(CaseList& list) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16})
    for (const std::int64_t d : {192, 256}) {
      VarlenSpec spec;
      spec.common.dtype = dtype;
      spec.common.heads_q = spec.common.heads_kv = std::max(1, multiprocessors());
      spec.common.head_dim = d;
      spec.lengths_q = {64, 20, 3, 3, 3, 3, 3, 128, 3, 70, 64, 64, 3, 20};
      spec.lengths_k = {100, 30, 0, 0, 0, 0, 0, 64, 0, 130, 7, 7, 0, 7};
      Case& added = list.add("varlen_tiles_without_keys_" + std::to_string(d) + "_" + short_name(dtype),
                             [spec](Call& call) { build_attention_varlen(call, spec); });
      added.is_for(hopper_id("attention_fwd", dtype) + "/d" + std::to_string(d));
    }
}

// Without LSE kernels may make the row sums in another way (attention_fwd_cases.cpp).
void without_lse_cases(CaseList& list) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16})
    for (const std::int64_t d : {64, 128})
      for (const Mask& mask : {kFull, kCausal}) {
        const std::string suffix =
            std::string(mask.name) + "_d" + std::to_string(d) + "_without_lse_" + short_name(dtype);
        AttentionSpec common;
        common.dtype = dtype;
        common.heads_q = 4;
        common.head_dim = d;
        common.mask = mask;
        common.lse = false;
        for (const Lengths& each : {lengths()[1], lengths()[6], lengths()[10]}) {
          VarlenSpec spec;
          spec.common = common;
          spec.lengths_q = each.q;
          spec.lengths_k = each.k;
          list.add(std::string("varlen_") + each.name + "_" + suffix,
                   [spec](Call& call) { build_attention_varlen(call, spec); });
        }
        for (const std::int64_t page_size : {16, 256}) {
          PagedSpec spec;
          spec.common = common;
          spec.common.seq_q = 270;
          spec.page_size = page_size;
          spec.lengths = {270, 0, 600, 2 * page_size + 1};
          list.add("paged_prefill_page" + std::to_string(page_size) + "_" + suffix,
                   [spec](Call& call) { build_attention_paged(call, spec); });
        }
      }
}

void paged_cases(CaseList& list) {
  const auto add = [&](const std::string& name, const PagedSpec& spec) {
    list.add("paged_" + name + "_" + short_name(spec.common.dtype),
             [spec](Call& call) { build_attention_paged(call, spec); });
  };
  for (const DType dtype : kFloatTypes) {
    PagedSpec base;
    base.common.dtype = dtype;
    base.common.heads_q = 6;
    base.common.heads_kv = 2;
    base.common.head_dim = 64;
    base.common.seq_q = 1;
    for (const std::int64_t page_size : {1, 4, 7, 8, 16, 32, 64, 128, 256}) {
      PagedSpec spec = base;
      spec.page_size = page_size;
      spec.lengths = {1, 300, 0, page_size, 2 * page_size + 1, 131};
      add("decode_page" + std::to_string(page_size), spec);
      spec.common.seq_q = 5;
      spec.common.mask = kCausal;
      add("chunk_page" + std::to_string(page_size), spec);
    }
    PagedSpec spec = base;
    spec.lengths = {64, 32, 48};  // exactly full, no spare column
    spec.spare_columns = 0;
    add("exactly_full", spec);
    spec = base;
    spec.lengths = {40, 41, 55};
    spec.shared_first_page = true;
    spec.index_dtype = DType::kInt64;
    add("shared_prefix", spec);
    spec = base;
    spec.lengths = {0, 0};
    add("all_empty", spec);
    spec.spare_columns = 0;
    add("table_without_columns", spec);
    spec = base;
    spec.common.head_dim_v = 40;
    spec.common.mask = kCausal;
    spec.lengths = {20, 33, 70, 0, 9};
    spec.lengths_q = {20, 1, 40, 0, 12};
    spec.page_size = 32;
    add("varlen_queries", spec);
    spec.common.softcap = 2;
    spec.common.alibi_dims = 2;
    spec.common.sinks = true;
    spec.common.mask = kMasks[4];
    spec.layout_pages = {{}, {2, 0, 1, 3}, 3, 1};  // heads outermost: other strides for every dim
    add("varlen_queries_features", spec);
    spec = base;
    spec.lengths = {40, 70};
    spec.first_page = 1100000;  // x 16 tokens x 2 heads x 64: offsets past 2^31 elements
    spec.common.mask = kMasks[4];
    add("page_ids_past_a_million", spec);
    spec = base;
    spec.lengths = {500, 257, 31};
    spec.page_size = 16;
    spec.common.mask = {"left100_right0", false, 100, 0};
    spec.common.sinks = true;
    add("decode_window", spec);
    spec.common.sinks = false;
    spec.common.seq_q = 7;
    spec.common.mask = {"causal_left20", true, 20, -1};
    spec.check_pages = true;  // which must not look behind the window either
    add("chunk_behind_dropped_pages", spec);
    spec.page_size = 64;
    spec.common.seq_q = 1;
    spec.common.mask = {"causal_left63", true, 63, -1};
    spec.lengths = {512, 128, 64, 127, 129, 1};  // the window begins with a page, or one before or behind that
    add("decode_behind_dropped_pages", spec);
    spec.page_size = 16;
    spec.common.mask = {"causal_left40", true, 40, -1};
    spec.lengths = {330, 100, 0, 61};
    spec.lengths_q = {70, 1, 0, 3};
    add("varlen_behind_dropped_pages", spec);
    spec = base;
    spec.lengths = {3000, 1};
    spec.common.repeats = 30;
    add("deterministic_30_runs", spec);
  }
}

// Rows that are queries of all heads of a group, over keys in parts: groups that fill a tile of 64 or 128 rows, and
// that end within one; lengths that leave blocks without keys, and sequences without any; queries side by side. Pages
// of whole lines of the copy engine's swizzle, and smaller or odd ones, whose rows are gathered.
void few_queries_cases(CaseList& list) {
  struct Group {
    std::int64_t heads, heads_kv, queries;
  };
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16})
    for (const std::int64_t d : {64, 128}) {
      const std::string row = std::string("attention_fwd/cuda/sm90a/few_queries/") +
                              (dtype == DType::kFloat16 ? "f16" : "bf16") + "/d" + std::to_string(d);
      int number = 0;
      for (const Group& group : {Group{2, 2, 70}, {8, 2, 16}, {14, 2, 9}, {48, 1, 1}, {71, 1, 2}, {128, 1, 1}}) {
        PagedSpec spec;
        spec.common.dtype = dtype;
        spec.common.heads_q = group.heads;
        spec.common.heads_kv = group.heads_kv;
        spec.common.head_dim = d;
        spec.common.seq_q = group.queries;
        spec.common.mask = number % 3 == 2 ? kMasks[3] : kCausal;
        spec.common.lse = number % 2 == 0;
        spec.common.sinks = number % 4 == 1;
        spec.page_size = number % 3 == 0 ? 16 : number % 3 == 1 ? 64 : 256;
        spec.lengths = {group.heads == 48 ? 2100 : 700, 0, 1, 131, 64};  // several clusters for a tile; one
        const std::string heads = std::to_string(group.heads) + "_heads_of_" + std::to_string(group.heads_kv) + "_d" +
                                  std::to_string(d) + "_" + short_name(dtype);
        list.add("paged_few_queries_" + heads, [spec](Call& call) { build_attention_paged(call, spec); }).is_for(row);
        spec.lengths_q = {group.queries, 3, 1, 0, group.queries};
        spec.common.lse = !spec.common.lse;
        list.add("paged_few_queries_side_by_side_" + heads, [spec](Call& call) { build_attention_paged(call, spec); })
            .is_for(row);
        spec.page_size = number % 3 == 0 ? 1 : number % 3 == 1 ? 12 : 3;
        list.add("paged_few_queries_gathered_" + heads, [spec](Call& call) { build_attention_paged(call, spec); })
            .is_for(row);
        AttentionSpec dense = spec.common;
        dense.batch = 1;
        dense.seq_q = group.queries;
        dense.seq_k = 900;
        dense.mask = kFull;
        list.add("few_queries_" + heads, [dense](Call& call) { build_attention(call, dense); }).is_for(row);
        ++number;
      }
    }
}

// Sequences of one small tile or a few: side by side, and with a bias over each.
void short_cases(CaseList& list) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16})
    for (const std::int64_t d : {32, 64, 128}) {
      const std::string row = std::string("attention_fwd/cuda/sm80/short/") +
                              (dtype == DType::kFloat16 ? "f16" : "bf16") + "/d" + std::to_string(d);
      const std::string name = "_d" + std::to_string(d) + "_" + short_name(dtype);
      for (const Mask& mask : {kFull, kCausal, kMasks[3]}) {
        VarlenSpec spec;
        spec.common.dtype = dtype;
        spec.common.heads_q = 4;
        spec.common.head_dim = d;
        spec.common.mask = mask;
        spec.common.lse = d != 64;
        spec.lengths_q = {30, 60, 45, 0, 1, 64, 63, 17};
        spec.lengths_k = {30, 60, 45, 9, 64, 64, 70, 0};
        list.add(std::string("varlen_short_") + mask.name + name,
                 [spec](Call& call) { build_attention_varlen(call, spec); })
            .is_for(row);
      }
      AttentionSpec window;
      window.dtype = dtype;
      window.batch = 5;
      window.heads_q = window.heads_kv = 3;
      window.seq_q = window.seq_k = 49;
      window.head_dim = d;
      window.bias = BiasSpec{{1, 3, 49, 49}, dtype};
      list.add("short_bias" + name, [window](Call& call) { build_attention(call, window); }).is_for(row);
    }
}

void cases(CaseList& list) {
  varlen_cases(list);
  bounds_cases(list);
  threes_cases(list);
  passing_tiles_cases(list);
  without_lse_cases(list);
  paged_cases(list);
  few_queries_cases(list);
  short_cases(list);
}

const OpCases registration("attention_fwd", cases);

}  // namespace
}  // namespace flashkernel::conformance
