// See conformance.hpp: one GoogleTest test per kernel and case, named "<kernel id>.<case>".
#include "conformance/conformance.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>

#include "flashkernel/flashkernel.hpp"

namespace flashkernel::conformance {
namespace {

std::map<std::string, CaseList>& suites() {
  static std::map<std::string, CaseList> all;
  return all;
}

class Forced {
 public:
  explicit Forced(const std::string& id) : before_(forced_kernels()) { force_kernels(id); }
  ~Forced() { force_kernels(before_); }

 private:
  std::string before_;
};

// The cases are small: without this, each would run in one thread.
void share_small_calls() {
#if defined(_WIN32)
  _putenv_s("FLASHKERNEL_STEPS_PER_THREAD", "0");
#else
  setenv("FLASHKERNEL_STEPS_PER_THREAD", "0", 0);
#endif
}

class Threads {
 public:
  explicit Threads(int count) : before_(num_threads()) { set_num_threads(count); }
  ~Threads() { set_num_threads(before_); }

 private:
  int before_;
};

struct Prepared {
  Prepared(const std::string& op, const Case& test_case, Device device)
      : call(seed_of(op + "/" + test_case.name), device) {
    test_case.build(call);
    for (TestTensor* input : call.inputs()) {
      input->upload();
      input_bytes.push_back(input->snapshot());
    }
    for (const auto& output : call.outputs()) output_bytes.push_back(output.tensor->snapshot());
  }

  // Outputs as before the first run.
  void reset() {
    for (std::size_t i = 0; i < call.outputs().size(); ++i) {
      call.outputs()[i].tensor->restore(output_bytes[i]);
      call.outputs()[i].tensor->upload();
    }
  }

  void run(bool invariant = false) {
    reset();
    ExecutionContext context;
    context.invariant = invariant;
    call.run(context);
    for (const auto& output : call.outputs()) output.tensor->download();
    for (TestTensor* input : call.inputs()) input->download();  // they must come back as they went
  }

  Call call;
  std::vector<std::vector<unsigned char>> input_bytes, output_bytes;
};

using Values = std::vector<std::vector<double>>;

Values values_of(const Call& call) {
  Values values;
  for (const auto& output : call.outputs()) values.push_back(output.tensor->values());
  return values;
}

// FK_CONFORMANCE_REPEATS=n: no case runs more than n times. Under a sanitizer a second run shows nothing new.
int most_repeats() {
  static const char* const most = std::getenv("FK_CONFORMANCE_REPEATS");
  return most ? std::max(1, std::atoi(most)) : 1 << 30;
}

// FK_CONFORMANCE_ORACLE=0: results are not compared with the oracle's, which takes longer than most kernels. Under a
// sanitizer, which looks at what a kernel does on the way; a run without one compares.
bool asks_oracle() {
  static const char* const setting = std::getenv("FK_CONFORMANCE_ORACLE");
  return !setting || std::strcmp(setting, "0") != 0;
}

std::vector<std::vector<unsigned char>> bytes_of(const Call& call) {
  std::vector<std::vector<unsigned char>> bytes;
  for (const auto& output : call.outputs()) bytes.push_back(output.tensor->snapshot());
  return bytes;
}

struct Expected {
  Values values;
  std::vector<std::vector<unsigned char>> bytes;
};

// What cpu/scalar gives; computed once a case.
const Expected& expected_of(const std::string& op, const Case& test_case) {
  static std::map<std::string, Expected> known;
  const auto [at, missing] = known.try_emplace(op + "/" + test_case.name);
  if (missing) {
    const Forced forced(op + "/cpu/scalar");
    Prepared oracle(op, test_case, Device::cpu());
    oracle.run();
    at->second = {values_of(oracle.call), bytes_of(oracle.call)};
  }
  return at->second;
}

// Where the head dim of an id stands: "attention_fwd/cuda/sm80/f16/d64" at "d64". The end of the id: nowhere.
std::size_t head_dim_at(const std::string& id) {
  for (std::size_t at = id.find("/d"); at != std::string::npos; at = id.find("/d", at + 1))
    if (at + 2 < id.size() && id[at + 2] >= '0' && id[at + 2] <= '9') return at + 1;
  return id.size();
}

// The kernel's id and those that differ from it in the head dim alone, as a pattern for `force_kernels`.
std::string of_any_head_dim(const std::string& id) {
  const std::size_t at = head_dim_at(id);
  if (at == id.size()) return id;
  const auto rest = [](const std::string& of, std::size_t from) {
    return of.substr(std::min(of.find('/', from), of.size()));
  };
  std::string pattern = id;
  for (const KernelInfo& other : kernels())
    if (other.id != id && head_dim_at(other.id) == at && other.id.compare(0, at, id, 0, at) == 0 &&
        rest(other.id, at) == rest(id, at))
      pattern += "," + other.id;
  return pattern;
}

// FK_CONFORMANCE_LARGER_HEAD_DIMS=n: of the cases that a kernel takes but leaves to one for a smaller head dim, one in
// n; 0: none. They are several times as many as the others, and show the same code with more zeros.
std::uint64_t one_in_of_larger_head_dims() {
  static const char* const setting = std::getenv("FK_CONFORMANCE_LARGER_HEAD_DIMS");
  return setting ? std::strtoull(setting, nullptr, 10) : 1;
}

// What `explain` says with only these kernels allowed, about a call without values: most kernels refuse most cases, and
// to fill their tensors would take longer than all that is run.
Explanation explained(const std::string& pattern, const KernelInfo& kernel, const Case& test_case,
                      bool invariant = false) {
  const Forced forced(pattern);
  Call call(0, kernel.device == DeviceType::kCpu ? Device::cpu() : Device::cuda(0), /*blank=*/true);
  test_case.build(call);
  Explanation explanation;
  ExecutionContext context;
  context.explain = &explanation;
  context.invariant = invariant;
  call.run(context);
  return explanation;
}

// "": accepted.
std::string why_refused(const KernelInfo& kernel, const Case& test_case) {
  const std::string& id = kernel.id;
  const Explanation explanation = explained(id, kernel, test_case);
  for (const auto& candidate : explanation.candidates) {
    if (candidate.kernel != id) continue;
    if (candidate.accepted && explanation.kernel != id)
      return "accepts, but forcing its id runs " + explanation.kernel + ": one id must not be a prefix of another";
    return candidate.accepted ? "" : candidate.reason;
  }
  return "explain does not list it";
}

struct Part {
  std::uint64_t number = 0, of = 1;
};

// FK_CONFORMANCE_PART=k/n: the k-th of n parts, counted from 0. All rows of a case are in one part, so that the oracle
// answers once.
Part part() {
  const char* const text = std::getenv("FK_CONFORMANCE_PART");
  if (!text) return {};
  char* slash = nullptr;
  const std::uint64_t number = std::strtoull(text, &slash, 10);
  return {number, *slash == '/' ? std::strtoull(slash + 1, nullptr, 10) : 1};
}

bool is_of_this_part(const std::string& name) {
  return (seed_of(name) >> 32) % part().of == part().number;  // other bits than the sample
}

// FK_CONFORMANCE_EACH_ROW=1: a kernel of whose cases a sample holds none that it takes runs one all the same. Of
// several parts one does so.
bool runs_one_at_least(const std::string& id) {
  const char* const setting = std::getenv("FK_CONFORMANCE_EACH_ROW");
  return setting && std::strcmp(setting, "1") == 0 && is_of_this_part(id);
}

// What the first row of each arithmetic gave for a case: who it was, and a hash of all bytes.
struct Bits {
  std::string kernel;
  std::uint64_t hash;
};
Bits& bits_of(const std::string& call, const Bits& own) {
  static std::map<std::string, Bits> known;
  return known.try_emplace(call, own).first->second;
}

// The invariant mode's plans run in one of so many cases of a row.
constexpr std::uint64_t kOneInMode = 8;

// Kernels that have run a case.
std::set<std::string>& accepting() {
  static std::set<std::string> ids;
  return ids;
}

class ConformanceTest : public ::testing::Test {
 public:
  ConformanceTest(KernelInfo kernel, const Case* test_case) : kernel_(std::move(kernel)), case_(test_case) {}

  void TestBody() override {
    if (case_) {
      run_case(*case_);
    } else {
      accepts_a_case();
    }
  }

 private:
  Device device() const { return kernel_.device == DeviceType::kCpu ? Device::cpu() : Device::cuda(0); }

  void run_case(const Case& test_case) {
    if (const std::string reason = why_refused(kernel_, test_case); !reason.empty()) {
      EXPECT_NE(test_case.kernel, kernel_.id) << "the case is written for this kernel, which refuses it: " << reason;
      RecordProperty("refused", reason);  // its right: accepts_a_case makes sure that it does not refuse everything
      return;
    }
    if (is_left_out(test_case)) {
      RecordProperty("left_out", "for a kernel of a smaller head dim");
      return;
    }
    accepting().insert(kernel_.id);
    const Expected* const expected = asks_oracle() ? &expected_of(kernel_.op, test_case) : nullptr;
    const Forced forced(kernel_.id);
    Prepared prepared(kernel_.op, test_case, device());
    const bool is_oracle = kernel_.id == kernel_.op + "/cpu/scalar";
    const int usual = num_threads(), most = std::min(prepared.call.repeats, most_repeats());
    // The oracle's answer was its first run, with the usual threads, and is what all others must repeat.
    const int repeats = is_oracle && expected ? std::max(1, most - 1) : most;
    std::vector<std::vector<unsigned char>> first;
    if (is_oracle && expected) first = expected->bytes;
    bool ran_usual = false;
    for (const int threads : {usual, 1, 2, 3}) {
      if (threads != usual && device().is_cuda()) break;  // the CPU's threads change nothing there
      // A scalar kernel splits its work without asking for the number of threads, so it does the same with memory.
      if (threads != usual && is_oracle && !expected) break;
      if (threads == usual && ran_usual) continue;
      ran_usual = true;
      const Threads setting(threads);
      for (int repeat = 0; repeat < (threads == usual ? repeats : 1); ++repeat) {
        SCOPED_TRACE(std::to_string(threads) + " threads, run " + std::to_string(repeat));
        prepared.run();
        check(prepared, expected, test_case.name);
        if (HasFailure()) return;
        if (first.empty()) first = bytes_of(prepared.call);
        if (threads == usual || prepared.call.bitwise_across_threads) {
          ASSERT_TRUE(first == bytes_of(prepared.call)) << "the result is not the same bit for bit";
        }
      }
    }
    expect_bits_of_the_arithmetic(test_case, first);
    if ((seed_of(kernel_.id + "." + test_case.name) >> 16) % kOneInMode != 0) return;
    if (explained(kernel_.id, kernel_, test_case, true).kernel != kernel_.id) return;
    SCOPED_TRACE("in the invariant mode");
    prepared.run(true);
    check(prepared, expected, test_case.name);
  }

  void expect_bits_of_the_arithmetic(const Case& test_case,
                                     const std::vector<std::vector<unsigned char>>& bytes) const {
    std::string all;
    for (const auto& output : bytes) all.append(output.begin(), output.end());
    const Bits own{kernel_.id, seed_of(all)};
    const Bits& first = bits_of(
        (device().is_cuda() ? "cuda " : "cpu ") + kernel_.arithmetic + " " + kernel_.op + "/" + test_case.name, own);
    EXPECT_EQ(first.hash, own.hash) << "other bits than " << first.kernel << ", whose arithmetic is "
                                    << kernel_.arithmetic << ", too";
  }

  bool is_left_out(const Case& test_case) const {
    const std::uint64_t one_in = one_in_of_larger_head_dims();
    if (one_in == 1 || (one_in && (seed_of(kernel_.id + "." + test_case.name) >> 32) % one_in == 0)) return false;
    const std::string family = of_any_head_dim(kernel_.id);
    return family != kernel_.id && explained(family, kernel_, test_case).kernel != kernel_.id;
  }

  /// Rows that round what 8-bit elements stand for to the dtype of the queries first, as a cache of that dtype holds
  /// it. A score is then off by up to half of that dtype's last place times sum |q k|, and the LSE, which is fp32, with
  /// it.
  double factor_of_rounded_inputs(const std::string& output, const std::string& name) const {
    const auto has = [&](const char* part) { return kernel_.id.find(part) != std::string::npos; };
    const bool in_fp16 = has("/decode_int4/"), on_cpu = has("_widened");  // (one row for all dtypes)
    if (in_fp16 && output == "lse") return 32;
    if (!(has("/widened/") || on_cpu || in_fp16) || has("/f32/")) return 1;
    if (on_cpu && name.find("_f32") != std::string::npos) return 1;
    if (output == "lse") return has("/bf16/") || (on_cpu && name.find("_bf16") != std::string::npos) ? 256 : 32;
    // Weights of scores that are off; of the case with large scores 8.4 were measured (of 4-bit elements, whose numbers
    // are larger, 16.9), of others less than 4.
    return name.find("large_scores") != std::string::npos ? 32 : 4;
  }

  void check(const Prepared& prepared, const Expected* expected, const std::string& name) {
    const Call& call = prepared.call;
    for (std::size_t i = 0; i < call.outputs().size(); ++i) {
      const auto& output = call.outputs()[i];
      if (expected) {
        const double factor = output.factor * factor_of_rounded_inputs(output.tensor->name(), name);
        EXPECT_EQ(difference(output.tensor->dtype(), output.tensor->values(), expected->values[i], factor), "")
            << output.tensor->name();
      }
      EXPECT_EQ(output.tensor->damage(), "");
    }
    for (std::size_t i = 0; i < call.inputs().size(); ++i) {
      EXPECT_EQ(call.inputs()[i]->damage(), "");
      EXPECT_TRUE(call.inputs()[i]->holds(prepared.input_bytes[i]))
          << call.inputs()[i]->name() << " is an input and changed";
    }
  }

  void accepts_a_case() {
    if (accepting().count(kernel_.id)) return;
    if (runs_one_at_least(kernel_.id)) {
      for (const Case* const test_case : in_some_order()) {
        if (!why_refused(kernel_, *test_case).empty() || is_left_out(*test_case)) continue;
        SCOPED_TRACE(test_case->name);
        RecordProperty("ran", test_case->name);
        return run_case(*test_case);
      }
    }
    std::string reasons;
    for (const bool huge : {false, true}) {  // to ask, a case makes its tensors: those of gigabytes come last
      for (const Case& test_case : suites()[kernel_.op].cases) {
        if ((test_case.name.find("past_2_31") != std::string::npos) != huge) continue;
        const std::string reason = why_refused(kernel_, test_case);
        if (reason.empty()) return;
        reasons += "\n  " + test_case.name + ": " + reason;
      }
    }
    FAIL() << kernel_.id
           << " accepts none of the cases of its op (tests_cpp/conformance), so nothing tests it:" << reasons;
  }

  // The op's cases, in an order that differs from row to row. Without those of gigabytes.
  std::vector<const Case*> in_some_order() const {
    std::vector<std::pair<std::uint64_t, const Case*>> order;
    for (const Case& test_case : suites()[kernel_.op].cases)
      if (test_case.name.find("past_2_31") == std::string::npos)
        order.emplace_back(seed_of(test_case.name + "." + kernel_.id), &test_case);
    std::sort(order.begin(), order.end());
    std::vector<const Case*> cases;
    for (const auto& [seed, test_case] : order) cases.push_back(test_case);
    return cases;
  }

  KernelInfo kernel_;
  const Case* case_;
};

void register_test(const KernelInfo& kernel, const Case* test_case) {
  ::testing::RegisterTest(kernel.id.c_str(), test_case ? test_case->name.c_str() : "accepts_a_case", nullptr, nullptr,
                          __FILE__, __LINE__,
                          [=]() -> ConformanceTest* { return new ConformanceTest(kernel, test_case); });
}

}  // namespace

const std::vector<Case>& cases_of(const std::string& op) { return suites()[op].cases; }

// FNV-1a: a case's values depend on its name alone, not on its neighbours.
std::uint64_t seed_of(const std::string& text) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return hash;
}

void Call::fill_random(TestTensor& tensor) {
  if (blank_) return;
  std::vector<double> values(static_cast<std::size_t>(tensor.numel()));
  random.normals(values.data(), values.size());
  if (is_quantized(tensor.dtype()))
    for (double& value : values) value = std::clamp(40 * value, -127.0, 127.0);
  if (is_packed(tensor.dtype()))  // elements alike often
    for (double& value : values) value = static_cast<double>(static_cast<int>(std::abs(value) * 1000) % 256);
  tensor.fill(values);
}

TestTensor& Call::new_input(const std::string& name, DType dtype, const Shape& shape, const Layout& layout,
                            bool blank) {
  TestTensor& tensor = inputs_of_ ? tensors_.emplace_back(inputs_of_->inputs_.at(inputs_.size())->same_memory())
                                  : tensors_.emplace_back(name, dtype, shape, layout, device_, blank);
  if (tensor.shape() != shape || tensor.dtype() != dtype) throw std::logic_error(name + ": a case that varies");
  inputs_.push_back(&tensor);
  return tensor;
}

TestTensor& Call::input(const std::string& name, DType dtype, const Shape& shape, const Layout& layout) {
  TestTensor& tensor = new_input(name, dtype, shape, layout, blank_);
  fill_random(tensor);
  return tensor;
}

TestTensor& Call::indices(const std::string& name, DType dtype, const Shape& shape,
                          const std::vector<std::int64_t>& values, const Layout& layout) {
  TestTensor& tensor = new_input(name, dtype, shape, layout, false);
  for (std::int64_t i = 0; i < tensor.numel(); ++i)
    tensor.set(i, static_cast<double>(values.at(static_cast<std::size_t>(i))));
  return tensor;
}

TestTensor& Call::output(const std::string& name, DType dtype, const Shape& shape, const Layout& layout,
                         double factor) {
  TestTensor& tensor = tensors_.emplace_back(name, dtype, shape, layout, device_, blank_);
  outputs_.push_back({&tensor, factor, false});
  return tensor;
}

TestTensor& Call::in_out(const std::string& name, DType dtype, const Shape& shape, const Layout& layout,
                         double factor) {
  TestTensor& tensor = tensors_.emplace_back(name, dtype, shape, layout, device_, blank_);
  fill_random(tensor);
  outputs_.push_back({&tensor, factor, true});
  return tensor;
}

void Call::compute_once(const std::vector<TestTensor*>& inputs, const std::function<void()>& compute) const {
  if (blank_ || inputs_of_) return;
  static std::map<std::uint64_t, std::vector<std::vector<unsigned char>>> known;
  const auto [at, missing] = known.try_emplace(seed_);
  if (missing) {
    compute();
    for (const TestTensor* input : inputs) at->second.push_back(input->snapshot());
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) inputs[i]->restore(at->second[i]);
}

OpCases::OpCases(const char* op, void (*fill)(CaseList&)) { fill(suites()[op]); }

double tolerance(DType dtype, double expected, double magnitude, double factor) {
  if (dtype == DType::kInt8) return factor - 1;
  if (dtype == DType::kFloat8E4M3)
    return (factor - 1) * std::ldexp(1.0, (expected == 0 ? -6 : std::max(std::ilogb(expected), -6)) - 3);
  if (!is_floating(dtype)) return 0;
  const double scale = factor * std::max(1.0, magnitude);
  if (dtype == DType::kFloat32) return 1e-5 * scale;
  const int mantissa_bits = dtype == DType::kFloat16 ? 10 : 7;
  const double last_place = expected == 0 ? 0 : std::ldexp(1.0, std::ilogb(expected) - mantissa_bits);
  return std::max((dtype == DType::kFloat16 ? 1e-3 : 0x1p-8) * scale, last_place);
}

std::string difference(DType dtype, const std::vector<double>& got, const std::vector<double>& expected,
                       double factor) {
  if (got.size() != expected.size()) return "sizes differ";
  double magnitude = 0;
  for (const double value : expected)
    if (std::isfinite(value)) magnitude = std::max(magnitude, std::abs(value));
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double a = got[i], b = expected[i];
    if (a == b) continue;
    if (dtype == DType::kInt4x2) {  // elements may be a step apart where a rounding may
      const int first = static_cast<int>(a), second = static_cast<int>(b);
      if (std::max(std::abs(first % 16 - second % 16), std::abs(first / 16 - second / 16)) <= factor - 1) continue;
    }
    const bool same_kind = std::isnan(a) == std::isnan(b) && (std::isnan(b) || std::isfinite(b) == std::isfinite(a));
    const bool close =
        std::isfinite(b) ? std::abs(a - b) <= tolerance(dtype, b, magnitude, factor) : (std::isnan(b) || a == b);
    if (same_kind && close) continue;
    return "element " + std::to_string(i) + " is " + std::to_string(a) + ", the oracle says " + std::to_string(b) +
           " (difference " + std::to_string(std::abs(a - b) * 1e6) + "e-6, allowed " +
           std::to_string(std::isfinite(b) ? tolerance(dtype, b, magnitude, factor) * 1e6 : 0.0) + "e-6)";
  }
  return "";
}

}  // namespace flashkernel::conformance

int main(int argc, char** argv) {
  using namespace flashkernel;
  using namespace flashkernel::conformance;
  ::testing::InitGoogleTest(&argc, argv);
  share_small_calls();
  // FK_CONFORMANCE_SAMPLE=n: one case in n, the same ones for all rows of an op, so that the oracle, which takes longer
  // than most kernels, answers once for all of them. Where a full run would take too long.
  const char* const sample = std::getenv("FK_CONFORMANCE_SAMPLE");
  const auto one_in = std::max<std::uint64_t>(1, sample ? std::strtoull(sample, nullptr, 10) : 1);
  if (part().number >= part().of) return std::fprintf(stderr, "FK_CONFORMANCE_PART is k/n with k < n\n"), 2;
  std::size_t chosen = 0, all = 0;
  for (const KernelInfo& kernel : kernels()) {
    if (!kernel.available) continue;
    for (const Case& test_case : suites()[kernel.op].cases) {
      if (!is_of_this_part(kernel.op + "/" + test_case.name)) continue;
      ++all;
      if (seed_of(kernel.op + "." + test_case.name) % one_in != 0) continue;
      ++chosen;
      register_test(kernel, &test_case);
    }
    register_test(kernel, nullptr);
  }
  if (!asks_oracle()) std::printf("conformance: results are not compared (FK_CONFORMANCE_ORACLE=0)\n");
  if (one_in > 1)
    std::printf("conformance: a sample of %zu of the %zu cases (FK_CONFORMANCE_SAMPLE=%s)\n", chosen, all, sample);
  return RUN_ALL_TESTS();
}
