// Cases of merge_states: parts of every kind, and 1-D to 4-D.
#include <limits>

#include "conformance/conformance.hpp"
#include "flashkernel/attention.hpp"

namespace flashkernel::conformance {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Spec {
  DType dtype;
  Shape shape;
  Layout layout_a = {}, layout_b = {}, layout_out = {};
  bool lse = true;
  bool in_place = false;
  std::function<void(TestTensor& lse_a, TestTensor& lse_b)> adjust = {};
};

void build(Call& call, const Spec& spec) {
  const Shape rows(spec.shape.begin(), spec.shape.end() - 1);
  TestTensor& out_a = spec.in_place ? call.in_out("out_a", spec.dtype, spec.shape, spec.layout_a)
                                    : call.input("out_a", spec.dtype, spec.shape, spec.layout_a);
  TestTensor& lse_a =
      spec.in_place ? call.in_out("lse_a", DType::kFloat32, rows) : call.input("lse_a", DType::kFloat32, rows);
  TestTensor& out_b = call.input("out_b", spec.dtype, spec.shape, spec.layout_b);
  TestTensor& lse_b = call.input("lse_b", DType::kFloat32, rows);
  for (TestTensor* const lse : {&lse_a, &lse_b}) lse->transform([](double x) { return 3 * x; });
  if (spec.adjust) spec.adjust(lse_a, lse_b);
  TestTensor* out = spec.in_place ? &out_a : &call.output("out", spec.dtype, spec.shape, spec.layout_out);
  TestTensor* lse = spec.in_place ? &lse_a : spec.lse ? &call.output("lse", DType::kFloat32, rows) : nullptr;
  call.run = [=, &out_a, &lse_a, &out_b, &lse_b](const ExecutionContext& context) {
    merge_states(out_a.view(), lse_a.view(), out_b.view(), lse_b.view(), out->view(), lse ? lse->view() : TensorView(),
                 context);
  };
}

void cases(CaseList& list) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const std::string suffix = dtype == DType::kFloat32 ? "_fp32" : dtype == DType::kFloat16 ? "_fp16" : "_bf16";
    const auto add = [&](const char* name, const Spec& spec) {
      list.add(name + suffix, [spec](Call& call) { build(call, spec); });
    };
    add("dims1", {dtype, {33}});
    add("dims2", {dtype, {17, 64}});
    add("dims3", {dtype, {5, 7, 100}});
    add("dims4", {dtype, {2, 3, 19, 128}});
    add("head_dim_1", {dtype, {4, 1}});
    add("head_dim_300", {dtype, {4, 300}});
    add("no_rows", {dtype, {0, 3, 64}});
    Spec spec{dtype, {2, 3, 19, 40}, {{}, {0, 2, 1, 3}, 3, 1}, {{}, {2, 1, 0, 3}, 5}, {{}, {1, 0, 2, 3}, 7, 3}};
    add("strides", spec);
    spec.lse = false;
    add("without_lse", spec);
    spec.in_place = true;
    add("in_place", spec);
    Spec empty{dtype, {6, 40}};
    empty.adjust = [](TestTensor& a, TestTensor& b) {
      for (const std::int64_t i : {0, 1, 2}) a.set(i, -kInfinity);
      for (const std::int64_t i : {2, 3, 4}) b.set(i, -kInfinity);
    };
    add("empty_parts", empty);
    empty.adjust = [](TestTensor& a, TestTensor& b) {
      a.set(0, 1e5), b.set(0, 1e5);
      a.set(1, -1e5), b.set(1, -1e5 - 1);
      a.set(2, 1e5), b.set(2, -1e5);
      a.set(3, std::numeric_limits<double>::quiet_NaN());
    };
    add("extreme_lse", empty);
  }
}

const OpCases registration("merge_states", cases);

}  // namespace
}  // namespace flashkernel::conformance
