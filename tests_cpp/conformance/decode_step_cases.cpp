// Cases of decode_step: small decoders whose matrices have partial slots, several parts of k and units that the blocks
// share unevenly; rows without a sequence, without a slot, and of several parts of keys.
#include <cmath>
#include <string>
#include <vector>

#include "conformance/conformance.hpp"
#include "flashkernel/decode_step.hpp"

namespace flashkernel::conformance {
namespace {

struct Spec {
  DType dtype;
  std::vector<std::int64_t> lengths;
  std::int64_t layers = 2, hidden = 96, heads_q = 4, heads_kv = 2, head_dim = 64, inner = 160, outputs = 101;
  std::int64_t page_size = 16;
  std::int64_t gap = 0;  // between rows of weights
};

void build(Call& call, const Spec& s) {
  const auto rows = static_cast<std::int64_t>(s.lengths.size());
  constexpr std::int64_t kVocab = 37;
  const std::int64_t width = s.heads_q * s.head_dim, all = (s.heads_q + 2 * s.heads_kv) * s.head_dim;
  std::int64_t max_pages = 1, num_pages = 0;
  for (const std::int64_t length : s.lengths) {
    const std::int64_t pages = (length + s.page_size - 1) / s.page_size;
    max_pages = std::max(max_pages, pages), num_pages += pages;
  }
  num_pages += 2;
  std::vector<std::int64_t> free;
  for (std::int64_t i = 0; i < num_pages; ++i) free.push_back(i);
  call.random.shuffle(free);
  std::vector<std::int64_t> tokens, positions, slots, table;
  for (const std::int64_t length : s.lengths) {
    const std::size_t begin = table.size();
    for (std::int64_t i = 0; i < max_pages; ++i) {
      const bool used = i * s.page_size < length;
      table.push_back(used ? free.back() : -1);
      if (used) free.pop_back();
    }
    tokens.push_back(call.random.integer(0, kVocab - 1));
    positions.push_back(length > 0 ? length - 1 : 0);
    const std::int64_t last = length - 1;
    slots.push_back(length > 0
                        ? table[begin + static_cast<std::size_t>(last / s.page_size)] * s.page_size + last % s.page_size
                        : -1);
  }
  const Layout apart{{}, {}, s.gap};
  const auto weight = [&](const char* name, const Shape& shape, std::int64_t columns) -> TestTensor& {
    TestTensor& tensor = call.input(name, s.dtype, shape, apart);
    tensor.transform([=](double x) { return x / std::sqrt(static_cast<double>(columns)); });
    return tensor;
  };
  TestTensor& token = call.indices("tokens", DType::kInt64, {rows}, tokens);
  TestTensor& position = call.indices("positions", DType::kInt64, {rows}, positions);
  TestTensor& slot = call.indices("slots", DType::kInt64, {rows}, slots);
  TestTensor& block_table = call.indices("block_table", DType::kInt32, {rows, max_pages}, table);
  TestTensor& seq_lens = call.indices("seq_lens", DType::kInt64, {rows}, s.lengths);
  TestTensor& embedding = call.input("embedding", s.dtype, {kVocab, s.hidden}, apart);
  TestTensor& norms = call.input("norms", s.dtype, {2 * s.layers + 1, s.hidden}, apart);
  norms.transform([](double x) { return 1 + x / 8; });
  TestTensor& qkv = weight("qkv_weight", {s.layers, all, s.hidden}, s.hidden);
  TestTensor& out = weight("out_weight", {s.layers, s.hidden, width}, width);
  TestTensor& gate_up = weight("gate_up_weight", {s.layers, 2 * s.inner, s.hidden}, s.hidden);
  TestTensor& down = weight("down_weight", {s.layers, s.hidden, s.inner}, s.inner);
  TestTensor& head = weight("head_weight", {s.outputs, s.hidden}, s.hidden);
  TestTensor& inv_freq = call.input("inv_freq", DType::kFloat32, {s.head_dim / 2});
  inv_freq.transform([](double x) { return std::exp(-std::abs(x)); });
  // A result goes through every matrix of every layer, each of which rounds what the one before has rounded.
  const double factor = 8;
  const Shape pages{s.layers, num_pages, s.page_size, s.heads_kv, s.head_dim};
  TestTensor& k_pages = call.in_out("k_pages", s.dtype, pages, {}, factor);
  TestTensor& v_pages = call.in_out("v_pages", s.dtype, pages, {}, factor);
  TestTensor& logits = call.output("logits", s.dtype, {rows, s.outputs}, apart, factor);
  const float scale = 1 / std::sqrt(static_cast<float>(s.head_dim));
  call.run = [=, &token, &position, &slot, &block_table, &seq_lens, &embedding, &norms, &qkv, &out, &gate_up, &down,
              &head, &inv_freq, &k_pages, &v_pages, &logits](const ExecutionContext& context) {
    decode_step(token.view(), position.view(), slot.view(), block_table.view(), seq_lens.view(), embedding.view(),
                norms.view(), qkv.view(), out.view(), gate_up.view(), down.view(), head.view(), inv_freq.view(),
                k_pages.view(), v_pages.view(), logits.view(), 1e-5f, scale, TensorView(), context);
  };
}

void cases(CaseList& list) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const auto add = [&](const std::string& name, Spec spec) {
      spec.dtype = dtype;
      list.add(name + "_" + std::to_string(static_cast<int>(dtype)), [spec](Call& call) { build(call, spec); });
    };
    add("one_row", {dtype, {5}});
    add("parts_of_keys", {dtype, {300}, 1});
    add("three_rows", {dtype, {17, 0, 200}, 2, 64, 2, 1});
    add("eight_rows", {dtype, {1, 2, 3, 4, 31, 0, 40, 8}, 1, 64, 8, 1, 64, 32, 40});
    add("long_k", {dtype, {9, 20, 3, 1, 5}, 1, 2112, 2, 2, 64, 2208, 24, 16, 8});
    add("wide_heads", {dtype, {3, 140}, 2, 128, 6, 2, 128, 96, 64});
  }
}

const OpCases registration("decode_step", cases);

}  // namespace
}  // namespace flashkernel::conformance
