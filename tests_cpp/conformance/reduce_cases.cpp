// Cases of reduce: every op over every kind of axis set.
#include <limits>

#include "conformance/conformance.hpp"
#include "conformance/each_dtype.hpp"
#include "flashkernel/reduce.hpp"

namespace flashkernel::conformance {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

using Reduce = void (*)(const TensorView&, const TensorView&, AxisMask, const ExecutionContext&);

struct Op {
  const char* name;
  Reduce run;
};
constexpr Op kOps[] = {{"sum", reduce_sum}, {"mean", reduce_mean}, {"max", reduce_max}, {"argmax", argmax}};

struct Spec {
  DType dtype;
  Shape shape;
  AxisMask axes = 0;
  Layout x = {}, out = {};
  bool fp32_out = false;
  std::vector<std::pair<std::int64_t, double>> values = {};  // index (counted from the end when negative), value
  double mean = 0;
};

void build(Call& call, const Spec& spec, const Op& op) {
  TestTensor& x = call.input("x", spec.dtype, spec.shape, spec.x);
  if (spec.mean != 0) x.transform([&](double value) { return value + spec.mean; });
  for (const auto& [index, value] : spec.values) x.set(index < 0 ? x.numel() + index : index, value);
  Shape kept;
  for (std::size_t d = 0; d < spec.shape.size(); ++d)
    if (spec.axes != 0 && !(spec.axes >> d & 1)) kept.push_back(spec.shape[d]);
  const bool is_index = std::string(op.name) == "argmax";  // addresses of imported functions need not compare equal
  const DType dtype = is_index ? DType::kInt64 : (spec.fp32_out ? DType::kFloat32 : spec.dtype);
  TestTensor& out = call.output("out", dtype, kept, spec.out);
  call.bitwise_across_threads = true;
  const Reduce run = op.run;
  const AxisMask axes = spec.axes;
  call.run = [=, &x, &out](const ExecutionContext& context) { run(x.view(), out.view(), axes, context); };
}

void cases(CaseList& list) {
  each_dtype([&](DType dtype, const std::string& suffix) {
    for (const Op& op : kOps) {
      const auto add = [&](const std::string& name, const Spec& spec) {
        list.add(std::string(op.name) + "_" + name + suffix, [=](Call& call) { build(call, spec, op); });
      };
      for (const std::int64_t n : {1, 3, 8, 16, 17, 33, 64, 100, 255, 1024, 5000})
        add("rows_of_" + std::to_string(n), {dtype, {7, n}, 2});
      for (const std::int64_t n : {1, 5, 16, 33, 300, 2000}) add("columns_" + std::to_string(n), {dtype, {n, 37}, 1});
      // Columns in whole vectors, and rows so many and short that a warp takes one.
      for (const std::int64_t n : {1, 9, 300, 2000}) add("whole_columns_" + std::to_string(n), {dtype, {n, 40}, 1});
      add("whole_columns_wide", {dtype, {70, 2, 264}, 1});
      add("whole_columns_of_both", {dtype, {70, 3, 24}, 3});
      for (const std::int64_t n : {40, 380, 744, 776}) add("many_rows_of_" + std::to_string(n), {dtype, {4100, n}, 2});
      add("all_long", {dtype, {100003}});
      for (AxisMask axes = 1; axes < 16; ++axes) {
        add("axes" + std::to_string(axes), {dtype, {3, 5, 4, 19}, axes});
        add("permuted_axes" + std::to_string(axes), {dtype, {3, 5, 4, 19}, axes, {{}, {2, 3, 0, 1}, 3, 1}, {}, true});
      }
      add("middle", {dtype, {6, 40, 33}, 2});
      add("ends", {dtype, {6, 40, 33}, 5});
      add("scalar", {dtype, {}});
      add("no_outputs", {dtype, {0, 9}, 2});
      Spec broadcast{dtype, {9, 21}, 1};
      broadcast.x.expanded = {0};
      add("broadcast", broadcast);
      Spec backwards{dtype, {9, 50}, 2};
      backwards.x.strides = {-50, -1}, backwards.x.offset = 449;
      add("backwards", backwards);
      Spec far{dtype, {2, 3, 20}, 4};
      far.x.strides = {kFarStride, 32, 1}, far.out.strides = {1, kFarStride};
      add("strides_past_2_31", far);
      far.axes = 1;
      far.out = {};
      add("reduced_stride_past_2_31", far);
      add("offset_mean", {dtype, {5, 900}, 2, {}, {}, true, {}, 100});
      add("nan", {dtype,
                  {4, 300},
                  2,
                  {},
                  {},
                  false,
                  {{5, kNaN}, {7, kNaN}, {299, kInfinity}, {599, kNaN}, {-1, kNaN}, {-200, kInfinity}}});
      add("nan_in_columns",
          {dtype, {40, 33}, 1, {}, {}, false, {{5, kNaN}, {38, kNaN}, {40 * 33 - 2, kNaN}, {100, kInfinity}}});
      add("nan_in_whole_columns",
          {dtype, {40, 32}, 1, {}, {}, false, {{5, kNaN}, {37, kNaN}, {40 * 32 - 2, kNaN}, {100, kInfinity}}});
      add("infinities", {dtype,
                         {3, 70},
                         2,
                         {},
                         {},
                         false,
                         {{1, kInfinity}, {50, kInfinity}, {80, -kInfinity}, {150, kInfinity}, {160, -kInfinity}}});
      Spec ties{dtype, {3, 200}, 2};
      for (const std::int64_t at : {3, 70, 150, 390, 399, 400, 500, 599}) ties.values.push_back({at, 9.0});
      add("ties", ties);
      Spec column_ties{dtype, {200, 16}, 1};
      for (const std::int64_t row : {2, 3, 70, 199}) column_ties.values.push_back({row * 16 + 5, 9.0});
      for (std::int64_t row = 0; row < 200; ++row) column_ties.values.push_back({row * 16 + 6, -kInfinity});
      add("ties_in_columns", column_ties);
      Spec masked{dtype, {2, 90}, 2};
      for (std::int64_t i = 0; i < 90; ++i) masked.values.push_back({i, -kInfinity});
      add("all_minus_infinity", masked);
      if (op.run == static_cast<Reduce>(reduce_sum) || op.run == static_cast<Reduce>(reduce_mean))
        add("over_nothing", {dtype, {3, 0}, 2});
    }
  });
}

const OpCases registration("reduce", cases);

}  // namespace
}  // namespace flashkernel::conformance
