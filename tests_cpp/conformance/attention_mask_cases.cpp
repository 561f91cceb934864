// Cases of attention's packed masks, forward and backward: padding, blocks, trees, masks of each head; rows that see
// nothing, tiles that nobody sees, NaN behind a mask; beside every other option. Trees over pages. And of the forms of
// ALiBi.
#include "conformance/attention_spec.hpp"

namespace flashkernel::conformance {
namespace {

using Add = std::function<void(const std::string&, const AttentionSpec&)>;

bool scattered(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
  return ((b * 7 + h * 5 + i * 3 + j * 11) * 2654435761u >> 7) % 3 != 0;
}

// A dense call that has whole tiles of keys and queries, some of both cut.
AttentionSpec base_of(DType dtype, std::int64_t head_dim) {
  AttentionSpec spec;
  spec.dtype = dtype;
  spec.heads_q = 4;
  spec.seq_q = 150;
  spec.seq_k = 333;
  spec.head_dim = head_dim;
  return spec;
}

void mask_cases(const Add& add, DType dtype) {
  for (const std::int64_t head_dim : {64, 128, 192}) {
    const std::string suffix = "_d" + std::to_string(head_dim);
    AttentionSpec spec = base_of(dtype, head_dim);
    spec.bits = BitsSpec{{2, 1, 1}, [](auto b, auto, auto, auto j) { return j < (b == 0 ? 70 : 257); }};
    add("padding" + suffix, spec);
    spec.bits = BitsSpec{{150}, [](auto, auto, auto i, auto j) { return i / 50 == j / 111; }};
    add("blocks" + suffix, spec);
    if (head_dim == 64) {
      spec.bits->layout = {{}, {}, 2, 1};
      add("blocks_with_gaps" + suffix, spec);
    }
    // A tree of drafts behind 250 keys: query i sees its ancestors among the drafts, i / 2, i / 4, .. and itself.
    spec.bits = BitsSpec{{1, 150}, [](auto, auto, auto i, auto j) {
                           if (j < 250) return true;
                           for (auto a = i + 1; a > 0; a /= 2)
                             if (j - 249 == a) return true;
                           return false;
                         }};
    add("tree" + suffix, spec);
    // A mask for each head. Row 4 sees no key; no query from 64 on sees keys 64 to 191. Hidden elements are NaN.
    spec.bits = BitsSpec{{2, 4, 150}, [](auto b, auto h, auto i, auto j) {
                           if (i == 4 || j == 77 || (i >= 64 && j >= 64 && j < 192)) return false;
                           return scattered(b, h, i, j);
                         }};
    add("scattered" + suffix, spec);
    spec.heads_kv = 1;
    spec.adjust = [head_dim](AttentionTensors& t) {
      for (std::int64_t c = 0; c < head_dim; ++c) t.v->set_at({1, 0, 77, c}, kNan);
    };
    add("hides_nan_value" + suffix, spec);
    spec.adjust = {};
    spec.mask = kCausal;
    spec.sinks = spec.grad_lse = true;
    add("causal_sinks" + suffix, spec);
    spec.mask = kMasks[3];
    spec.softcap = 2;
    spec.alibi_dims = 2;
    spec.bias = BiasSpec{{1, 4, 150, 333}, DType::kFloat32};
    add("everything" + suffix, spec);
  }
  for (const auto& [q, k] : {std::pair{1, 1}, {1, 100}, {3, 32}, {5, 64}, {2, 33}, {40, 31}}) {
    AttentionSpec spec = base_of(dtype, 40);
    spec.heads_kv = 2;
    spec.seq_q = q;
    spec.seq_k = k;
    spec.bits = BitsSpec{{2, 1, q}, [](auto b, auto h, auto i, auto j) { return scattered(b, h, i, j); }};
    add("small_q" + std::to_string(q) + "_k" + std::to_string(k), spec);
  }
}

void alibi_cases(const Add& add, DType dtype) {
  for (const auto& [name, alibi] : {std::pair{"signed", Alibi::kSigned}, {"sqrt", Alibi::kSqrt}})
    for (const Mask& mask : {kFull, kCausal, kMasks[3]}) {
      AttentionSpec spec = base_of(dtype, 64);
      spec.alibi = alibi;
      spec.alibi_dims = mask.causal ? 1 : 2;
      spec.mask = mask;
      spec.seq_q = 70;
      spec.seq_k = 140;
      add(std::string(name) + "_" + mask.name, spec);
      spec.seq_q = 1;
      add(std::string(name) + "_one_query_" + mask.name, spec);
    }
}

void forward_cases(CaseList& list) {
  for (const DType dtype : kFloatTypes) {
    const std::string suffix = std::string("_") + short_name(dtype);
    const auto dense = [&](const char* prefix) {
      return [&list, prefix, suffix](const std::string& name, const AttentionSpec& spec) {
        list.add(prefix + name + suffix, [spec](Call& call) { build_attention(call, spec); });
      };
    };
    mask_cases(dense("bits_"), dtype);
    alibi_cases(dense("alibi_"), dtype);
    for (const auto& [name, alibi] : {std::pair{"signed", Alibi::kSigned}, {"sqrt", Alibi::kSqrt}}) {
      PagedSpec spec;
      spec.common.dtype = dtype;
      spec.common.heads_q = 4;
      spec.common.heads_kv = 1;
      spec.common.seq_q = 1;
      spec.common.head_dim = 64;
      spec.common.alibi = alibi;
      spec.common.alibi_dims = 1;
      spec.lengths = {200, 1, 77};
      list.add(std::string("alibi_paged_") + name + suffix, [spec](Call& call) { build_attention_paged(call, spec); });
    }
  }
}

void backward_cases(CaseList& list) {
  for (const DType dtype : kFloatTypes) {
    const std::string suffix = std::string("_") + short_name(dtype);
    const auto dense = [&](const char* prefix) {
      return [&list, prefix, suffix](const std::string& name, const AttentionSpec& spec) {
        list.add(prefix + name + suffix, [spec](Call& call) { build_attention_backward(call, spec); });
      };
    };
    mask_cases(dense("bits_"), dtype);
    alibi_cases(dense("alibi_"), dtype);
  }
}

// Query i of a tree of drafts sees its ancestors, i / 2, i / 4, .. and itself, counted from 1.
bool sees_ancestor(std::int64_t i, std::int64_t j) {
  for (std::int64_t a = i + 1; a > 0; a /= 2)
    if (j + 1 == a) return true;
  return false;
}

// Over pages a mask has bits for the last keys, as many as there are queries.
void pages_cases(CaseList& list) {
  for (const DType dtype : kFloatTypes)
    for (const std::int64_t head_dim : {64, 128}) {
      const std::string suffix = "_d" + std::to_string(head_dim) + "_" + short_name(dtype);
      const auto add = [&](const std::string& name, PagedSpec spec) -> Case& {
        spec.common.dtype = dtype;
        spec.common.head_dim = head_dim;
        return list.add("tree_paged_" + name + suffix, [spec](Call& call) { build_attention_paged(call, spec); });
      };
      PagedSpec spec;
      AttentionSpec& common = spec.common;
      common.heads_q = 4;
      common.seq_q = 7;
      common.bits = BitsSpec{{7}, [](auto, auto, auto i, auto j) { return sees_ancestor(i, j); }};
      spec.lengths = {100, 7, 33, 5, 0, 64};  // of 5 keys the queries' own are the last ones
      add("of_7", spec);
      common.mask = kCausal;
      common.softcap = 3, common.alibi_dims = 2, common.sinks = true;
      spec.starts = {3, 0, 40, 1, 0, 60};
      add("features", spec);
      spec = {};
      common.heads_q = 4, common.heads_kv = 1;
      common.seq_q = 40;  // two words, which no block of keys begins with
      common.bits =
          BitsSpec{{2, 1, 40}, [](auto b, auto, auto i, auto j) { return b == 0 ? sees_ancestor(i, j) : i == j; }};
      spec.lengths = {1100, 45};
      spec.page_size = 64;
      Case& long_one = add("of_40", spec);
      if (dtype != DType::kFloat32)
        long_one.is_for(std::string("attention_fwd/cuda/sm90a/few_queries/") +
                        (dtype == DType::kFloat16 ? "f16" : "bf16") + "/d" + std::to_string(head_dim));
      // A mask for each head; nobody sees the third key from behind, whose elements are NaN in every page.
      common.bits = BitsSpec{{4, 40}, [](auto b, auto h, auto i, auto j) { return j != 37 && scattered(b, h, i, j); }};
      spec.lengths = {62};
      common.adjust = [head_dim](AttentionTensors& t) {
        for (std::int64_t page = 0; page < 3; ++page)
          for (std::int64_t c = 0; c < head_dim; ++c) {
            t.k->set_at({page, 59, 0, c}, kNan);
            t.v->set_at({page, 59, 0, c}, kNan);
          }
      };
      add("hides_nan", spec);
      spec = {};
      common.heads_q = 4;
      spec.lengths_q = {5, 0, 70, 1, 33};
      spec.lengths = {130, 9, 200, 17, 33};
      common.bits = BitsSpec{{1, 109}, [](auto, auto, auto i, auto j) { return (i + 3 * j) % 4 != 0; }};
      common.bits->layout = {{}, {}, 2, 1};
      add("side_by_side", spec);
      if (head_dim == 128 && dtype != DType::kFloat32) {
        spec.lengths_q.clear();
        common.seq_q = 12;
        common.bits = BitsSpec{{12}, [](auto, auto, auto i, auto j) { return sees_ancestor(i, j); }};
        spec.pages_dtype = DType::kInt8;
        add("int8", spec);
      }
    }
}

void all_forward_cases(CaseList& list) {
  forward_cases(list);
  pages_cases(list);
}

const OpCases forward("attention_fwd", all_forward_cases), backward("attention_bwd", backward_cases);

}  // namespace
}  // namespace flashkernel::conformance
