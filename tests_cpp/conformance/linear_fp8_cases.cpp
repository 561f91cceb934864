// Cases of linear_fp8: every kind of scale, few rows and many, sizes round tiles, rows that lie apart; and of
// quantize_fp8_blocks.
#include <array>
#include <cmath>
#include <limits>

#include "conformance/conformance.hpp"
#include "conformance/each_dtype.hpp"
#include "flashkernel/linear_fp8.hpp"

namespace flashkernel::conformance {
namespace {

constexpr std::int64_t kBlock = 128;
std::int64_t blocks_of(std::int64_t elements) { return (elements + kBlock - 1) / kBlock; }

enum class Scales { kBlocks, kRows, kNumber, kBlocksOfRows };  // of the weight; those of x are of blocks in the last

struct Spec {
  DType dtype;
  Scales scales;
  std::int64_t rows, in, out;
  Activation activation = Activation::kNone;
  bool bias = true, bias_fp32 = false;
  std::int64_t x_gap = 0, weight_gap = 0, out_gap = 0;
  bool columns = false;  // x's scales: rows lie side by side
  bool nan = false;
};

Shape weight_scales(const Spec& s) {
  switch (s.scales) {
    case Scales::kBlocks: return {blocks_of(s.out), blocks_of(s.in)};
    case Scales::kRows: return {s.out, 1};
    case Scales::kNumber: return {1};
    default: return {s.out, blocks_of(s.in)};
  }
}

Shape x_scales(const Spec& s) {
  switch (s.scales) {
    case Scales::kRows: return {s.rows, 1};
    case Scales::kNumber: return {};
    default: return {s.rows, blocks_of(s.in)};
  }
}

void build(Call& call, const Spec& spec) {
  TestTensor& x = call.input("x", DType::kFloat8E4M3, {spec.rows, spec.in}, {{}, {}, spec.x_gap});
  TestTensor& weight = call.input("weight", DType::kFloat8E4M3, {spec.out, spec.in}, {{}, {}, spec.weight_gap});
  const bool turned = spec.columns && spec.scales != Scales::kNumber;
  const Layout layout = turned ? Layout{{}, {1, 0}} : Layout{};
  TestTensor& x_scale = call.input("x_scale", DType::kFloat32, x_scales(spec), layout);
  TestTensor& weight_scale = call.input("weight_scale", DType::kFloat32, weight_scales(spec));
  // Elements are 40 times unit normal ones: results are, as a rule, between 0.2 and 4.
  x_scale.transform([](double value) { return (0.3 + std::fabs(value)) / 40; });
  const double root = std::sqrt(static_cast<double>(spec.in > 0 ? spec.in : 1));
  weight_scale.transform([=](double value) { return (0.3 + std::fabs(value)) / 40 / root; });
  if (spec.nan && !x.blank()) {
    std::int64_t i = 0;
    x.transform([&](double value) { return i++ == spec.in + 5 ? std::numeric_limits<double>::quiet_NaN() : value; });
  }
  TestTensor* bias =
      spec.bias ? &call.input("bias", spec.bias_fp32 ? DType::kFloat32 : spec.dtype, {spec.out}) : nullptr;
  // Tensor cores of 9.0 add 8-bit products with some 14 bits: 2^-13 of the largest of 32 products, four times for each
  // 128 of k.
  const double factor = spec.dtype == DType::kFloat32 ? 60 : 1;
  TestTensor& out = call.output("out", spec.dtype, {spec.rows, spec.out}, {{}, {}, spec.out_gap}, factor);
  const Activation activation = spec.activation;
  call.run = [=, &x, &weight, &x_scale, &weight_scale, &out](const ExecutionContext& context) {
    linear_fp8(x.view(), weight.view(), x_scale.view(), weight_scale.view(), bias ? bias->view() : TensorView(),
               out.view(), activation, context);
  };
}

void cases(CaseList& list) {
  each_dtype([&](DType dtype, const std::string& suffix) {
    const auto add = [&](const std::string& name, const Spec& spec) -> Case& {
      return list.add(name + suffix, [=](Call& call) { build(call, spec); });
    };
    constexpr std::pair<const char*, Scales> kScales[] = {{"blocks", Scales::kBlocks},
                                                          {"rows", Scales::kRows},
                                                          {"number", Scales::kNumber},
                                                          {"blocks_of_rows", Scales::kBlocksOfRows}};
    for (const auto& [name, scales] : kScales)
      for (const auto& [rows, in, out] : std::vector<std::array<std::int64_t, 3>>{{1, 128, 64},
                                                                                  {2, 1024, 200},
                                                                                  {7, 400, 137},
                                                                                  {8, 2304, 128},
                                                                                  {12, 656, 72},
                                                                                  {30, 144, 256},
                                                                                  {64, 1040, 320},
                                                                                  {100, 512, 192},
                                                                                  {130, 384, 448}})
        add(std::string(name) + "_r" + std::to_string(rows) + "_i" + std::to_string(in) + "_o" + std::to_string(out),
            Spec{dtype, scales, rows, in, out});
    // Tiles of 192 and of 128 columns, the last one of which begins within a block of scales; two tiles of rows.
    for (const auto& [rows, in, out] : std::vector<std::array<std::int64_t, 3>>{{300, 640, 832}, {257, 272, 192}})
      for (const auto& [name, scales] : kScales)
        if (scales != Scales::kBlocksOfRows)
          add(std::string("tiles_") + name + "_r" + std::to_string(rows) + "_o" + std::to_string(out),
              Spec{dtype, scales, rows, in, out})
              .is_for("linear_fp8/cuda/sm90a/tiles");
    for (const Activation activation : {Activation::kGeluTanh, Activation::kGelu, Activation::kSilu})
      for (const std::int64_t rows : {3, 140}) {
        Spec spec{dtype, Scales::kBlocks, rows, 256, 320};
        spec.activation = activation;
        spec.bias_fp32 = rows > 3;
        add("activation" + std::to_string(static_cast<int>(activation)) + "_r" + std::to_string(rows), spec);
      }
    Spec apart{dtype, Scales::kBlocks, 33, 384, 256};
    apart.x_gap = 16, apart.weight_gap = 48, apart.out_gap = 8, apart.columns = true, apart.bias = false;
    add("apart_columns", apart);
    Spec odd = apart;  // rows that no copy engine takes
    odd.x_gap = 5, odd.weight_gap = 3, odd.out_gap = 1;
    add("odd_gaps", odd);
    Spec nan{dtype, Scales::kBlocks, 20, 256, 128};
    nan.nan = true;
    add("nan", nan);
    nan.rows = 150;
    add("nan_many", nan);
    add("no_rows", Spec{dtype, Scales::kBlocks, 0, 256, 128});
    add("no_features", Spec{dtype, Scales::kBlocks, 5, 0, 64});
    add("no_outputs", Spec{dtype, Scales::kBlocks, 5, 128, 0});
    // One that becomes 8 bits on the way.
    for (const std::int64_t rows : {5, 140})
      list.add("wider_r" + std::to_string(rows) + suffix, [=](Call& call) {
        TestTensor& x = call.input("x", dtype, {rows, 336}, {{}, {}, 3});
        TestTensor& weight = call.input("weight", DType::kFloat8E4M3, {192, 336});
        TestTensor& scale = call.input("weight_scale", DType::kFloat32, {2, 3});
        scale.transform([](double value) { return (0.3 + std::fabs(value)) / 40 / 18; });
        TestTensor& out = call.output("out", dtype, {rows, 192}, {}, dtype == DType::kFloat32 ? 60 : 1);
        call.run = [&](const ExecutionContext& context) {
          linear_fp8(x.view(), weight.view(), {}, scale.view(), {}, out.view(), Activation::kNone, context);
        };
      });
  });
}

void quantize_cases(CaseList& list) {
  each_dtype([&](DType dtype, const std::string& suffix) {
    const auto add = [&](const std::string& name, std::int64_t rows, std::int64_t features, std::int64_t gap,
                         bool columns, bool special) {
      list.add(name + suffix, [=](Call& call) {
        TestTensor& x = call.input("x", dtype, {rows, features}, {{}, {}, gap});
        if (special && !x.blank()) {
          std::int64_t i = 0;
          constexpr double kInfinity = std::numeric_limits<double>::infinity();
          x.transform([&](double value) {
            const std::int64_t at = i++;
            if (at == 3) return kInfinity;
            if (at == 130) return std::numeric_limits<double>::quiet_NaN();
            return at >= 256 && at < 384 ? 0.0 : value;
          });
        }
        TestTensor& out = call.output("out", DType::kFloat8E4M3, {rows, features}, {{}, {}, gap});
        TestTensor& scales = call.output("scales", DType::kFloat32, {rows, blocks_of(features)},
                                         columns ? Layout{{}, {1, 0}} : Layout{});
        call.run = [&](const ExecutionContext& context) {
          quantize_fp8_blocks(x.view(), out.view(), scales.view(), context);
        };
      });
    };
    add("whole", 5, 384, 0, false, false);
    add("columns", 9, 256, 0, true, false);
    add("tail", 3, 200, 0, false, false);
    add("gaps", 17, 128, 8, false, false);
    add("odd_gaps", 2, 130, 3, true, false);
    add("one_element", 3, 1, 0, false, false);
    add("special", 2, 640, 0, false, true);
    add("no_rows", 0, 128, 0, false, false);
  });
}

const OpCases registration("linear_fp8", cases);
const OpCases quantize_registration("quantize_fp8_blocks", quantize_cases);

}  // namespace
}  // namespace flashkernel::conformance
