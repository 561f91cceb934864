// Cases of softmax and softmax_bwd, with their logarithmic forms.
#include <cmath>
#include <limits>
#include <utility>

#include "conformance/conformance.hpp"
#include "conformance/each_dtype.hpp"
#include "flashkernel/reduce.hpp"

namespace flashkernel::conformance {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Spec {
  DType dtype;
  Shape shape;
  int axis = -1;
  Layout x = {}, out = {};
  bool in_place = false;
  std::function<void(TestTensor&)> adjust = {};
};

void build(Call& call, const Spec& spec, bool log) {
  TestTensor& x = spec.in_place ? call.in_out("x", spec.dtype, spec.shape, spec.x)
                                : call.input("x", spec.dtype, spec.shape, spec.x);
  x.transform([](double logit) { return 3 * logit; });
  if (spec.adjust) spec.adjust(x);
  TestTensor* out = spec.in_place ? &x : &call.output("out", spec.dtype, spec.shape, spec.out);
  const int axis = spec.axis;
  call.run = [=, &x](const ExecutionContext& context) {
    (log ? log_softmax : softmax)(x.view(), out->view(), axis, context);
  };
}

void build_backward(Call& call, const Spec& spec, bool log) {
  TestTensor& grad_out = spec.in_place ? call.in_out("grad_out", spec.dtype, spec.shape, spec.x)
                                       : call.input("grad_out", spec.dtype, spec.shape, spec.x);
  TestTensor& y = call.input("out", spec.dtype, spec.shape, spec.out);
  // Any positive numbers (negative for the logarithm) will do: the formula does not need them to add up to 1.
  y.transform([=](double x) { return log ? -std::abs(x) - 3 : 0.05 * std::abs(x); });
  if (spec.adjust) spec.adjust(y);
  TestTensor* grad_x = spec.in_place ? &grad_out : &call.output("grad_x", spec.dtype, spec.shape);
  const int axis = spec.axis;
  call.run = [=, &grad_out, &y](const ExecutionContext& context) {
    (log ? log_softmax_backward : softmax_backward)(grad_out.view(), y.view(), grad_x->view(), axis, context);
  };
}

template <void (*kBuild)(Call&, const Spec&, bool)>
void cases(CaseList& list) {
  const bool backward = kBuild == static_cast<void (*)(Call&, const Spec&, bool)>(build_backward);
  each_dtype([&](DType dtype, const std::string& suffix) {
    for (const bool log : {false, true}) {
      const auto add = [&](const std::string& name, const Spec& spec) {
        list.add((log ? "log_" : "") + name + suffix, [=](Call& call) { kBuild(call, spec, log); });
      };
      for (const std::int64_t n : {1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 1000, 4099})
        add("rows_of_" + std::to_string(n), {dtype, {5, n}});
      add("many_rows", {dtype, {600, 20}});
      // Enough rows for a small GPU's kernels of many rows, and lengths that are not whole in a block's vectors.
      const std::pair<std::int64_t, std::int64_t> many[] = {{20, 768},  {17, 1000}, {17, 1024}, {16, 1992},
                                                            {16, 4000}, {16, 8192}, {16, 16384}};
      for (const auto& [count, n] : many) add("whole_vectors" + std::to_string(n), {dtype, {count, n}});
      for (const std::int64_t n : {1016, 12296}) {
        Spec special{dtype, {16, n}};
        special.adjust = [=](TestTensor& x) {
          for (std::int64_t c = 0; c < n; ++c) {
            const double empty = log || !backward ? -kInfinity : 0;
            x.set(c, empty);                          // a row of nothing
            x.set(n + c, c == n - 1 ? -1.5 : empty);  // all but its last
            if (!backward) x.set(2 * n + c, c % 2 ? 30000 : -30000);
          }
          x.set(4 * n - 1, std::numeric_limits<double>::quiet_NaN());
          x.set(4 * n + 1, -kInfinity);
        };
        add("whole_vectors_special" + std::to_string(n), special);
      }
      // Rows of 64 KB and more: walked, or held by a cluster of blocks, evenly shared and not.
      for (const auto& [count, n] : {std::pair{2, 32776}, {1, 131072}})
        add("long_rows" + std::to_string(n), {dtype, {count, n}});
      Spec turns{dtype, {7, 50008}};  // more rows than a small GPU has clusters: each takes several
      turns.in_place = true;
      add("long_rows_in_turn", turns);
      turns.adjust = [=](TestTensor& x) {
        constexpr std::int64_t n = 50008;
        for (std::int64_t c = 0; c < n; ++c) {
          const double empty = log || !backward ? -kInfinity : 0;
          x.set(c, empty);                      // a row of nothing
          if (c < n - 40) x.set(n + c, empty);  // all but the last block's
          if (!backward && c < 40) x.set(2 * n + c, 30000 + 16 * static_cast<double>(c % 2));
          if (!backward) x.set(3 * n + c, -30000 - 16 * static_cast<double>(c % 2));
        }
        x.set(4 * n + n - 1, std::numeric_limits<double>::quiet_NaN());
        x.set(5 * n + 1, -kInfinity);
      };
      add("long_rows_special_values", turns);
      // Clusters of the fewest blocks, of an odd number, and of the most, whose last has a vector less.
      const std::int64_t longest = (512 * 1024 - 16) / static_cast<std::int64_t>(dtype_bytes(dtype));
      add("long_rows_pair", {dtype, {3, 32768}});
      add("long_rows_odd_cluster", {dtype, {2, 100008}});
      add("long_rows_longest", {dtype, {3, longest}});
      for (int axis = 0; axis < 3; ++axis) {
        add("axis" + std::to_string(axis), {dtype, {6, 7, 35}, axis});
        add("permuted_axis" + std::to_string(axis),
            {dtype, {6, 7, 35}, axis, {{}, {1, 2, 0}, 3, 1}, {{}, {2, 0, 1}, 2}});
      }
      add("scalar", {dtype, {}, 0});
      add("empty", {dtype, {4, 0}});
      add("gaps", {dtype, {9, 70}, -1, {{}, {}, 3, 1}, {{}, {}, 5, 1}});
      Spec in_place{dtype, {9, 70}};
      in_place.in_place = true;
      add("in_place", in_place);
      Spec broadcast{dtype, {9, 33}};
      (backward ? broadcast.out : broadcast.x).expanded = {0};
      add("broadcast", broadcast);
      Spec far{dtype, {2, 40}};
      far.x.strides = {kFarStride, 1}, far.out.strides = {kFarStride, 1};
      add("strides_past_2_31", far);
      far.axis = 0;
      add("column_stride_past_2_31", far);
      Spec special{dtype, {6, 70}};
      special.adjust = [=](TestTensor& x) {
        for (std::int64_t c = 0; c < 70; ++c) {
          x.set(c, log || !backward ? -kInfinity : 0);
          x.set(70 + c, c == 69 ? 0 : (log || !backward ? -kInfinity : 0));
          if (!backward)
            x.set(140 + c, c % 2 ? 30000 : -30000), x.set(210 + c, -30000 - 16 * static_cast<double>(c % 2));
        }
        x.set(4 * 70 + 69, std::numeric_limits<double>::quiet_NaN());
        x.set(5 * 70 + 1, -kInfinity);
      };
      add("special_values", special);
    }
  });
}

const OpCases forward("softmax", cases<build>);
const OpCases backward("softmax_bwd", cases<build_backward>);

}  // namespace
}  // namespace flashkernel::conformance
