// Cases of add, swiglu and swiglu_bwd: layouts that merge into one dim, and those that do not.
#include <limits>

#include "conformance/conformance.hpp"
#include "conformance/each_dtype.hpp"
#include "flashkernel/elementwise.hpp"

namespace flashkernel::conformance {
namespace {

struct Spec {
  DType dtype;
  Shape shape;
  Layout a = {}, b = {}, out = {};
  bool in_place = false;
  double scale = 1;
  bool special = false;
};

using Binary = void (*)(const TensorView&, const TensorView&, const TensorView&, const ExecutionContext&);

void prepare(TestTensor& tensor, const Spec& spec, std::int64_t shift) {
  tensor.transform([&](double x) { return spec.scale * x; });
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const double values[] = {kInfinity, -kInfinity, -0.0, std::numeric_limits<double>::quiet_NaN(),
                           -30.0,     60.0,       0.0,  1e-7};
  for (std::int64_t i = 0; spec.special && i < tensor.numel(); ++i)
    if ((i + shift) % 5 == 0) tensor.set(i, values[i / 5 % 8]);
}

template <Binary kOp>
void build(Call& call, const Spec& spec) {
  TestTensor& a = spec.in_place ? call.in_out("a", spec.dtype, spec.shape, spec.a)
                                : call.input("a", spec.dtype, spec.shape, spec.a);
  TestTensor& b = call.input("b", spec.dtype, spec.shape, spec.b);
  prepare(a, spec, 0), prepare(b, spec, 2);
  TestTensor* out = spec.in_place ? &a : &call.output("out", spec.dtype, spec.shape, spec.out);
  call.run = [=, &a, &b](const ExecutionContext& context) { kOp(a.view(), b.view(), out->view(), context); };
}

void build_backward(Call& call, const Spec& spec) {
  TestTensor& grad_out = call.input("grad_out", spec.dtype, spec.shape);
  TestTensor& gate = spec.in_place ? call.in_out("gate", spec.dtype, spec.shape, spec.a)
                                   : call.input("gate", spec.dtype, spec.shape, spec.a);
  TestTensor& up = spec.in_place ? call.in_out("up", spec.dtype, spec.shape, spec.b)
                                 : call.input("up", spec.dtype, spec.shape, spec.b);
  prepare(gate, spec, 0), prepare(up, spec, 2);
  TestTensor* grad_gate = spec.in_place ? &gate : &call.output("grad_gate", spec.dtype, spec.shape, spec.out);
  TestTensor* grad_up = spec.in_place ? &up : &call.output("grad_up", spec.dtype, spec.shape);
  call.run = [=, &grad_out, &gate, &up](const ExecutionContext& context) {
    swiglu_backward(grad_out.view(), gate.view(), up.view(), grad_gate->view(), grad_up->view(), context);
  };
}

template <void (*kBuild)(Call&, const Spec&)>
void cases(CaseList& list) {
  each_dtype([&](DType dtype, const std::string& suffix) {
    const auto add_case = [&](const std::string& name, const Spec& spec) {
      list.add(name + suffix, [=](Call& call) { kBuild(call, spec); });
    };
    for (const std::int64_t n : {1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 1000, 20011})
      add_case("n" + std::to_string(n), {dtype, {n}});
    add_case("scalar", {dtype, {}});
    add_case("empty", {dtype, {3, 0, 4}});
    add_case("rows_with_gaps", {dtype, {5, 77}, {{}, {}, 3, 1}, {{}, {}, 5}, {{}, {}, 1, 3}});
    add_case("halves_of_rows", {dtype, {37, 64}, {{}, {}, 64}, {{}, {}, 64, 64}});
    add_case("rows_of_vectors", {dtype, {3, 5, 40}, {{}, {1, 0, 2}, 8}, {{}, {}, 0, 0, {0}}, {{}, {}, 16, 8}});
    add_case("rows_of_vectors_but_one", {dtype, {6, 32}, {{}, {}, 8}, {{}, {}, 8, 1}, {{}, {}, 24}});
    add_case("permuted_alike", {dtype, {3, 5, 7, 11}, {{}, {2, 0, 3, 1}}, {{}, {2, 0, 3, 1}}, {{}, {2, 0, 3, 1}}});
    add_case("permuted_apart", {dtype, {3, 5, 7, 11}, {{}, {3, 2, 1, 0}}, {{}, {0, 2, 1, 3}, 2}, {{}, {1, 0, 3, 2}}});
    add_case(
        "eight_dims",
        {dtype, {2, 2, 2, 2, 2, 2, 2, 3}, {{}, {7, 1, 5, 3, 0, 2, 4, 6}}, {{}, {}, 1}, {{}, {0, 2, 4, 6, 1, 3, 5, 7}}});
    Spec broadcast{dtype, {6, 50}};
    broadcast.a.expanded = {0}, broadcast.b.expanded = {1};
    add_case("broadcast", broadcast);
    Spec backwards{dtype, {6, 50}};
    backwards.b.strides = {-50, -1};
    backwards.b.offset = 299;
    add_case("backwards", backwards);
    Spec far{dtype, {2, 70}};
    far.a.strides = {kFarStride, 1}, far.b.strides = {3, kFarStride / 32}, far.out.strides = {kFarStride, 1};
    add_case("strides_past_2_31", far);
    Spec in_place{dtype, {9, 40}, {{}, {}, 5}, {{}, {}, 5}};
    in_place.in_place = true;
    add_case("in_place", in_place);
    add_case("large_values", {dtype, {300}, {}, {}, {}, false, 20});
    add_case("special_values", {dtype, {333}, {}, {}, {}, false, 1, true});
  });
}

const OpCases of_add("add", cases<build<add>>);
const OpCases of_swiglu("swiglu", cases<build<swiglu>>);
const OpCases of_backward("swiglu_bwd", cases<build_backward>);

}  // namespace
}  // namespace flashkernel::conformance
