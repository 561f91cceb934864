// Cases of quantized_linear: every format, few rows and many, groups of each size, rows that lie apart.
#include <array>
#include <cmath>
#include <limits>

#include "conformance/conformance.hpp"
#include "conformance/each_dtype.hpp"
#include "flashkernel/quantized_linear.hpp"

namespace flashkernel::conformance {
namespace {

constexpr std::int64_t kBlock = 32;  // elements

struct BlockLayout {
  int head, elements;  // bytes
};
constexpr BlockLayout layout_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::kInt4: return {0, 16};
    case WeightFormat::kInt8: return {0, 32};
    case WeightFormat::kQ4_0: return {2, 16};
    case WeightFormat::kQ4_1: return {4, 16};
    case WeightFormat::kQ8_0: return {2, 32};
  }
  return {};
}

struct Spec {
  DType dtype;
  WeightFormat format;
  std::int64_t rows, in, out;
  std::int64_t group = 32;  // of int4 and int8
  bool zeros = false;
  DType scale_dtype = DType::kFloat16;
  Activation activation = Activation::kNone;
  bool bias = true, bias_fp32 = false;
  Layout x = {}, y = {};
  std::int64_t weight_gap = 0, scale_gap = 0;
  bool tiles = false;                            // blocks of 16 rows side by side
  std::function<void(TestTensor&)> adjust = {};  // x
};

// An fp16 number of a block's head: 2^-2 to 2^-1 over the square root of a row, of either sign.
std::uint64_t head_number(Call& call, std::int64_t in, double size) {
  const double magnitude = size * (1 + call.random.uniform()) / std::sqrt(static_cast<double>(in));
  return encode(DType::kFloat16, call.random.uniform() < 0.5 ? -magnitude : magnitude);
}

void fill_weight(Call& call, const Spec& spec, TestTensor& weight) {
  const auto byte = [&] { return static_cast<double>(call.random.integer(0, 255)); };
  if (spec.format == WeightFormat::kInt8) return;  // its values are random as they are
  std::vector<double> bytes;
  const BlockLayout layout = layout_of(spec.format);
  const std::int64_t blocks = spec.out * (spec.in / kBlock);
  for (std::int64_t b = 0; b < blocks; ++b) {
    for (int i = 0; i < layout.head; i += 2) {
      const double size = layout.elements == 32 ? 1.0 / 64 : (i == 0 ? 1.0 / 8 : 1);
      const std::uint64_t bits = head_number(call, spec.in, size);
      bytes.push_back(static_cast<double>(bits & 255));
      bytes.push_back(static_cast<double>(bits >> 8));
    }
    for (int i = 0; i < layout.elements; ++i) bytes.push_back(byte());
  }
  if (spec.tiles) {
    // 2 bytes of a head and 4 bytes of elements of each of 16 rows, in turn.
    const std::int64_t size = layout.head + layout.elements, row = spec.in / kBlock * size;
    std::vector<double> tiles;
    for (std::int64_t o = 0; o < spec.out; o += 16)
      for (std::int64_t b = 0; b < row; b += size)
        for (std::int64_t at = 0; at < size;) {
          const std::int64_t unit = at < layout.head ? 2 : 4;
          for (std::int64_t r = o; r < o + 16; ++r)
            for (std::int64_t i = 0; i < unit; ++i)
              tiles.push_back(bytes[static_cast<std::size_t>(r * row + b + at + i)]);
          at += unit;
        }
    bytes = std::move(tiles);
  }
  weight.fill(bytes);
}

void build(Call& call, const Spec& spec) {
  const bool int8 = spec.format == WeightFormat::kInt8, gguf = layout_of(spec.format).head > 0;
  const BlockLayout layout = layout_of(spec.format);
  const std::int64_t bytes = int8 ? spec.in : spec.in / kBlock * (layout.head + layout.elements);
  TestTensor& x = call.input("x", spec.dtype, {spec.rows, spec.in}, spec.x);
  const std::int64_t blocks = spec.in / kBlock;
  TestTensor& weight =
      spec.tiles
          ? call.input("weight", DType::kUInt8, {spec.out / 16, blocks, 16 * (layout.head + layout.elements)})
          : call.input("weight", int8 ? DType::kInt8 : DType::kUInt8, {spec.out, bytes}, {{}, {}, spec.weight_gap});
  if (!weight.blank()) fill_weight(call, spec, weight);
  TestTensor *scales = nullptr, *zeros = nullptr;
  if (!gguf) {
    const Shape groups{spec.out, spec.in > 0 ? spec.in / spec.group : 1};
    const Layout apart{{}, {}, spec.scale_gap};
    scales = &call.input("scales", spec.scale_dtype, groups, apart);
    const double size = (int8 ? 1.0 / 40 : 1.0 / 6) / std::sqrt(static_cast<double>(spec.in > 0 ? spec.in : 1));
    scales->transform([=](double value) { return size * value; });
    if (spec.zeros) {
      zeros = &call.input("zeros", spec.scale_dtype, groups, apart);
      zeros->transform([=](double value) { return std::round(int8 ? 20 * value : 7.5 + 2 * value); });
    }
  }
  const DType bias_dtype = spec.bias_fp32 ? DType::kFloat32 : spec.dtype;
  TestTensor* bias = spec.bias ? &call.input("bias", bias_dtype, {spec.out}) : nullptr;
  TestTensor& out = call.output("out", spec.dtype, {spec.rows, spec.out}, spec.y);
  if (spec.adjust) spec.adjust(x);
  const auto view = [](const TestTensor* tensor) { return tensor ? tensor->view() : TensorView(); };
  const WeightFormat format = spec.format;
  const Activation activation = spec.activation;
  call.run = [=, &x, &weight, &out](const ExecutionContext& context) {
    quantized_linear(x.view(), weight.view(), view(scales), view(zeros), view(bias), out.view(), format, activation,
                     context);
  };
}

struct Kind {
  const char* name;
  WeightFormat format;
  std::int64_t group;
  bool zeros;
  DType scale_dtype;
};
constexpr Kind kKinds[] = {
    {"q4_0", WeightFormat::kQ4_0, 32, false, DType::kFloat16},
    {"q4_1", WeightFormat::kQ4_1, 32, false, DType::kFloat16},
    {"q8_0", WeightFormat::kQ8_0, 32, false, DType::kFloat16},
    {"int4_g32", WeightFormat::kInt4, 32, false, DType::kFloat32},
    {"int4_g64_zeros", WeightFormat::kInt4, 64, true, DType::kBFloat16},
    {"int4_g128", WeightFormat::kInt4, 128, false, DType::kFloat16},
    {"int4_g128_zeros", WeightFormat::kInt4, 128, true, DType::kFloat16},
    {"int8_g32_zeros", WeightFormat::kInt8, 32, true, DType::kFloat32},
    {"int8_g128", WeightFormat::kInt8, 128, false, DType::kFloat16},
    {"int8_row", WeightFormat::kInt8, 0, false, DType::kFloat32},  // one group for the row
};

void cases(CaseList& list) {
  each_dtype([&](DType dtype, const std::string& suffix) {
    const auto add = [&](const std::string& name, const Spec& spec) {
      list.add(name + suffix, [=](Call& call) { build(call, spec); });
    };
    for (const Kind& kind : kKinds) {
      const auto spec = [&](std::int64_t rows, std::int64_t in, std::int64_t out) {
        return Spec{dtype, kind.format, rows, in, out, kind.group > 0 ? kind.group : in, kind.zeros, kind.scale_dtype};
      };
      const std::string name = kind.name;
      // Few rows, and sizes round tiles of 8, 16 and 64; k of one block, of several groups, of several chunks.
      for (const auto& [rows, in, out] : std::vector<std::array<std::int64_t, 3>>{{1, 128, 64},
                                                                                  {1, 1152, 131},
                                                                                  {2, 256, 48},
                                                                                  {3, 128, 65},
                                                                                  {4, 384, 17},
                                                                                  {7, 640, 200},
                                                                                  {8, 256, 129},
                                                                                  {9, 128, 8},
                                                                                  {16, 512, 72},
                                                                                  {33, 256, 130},
                                                                                  {64, 1024, 64},
                                                                                  {130, 896, 40}})
        add(name + "_r" + std::to_string(rows) + "_i" + std::to_string(in) + "_o" + std::to_string(out),
            spec(rows, in, out));
      for (const Activation activation : {Activation::kGeluTanh, Activation::kGelu, Activation::kSilu})
        for (const std::int64_t rows : {1, 19}) {
          Spec own = spec(rows, 128, 70);
          own.activation = activation;
          own.bias_fp32 = rows > 1;
          add(name + "_activation" + std::to_string(static_cast<int>(activation)) + "_r" + std::to_string(rows), own);
        }
      for (const std::int64_t rows : {2, 12}) {
        Spec gaps = spec(rows, 256, 50);
        gaps.bias = false;
        gaps.x.gap = 3, gaps.x.offset = 1;
        gaps.y.gap = 7, gaps.y.offset = 1;
        gaps.weight_gap = 5, gaps.scale_gap = 3;
        add(name + "_gaps_r" + std::to_string(rows), gaps);
      }
      // More chunks of k than a warp has under way, by two warps: the emulator's four multiprocessors are full of
      // blocks.
      for (const std::int64_t rows : {1, 20})
        if (kind.format == WeightFormat::kQ8_0 || name == "int4_g64_zeros")
          add(name + "_long_r" + std::to_string(rows), spec(rows, 2816, rows == 1 ? 384 : 768));
      add(name + "_no_rows", spec(0, 128, 5));
      Spec special = spec(17, 128, 30);
      special.adjust = [](TestTensor& x) {  // each in a row of its own
        x.set(3 * 128 + 5, std::numeric_limits<double>::quiet_NaN());
        for (std::int64_t i = 128; i < 256; ++i) x.set(i, 100 * x.get(i));
      };
      add(name + "_special_values", special);
    }
    // Blocks of 16 rows side by side: fewer rows and more than one of each kernel's passes, a last half of 32 outputs.
    for (const Kind& kind : kKinds) {
      if (layout_of(kind.format).head == 0) continue;
      for (const auto& [rows, in, out] : std::vector<std::array<std::int64_t, 3>>{{1, 128, 64},
                                                                                  {2, 1152, 48},
                                                                                  {3, 32, 16},
                                                                                  {4, 96, 208},
                                                                                  {7, 640, 32},
                                                                                  {9, 576, 80},
                                                                                  {17, 288, 48},
                                                                                  {33, 256, 144},
                                                                                  {64, 1536, 96},
                                                                                  {290, 160, 48}}) {
        Spec spec{dtype, kind.format, rows, in, out};
        spec.tiles = true;
        spec.bias = rows != 4;
        spec.bias_fp32 = rows == 9;
        if (rows == 7 || rows == 33) spec.activation = Activation::kSilu;
        if (rows == 3 || rows == 17) {
          spec.x.gap = 3, spec.x.offset = 1;
          spec.y.gap = 7, spec.y.offset = 1;
        }
        if (rows == 9)
          spec.adjust = [](TestTensor& x) {  // blocks far apart in size, one of zeros
            for (std::int64_t i = 0; i < 32; ++i) {
              x.set(2 * 576 + i, 1000 * x.get(2 * 576 + i));
              x.set(4 * 576 + 64 + i, 0);
            }
          };
        if (rows == 64)
          spec.adjust = [](TestTensor& x) { x.set(3 * 1536 + 5, std::numeric_limits<double>::quiet_NaN()); };
        if (rows == 2) spec.adjust = [](TestTensor& x) { x.set(1152 + 700, std::numeric_limits<double>::infinity()); };
        add(std::string(kind.name) + "_tiles_r" + std::to_string(rows) + "_i" + std::to_string(in) + "_o" +
                std::to_string(out),
            spec);
      }
      Spec none{dtype, kind.format, 3, 0, 32};
      none.tiles = true;
      add(std::string(kind.name) + "_tiles_no_in_features", none);
    }
    // Rows of int8 that end within a block; k of none.
    for (const std::int64_t rows : {1, 5, 40})
      add("int8_row_i101_r" + std::to_string(rows),
          {dtype, WeightFormat::kInt8, rows, 101, 37, 101, false, DType::kFloat32});
    // An odd number of blocks in the last chunk of 256.
    for (const std::int64_t rows : {5, 20}) {
      add("int4_odd_r" + std::to_string(rows), {dtype, WeightFormat::kInt4, rows, 288, 33, 32, true});
      add("int8_odd_r" + std::to_string(rows), {dtype, WeightFormat::kInt8, rows, 608, 33, 32, false});
    }
    // Rows of blocks that end within a vector of 16 bytes, and start at multiples of 16.
    struct Padded {
      const char* name;
      WeightFormat format;
      std::int64_t in, gap;
    };
    for (const Padded& padded :
         {Padded{"q4_0", WeightFormat::kQ4_0, 224, 2}, Padded{"q4_0_long", WeightFormat::kQ4_0, 576, 12},
          Padded{"q4_1", WeightFormat::kQ4_1, 96, 4}, Padded{"q8_0", WeightFormat::kQ8_0, 352, 10}})
      for (const std::int64_t rows : {5, 20}) {
        Spec spec{dtype, padded.format, rows, padded.in, 33};
        spec.weight_gap = padded.gap;
        add(std::string(padded.name) + "_padded_r" + std::to_string(rows), spec);
      }
    add("no_in_features_q4_0", {dtype, WeightFormat::kQ4_0, 3, 0, 5});
    add("no_in_features_int8", {dtype, WeightFormat::kInt8, 12, 0, 5});
    Spec far{dtype, WeightFormat::kQ4_0, 2, 64, 33};
    far.x.strides = {kFarStride, 1};
    far.y.strides = {kFarStride, 1};
    add("rows_past_2_31", far);
  });
}

const OpCases registration("quantized_linear", cases);

}  // namespace
}  // namespace flashkernel::conformance
