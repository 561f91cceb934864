// Cases of linear and linear_bwd: both weight layouts, every activation, sizes round the tiles of the matrix kernels.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <tuple>

#include "conformance/conformance.hpp"
#include "conformance/device_memory.hpp"
#include "conformance/each_dtype.hpp"
#include "conformance/linear_sizes.hpp"
#include "flashkernel/linear.hpp"

namespace flashkernel::conformance {
namespace {

struct Spec {
  DType dtype;
  std::int64_t rows, in, out;
  bool transposed = false;  // the weight's out dim is contiguous
  Activation activation = Activation::kNone;
  bool bias = true, bias_fp32 = false, preactivation = false;
  Layout x = {}, y = {}, bias_layout = {};
  std::int64_t weight_gap = 0;
  std::function<void(TestTensor&)> adjust = {};  // x; backward: the pre-activation
};

Layout weight_layout(const Spec& spec) {
  Layout layout;
  if (spec.transposed) layout.order = {1, 0};
  layout.gap = spec.weight_gap;
  return layout;
}

TensorView view_of(const TestTensor* tensor) { return tensor ? tensor->view() : TensorView(); }

void scale(TestTensor& tensor, double factor) {
  tensor.transform([=](double x) { return factor * x; });
}

void build_forward(Call& call, const Spec& spec) {
  TestTensor& x = call.input("x", spec.dtype, {spec.rows, spec.in}, spec.x);
  TestTensor& weight = call.input("weight", spec.dtype, {spec.out, spec.in}, weight_layout(spec));
  scale(weight, 1 / std::sqrt(static_cast<double>(spec.in > 0 ? spec.in : 1)));
  const DType bias_dtype = spec.bias_fp32 ? DType::kFloat32 : spec.dtype;
  TestTensor* bias = spec.bias ? &call.input("bias", bias_dtype, {spec.out}, spec.bias_layout) : nullptr;
  TestTensor& out = call.output("out", spec.dtype, {spec.rows, spec.out}, spec.y);
  TestTensor* saved =
      spec.preactivation ? &call.output("preactivation", spec.dtype, {spec.rows, spec.out}, spec.y) : nullptr;
  if (spec.adjust) spec.adjust(x);
  const Activation activation = spec.activation;
  call.run = [=, &x, &weight, &out](const ExecutionContext& context) {
    linear(x.view(), weight.view(), view_of(bias), out.view(), view_of(saved), activation, context);
  };
}

void build_backward(Call& call, const Spec& spec) {
  TestTensor& grad_out = call.input("grad_out", spec.dtype, {spec.rows, spec.out}, spec.y);
  TestTensor& x = call.input("x", spec.dtype, {spec.rows, spec.in}, spec.x);
  TestTensor& weight = call.input("weight", spec.dtype, {spec.out, spec.in}, weight_layout(spec));
  scale(weight, 1 / std::sqrt(static_cast<double>(spec.out > 0 ? spec.out : 1)));
  TestTensor* saved = nullptr;
  if (spec.activation != Activation::kNone) saved = &call.input("preactivation", spec.dtype, {spec.rows, spec.out});
  if (spec.adjust) spec.adjust(*saved);
  TestTensor& grad_x = call.output("grad_x", spec.dtype, {spec.rows, spec.in}, spec.x);
  TestTensor& grad_weight = call.output("grad_weight", spec.dtype, {spec.out, spec.in}, weight_layout(spec));
  const DType bias_dtype = spec.bias_fp32 ? DType::kFloat32 : spec.dtype;
  TestTensor* grad_bias = nullptr;
  if (spec.bias) {
    // In half precision a kernel may round the gradient of the pre-activation once, which an fp32 sum of it then shows.
    const double factor = spec.bias_fp32 && spec.dtype != DType::kFloat32 ? 400 : 1;  // 400 * 1e-5 = 2^-8
    grad_bias = &call.output("grad_bias", bias_dtype, {spec.out}, {}, factor);
  }
  const Activation activation = spec.activation;
  call.run = [=, &grad_out, &x, &weight, &grad_x, &grad_weight](const ExecutionContext& context) {
    linear_backward(grad_out.view(), x.view(), weight.view(), view_of(saved),
                    {grad_x.view(), grad_weight.view(), view_of(grad_bias)}, activation, context);
  };
}

// Two extents that make more tiles of 128 than the GPU has multiprocessors: 14 x 15, or 7 x 7 where it is an emulated
// one with four. 800 are also more than one block of the CPU's products in each dim (512 x 256 x 768).
std::array<std::int64_t, 2> many_tiles() {
  if (multiprocessors() > 32) return {1700, 1920};
  return {800, 800};
}

void fill(CaseList& list, void (*build)(Call&, const Spec&)) {
  each_dtype([&](DType dtype, const std::string& suffix) {
    const auto add = [&](const std::string& name, const Spec& spec) {
      list.add(name + suffix, [=](Call& call) { build(call, spec); });
    };
    for (const bool transposed : {false, true}) {
      const std::string layout = transposed ? "_in_out" : "_out_in";
      // One row (decode), few rows, and sizes below, at and above tiles of 8, 14, 16, 32 and 64.
      for (const auto& [rows, in, out] : std::vector<std::array<std::int64_t, 3>>{{1, 64, 64},
                                                                                  {1, 1, 1},
                                                                                  {1, 257, 131},
                                                                                  {2, 96, 48},
                                                                                  {3, 33, 65},
                                                                                  {7, 15, 17},
                                                                                  {13, 31, 200},
                                                                                  {16, 64, 32},
                                                                                  {33, 70, 129},
                                                                                  {64, 128, 64},
                                                                                  {65, 300, 40},
                                                                                  {130, 17, 9}})
        add("r" + std::to_string(rows) + "_i" + std::to_string(in) + "_o" + std::to_string(out) + layout,
            {dtype, rows, in, out, transposed});
      // A long sum for few results (split into parts), and more large tiles than a GPU has multiprocessors.
      Spec split{dtype, 70, 1104, 88, transposed, Activation::kGeluTanh};
      split.preactivation = true;
      add("split" + layout, split);
      for (const auto& [in, out] : std::vector<std::array<std::int64_t, 2>>{{2056, 88}, {4104, 200}}) {
        split.in = in, split.out = out;
        add("split_i" + std::to_string(in) + layout, split);
      }
      split.out = 88;
      // The same for as few rows as a decode step has: parts of k in blocks that exchange their sums.
      for (const auto& [rows, in] :
           std::vector<std::array<std::int64_t, 2>>{{1, 264}, {5, 1104}, {16, 520}, {27, 2056}, {64, 1032}}) {
        split.rows = rows, split.in = in, split.bias_fp32 = rows == 5;
        add("split_r" + std::to_string(rows) + "_i" + std::to_string(in) + layout, split);
      }
      list.add("large" + layout + suffix, [=](Call& call) {
        const auto [rows, out] = many_tiles();
        Spec large{dtype, rows, 40, out, transposed, Activation::kGeluTanh};
        large.preactivation = true;
        build(call, large);
      });
      list.add("wide" + layout + suffix, [=](Call& call) {  // some two tiles of 128 a multiprocessor, and a longer sum
        Spec wide{dtype, 500, 328, multiprocessors() > 32 ? 8200 : 504, transposed, Activation::kGeluTanh};
        wide.preactivation = true;
        build(call, wide);
      });
      list.add("large_weight" + layout + suffix, [=](Call& call) {  // the same for the weight's gradient
        const auto [in, out] = many_tiles();
        build(call, {dtype, 40, in, out, transposed});
      });
      for (const Activation activation : {Activation::kGeluTanh, Activation::kGelu, Activation::kSilu})
        for (const std::int64_t rows : {1, 19}) {
          Spec spec{dtype, rows, 40, 70, transposed, activation};
          spec.preactivation = rows > 1;
          spec.bias_fp32 = rows > 1;
          add("activation" + std::to_string(static_cast<int>(activation)) + "_r" + std::to_string(rows) + layout, spec);
        }
      Spec plain{dtype, 9, 48, 50, transposed};
      plain.bias = false;
      add("no_bias" + layout, plain);
      plain.weight_gap = 5;
      plain.x.gap = 3, plain.x.offset = 1;
      plain.y.gap = 7, plain.y.offset = 1;
      add("gaps" + layout, plain);
      Spec far{dtype, 2, 24, 33, transposed};
      far.x.strides = {kFarStride, 1};
      far.y.strides = {kFarStride, 1};
      add("rows_past_2_31" + layout, far);
      add("no_in_features" + layout, {dtype, 3, 0, 5, transposed});
    }
    add("no_rows", {dtype, 0, 12, 5});
  });
}

void forward_cases(CaseList& list) {
  fill(list, build_forward);
  each_dtype([&](DType dtype, const std::string& suffix) {
    // In half precision for a row of sm90a, which must take it.
    const auto add = [&](const std::string& name, const Spec& spec, const std::string& row) {
      Case& added = list.add(name + suffix, [=](Call& call) { build_forward(call, spec); });
      if (dtype != DType::kFloat32) added.is_for(hopper_id("linear", dtype) + row);
    };
    const bool gpu = multiprocessors() > 32;
    for (const FewRowsSize& size : kFewRowsSizes) {
      if (dtype == DType::kFloat32 && size.in > 2112) continue;  // its kernels know no such limit
      const std::int64_t rows = size.rows;
      Spec few{dtype, rows, size.in, gpu ? size.out : size.out_emulated, size.along_out, Activation::kGeluTanh};
      few.preactivation = few.bias_fp32 = rows == 2 || rows == 5 || rows == 11 || rows == 13;
      few.weight_gap = rows == 3 || rows == 6 || rows == 7 || rows == 9 || rows == 64 ? 8 : 0;
      few.x.gap = rows == 4 ? 8 : 0;
      few.y.gap = (8 - few.out % 8) % 8 + few.x.gap;  // rows at multiples of 16 bytes
      const std::string plan = size.plan,
                        kernel = plan.find("parts") == plan.npos ? plan.substr(0, plan.find(' ')) : "parts";
      const std::string row = kernel == "direct" || kernel == "stream" ? kernel : "blocks";
      add("few_" + kernel + "_r" + std::to_string(rows) + "_i" + std::to_string(size.in) + "_o" +
              std::to_string(size.out),
          few, "/few_rows/" + row);
    }
    // The order of the tiles for few rows: as many columns of x as there are, slots of 256 k that end with it or not,
    // and of features less than one a multiprocessor, one tile, two (emulated: more), an eight that is cut.
    const auto in_order = [&](std::int64_t rows, std::int64_t in, std::int64_t out, Activation activation,
                              const std::function<void(Spec&)>& change) {
      Spec spec{dtype, rows, in, out, false, activation};
      change(spec);
      add("in_order_r" + std::to_string(rows) + "_i" + std::to_string(in) + "_o" + std::to_string(out), spec,
          "/few_rows/in_order");
    };
    in_order(1, 64, 8, Activation::kNone, [](Spec& spec) { spec.bias = false; });
    in_order(1, 4096, 96, Activation::kNone, [](Spec&) {});
    in_order(5, 704, 616, Activation::kSilu, [](Spec& spec) { spec.bias_fp32 = spec.preactivation = true; });
    in_order(8, 2048, 128, Activation::kGeluTanh, [](Spec& spec) { spec.weight_gap = 8, spec.y.gap = 8; });
    in_order(11, 1536, gpu ? 9504 : 296, Activation::kGelu, [](Spec& spec) { spec.x.gap = 24; });
    in_order(16, 2112, gpu ? 8600 : 520, Activation::kGeluTanh, [](Spec& spec) { spec.preactivation = true; });
    in_order(27, 1088, gpu ? 5272 : 152, Activation::kSilu, [](Spec& spec) { spec.bias_layout.offset = 1; });
    in_order(64, 1024, 344, Activation::kGeluTanh, [](Spec& spec) { spec.preactivation = true; });
    in_order(40, 320, gpu ? 17003 : 531, Activation::kNone, [](Spec& spec) { spec.y.gap = 5; });
    // The same by the blocks: where k ends within a line, lines in pairs, two blocks a multiprocessor.
    for (const auto& [rows, in, out] :
         {std::tuple{3, 72, 24}, {33, 2048, gpu ? 8192 : 248}, {64, 392, gpu ? 19008 : 576}})
      add("blocks_in_order_r" + std::to_string(rows) + "_i" + std::to_string(in) + "_o" + std::to_string(out),
          {dtype, rows, in, out, false, Activation::kGelu}, "/few_rows/blocks_in_order");
    // Full waves of ping-pong tiles, one to four a multiprocessor, the last rows and columns cut: 2 of 112 columns
    // (216), 3 of 128 (376), 2 or 3 of 144 (280, 432), 2 of 160 (320), 1 or 3 of 168 (168, 504), 2 of 176 (352), 3 or 4
    // of 192 (544, 568, 736). With enough k-tiles of 64 and a bias that the copy engine can fetch a thread of the
    // matrix kernels may own 8 neighbouring results; fewer take 128 or 192 columns.
    const auto waves = [&](const std::string& name, std::int64_t in, std::int64_t out, Activation activation,
                           const std::function<void(Spec&)>& change) {
      Spec spec{dtype, 128 * std::max(multiprocessors(), 4) - 90, in, out, false, activation};
      change(spec);
      add("waves_" + name, spec, "/large/ping_pong");
    };
    const auto without_bias = [](Spec& spec) {
      spec.bias = false;
      spec.weight_gap = spec.x.gap = 8, spec.y.gap = 16;
    };
    waves("o352", 440, 352, Activation::kGeluTanh, [](Spec& spec) { spec.preactivation = true; });
    waves("o352_none", 392, 352, Activation::kNone, without_bias);
    waves("o320", 392, 320, Activation::kGeluTanh, [](Spec& spec) { spec.preactivation = true; });
    waves("o320_none", 392, 320, Activation::kNone, without_bias);
    waves("o320_gelu", 392, 320, Activation::kGelu, [](Spec& spec) { spec.y.gap = 8; });
    waves("o544", 264, 544, Activation::kGeluTanh, [](Spec& spec) { spec.preactivation = true; });
    waves("o544_none", 264, 544, Activation::kNone, without_bias);
    waves("o544_silu", 296, 544, Activation::kSilu, [](Spec& spec) { spec.weight_gap = 24; });
    waves("o736", 264, 736, Activation::kNone, [](Spec&) {});
    waves("o352_short", 104, 352, Activation::kGeluTanh, [](Spec& spec) { spec.preactivation = true; });
    waves("o320_bias_fp32", 392, 320, Activation::kGeluTanh, [](Spec& spec) { spec.bias_fp32 = true; });
    waves("o544_bias_unaligned", 264, 544, Activation::kSilu, [](Spec& spec) { spec.bias_layout.offset = 1; });
    waves("o376", 104, 376, Activation::kGeluTanh, [](Spec& spec) { spec.preactivation = true; });
    waves("o568", 104, 568, Activation::kGeluTanh, [](Spec& spec) { spec.preactivation = true; });
    waves("o376_none", 72, 376, Activation::kNone, [](Spec& spec) { spec.weight_gap = 8, spec.bias = false; });
    waves("o376_long", 440, 376, Activation::kGeluTanh, [](Spec& spec) { spec.preactivation = true; });
    waves("o216", 392, 216, Activation::kGeluTanh, [](Spec& spec) { spec.preactivation = true; });
    waves("o224_none", 456, 224, Activation::kNone, without_bias);
    waves("o280", 392, 280, Activation::kSilu, [](Spec& spec) { spec.preactivation = true; });
    waves("o432_none", 392, 432, Activation::kNone, without_bias);
    waves("o168", 392, 168, Activation::kGelu, [](Spec& spec) { spec.preactivation = true; });
    waves("o504", 840, 504, Activation::kNone, [](Spec& spec) { spec.y.gap = 8; });
    waves("o280_bias_fp32", 392, 280, Activation::kGeluTanh, [](Spec& spec) { spec.bias_fp32 = true; });
    // Results of 192 columns leave by the copy engine: without a pre-activation, with tanh-GELU or no activation.
    waves("o544_long", 1544, 544, Activation::kGeluTanh, [](Spec& spec) { spec.y.gap = 8; });
    waves("o544_long_silu", 1544, 544, Activation::kSilu, [](Spec&) {});
    // They do not where tiles have fewer rows than a copy brings: three tiles of 192 columns a multiprocessor.
    add("short_rows", {dtype, 100, 392, gpu ? 76032 : 2304, false, Activation::kNone}, "/large/ping_pong");
    for (const LinearEdge& edge : kLinearEdges) {
      Spec edges{dtype,   gpu ? kEdgeRows : kEdgeRowsEmulated,
                 kEdgeIn, gpu ? edge.out : edge.out_emulated,
                 false,   Activation::kGeluTanh};
      add("edges_o" + std::to_string(edge.out), edges, "/large/ping_pong");
      if (edge.columns != 192) continue;
      edges.activation = Activation::kNone;
      add("edges_none_o" + std::to_string(edge.out), edges, "/large/ping_pong");
    }
    Spec wide{dtype, 500, 392, gpu ? 8160 : 480, false, Activation::kGeluTanh};
    add("wide_32", wide, "/large/ping_pong");  // see "wide"; a multiple of 32
    // Seven rows of ping-pong tiles, walked in groups of four and three: of 112, 144 and 192 columns on a GPU.
    for (const std::int64_t out : {3584, 2560, 3456}) {
      const Spec groups{dtype, 782, 392, gpu ? out : out / 8, false, Activation::kGeluTanh};
      add("groups_o" + std::to_string(out), groups, "/large/ping_pong");
    }
    // A tile or two whose k the blocks of a cluster share, in 3 to 8 parts; the last three, where the GPU is an
    // emulated one, of 128 columns. k's tail, rows and columns that end within a tile, every way out.
    const auto cluster = [&](std::int64_t rows, std::int64_t in, std::int64_t out, Activation activation,
                             const std::function<void(Spec&)>& change) {
      Spec spec{dtype, rows, in, out, false, activation};
      change(spec);
      add("cluster_r" + std::to_string(rows) + "_i" + std::to_string(in) + "_o" + std::to_string(out), spec,
          "/large/cluster");
    };
    cluster(70, 720, 88, Activation::kGelu, [](Spec& spec) { spec.preactivation = spec.bias_fp32 = true; });
    cluster(130, 760, 80, Activation::kNone, [](Spec& spec) { spec.bias = false; });
    cluster(100, 1000, 96, Activation::kSilu,
            [](Spec& spec) { spec.weight_gap = 8, spec.x.gap = 24, spec.y.gap = 16; });
    cluster(70, 2872, 184, Activation::kGeluTanh, [](Spec& spec) { spec.preactivation = true, spec.y.gap = 8; });
    cluster(129, 1480, 72, Activation::kNone, [](Spec& spec) { spec.bias_layout.offset = 1; });
    cluster(128, 4040, 88, Activation::kGeluTanh, [](Spec& spec) { spec.preactivation = true; });
    cluster(120, 1032, 248, Activation::kGeluTanh, [](Spec& spec) { spec.preactivation = true; });
    cluster(68, 2056, 232, Activation::kGelu, [](Spec&) {});
    cluster(96, 2872, 240, Activation::kSilu, [](Spec& spec) { spec.bias_fp32 = spec.preactivation = true; });
    // 5 parts; 5 of 128 columns (emulated: 6); 8 of 128.
    cluster(190, 2424, gpu ? 792 : 88, Activation::kGeluTanh, [](Spec& spec) { spec.preactivation = true; });
    cluster(gpu ? 190 : 60, gpu ? 3960 : 1480, gpu ? 1352 : 232, Activation::kSilu, [](Spec&) {});
    cluster(190, 3960, gpu ? 872 : 88, Activation::kNone, [](Spec& spec) { spec.y.gap = 8; });
    // Two parts of as many tiles as find room in pairs.
    cluster(500, 1480, gpu ? 1000 : 184, Activation::kGeluTanh, [](Spec& spec) { spec.preactivation = true; });
    Spec broadcast{dtype, 21, 40, 30};
    broadcast.x.expanded = {0};
    list.add("broadcast_rows" + suffix, [=](Call& call) { build_forward(call, broadcast); });
    for (const Activation activation :
         {Activation::kNone, Activation::kGeluTanh, Activation::kGelu, Activation::kSilu}) {
      Spec special{dtype, 17, 40, 30, false, activation};
      special.preactivation = true;
      special.adjust = [](TestTensor& x) {  // row 16: +inf or -inf by the weight's sign; rows 1 and 2: far out
        x.set(3 * 40 + 5, std::numeric_limits<double>::quiet_NaN());
        x.set(16 * 40 + 39, std::numeric_limits<double>::infinity());
        for (std::int64_t i = 40; i < 120; ++i) x.set(i, (i < 80 ? 8 : 200) * x.get(i));
      };
      list.add("special_values_activation" + std::to_string(static_cast<int>(activation)) + suffix,
               [=](Call& call) { build_forward(call, special); });
    }
    // Not in the rows beside them, whatever shares a matrix instruction.
    for (const std::int64_t rows : {8, 4}) {
      const std::int64_t in = rows == 4 ? 4640 : 4096, out = rows == 4 ? (gpu ? 4760 : 152) : (gpu ? 13208 : 408);
      Spec apart{dtype, rows, in, out, false, Activation::kSilu};
      apart.adjust = [in](TestTensor& x) {
        for (std::int64_t i = 0; i < in; ++i)
          x.set(in * (i % 2 == 0 ? 1 : 2) + i, std::numeric_limits<double>::quiet_NaN());
      };
      add("special_values_few_stream_r" + std::to_string(rows), apart, "/few_rows/stream");
    }
  });
}

void backward_cases(CaseList& list) {
  fill(list, build_backward);
  each_dtype([&](DType dtype, const std::string& suffix) {
    for (const bool transposed : {false, true}) {
      // Few tiles of results, each a sum long enough to be cut into parts: of the weight's gradient and of x's.
      const Spec of_weight{dtype, 2600, 72, 136, transposed}, of_x{dtype, 70, 88, 2120, transposed};
      const std::string layout = transposed ? "_in_out" : "_out_in";
      list.add("long_sum_weight" + layout + suffix, [=](Call& call) { build_backward(call, of_weight); });
      list.add("long_sum_x" + layout + suffix, [=](Call& call) { build_backward(call, of_x); });
      // The same in fewer parts: blocks of one cluster.
      for (const std::int64_t sum : {704, 1096, 1544})
        for (const Spec& spec : {Spec{dtype, sum - 3, 72, 136, transposed}, Spec{dtype, 70, 88, sum, transposed}})
          list.add("sum_of_" + std::to_string(sum) + (spec.rows == 70 ? "_x" : "_weight") + layout + suffix,
                   [=](Call& call) { build_backward(call, spec); });
    }
    for (const Activation activation : {Activation::kGeluTanh, Activation::kGelu, Activation::kSilu}) {
      Spec special{dtype, 17, 40, 30, false, activation};
      special.adjust = [](TestTensor& preactivation) {
        preactivation.set(3 * 30 + 5, std::numeric_limits<double>::quiet_NaN());
        preactivation.set(4 * 30 + 5, std::numeric_limits<double>::infinity());
        preactivation.set(5 * 30 + 9, -std::numeric_limits<double>::infinity());
        for (std::int64_t i = 6 * 30; i < 8 * 30; ++i) preactivation.set(i, 100 * preactivation.get(i));
      };
      list.add("special_values_activation" + std::to_string(static_cast<int>(activation)) + suffix,
               [=](Call& call) { build_backward(call, special); });
    }
  });
}

const OpCases forward("linear", forward_cases);
const OpCases backward("linear_bwd", backward_cases);

}  // namespace
}  // namespace flashkernel::conformance
