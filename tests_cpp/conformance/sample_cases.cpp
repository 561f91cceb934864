// Cases of sample: each limit alone and all of them together, ties, tables of penalties, rows that are refused. Tokens
// must be equal: arithmetic that decides is of integers.
#include <cmath>
#include <limits>

#include "conformance/conformance.hpp"
#include "conformance/each_dtype.hpp"
#include "flashkernel/sample.hpp"

namespace flashkernel::conformance {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Spec {
  std::int64_t rows = 5, vocab = 1000;
  double scale = 3;        // of the logits
  double step = 0;         // logits are multiples of it, so that many are equal
  double temperature = 1;  // 0: greedy; below 0: absent
  std::int64_t top_k = 0;
  double top_p = 1, min_p = 0;
  bool penalties = false, bias = false, logprob = false;
  bool mixed = false;  // every other row is greedy, and limits differ
  Layout logits = {};
  std::vector<std::pair<std::int64_t, double>> values = {};  // place, value
  DType out = DType::kInt64;
};

void build(Call& call, DType dtype, const Spec& spec) {
  TestTensor& logits = call.input("logits", dtype, {spec.rows, spec.vocab}, spec.logits);
  logits.transform([&](double value) {
    value *= spec.scale;
    return spec.step > 0 ? std::round(value / spec.step) * spec.step : value;
  });
  for (const auto& [place, value] : spec.values) logits.set(place, value);
  // `usual`, or in a call of mixed rows `other` for every third one.
  const auto numbers = [&](const char* name, double usual, double other) -> TestTensor& {
    TestTensor& made = call.input(name, DType::kFloat32, {spec.rows});
    std::int64_t row = 0;
    made.fill([&] { return spec.mixed && row++ % 3 == 1 ? other : usual; });
    return made;
  };
  const auto integers = [&](const char* name, DType integer, const std::function<std::int64_t(std::int64_t)>& of) {
    std::vector<std::int64_t> values;
    for (std::int64_t row = 0; row < spec.rows; ++row) values.push_back(of(row));
    return call.indices(name, integer, {spec.rows}, values).view();
  };
  const TensorView temperature =
      spec.temperature < 0 ? TensorView{} : numbers("temperature", spec.temperature, 0).view();
  const TensorView top_p = spec.top_p == 1 && !spec.mixed ? TensorView{} : numbers("top_p", spec.top_p, 0.5).view();
  const TensorView min_p = spec.min_p == 0 && !spec.mixed ? TensorView{} : numbers("min_p", spec.min_p, 0.1).view();
  TensorView top_k, bias, history, repetition, frequency, presence;
  if (spec.top_k > 0 || spec.mixed)
    top_k = integers("top_k", spec.mixed ? DType::kInt32 : DType::kInt64,
                     [&](std::int64_t row) { return spec.mixed && row % 2 ? 7 : spec.top_k; });
  if (spec.bias) {
    TestTensor& tensor = call.input("bias", DType::kFloat32, {spec.rows, spec.vocab}, {{}, {}, 3});
    tensor.set(0, -kInfinity);
    bias = tensor.view();
  }
  if (spec.penalties) {
    std::vector<std::int64_t> seen;
    for (std::int64_t i = 0; i < spec.rows * spec.vocab; ++i)
      seen.push_back(i % 3 == 0 ? call.random.integer(0, 9) : 0);
    history = call.indices("history", DType::kInt32, {spec.rows, spec.vocab}, seen).view();
    repetition = numbers("repetition", 1.3, 1).view();
    frequency = numbers("frequency", 0.3, -0.2).view();
    presence = numbers("presence", 0.7, 0).view();
  }
  const TensorView seed =
      integers("seed", DType::kInt64, [](std::int64_t row) { return 0x123456789abcdef * (row + 1); });
  const TensorView offset = integers("offset", DType::kInt64, [](std::int64_t row) { return row % 4 * 5000000000; });
  TestTensor& out = call.output("out", spec.out, {spec.rows});
  const TensorView logprob =
      spec.logprob ? call.output("logprob", DType::kFloat32, {spec.rows}, {}, 4).view() : TensorView{};
  call.bitwise_across_threads = true;
  call.run = [=, &logits, &out](const ExecutionContext& context) {
    sample(logits.view(), temperature, top_k, top_p, min_p, bias, history, repetition, frequency, presence, seed,
           offset, out.view(), logprob, context);
  };
}

void cases(CaseList& list) {
  each_dtype([&](DType dtype, const std::string& suffix) {
    const auto add = [&](const std::string& name, const Spec& spec) {
      list.add(name + suffix, [=](Call& call) { build(call, dtype, spec); });
    };
    const auto with = [](auto change) {
      Spec spec;
      change(spec);
      return spec;
    };
    for (const std::int64_t vocab : {1, 2, 31, 33, 384, 1000, 4099, 9000})
      add("plain_" + std::to_string(vocab), with([&](Spec& s) { s.vocab = vocab, s.logprob = true; }));
    add("greedy", with([](Spec& s) { s.temperature = 0, s.logprob = true; }));
    add("greedy_of_equals", with([](Spec& s) { s.temperature = -1, s.step = 4, s.out = DType::kInt32; }));
    for (const double top_p : {1e-9, 0.3, 0.9, 0.999}) {
      const std::string name = "top_p_" + std::to_string(static_cast<int>(top_p * 1000));
      add(name, with([&](Spec& s) { s.top_p = top_p, s.vocab = 5000; }));
      add(name + "_ties", with([&](Spec& s) { s.top_p = top_p, s.vocab = 5000, s.step = 2; }));
      add(name + "_all_equal", with([&](Spec& s) { s.top_p = top_p, s.vocab = 3000, s.scale = 0; }));
      add(name + "_flat", with([&](Spec& s) { s.top_p = top_p, s.vocab = 3000, s.scale = 1e-3; }));
    }
    for (const std::int64_t top_k : {1, 2, 50, 999, 1000, 4000}) {
      const std::string name = "top_k_" + std::to_string(top_k);
      add(name, with([&](Spec& s) { s.top_k = top_k; }));
      add(name + "_ties", with([&](Spec& s) { s.top_k = top_k, s.step = 1; }));
    }
    for (const double temperature : {1e-30, 1e-3, 0.1, 50.0, 1e20})
      add("temperature_" + std::to_string(static_cast<int>(std::log10(temperature) * 10 + 1000)),
          with([&](Spec& s) { s.temperature = temperature, s.top_p = 0.8, s.scale = 9; }));
    // One token of a row far before all others, which decide together: the limit lies below 2^-12 of its weight.
    for (const double step : {0.0, 0.25}) {
      const auto far = [&](Spec& s) {
        s.rows = 24, s.vocab = 5000, s.scale = 0.3, s.step = step;
        for (std::int64_t row = 0; row < s.rows; ++row) s.values.emplace_back(row * s.vocab + 70 * row, 9.5);
      };
      const std::string suffix_of = step > 0 ? "_far_ties" : "_far";
      add("top_p" + suffix_of, with([&](Spec& s) { far(s), s.top_p = 0.9; }));
      add("top_k" + suffix_of, with([&](Spec& s) { far(s), s.top_k = 3000; }));
      add("top_k_and_p" + suffix_of, with([&](Spec& s) { far(s), s.top_k = 3000, s.top_p = 0.95; }));
      add("min_p" + suffix_of, with([&](Spec& s) { far(s), s.min_p = 2e-5; }));
    }
    add("min_p", with([](Spec& s) { s.min_p = 0.05; }));
    add("min_p_whole", with([](Spec& s) { s.min_p = 1, s.step = 3; }));
    int odd = 0;
    for (const double value : {kNaN, kInfinity, 1.5, -1.0}) {
      const std::string name = "_odd_" + std::to_string(odd++);
      add("min_p" + name, with([&](Spec& s) { s.min_p = value; }));
      add("top_p" + name, with([&](Spec& s) { s.top_p = value; }));
      if (value > 1 || value != value) add("temperature" + name, with([&](Spec& s) { s.temperature = value; }));
    }
    add("all_limits", with([](Spec& s) {
          s.top_k = 200, s.top_p = 0.9, s.min_p = 0.01, s.temperature = 0.7, s.rows = 9, s.logprob = true;
        }));
    add("mixed", with([](Spec& s) { s.mixed = true, s.top_k = 60, s.top_p = 0.95, s.rows = 11, s.vocab = 2500; }));
    add("penalties", with([](Spec& s) { s.penalties = s.bias = s.mixed = s.logprob = true, s.top_p = 0.9; }));
    add("penalties_greedy", with([](Spec& s) { s.penalties = true, s.temperature = 0, s.logprob = true; }));
    add("gaps", with([](Spec& s) { s.logits = {{}, {}, 5, 3}, s.top_p = 0.9; }));
    add("rows_expanded", with([](Spec& s) { s.logits = {{}, {}, 0, 0, {0}}, s.top_k = 30; }));
    add("one_row", with([](Spec& s) { s.rows = 1, s.vocab = 50257, s.top_p = 0.9, s.temperature = 0.7; }));
    add("many_rows", with([](Spec& s) { s.rows = 70, s.vocab = 300, s.top_p = 0.9; }));
    add("no_rows", with([](Spec& s) { s.rows = 0; }));
    // Rows of 1000: one is refused for each reason, and one has banned tokens alone but for its last.
    Spec refused;
    refused.rows = 8, refused.logprob = true, refused.top_p = 0.9;
    refused.values = {{17, kNaN}, {900, kNaN}, {1999, kInfinity}};
    for (std::int64_t i = 2000; i < 4000; ++i) refused.values.emplace_back(i, -kInfinity);
    refused.values.emplace_back(3999, -2.0);
    add("refused", refused);
    refused.temperature = 0;
    add("refused_greedy", refused);
  });
}

const OpCases registration("sample", cases);

}  // namespace
}  // namespace flashkernel::conformance
