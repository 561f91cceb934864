// Cases of attention_fwd and attention_bwd with head dims over 256, dense, variable-length and in pages. Kernels hold
// such rows in parts, so these go over the borders of parts, of tiles and of the largest head dim.
#include <vector>

#include "conformance/attention_spec.hpp"

namespace flashkernel::conformance {
namespace {

constexpr std::int64_t kDims[][2] = {{320, 320}, {512, 512}, {512, 40}, {40, 512}, {333, 259}};

AttentionSpec wide(DType dtype) {
  AttentionSpec spec;
  spec.dtype = dtype;
  spec.batch = 1;
  spec.heads_q = 4;
  spec.heads_kv = 2;
  spec.seq_q = 19;
  spec.seq_k = 45;
  spec.head_dim = 512;
  spec.mask = kCausal;
  return spec;
}

std::string of_dims(const char* name, std::int64_t d, std::int64_t dv, DType dtype) {
  return std::string("wide_") + name + "_" + std::to_string(d) + "_" + std::to_string(dv) + "_" + short_name(dtype);
}

// A key and a value that the causal mask hides from the first queries are not finite.
void break_late_key(AttentionTensors& t) {
  const auto& shape = t.v->shape();
  t.v->set_at({0, 1, shape[2] - 2, shape[3] - 1}, kNan);
  t.v->set_at({0, 0, shape[2] - 3, 3}, kInfinity);
}

void add(CaseList& list, const std::string& name, const AttentionSpec& spec) {
  list.add("wide_" + name + "_" + short_name(spec.dtype), [spec](Call& call) { build_attention(call, spec); });
}

void dense_cases(CaseList& list, DType dtype) {
  for (const auto& [d, dv] : kDims) {
    AttentionSpec spec = wide(dtype);
    spec.head_dim = d;
    spec.head_dim_v = dv;
    list.add(of_dims("head_dims", d, dv, dtype), [spec](Call& call) { build_attention(call, spec); });
  }
  for (const Mask& mask : {kFull, kMasks[4]}) {
    AttentionSpec spec = wide(dtype);
    spec.heads_q = 2;
    spec.heads_kv = 1;
    spec.seq_q = 150;
    spec.seq_k = 233;
    spec.mask = mask;
    add(list, std::string("blocks_") + mask.name, spec);
  }
  AttentionSpec spec = wide(dtype);
  spec.seq_q = 70;
  spec.seq_k = 140;
  spec.adjust = break_late_key;
  add(list, "not_finite", spec);
  spec.adjust = {};
  spec.softcap = 1.5f;
  spec.sinks = true;
  add(list, "softcap_sinks", spec);
  spec.alibi_dims = 1;
  spec.bias = BiasSpec{{1, 4, 70, 140}, DType::kFloat32};
  spec.bits = BitsSpec{{1, 1, 70},
                       [](std::int64_t, std::int64_t, std::int64_t i, std::int64_t j) { return (i + 2 * j) % 5 > 0; }};
  spec.adjust = break_late_key;
  add(list, "all_modifiers", spec);
  spec = wide(dtype);
  spec.layout_q = {{}, {0, 2, 1, 3}, 3, 1};
  spec.layout_k = spec.layout_v = {{}, {0, 2, 1, 3}, 5, 1};
  add(list, "unaligned", spec);
  spec = wide(dtype);
  spec.seq_q = 1;
  spec.heads_q = 16;
  add(list, "one_query", spec);
}

void lengths_cases(CaseList& list, DType dtype) {
  VarlenSpec varlen;
  varlen.common = wide(dtype);
  varlen.lengths_q = {3, 0, 70, 1};
  varlen.lengths_k = {40, 9, 75, 200};
  list.add(std::string("wide_varlen_") + short_name(dtype),
           [varlen](Call& call) { build_attention_varlen(call, varlen); });
  // One tile of decode's query rows, more rows than that, and a prefill.
  struct Pages {
    std::int64_t size, group, queries;
  };
  for (const auto& [size, group, queries] : {Pages{16, 8, 1}, {64, 2, 4}, {4, 4, 1}, {7, 4, 1}, {16, 2, 70}}) {
    PagedSpec spec;
    spec.common = wide(dtype);
    spec.common.heads_q = 2 * group;
    spec.common.seq_q = queries;
    spec.lengths = {1, 300, 0, 83};
    spec.page_size = size;
    list.add("wide_pages_of_" + std::to_string(size) + "_group" + std::to_string(group) + "_q" +
                 std::to_string(queries) + "_" + short_name(dtype),
             [spec](Call& call) { build_attention_paged(call, spec); });
  }
}

void quantized_cases(CaseList& list, DType dtype) {
  for (const DType pages : {DType::kFloat8E4M3, DType::kInt8})
    for (const std::int64_t queries : {1, 20}) {
      PagedSpec spec;
      spec.common = wide(dtype);
      spec.common.seq_q = queries;
      spec.lengths = {1, 150, 0, 83};
      spec.pages_dtype = pages;
      spec.token_scales = queries == 1;
      list.add(std::string("wide_quantized_") + (pages == DType::kInt8 ? "int8" : "e4m3") + "_q" +
                   std::to_string(queries) + "_" + short_name(dtype),
               [spec](Call& call) { build_attention_paged(call, spec); });
    }
}

void forward_cases(CaseList& list) {
  for (const DType dtype : kFloatTypes) {
    dense_cases(list, dtype);
    lengths_cases(list, dtype);
    quantized_cases(list, dtype);
  }
}

void backward_cases(CaseList& list) {
  for (const DType dtype : kFloatTypes) {
    const auto of_call = [&](const std::string& name, const AttentionSpec& spec) {
      list.add("wide_" + name + "_" + short_name(dtype), [spec](Call& call) { build_attention_backward(call, spec); });
    };
    for (const auto& [d, dv] : kDims) {
      AttentionSpec spec = wide(dtype);
      spec.head_dim = d;
      spec.head_dim_v = dv;
      list.add(of_dims("head_dims", d, dv, dtype), [spec](Call& call) { build_attention_backward(call, spec); });
    }
    for (const Mask& mask : {kFull, kMasks[4]}) {
      AttentionSpec spec = wide(dtype);
      spec.heads_q = 2;
      spec.heads_kv = 1;
      spec.seq_q = 70;
      spec.seq_k = 110;
      spec.mask = mask;
      spec.grad_lse = mask.causal;
      of_call(std::string("blocks_") + mask.name, spec);
    }
    AttentionSpec spec = wide(dtype);
    spec.adjust = break_late_key;
    of_call("not_finite", spec);
    spec.adjust = {};
    spec.softcap = 1.5f;
    spec.sinks = true;
    spec.bias = BiasSpec{{1, 4, 19, 45}, DType::kFloat32};
    of_call("all_modifiers", spec);
    VarlenSpec varlen;
    varlen.common = wide(dtype);
    varlen.lengths_q = {3, 0, 40, 1};
    varlen.lengths_k = {20, 9, 45, 60};
    list.add(std::string("wide_varlen_") + short_name(dtype),
             [varlen](Call& call) { build_attention_varlen_backward(call, varlen); });
  }
}

const OpCases forward("attention_fwd", forward_cases), backward("attention_bwd", backward_cases);

}  // namespace
}  // namespace flashkernel::conformance
