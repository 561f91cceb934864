// The vector mathematics of the fast CPU kernels (exp, the activations and their slopes, sine and cosine), seen through
// the ops on dense grids of inputs, for every kernel that this machine can run; and what linear promises beyond the
// conformance cases: infinities through split operands, and results that do not depend on the number of threads.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "cpu/simd/gemm_plan.hpp"
#include "flashkernel/device.hpp"
#include "flashkernel/elementwise.hpp"
#include "flashkernel/kernels.hpp"
#include "flashkernel/linear.hpp"
#include "flashkernel/reduce.hpp"
#include "flashkernel/rope.hpp"
#include "test_tensor.hpp"

namespace flashkernel {
namespace {

using namespace testing;

// Runs `body` with each available CPU kernel of the op forced in turn.
template <class F>
void for_each_kernel(const std::string& op, F&& body) {
  const std::string before = forced_kernels();
  int count = 0;
  for (const auto& info : kernels()) {
    if (info.op != op || info.device != DeviceType::kCpu || !info.available) continue;
    SCOPED_TRACE(info.id);
    force_kernels(info.id);
    body(info.id);
    ++count;
  }
  force_kernels(before);
  EXPECT_GE(count, 1);
}

bool refuses_fp32_rows(const std::string& id, std::int64_t rows) {  // what the rows' `supports` say
  return id.find("amx_fp16") != std::string::npos || id.find("amx_stream") != std::string::npos ||
         (id.find("/amx") != std::string::npos && rows < 49);
}

double activation(Activation kind, double x) {
  switch (kind) {
    case Activation::kGeluTanh: return x / (1 + std::exp(-2 * std::sqrt(2 / kPi) * (x + 0.044715 * x * x * x)));
    case Activation::kGelu: return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case Activation::kSilu: return x / (1 + std::exp(-x));
    default: return x;
  }
}

double slope(Activation kind, double x) {
  switch (kind) {
    case Activation::kGeluTanh: {
      const double s = 1 / (1 + std::exp(-2 * std::sqrt(2 / kPi) * (x + 0.044715 * x * x * x)));
      return s + x * s * (1 - s) * 2 * std::sqrt(2 / kPi) * (1 + 3 * 0.044715 * x * x);
    }
    case Activation::kGelu:
      return 0.5 * std::erfc(-x / std::sqrt(2.0)) + x * std::exp(-0.5 * x * x) / std::sqrt(2 * kPi);
    case Activation::kSilu: {
      const double s = 1 / (1 + std::exp(-x));
      return s + x * s * (1 - s);
    }
    default: return 1;
  }
}

const Activation kCurved[] = {Activation::kGeluTanh, Activation::kGelu, Activation::kSilu};

constexpr std::int64_t kGrid = 40001;

TestTensor grid(const Shape& shape, double low, double high) {
  TestTensor x(DType::kFloat32, shape);
  for (std::int64_t i = 0; i < x.numel(); ++i)
    x.set(i, low + (high - low) * static_cast<double>(i) / static_cast<double>(x.numel() - 1));
  return x;
}

TEST(VectorMath, ActivationsOnADenseGrid) {
  const TestTensor x = grid({kGrid, 1}, -20, 20);
  TestTensor weight(DType::kFloat32, {1, 1}), out(DType::kFloat32, {kGrid, 1});
  weight.fill(1);
  for_each_kernel("linear", [&](const std::string& id) {
    if (refuses_fp32_rows(id, kGrid)) return;
    for (const Activation kind : kCurved) {
      linear(x, weight, {}, out, {}, kind);
      double worst = 0;
      for (std::int64_t i = 0; i < kGrid; ++i) {
        const double want = activation(kind, x[i]);
        worst = std::max(worst, std::abs(out[i] - want) / std::max(1.0, std::abs(want)));
      }
      EXPECT_LE(worst, 3e-7) << static_cast<int>(kind);
    }
  });
}

TEST(VectorMath, NegativeTailsKeepRelativeAccuracy) {
  const TestTensor x = grid({kGrid, 1}, -12, -1);
  TestTensor weight(DType::kFloat32, {1, 1}), out(DType::kFloat32, {kGrid, 1});
  weight.fill(1);
  for_each_kernel("linear", [&](const std::string& id) {
    if (refuses_fp32_rows(id, kGrid) || id.find("scalar") != std::string::npos)
      return;  // the oracle's 1 + tanh cancels
    for (const Activation kind : kCurved) {
      linear(x, weight, {}, out, {}, kind);
      // exp of an argument rounded at size 72 to 120 carries 72 * 2^-24 of it; subnormal results (below 1e-37) are
      // coarser.
      for (std::int64_t i = 0; i < kGrid; ++i) {
        const double want = activation(kind, x[i]);
        ASSERT_NEAR(out[i], want, 3e-5 * std::abs(want) + 1e-37)
            << "activation " << static_cast<int>(kind) << " at " << x[i];
      }
    }
  });
}

TEST(VectorMath, SlopesOnADenseGrid) {
  const TestTensor pre = grid({kGrid, 1}, -40, 40);
  TestTensor weight(DType::kFloat32, {1, 1}), ones(DType::kFloat32, {kGrid, 1}), grad(DType::kFloat32, {kGrid, 1});
  weight.fill(1), ones.fill(1);
  for_each_kernel("linear_bwd", [&](const std::string& id) {
    if (id.find("amx_fp16") != std::string::npos) return;
    for (const Activation kind : kCurved) {
      linear_backward(ones, pre, weight, pre, {grad, {}, {}}, kind);
      double worst = 0;
      for (std::int64_t i = 0; i < kGrid; ++i) worst = std::max(worst, std::abs(grad[i] - slope(kind, pre[i])));
      EXPECT_LE(worst, 1e-6) << static_cast<int>(kind);
    }
  });
}

TEST(VectorMath, ExponentialsOfSoftmax) {
  const std::int64_t columns = 4097;
  const TestTensor x = grid({8, columns}, -100, 0);
  TestTensor out(DType::kFloat32, {8, columns});
  for_each_kernel("softmax", [&](const std::string&) {
    softmax(x, out);
    for (std::int64_t r = 0; r < 8; ++r) {
      double sum = 0;
      const double top = x[r * columns + columns - 1];
      for (std::int64_t c = 0; c < columns; ++c) sum += std::exp(x[r * columns + c] - top);
      for (std::int64_t c = 0; c < columns; ++c) {
        const double want = std::exp(x[r * columns + c] - top) / sum;
        ASSERT_NEAR(out[r * columns + c], want, 1e-6 * want + 1e-44) << r << " " << c;
      }
    }
  });
}

TEST(VectorMath, AnglesUpTo2To31) {
  // q = (1, 0) turns into (cos, sin); odd strides through the positions meet every quadrant.
  const std::int64_t tokens = 20011;
  TestTensor q(DType::kFloat32, {1, 1, tokens, 2}), out(DType::kFloat32, {1, 1, tokens, 2}),
      positions(DType::kInt64, {tokens});
  for (std::int64_t t = 0; t < tokens; ++t) {
    q.set(2 * t, 1), q.set(2 * t + 1, 0);
    positions.set(t, static_cast<double>(t < 1000 ? t : (t * 107347) % 2147483647));
  }
  for_each_kernel("rope", [&](const std::string&) {
    rope(q, {}, positions, out, {});
    for (std::int64_t t = 0; t < tokens; ++t) {
      // The angle itself is exact here (frequency 1): only the reduction and the series err.
      ASSERT_NEAR(out[2 * t], std::cos(positions[t]), 1.2e-7) << positions[t];
      ASSERT_NEAR(out[2 * t + 1], std::sin(positions[t]), 1.2e-7) << positions[t];
    }
  });
}

TEST(VectorMath, GatesAgreeWithTheActivations) {
  const TestTensor gate = grid({kGrid}, -30, 30);
  TestTensor up(DType::kFloat32, {kGrid}), out(DType::kFloat32, {kGrid});
  up.fill(1);
  for_each_kernel("swiglu", [&](const std::string&) {
    swiglu(gate, up, out);
    for (std::int64_t i = 0; i < kGrid; ++i)
      ASSERT_NEAR(out[i], activation(Activation::kSilu, gate[i]), 3e-7 * std::max(1.0, std::abs(gate[i])));
  });
}

// Split operands turn an infinity into NaN on the way: the kernels must notice and give what plain arithmetic gives.
TEST(LinearKernels, InfinitiesAndHugeValuesSurviveSplitting) {
  const std::int64_t rows = 64, in = 70, outs = 40;
  for (const DType dtype : floating_dtypes()) {
    TestTensor x(dtype, {rows, in}), weight(dtype, {outs, in}), out(dtype, {rows, outs});
    x.random(1), weight.random(2);
    x.set(3 * in + 5, kInf), x.set(17 * in + 69, -kInf), x.set(40 * in, kNaN);
    weight.set(7 * in + 5, kInf), weight.set(9 * in + 11, 0);
    if (dtype == DType::kFloat32) x.set(50 * in + 11, 3.4e38);  // rounds to infinity in bf16
    for_each_kernel("linear", [&](const std::string& id) {
      if (id.find("amx_fp16") != std::string::npos && dtype != DType::kFloat16) return;
      if (id.find("amx_stream") != std::string::npos && dtype != DType::kBFloat16) return;
      linear(x, weight, {}, out, {});
      for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t o = 0; o < outs; ++o) {
          double want = 0;
          for (std::int64_t i = 0; i < in; ++i) want += x[r * in + i] * weight[o * in + i];
          const double got = out[r * outs + o];
          if (std::abs(want) > 3e38 && !std::isinf(want)) continue;  // beyond fp32: inf or the nearest number
          ASSERT_EQ(std::isnan(got), std::isnan(want)) << r << " " << o;
          if (std::isinf(want)) {
            ASSERT_EQ(got, want) << r << " " << o;
          } else if (!std::isnan(want)) {
            ASSERT_NEAR(got, want,
                        dtype == DType::kFloat32 ? 1e-4 + 1e-6 * std::abs(want) : 1e-2 + 1e-2 * std::abs(want));
          }
        }
    });
  }
}

TEST(LinearKernels, SameBitsForAnyNumberOfThreads) {
  const int before = num_threads();
  for (const DType dtype : floating_dtypes())
    for (const std::int64_t rows : {1, 8, 70, 600}) {
      const std::int64_t in = 1100, outs = 333;
      TestTensor x(dtype, {rows, in}), weight(dtype, {outs, in}, Layout::kReversed), out(dtype, {rows, outs});
      x.random(3), weight.random(4);
      for_each_kernel("linear", [&](const std::string& id) {
        if (id.find("scalar") != std::string::npos ||
            (id.find("amx_fp16") != std::string::npos && dtype != DType::kFloat16))
          return;
        if (id.find("/amx") != std::string::npos && rows < 49) return;
        if (id.find("amx_stream") != std::string::npos) return;  // another layout: the next test
        set_num_threads(1);
        linear(x, weight, {}, out, {}, Activation::kGeluTanh);
        const std::vector<double> once = out.values();
        for (const int threads : {2, 3, 5}) {
          set_num_threads(threads);
          out.fill(kNaN);
          linear(x, weight, {}, out, {}, Activation::kGeluTanh);
          ASSERT_EQ(out.values(), once) << threads << " threads, " << rows << " rows";
        }
      });
    }
  set_num_threads(before);
}

// Half a megabyte a run, as many runs for each thread, and every unit in one of them.
TEST(LinearKernels, RunsOfAStreamedWeight) {
  using cpu::stream_grain;
  EXPECT_EQ(stream_grain(36, 16 * 576 * 2, 2), 18);  // a small layer: half for each of two threads
  EXPECT_EQ(stream_grain(36, 16 * 576 * 2, 1), 18);  // 28 fit half a megabyte: two even runs
  EXPECT_EQ(stream_grain(96, 16 * 576 * 2, 2), 24);  // four runs, not three of 28 and one of 12
  EXPECT_EQ(stream_grain(3072, 16 * 576 * 2, 2), 28);
  EXPECT_EQ(stream_grain(128, 16 * 8192 * 4, 2), 1);   // a unit is half a megabyte
  EXPECT_EQ(stream_grain(128, 16 * 65536 * 4, 2), 1);  // and more
  EXPECT_EQ(stream_grain(1, 64, 8), 1);
  EXPECT_EQ(stream_grain(40, 0, 4), 10);  // no k
}

// The weight as the left operand, read as it lies, and as the right one, packed: one order of sums, and so one row of
// the invariant mode for any number of rows.
TEST(LinearKernels, StreamedAndPackedAmxGiveTheSameBits) {
  bool available = false;
  for (const auto& info : kernels()) available |= info.id == "linear/cpu/amx_stream" && info.available;
  if (!available) GTEST_SKIP() << "needs AMX";
  const std::string forced = forced_kernels();
  const int before = num_threads();
  for (const auto& [rows, in, outs] : std::vector<std::array<std::int64_t, 3>>{
           {1, 576, 70}, {1, 1100, 33}, {2, 31, 5}, {5, 64, 200}, {16, 2050, 48}, {17, 96, 64}, {33, 800, 130}}) {
    TestTensor x(DType::kBFloat16, {rows, in}), weight(DType::kBFloat16, {outs, in}, Layout::kPadded);
    TestTensor bias(DType::kFloat32, {outs}), out(DType::kBFloat16, {rows, outs}), pre(DType::kBFloat16, {rows, outs});
    x.random(5), weight.random(6), bias.random(7);
    force_kernels("linear/cpu/amx");
    linear(x, weight, bias, out, pre, Activation::kGeluTanh);
    const std::vector<double> packed = out.values(), packed_pre = pre.values();
    force_kernels("linear/cpu/amx_stream");
    for (const int threads : {1, 3}) {
      set_num_threads(threads);
      out.fill(kNaN), pre.fill(kNaN);
      linear(x, weight, bias, out, pre, Activation::kGeluTanh);
      EXPECT_EQ(out.values(), packed) << rows << " x " << in << " -> " << outs << ", " << threads << " threads";
      EXPECT_EQ(pre.values(), packed_pre) << rows << " x " << in << " -> " << outs << ", " << threads << " threads";
    }
  }
  force_kernels(forced);
  set_num_threads(before);
}

}  // namespace
}  // namespace flashkernel
