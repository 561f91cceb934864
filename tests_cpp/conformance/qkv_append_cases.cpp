// Cases of qkv_append: RoPE by frequencies, by a table and none, skipped slots, head dims that tiles do not fit.
#include <cmath>

#include "conformance/conformance.hpp"
#include "conformance/each_dtype.hpp"
#include "flashkernel/qkv_append.hpp"

namespace flashkernel::conformance {
namespace {

enum class Rope { kNone, kTheta, kFrequencies, kTable };

struct Spec {
  DType dtype;
  std::int64_t tokens, in, heads_q, heads_kv, dim;
  Rope rope = Rope::kNone;
  bool interleaved = false, norm = true, layer = false, bias = false, constant = false, transposed = false;
  std::int64_t rotary = -1;
  Layout x = {}, pages = {};
};

void build(Call& call, const Spec& s) {
  constexpr std::int64_t kPages = 5, kPageSize = 8;
  // Kernels may round the product before it is turned, and the norm's last bit is another one where its sums are.
  const double factor = s.dtype == DType::kFloat32 ? 2 : 4;
  const std::int64_t features = (s.heads_q + 2 * s.heads_kv) * s.dim;
  TestTensor& x = call.input("x", s.dtype, {s.tokens, s.in}, s.x);
  Layout of_weight;
  if (s.transposed) of_weight.order = {1, 0};
  TestTensor& weight = call.input("weight", s.dtype, {features, s.in}, of_weight);
  weight.transform([&](double w) { return w / std::sqrt(static_cast<double>(s.in)); });
  const auto optional = [&](bool present, const char* name, std::int64_t length) {
    return present ? call.input(name, s.dtype, {length}).view() : TensorView();
  };
  const TensorView bias = optional(s.bias, "bias", features), norm = optional(s.norm, "norm_weight", s.in),
                   norm_bias = optional(s.layer, "norm_bias", s.in);
  const Shape shape{kPages, kPageSize, s.heads_kv, s.dim};
  TestTensor& k_pages = call.in_out("k_pages", s.dtype, shape, s.pages, factor);
  TestTensor& v_pages = call.in_out("v_pages", s.dtype, shape, s.pages, factor);
  TestTensor& q = call.output("q", s.dtype, {s.tokens, s.heads_q, s.dim}, {}, factor);
  std::vector<std::int64_t> slots, positions;
  for (std::int64_t i = 0; i < kPages * kPageSize; ++i) slots.push_back(i);
  call.random.shuffle(slots);
  slots.resize(static_cast<std::size_t>(s.tokens));
  for (std::size_t t = 2; t < slots.size(); t += 3) slots[t] = -1;
  for (std::int64_t t = 0; t < s.tokens; ++t) positions.push_back(call.random.integer(0, 40));
  const DType index = s.dtype == DType::kBFloat16 ? DType::kInt32 : DType::kInt64;
  TestTensor& slot = call.indices("slots", index, {s.tokens}, slots);
  std::optional<KvAppendRope> rope;
  if (s.rope != Rope::kNone) {
    rope.emplace();
    rope->positions = call.indices("positions", index, {s.tokens}, positions).view();
    rope->options.interleaved = s.interleaved;
    rope->options.rotary_dim = s.rotary;
    if (s.rope == Rope::kFrequencies) {
      TestTensor& frequencies = call.input("inv_freq", DType::kFloat32, {s.dim / 2});
      frequencies.fill([&] { return call.random.uniform(); });
      rope->options.inv_freq = frequencies.view();
    }
    if (s.rope == Rope::kTable)
      for (TensorView* view : {&rope->cos, &rope->sin})
        *view = call.input(view == &rope->cos ? "cos" : "sin", DType::kFloat32, {41, s.dim / 2}, {{}, {}, 3}).view();
  }
  call.run = [=, &x, &weight, &k_pages, &v_pages, &q, &slot](const ExecutionContext& context) {
    qkv_append(x.view(), weight.view(), bias, norm, norm_bias, k_pages.view(), v_pages.view(), slot.view(), rope,
               q.view(), s.layer, 1e-5f, s.constant, context);
  };
}

void cases(CaseList& list) {
  each_dtype([&](DType dtype, const std::string& suffix) {
    const auto add = [&](const std::string& name, const Spec& spec) -> Case& {
      return list.add(name + suffix, [=](Call& call) { build(call, spec); });
    };
    const auto add_few = [&](const std::string& name, const Spec& spec) {
      Case& added = add("few_" + name, spec);
      if (dtype != DType::kFloat32)
        added.is_for(std::string("qkv_append/cuda/sm80/") + (dtype == DType::kFloat16 ? "f16" : "bf16") + "/few_rows");
    };
    Spec spec{dtype, 1, 2048, 4, 2, 16, Rope::kTheta};
    spec.constant = true;
    add_few("theta_r1", spec);
    spec = {dtype, 3, 96, 3, 1, 64, Rope::kFrequencies};
    spec.bias = true, spec.pages.gap = 8;
    add_few("frequencies_r3", spec);
    spec = {dtype, 4, 160, 4, 4, 24, Rope::kTable};
    spec.x.gap = 8, spec.constant = true;
    add_few("table_r4", spec);
    spec = {dtype, 2, 768, 2, 2, 8};
    spec.layer = spec.bias = true;
    add_few("plain_layer_r2", spec);
    spec = {dtype, 2, 64, 1, 1, 128, Rope::kTheta};
    spec.norm = false;
    add_few("no_norm_r2", spec);

    add("rows11", {dtype, 11, 40, 3, 1, 16, Rope::kTheta});
    spec = {dtype, 2, 64, 2, 1, 16, Rope::kTheta};
    spec.interleaved = spec.bias = true;
    add("interleaved", spec);
    spec.interleaved = false, spec.rotary = 8;
    add("part_of_a_head", spec);
    spec = {dtype, 3, 33, 2, 3, 6};
    spec.bias = spec.transposed = true;
    add("odd_in_out", spec);
    add("no_tokens", {dtype, 0, 32, 2, 1, 8, Rope::kTheta});
  });
}

const OpCases registration("qkv_append", cases);

}  // namespace
}  // namespace flashkernel::conformance
