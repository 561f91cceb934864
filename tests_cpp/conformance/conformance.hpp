// To register a kernel is to test it: every row of kernels() runs every case that it accepts and must agree with
// cpu/scalar.
// `<op>_cases.cpp` describes calls through the public API; the harness in conformance.cpp does the rest: outputs are
// poisoned before each call, memory round every tensor is watched, inputs must come back unchanged, runs repeat bit for
// bit, and 1, 2 and 3 threads agree. A row that accepts no case at all fails; so does a row that refuses a case that is
// written for it (`is_for`).
//
//   void cases(CaseList& list) {
//     list.add("rows7_fp16", [](Call& call) {
//       TestTensor& x = call.input("x", DType::kFloat16, {7, 33}, {{}, {}, /*gap=*/5});   // unit normal values
//       TestTensor& y = call.output("y", DType::kFloat16, {7, 33});
//       call.run = [&](const ExecutionContext& context) { softmax(x.view(), y.view(), context); };
//     });
//   }
//   const OpCases registration("softmax", cases);
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "conformance/test_tensor.hpp"
#include "flashkernel/execution.hpp"

namespace flashkernel::conformance {

/// One call of an op: its tensors, and how it is made. Built anew for each kernel, always from the same seed.
/// blank: only to ask which kernels would take it. Indices have their values, other tensors none, and `run` may only
/// explain.
class Call {
 public:
  Call(std::uint64_t seed, Device device, bool blank = false)
      : random(seed), seed_(seed), device_(device), blank_(blank) {}
  /// The call that `first` is, once more: with the same inputs, in the same memory, and outputs of its own.
  Call(std::uint64_t seed, const Call& first)
      : random(seed), seed_(seed), device_(first.device_), blank_(false), inputs_of_(&first) {}
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  /// Unit normal values (floating dtypes; 40 times that in 8-bit ones) to be overwritten at will while the call is
  /// built. References stay valid.
  TestTensor& input(const std::string& name, DType dtype, const Shape& shape, const Layout& layout = {});
  /// An int32 or int64 vector or matrix.
  TestTensor& indices(const std::string& name, DType dtype, const Shape& shape, const std::vector<std::int64_t>& values,
                      const Layout& layout = {});
  /// Poisoned before every run and compared. `factor` widens the tolerance; say why where it is not 1.
  TestTensor& output(const std::string& name, DType dtype, const Shape& shape, const Layout& layout = {},
                     double factor = 1);
  /// Holds values before the call and is compared after it; elements that the op leaves alone are compared too.
  TestTensor& in_out(const std::string& name, DType dtype, const Shape& shape, const Layout& layout = {},
                     double factor = 1);

  /// Runs `compute`, which writes `inputs` and nothing else (what the op's forward pass leaves to its backward pass),
  /// or puts back what it wrote when this case was built before.
  void compute_once(const std::vector<TestTensor*>& inputs, const std::function<void()>& compute) const;
  /// The same view of the host image, for what the CPU computes while a call for another device is built.
  TensorView on_host(TensorView view) const {
    for (const TestTensor& tensor : tensors_)
      if (tensor.to_host(view)) break;
    return view;
  }

  Random random;
  std::function<void(const ExecutionContext&)> run;
  int repeats = 2;  // runs that must agree bit for bit
  bool bitwise_across_threads = false;

  struct Output {
    TestTensor* tensor;
    double factor;
    bool keeps_values;  // in_out
  };
  const std::vector<Output>& outputs() const { return outputs_; }
  const std::vector<TestTensor*>& inputs() const { return inputs_; }

 private:
  void fill_random(TestTensor& tensor);
  TestTensor& new_input(const std::string& name, DType dtype, const Shape& shape, const Layout& layout, bool blank);

  std::uint64_t seed_;
  Device device_;
  bool blank_;
  const Call* inputs_of_ = nullptr;
  std::deque<TestTensor> tensors_;
  std::vector<Output> outputs_;
  std::vector<TestTensor*> inputs_;
};

/// The beginning of the ids of the kernels for sm90a in half precision: "linear/cuda/sm90a/f16".
inline std::string hopper_id(const std::string& op, DType dtype) {
  return op + "/cuda/sm90a/" + (dtype == DType::kFloat16 ? "f16" : "bf16");
}

struct Case {
  std::string name;  // letters, digits, underscores; unique within the op
  std::function<void(Call&)> build;
  std::string kernel = {};  // the id of the one that must accept it, where there is one
  void is_for(std::string id) { kernel = std::move(id); }
};

class CaseList {
 public:
  Case& add(std::string name, std::function<void(Call&)> build) {
    return cases.emplace_back(Case{std::move(name), std::move(build)});
  }
  std::vector<Case> cases;
};

/// The cases of an op; `op` as below.
const std::vector<Case>& cases_of(const std::string& op);
/// From which a case's values are made: of "<op>/<name of the case>".
std::uint64_t seed_of(const std::string& text);

/// Registers an op's cases; `op` is the id's first segment ("attention_fwd").
class OpCases {
 public:
  OpCases(const char* op, void (*fill)(CaseList&));
};

/// Largest difference allowed between a kernel's element and the oracle's `expected`, in an output whose largest
/// element is `magnitude`. fp32: 1e-5 of unit-variance values, and in proportion where values are larger. fp16: 1e-3 in
/// the same way. bf16: 2^-8. In half precision never less than one unit in the last place of `expected`, since two
/// roundings may part there. float8_e4m3fn and int8: factor - 1 units in the last place, so exactly equal at factor 1.
double tolerance(DType dtype, double expected, double magnitude, double factor);

/// Empty, or a sentence on the first element that disagrees. NaN and infinities must match exactly, integers too.
std::string difference(DType dtype, const std::vector<double>& got, const std::vector<double>& expected, double factor);

}  // namespace flashkernel::conformance
