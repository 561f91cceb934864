// Cases of norm and norm_bwd: LayerNorm and RMSNorm with every optional piece on and off.
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "conformance/conformance.hpp"
#include "conformance/device_memory.hpp"
#include "conformance/each_dtype.hpp"
#include "flashkernel/norm.hpp"

namespace flashkernel::conformance {
namespace {

struct Spec {
  DType dtype;
  bool rms;
  Shape shape;
  bool weight = true, bias = true, fp32_parameters = false, residual = false, saved = true;
  Layout x = {}, residual_layout = {}, out = {};
  bool in_place = false;
  double mean = 0.3;
  std::function<void(TestTensor&)> adjust = {};
  bool other_parameters = false;  // of a 16-bit dtype that the rows do not have, and a bias of a third one
  float offset = 0;               // of weights
  std::optional<DType> quantized = {};
  double scale = 0;  // of all rows; 0: each has one
};

DType weight_dtype(const Spec& s) {
  if (s.other_parameters) return s.dtype == DType::kBFloat16 ? DType::kFloat16 : DType::kBFloat16;
  return s.fp32_parameters ? DType::kFloat32 : s.dtype;
}
DType bias_dtype(const Spec& s) {
  if (s.other_parameters) return s.dtype == DType::kFloat32 ? DType::kFloat16 : DType::kFloat32;
  return weight_dtype(s);
}

TensorView view_of(const TestTensor* tensor) { return tensor ? tensor->view() : TensorView(); }

void build(Call& call, const Spec& s) {
  const Shape rows(s.shape.begin(), s.shape.end() - 1);
  TestTensor& x = s.in_place ? call.in_out("x", s.dtype, s.shape, s.x) : call.input("x", s.dtype, s.shape, s.x);
  x.transform([&](double value) { return value + s.mean; });
  if (s.adjust) s.adjust(x);
  TestTensor *residual = nullptr, *sum = nullptr;
  if (s.residual) {
    residual = s.in_place ? &call.in_out("residual", s.dtype, s.shape, s.residual_layout)
                          : &call.input("residual", s.dtype, s.shape, s.residual_layout);
    sum = s.in_place ? residual : &call.output("residual_out", s.dtype, s.shape, s.x);
  }
  TestTensor* weight = s.weight ? &call.input("weight", weight_dtype(s), {s.shape.back()}) : nullptr;
  TestTensor* bias = s.bias && !s.rms ? &call.input("bias", bias_dtype(s), {s.shape.back()}) : nullptr;
  // A number next to half way between two elements may be rounded to either: a step apart.
  TestTensor* out = s.quantized  ? &call.output("out", *s.quantized, s.shape, s.out, 2)
                    : s.in_place ? &x
                                 : &call.output("out", s.dtype, s.shape, s.out);
  TestTensor *scale = nullptr, *scales = nullptr;
  if (s.scale != 0) {
    scale = &call.input("scale", DType::kFloat32, {1});
    scale->transform([&](double) { return s.scale; });
  } else if (s.quantized) {
    scales = &call.output("scales", DType::kFloat32, rows);
  }
  const bool quantized = s.quantized.has_value();
  TestTensor* mean = s.saved && !s.rms ? &call.output("mean", DType::kFloat32, rows) : nullptr;
  TestTensor* rstd = s.saved ? &call.output("rstd", DType::kFloat32, rows) : nullptr;
  const bool rms = s.rms;
  const float offset = s.offset;
  call.run = [=, &x](const ExecutionContext& context) {
    const NormSaved saved{view_of(sum), view_of(mean), view_of(rstd), offset};
    if (quantized && rms) {
      rms_norm_quantized(x.view(), view_of(residual), view_of(weight), view_of(scale), out->view(), view_of(scales),
                         saved, 1e-5f, context);
    } else if (quantized) {
      layer_norm_quantized(x.view(), view_of(residual), view_of(weight), view_of(bias), view_of(scale), out->view(),
                           view_of(scales), saved, 1e-5f, context);
    } else if (rms) {
      rms_norm(x.view(), view_of(residual), view_of(weight), out->view(), saved, 1e-5f, context);
    } else {
      layer_norm(x.view(), view_of(residual), view_of(weight), view_of(bias), out->view(), saved, 1e-5f, context);
    }
  };
}

void build_backward(Call& call, const Spec& s) {
  const Shape rows(s.shape.begin(), s.shape.end() - 1);
  TestTensor& grad_out = call.input("grad_out", s.dtype, s.shape, s.out);
  TestTensor& h = call.input("h", s.dtype, s.shape, s.x);
  if (s.adjust) s.adjust(h);
  TestTensor* weight = s.weight ? &call.input("weight", weight_dtype(s), {s.shape.back()}) : nullptr;
  TestTensor* mean = s.rms ? nullptr : &call.input("mean", DType::kFloat32, rows);
  TestTensor& rstd = call.input("rstd", DType::kFloat32, rows);
  rstd.transform([](double value) { return 0.5 + std::abs(value); });
  TestTensor *residual = nullptr, *grad_x = nullptr;
  if (s.residual) {
    residual = s.in_place ? &call.in_out("grad_residual_out", s.dtype, s.shape, s.residual_layout)
                          : &call.input("grad_residual_out", s.dtype, s.shape, s.residual_layout);
  }
  grad_x = s.in_place ? residual : &call.output("grad_x", s.dtype, s.shape, s.x);
  TestTensor* grad_weight = s.weight ? &call.output("grad_weight", weight_dtype(s), {s.shape.back()}) : nullptr;
  TestTensor* grad_bias = s.bias && !s.rms ? &call.output("grad_bias", bias_dtype(s), {s.shape.back()}) : nullptr;
  const bool rms = s.rms;
  const float offset = s.offset;
  call.run = [=, &grad_out, &h, &rstd](const ExecutionContext& context) {
    const NormGradients gradients{grad_x->view(), view_of(grad_weight), view_of(grad_bias), offset};
    if (rms) {
      rms_norm_backward(grad_out.view(), h.view(), view_of(weight), rstd.view(), view_of(residual), gradients, context);
    } else {
      layer_norm_backward(grad_out.view(), h.view(), view_of(weight), mean->view(), rstd.view(), view_of(residual),
                          gradients, context);
    }
  };
}

/// Outputs of 8 bits: rows that a warp, a block or nobody holds, whole vectors and not.
void quantized_cases(CaseList& list) {
  each_dtype([&](DType dtype, const std::string& suffix) {
    for (const bool rms : {false, true})
      for (const DType to : {DType::kFloat8E4M3, DType::kInt8}) {
        const auto add = [&](const std::string& name, Spec spec) {
          spec.quantized = to;
          list.add((to == DType::kInt8 ? "int8_" : "e4m3_") + std::string(rms ? "rms_" : "layer_") + name + suffix,
                   [=](Call& call) { build(call, spec); });
        };
        for (const auto& [count, n] : {std::pair{7, 1},
                                       {5, 33},
                                       {9, 100},
                                       {13, 512},
                                       {9, 1024},
                                       {5, 2048},
                                       {5, 3000},
                                       {3, 8192},
                                       {3, 16384},
                                       {2, 20008},
                                       {2, 40000}}) {
          Spec own{dtype, rms, {count, n}};
          add("row_scales" + std::to_string(n), own);
          own.residual = own.other_parameters = true;
          own.offset = 1;
          own.scale = 0.02;
          add("scale_residual" + std::to_string(n), own);
        }
        Spec plain{dtype, rms, {3, 4, 72}};
        plain.weight = plain.bias = plain.saved = false;
        plain.residual = plain.fp32_parameters = true;
        add("row_scales_plain", plain);
        plain.out.gap = 3, plain.out.offset = 1, plain.x.gap = 5;
        plain.shape = {12, 72};
        add("gaps", plain);
        plain.x = plain.out = {};
        plain.out.gap = 8, plain.shape = {6, 1024};
        add("gaps_of_whole_vectors", plain);
        add("no_rows", {dtype, rms, {0, 50}});
        add("vector", {dtype, rms, {64}});
        // One row of zeros; NaN and an infinity in others.
        for (const std::int64_t n : {50, 1024}) {
          Spec special{dtype, rms, {4, n}};
          special.adjust = [n](TestTensor& x) {
            for (std::int64_t i = 0; i < n; ++i) x.set(i, 0);
            x.set(n + 3, std::numeric_limits<double>::quiet_NaN());
            x.set(2 * n + 9, std::numeric_limits<double>::infinity());
          };
          special.bias = false;
          add("special_rows" + std::to_string(n), special);
          special.scale = 0.05;
          add("special_rows_scale" + std::to_string(n), special);
        }
      }
  });
}

template <void (*kBuild)(Call&, const Spec&)>
void cases(CaseList& list) {
  const bool backward = kBuild == static_cast<void (*)(Call&, const Spec&)>(build_backward);
  each_dtype([&](DType dtype, const std::string& suffix) {
    for (const bool rms : {false, true}) {
      const auto add = [&](const std::string& name, const Spec& spec) {
        list.add((rms ? "rms_" : "layer_") + name + suffix, [=](Call& call) { kBuild(call, spec); });
      };
      for (const std::int64_t n : {1, 2, 7, 15, 16, 17, 31, 32, 33, 64, 65, 100, 768, 1023, 4100})
        add("features" + std::to_string(n), {dtype, rms, {5, n}});
      add("many_rows", {dtype, rms, {700, 24}});
      // Whole vectors: every way in which a GPU's blocks hold rows, with chunks of rows that end unevenly.
      for (const auto& [count, n] :
           {std::pair{301, 512}, {600, 768}, {77, 1024}, {69, 2048}, {41, 4096}, {9, 8192}, {5, 16384}}) {
        Spec whole{dtype, rms, {count, n}};
        add("whole_vectors" + std::to_string(n), whole);
        whole.residual = whole.fp32_parameters = true;
        add("whole_vectors_residual" + std::to_string(n), whole);
      }
      // Enough rows for a small GPU's kernels of many rows (but for 2000), far from zero and not always whole in a
      // block's vectors: elements past a row's end, counted as if they were there, would show. (Of a mean of 1000 the
      // rounding alone is too much in fp32.)
      if (!backward) {
        const std::pair<std::int64_t, std::int64_t> shapes[] = {
            {17, 384},  {41, 1000}, {21, 1024},  {17, 1536},  {9, 2000},   {19, 1992}, {19, 3000},
            {17, 4096}, {17, 5000}, {17, 12296}, {16, 16384}, {16, 20008}, {16, 32768}};
        for (const auto& [count, n] : shapes) {
          Spec many{dtype, rms, {count, n}};
          many.mean = dtype == DType::kFloat32 ? 100 : 1000;
          add("off_zero" + std::to_string(n), many);
          many.fp32_parameters = many.in_place = true;
          add("off_zero_fp32_parameters" + std::to_string(n), many);
          many.residual = true;
          add("off_zero_residual" + std::to_string(n), many);
          many.weight = many.bias = many.saved = many.residual = false;
          add("off_zero_plain" + std::to_string(n), many);
        }
      }
      // Rows of 64 KB and more: walked, or held by a cluster of blocks, evenly shared and not.
      for (const auto& [count, n] : {std::pair{2, 32776}, {backward ? 3 : 1, 131072}})
        add("long_rows" + std::to_string(n), {dtype, rms, {count, n}});
      if (backward) {  // a residual, and a last batch of rows that is not whole
        Spec both{dtype, rms, {9, 16392}};
        both.residual = both.fp32_parameters = true;
        add("long_rows_residual", both);
        add("long_rows_chunks", {dtype, rms, {19, 16392}});  // a cluster uses each place of its exchange again
        both.residual = both.fp32_parameters = both.weight = both.bias = false;
        add("long_rows_plain", both);
        for (const std::int64_t n : {8184, 16376})  // two blocks whose last threads have a vector less
          add("halves" + std::to_string(n), {dtype, rms, {11, n}});
        // Few rows, so that a block takes fewer at once than it could, and a last vector that ends before its threads.
        for (const auto& [count, n] : {std::pair{39, 760}, {3, 1000}, {5, 3000}, {3, 5000}})
          add("few_rows" + std::to_string(n), {dtype, rms, {count, n}});
        for (const std::int64_t n : {760, 1024, 4096, 16384}) {  // rows of vectors, some of which are not finite
          Spec special{dtype, rms, {7, n}};
          special.adjust = [n](TestTensor& x) {
            x.set(n + 3, std::numeric_limits<double>::quiet_NaN());
            x.set(3 * n + n - 5, std::numeric_limits<double>::infinity());
            x.set(6 * n + 9, -std::numeric_limits<double>::infinity());
          };
          add("special_rows" + std::to_string(n), special);
        }
      } else {
        Spec summed{dtype, rms, {3, 40000}};
        summed.residual = summed.fp32_parameters = true;
        add("long_rows_residual", summed);
        Spec turns{dtype, rms, {7 + multiprocessors(), 50008}};  // more rows than a GPU has clusters: several each
        turns.mean = 20;
        add("long_rows_in_turn", turns);
        turns.residual = turns.in_place = true;
        add("long_rows_in_turn_residual_in_place", turns);
        turns = {dtype, rms, {5, 50008}};
        turns.weight = turns.bias = turns.saved = false;
        add("long_rows_in_turn_plain", turns);
        // Clusters of an odd number of blocks, and the largest, whose last block has a vector less.
        Spec odd{dtype, rms, {2, 100008}};
        add("long_rows_odd_cluster", odd);
        odd.residual = odd.in_place = true;
        add("long_rows_odd_cluster_residual_in_place", odd);
        const std::int64_t n = (512 * 1024 - 16) / static_cast<std::int64_t>(dtype_bytes(dtype));
        Spec longest{dtype, rms, {5, n}};
        longest.mean = 20;
        longest.adjust = [=](TestTensor& x) {
          x.set(n + n - 1, std::numeric_limits<double>::quiet_NaN());
          x.set(3 * n, std::numeric_limits<double>::infinity());
          for (std::int64_t c = 0; c < n; ++c) x.set(4 * n + c, 0);
        };
        add("long_rows_longest", longest);
        longest = {dtype, rms, {2 + multiprocessors() / 4, n}};
        longest.residual = true;
        add("long_rows_longest_residual", longest);
      }
      // Weights of other dtypes than the rows, and an offset of theirs, in every kernel.
      for (const auto& [count, n] :
           {std::pair{12, 70}, {41, 512}, {37, 1024}, {19, 4096}, {9, 8192}, {7, 16384}, {3, 40000}, {1, 131072}}) {
        Spec other{dtype, rms, {count, n}};
        other.offset = 1;
        add("weight_offset" + std::to_string(n), other);
        other.residual = true;
        add("weight_offset_residual" + std::to_string(n), other);
        other.other_parameters = true;
        add("other_parameters_residual" + std::to_string(n), other);
        other.residual = false;
        add("other_parameters" + std::to_string(n), other);
      }
      add("vector", {dtype, rms, {50}});
      add("no_rows", {dtype, rms, {0, 50}});
      Spec spec{dtype, rms, {3, 4, 70}};
      spec.weight = spec.bias = spec.saved = false;
      add("plain", spec);
      spec.residual = true;
      add("residual", spec);
      spec.in_place = true;
      add("residual_in_place", spec);
      spec = {dtype, rms, {3, 4, 70}};
      spec.fp32_parameters = true;
      spec.residual = true;
      add("fp32_parameters", spec);
      spec.x.gap = 3, spec.residual_layout.gap = 5, spec.out.gap = 7, spec.out.offset = 1;
      spec.shape = {12, 70};
      add("gaps", spec);
      spec.shape = {3, 4, 70};
      spec.x = spec.residual_layout = spec.out = {};
      if (!backward) {
        spec.x.order = {1, 0, 2};
        add("rows_that_do_not_fold", spec);
        spec.x = {};
        spec.x.expanded = {0};
        spec.residual = false;
        add("broadcast", spec);
      }
      Spec far{dtype, rms, {2, 48}};
      far.residual = true;
      far.x.strides = far.residual_layout.strides = far.out.strides = {kFarStride, 1};
      add("strides_past_2_31", far);
      Spec special{dtype, rms, {4, 50}};
      special.adjust = [](TestTensor& x) {
        for (std::int64_t i = 0; i < 50; ++i) x.set(i, 2.5);
        x.set(50 + 49, std::numeric_limits<double>::quiet_NaN());
      };
      add("special_values", special);
      if (!backward) {
        Spec offset{dtype, rms, {4, 400}};
        offset.mean = 100;
        add("large_mean", offset);
      }
    }
  });
}

const OpCases forward("norm", cases<build>);
const OpCases forward_quantized("norm", quantized_cases);
const OpCases backward("norm_bwd", cases<build_backward>);

}  // namespace
}  // namespace flashkernel::conformance
