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

/// Any number of parts in one tensor.
struct Stack {
  DType dtype, out_dtype;
  Shape shape;  // [parts, ..., head_dim]
  Layout layout = {}, layout_lse = {}, layout_out = {};
  bool lse = true;
  std::function<void(TestTensor& lses)> adjust = {};
};

void build_stack(Call& call, const Stack& spec) {
  const Shape parts(spec.shape.begin(), spec.shape.end() - 1), result(spec.shape.begin() + 1, spec.shape.end()),
      rows(result.begin(), result.end() - 1);
  TestTensor& outs = call.input("out_a", spec.dtype, spec.shape, spec.layout);
  TestTensor& lses = call.input("lse_a", DType::kFloat32, parts, spec.layout_lse);
  lses.transform([](double x) { return 3 * x; });
  if (spec.adjust) spec.adjust(lses);
  TestTensor& out = call.output("out", spec.out_dtype, result, spec.layout_out);
  TestTensor* const lse = spec.lse ? &call.output("lse", DType::kFloat32, rows) : nullptr;
  call.run = [&, lse](const ExecutionContext& context) {
    merge_states(outs.view(), lses.view(), {}, {}, out.view(), lse ? lse->view() : TensorView(), context);
  };
}

void stack_cases(CaseList& list, DType dtype, DType out_dtype, const std::string& suffix) {
  const auto add = [&](const char* name, const Stack& spec) {
    list.add(name + suffix, [spec](Call& call) { build_stack(call, spec); });
  };
  add("stack_3", {dtype, out_dtype, {3, 5, 64}});
  add("stack_1", {dtype, out_dtype, {1, 7, 128}});
  add("stack_none", {dtype, out_dtype, {0, 7, 16}});
  add("stack_of_single_rows", {dtype, out_dtype, {9, 40}});
  add("stack_head_dim_1", {dtype, out_dtype, {4, 3, 1}});
  add("stack_head_dim_300", {dtype, out_dtype, {4, 3, 300}});
  add("stack_head_dim_512", {dtype, out_dtype, {17, 2, 3, 512}});
  Stack strides{
      dtype, out_dtype, {6, 2, 3, 11, 40}, {{}, {1, 3, 0, 2, 4}, 3, 1}, {{}, {1, 0, 3, 2}}, {{}, {1, 0, 2, 3}, 5, 3}};
  add("stack_strides", strides);
  strides.lse = false;
  add("stack_without_lse", strides);
  Stack empty{dtype, out_dtype, {3, 6, 40}};
  empty.adjust = [](TestTensor& lses) {
    for (const std::int64_t i : {0, 6, 12, 1, 7, 8, 15, 4, 16}) lses.set(i, -kInfinity);  // row 0: all of them
    lses.set(11, std::numeric_limits<double>::quiet_NaN());
    lses.set(2, 1e5), lses.set(14, 1e5 + 1);
  };
  add("stack_empty_parts", empty);
}

void cases(CaseList& list) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16})
    stack_cases(list, dtype, dtype, dtype == DType::kFloat32 ? "_fp32" : dtype == DType::kFloat16 ? "_fp16" : "_bf16");
  stack_cases(list, DType::kFloat32, DType::kFloat16, "_fp32_to_fp16");
  stack_cases(list, DType::kFloat32, DType::kBFloat16, "_fp32_to_bf16");
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
