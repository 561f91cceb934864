// rope and rope_table against complex rotation in extended precision.
#include "flashkernel/rope.hpp"

#include <gtest/gtest.h>

#include "flashkernel/error.hpp"
#include "test_tensor.hpp"

namespace flashkernel {
namespace {

using namespace testing;

struct Case {
  std::int64_t rotary_dim;
  bool interleaved, inverse;
  double theta = 10000.0;
  const TestTensor* inv_freq = nullptr;
};

/// [batch, heads, seq, head_dim] rotated by position(b, t), in long double.
template <class Position>
std::vector<double> reference(const TestTensor& x, const Case& c, Position position) {
  const std::int64_t heads = x.shape()[1], seq = x.shape()[2], dim = x.shape()[3];
  auto values = x.values();
  for (std::int64_t row = 0; row < x.numel() / dim; ++row) {
    const std::int64_t b = row / (heads * seq), t = row % seq;
    for (std::int64_t p = 0; p < c.rotary_dim / 2; ++p) {
      const long double frequency =
          c.inv_freq ? (*c.inv_freq)[p] : std::pow(static_cast<long double>(c.theta), -2.0L * p / c.rotary_dim);
      const long double angle = (c.inverse ? -1 : 1) * static_cast<long double>(position(b, t)) * frequency;
      const auto first = static_cast<std::size_t>(row * dim + (c.interleaved ? 2 * p : p));
      const std::size_t second = first + (c.interleaved ? 1 : static_cast<std::size_t>(c.rotary_dim / 2));
      const long double a = values[first], d = values[second];
      values[first] = static_cast<double>(a * std::cos(angle) - d * std::sin(angle));
      values[second] = static_cast<double>(a * std::sin(angle) + d * std::cos(angle));
    }
  }
  return values;
}

RopeOptions options_of(const Case& c) {
  RopeOptions options;
  options.theta = c.theta;
  options.rotary_dim = c.rotary_dim;
  options.interleaved = c.interleaved;
  options.inverse = c.inverse;
  if (c.inv_freq) options.inv_freq = *c.inv_freq;
  return options;
}

TEST(Rope, MatchesTheRotationForEveryDtypeLayoutAndForm) {
  std::uint64_t seed = 1;
  for (const DType dtype : floating_dtypes())
    for (const Layout layout : row_layouts())
      for (const bool interleaved : {false, true})
        for (const bool inverse : {false, true})
          for (const std::int64_t rotary : {0, 2, 10, 34}) {
            SCOPED_TRACE(std::string(dtype_name(dtype)) + " rotary " + std::to_string(rotary));
            const Case c{rotary, interleaved, inverse};
            TestTensor q(dtype, {2, 5, 7, 34}, layout), k(dtype, {2, 3, 7, 34}, Layout::kPadded);
            TestTensor q_out(dtype, {2, 5, 7, 34}, Layout::kSwapped), k_out(dtype, {2, 3, 7, 34}, layout);
            TestTensor positions(seed % 2 ? DType::kInt32 : DType::kInt64, {2, 7});
            q.random(seed++), k.random(seed++);
            for (std::int64_t i = 0; i < 14; ++i) positions.set(i, static_cast<double>((i * 7919) % 4001));
            rope(q, k, positions, q_out, k_out, options_of(c));
            const auto position = [&](std::int64_t b, std::int64_t t) { return positions[b * 7 + t]; };
            expect_close(q_out, reference(q, c, position), 1e-6, "q");
            expect_close(k_out, reference(k, c, position), 1e-6, "k");
          }
}

TEST(Rope, OddHeadDimTakesAPartialRotation) {
  const Case c{16, false, false};
  TestTensor q(DType::kFloat32, {1, 2, 3, 33}), out(DType::kFloat32, {1, 2, 3, 33});
  q.random(1);
  rope(q, {}, {}, out, {}, options_of(c));
  expect_close(out, reference(q, c, [](auto, auto t) { return t; }), 1e-6);
}

TEST(Rope, PositionsDefaultToZeroOneTwoAndBroadcast) {
  const Case c{8, false, false};
  TestTensor q(DType::kFloat32, {2, 2, 5, 8}), out(DType::kFloat32, {2, 2, 5, 8});
  q.random(1);
  const auto arange = reference(q, c, [](auto, auto t) { return t; });
  rope(q, {}, {}, out, {});
  expect_close(out, arange, 1e-6);
  for (const Shape& shape : {Shape{5}, Shape{1, 5}}) {
    TestTensor positions(DType::kInt64, shape);
    positions.fill({0, 1, 2, 3, 4});
    out.fill(kNaN);
    rope(q, {}, positions, out, {});
    expect_close(out, arange, 1e-6);
  }
  TestTensor expanded(DType::kInt32, {2, 5}, Shape{0, 1});
  expanded.fill({0, 1, 2, 3, 4, 0, 1, 2, 3, 4});
  out.fill(kNaN);
  rope(q, {}, expanded, out, {});
  expect_close(out, arange, 1e-6);
}

TEST(Rope, TwoAndThreeDims) {
  const Case c{8, true, false};
  TestTensor flat(DType::kFloat32, {5, 8}), out(DType::kFloat32, {5, 8}), full(DType::kFloat32, {1, 1, 5, 8});
  flat.random(1), full.random(1);
  rope(flat, {}, {}, out, {}, options_of(c));
  expect_close(out, reference(full, c, [](auto, auto t) { return t; }), 1e-6);
  TestTensor heads(DType::kFloat32, {3, 5, 8}), heads_out(DType::kFloat32, {3, 5, 8}),
      heads_full(DType::kFloat32, {1, 3, 5, 8});
  heads.random(2), heads_full.random(2);
  rope(heads, {}, {}, heads_out, {}, options_of(c));
  expect_close(heads_out, reference(heads_full, c, [](auto, auto t) { return t; }), 1e-6);
}

TEST(Rope, InPlaceAndBackAgain) {
  for (const bool interleaved : {false, true}) {
    TestTensor q(DType::kFloat32, {2, 3, 9, 64}, Layout::kSwapped), k(DType::kFloat32, {2, 1, 9, 64});
    q.random(1), k.random(2);
    const auto q_before = q.values(), k_before = k.values();
    Case c{64, interleaved, false};
    const auto want = reference(q, c, [](auto, auto t) { return t; });
    rope(q, k, {}, q, k, options_of(c));
    expect_close(q, want, 1e-6);
    c.inverse = true;
    rope(q, k, {}, q, k, options_of(c));
    expect_close(q, q_before, 1e-6);
    expect_close(k, k_before, 1e-6);
  }
}

TEST(Rope, AnglesAreExactAtFarPositions) {
  // The pair (1, 0) becomes (cos, sin). Double holds position * frequency to 2^31 * 2^-53 = 2.4e-7 at worst.
  const std::vector<double> far = {0, 1, 4095, 1e5, 131071, 16777217, 2147483647, -5};
  for (const double theta : {10000.0, 500000.0, 1e6}) {
    const Case c{64, false, false, theta};
    TestTensor q(DType::kFloat32, {1, 1, 8, 64}), out(DType::kFloat32, {1, 1, 8, 64}), positions(DType::kInt32, {8});
    for (std::int64_t i = 0; i < q.numel(); ++i) q.set(i, i % 64 < 32 ? 1.0 : 0.0);
    positions.fill(far);
    rope(q, {}, positions, out, {}, options_of(c));
    expect_close(out, reference(q, c, [&](auto, std::int64_t t) { return far[static_cast<std::size_t>(t)]; }), 5e-7);
  }
  // bf16 inputs still turn by exact angles (tables in bf16 would not).
  const Case c{64, false, false};
  TestTensor q(DType::kBFloat16, {1, 1, 8, 64}), out(DType::kBFloat16, {1, 1, 8, 64}), positions(DType::kInt64, {8});
  q.random(3), positions.fill(far);
  rope(q, {}, positions, out, {}, options_of(c));
  expect_close(out, reference(q, c, [&](auto, std::int64_t t) { return far[static_cast<std::size_t>(t)]; }), 2e-6);
}

TEST(Rope, GivenFrequenciesReplaceTheta) {
  TestTensor inv_freq(DType::kFloat32, {4});
  inv_freq.fill({1.0, 0.25, 0.03125, 0.001});
  const Case c{8, false, false, 10000.0, &inv_freq};
  TestTensor q(DType::kFloat32, {1, 2, 6, 12}), out(DType::kFloat32, {1, 2, 6, 12});
  q.random(1);
  RopeOptions options = options_of(c);
  options.theta = -1;  // not used
  rope(q, {}, {}, out, {}, options);
  expect_close(out, reference(q, c, [](auto, auto t) { return t; }), 1e-6);
}

TEST(Rope, EmptyDims) {
  for (const Shape& shape : {Shape{0, 2, 3, 8}, Shape{2, 0, 3, 8}, Shape{2, 2, 0, 8}, Shape{2, 2, 3, 0}}) {
    TestTensor q(DType::kFloat32, shape), out(DType::kFloat32, shape);
    rope(q, {}, {}, out, {});
    EXPECT_TRUE(out.canaries_intact());
  }
}

TEST(Rope, PassThroughKeepsBits) {
  TestTensor q(DType::kFloat16, {1, 1, 2, 8}), out(DType::kFloat16, {1, 1, 2, 8});
  q.random(1);
  static_cast<std::uint16_t*>(q.view().data)[7] = 0x7d01;  // a signalling NaN with a payload
  RopeOptions options;
  options.rotary_dim = 4;
  rope(q, {}, {}, out, {}, options);
  for (int i = 4; i < 8; ++i)
    EXPECT_EQ(static_cast<std::uint16_t*>(q.view().data)[i], static_cast<std::uint16_t*>(out.view().data)[i]);
}

class RopeTable : public ::testing::Test {
 protected:
  static void fill_table(TestTensor& cos, TestTensor& sin, std::int64_t half, double theta) {
    for (std::int64_t i = 0; i < cos.numel(); ++i) {
      const double angle =
          static_cast<double>(i / half) * std::pow(theta, -static_cast<double>(i % half) / static_cast<double>(half));
      cos.set(i, std::cos(angle));
      sin.set(i, std::sin(angle));
    }
  }
};

TEST_F(RopeTable, LooksPositionsUpInEitherDtype) {
  for (const DType dtype : floating_dtypes())
    for (const DType table : {DType::kFloat32, dtype})
      for (const bool interleaved : {false, true}) {
        const Case c{12, interleaved, interleaved};
        TestTensor q(dtype, {2, 3, 4, 16}), k(dtype, {2, 1, 4, 16}, Layout::kSwapped), q_out(dtype, {2, 3, 4, 16}),
            k_out(dtype, {2, 1, 4, 16});
        TestTensor cos(table, {50, 6}, Layout::kPadded), sin(table, {50, 6}), positions(DType::kInt32, {2, 4});
        q.random(1), k.random(2), positions.fill({49, 0, 3, 7, 1, 1, 20, 33});
        fill_table(cos, sin, 6, 10000.0);
        rope_table(q, k, cos, sin, positions, q_out, k_out, options_of(c));
        // Reference from the table's own values.
        const auto want = [&](const TestTensor& x) {
          auto values = x.values();
          for (std::int64_t row = 0; row < x.numel() / 16; ++row)
            for (std::int64_t p = 0; p < 6; ++p) {
              const auto at = static_cast<std::int64_t>(positions[row / (x.shape()[1] * 4) * 4 + row % 4]) * 6 + p;
              const auto first = static_cast<std::size_t>(row * 16 + (interleaved ? 2 * p : p)),
                         second = first + (interleaved ? 1 : 6);
              const double a = values[first], b = values[second], s = c.inverse ? -sin[at] : sin[at];
              values[first] = a * cos[at] - b * s;
              values[second] = a * s + b * cos[at];
            }
          return values;
        };
        expect_close(q_out, want(q), 1e-6, "q");
        expect_close(k_out, want(k), 1e-6, "k");
      }
}

TEST_F(RopeTable, AgreesWithRopeAndTakesRowsPerToken) {
  const Case c{8, false, false};
  TestTensor q(DType::kFloat32, {2, 3, 5, 8}), out(DType::kFloat32, {2, 3, 5, 8});
  TestTensor cos(DType::kFloat32, {9, 4}), sin(DType::kFloat32, {9, 4});
  q.random(1);
  fill_table(cos, sin, 4, 10000.0);
  const auto want = reference(q, c, [](auto, auto t) { return t; });
  rope_table(q, {}, cos, sin, {}, out, {});
  expect_close(out, want, 1e-6);
  for (const std::int64_t batch : {1, 2}) {
    TestTensor cos3(DType::kFloat32, {batch, 5, 4}), sin3(DType::kFloat32, {batch, 5, 4}, Layout::kSwapped);
    for (std::int64_t i = 0; i < cos3.numel(); ++i) cos3.set(i, cos[i % 20]), sin3.set(i, sin[i % 20]);
    out.fill(kNaN);
    rope_table(q, {}, cos3, sin3, {}, out, {});
    expect_close(out, want, 1e-6);
  }
}

TEST(Rope, Refusals) {
  const DType f32 = DType::kFloat32;
  TestTensor q(f32, {2, 3, 4, 8}), k(f32, {2, 1, 4, 8}), q_out(f32, {2, 3, 4, 8}), k_out(f32, {2, 1, 4, 8}),
      positions(DType::kInt32, {4});
  q.random(1), k.random(2), positions.fill({0, 1, 2, 3});
  const auto refused = [&](const TensorView& a, const TensorView& b, const TensorView& p, const TensorView& ao,
                           const TensorView& bo, const RopeOptions& o, std::vector<std::string> fragments) {
    expect_refused<InvalidArgument>([&] { rope(a, b, p, ao, bo, o); }, "rope", fragments, {&q_out, &k_out, &q, &k});
  };
  TestTensor half(DType::kFloat16, {2, 1, 4, 8}), short_k(f32, {2, 1, 3, 8}), wide_k(f32, {2, 1, 4, 10}),
      other_batch(f32, {3, 1, 4, 8});
  TestTensor reversed(f32, {2, 3, 4, 8}, Layout::kReversed), five(f32, {1, 2, 3, 4, 8}), floats(f32, {4}),
      long_positions(DType::kInt32, {5});
  TestTensor expanded(f32, {2, 3, 4, 8}, Shape{0, 32, 8, 1}), frequencies(f32, {3}),
      batch_positions(DType::kInt32, {3, 4});
  TestTensor short_out(f32, {2, 1, 3, 8}), half_out(DType::kFloat16, {2, 1, 4, 8}), wide_out(f32, {2, 1, 4, 10}),
      batch_out(f32, {3, 1, 4, 8});
  refused({}, k, positions, q_out, k_out, {}, {"q is absent"});
  refused(q, k, positions, {}, k_out, {}, {"q_out is absent"});
  refused(q, k, positions, q_out, {}, {}, {"k_out is absent"});
  refused(q, {}, positions, q_out, k_out, {}, {"k_out is given but k is absent"});
  refused(q, half, positions, q_out, half_out, {}, {"k is float16", "needs float32"});
  refused(q, short_k, positions, q_out, short_out, {}, {"k.shape[2]=3", "q's seq=4"});
  refused(q, wide_k, positions, q_out, wide_out, {}, {"k.shape[3]=10", "q's head_dim=8"});
  refused(q, other_batch, positions, q_out, batch_out, {}, {"k.shape[0]=3", "q's batch=2"});
  refused(reversed, k, positions, q_out, k_out, {}, {"q.stride[3]=24", "must be contiguous"});
  refused(five, k, positions, five, k_out, {}, {"q is float32[", "] on cpu; needs 2 to 4 dims"});
  refused(q, k, positions, k_out, k_out, {}, {"q_out is float32[2, 1, 4, 8]", "q is float32[2, 3, 4, 8]"});
  refused(q, k, positions, expanded, k_out, {}, {"q_out.stride[0]=0", "must not overlap itself"});
  refused(q, k, floats, q_out, k_out, {}, {"positions is float32", "needs int32 or int64"});
  refused(q, k, long_positions, q_out, k_out, {}, {"positions.shape[0]=5", "q's seq=4"});
  refused(q, k, batch_positions, q_out, k_out, {}, {"positions.shape[0]=3", "q's batch=2"});
  const auto with = [](std::int64_t rotary, double theta, TensorView inv_freq = {}) {
    RopeOptions options;
    options.rotary_dim = rotary, options.theta = theta, options.inv_freq = inv_freq;
    return options;
  };
  refused(q, k, positions, q_out, k_out, with(7, 1e4), {"rotary_dim=7", "even number up to head_dim=8"});
  refused(q, k, positions, q_out, k_out, with(10, 1e4), {"rotary_dim=10"});
  refused(q, k, positions, q_out, k_out, with(-2, 1e4), {"rotary_dim=-2"});
  refused(q, k, positions, q_out, k_out, with(8, 0), {"theta=0", "positive"});
  refused(q, k, positions, q_out, k_out, with(8, kNaN), {"theta=", "positive"});
  refused(q, k, positions, q_out, k_out, with(8, 1e4, frequencies), {"inv_freq.shape[0]=3", "rotary_dim / 2=4"});
  TensorView shifted = q.view();
  shifted.data = static_cast<float*>(shifted.data) + 8;
  refused(q, k, positions, shifted, k_out, {}, {"q_out shares part of its memory with q"});
}

TEST_F(RopeTable, Refusals) {
  const DType f32 = DType::kFloat32;
  TestTensor q(f32, {2, 3, 4, 8}), out(f32, {2, 3, 4, 8}), cos(f32, {6, 4}), sin(f32, {6, 4}),
      positions(DType::kInt64, {2, 4});
  q.random(1), positions.fill({0, 1, 2, 3, 2, 3, 4, 6});
  const auto refused = [&](const TensorView& c, const TensorView& s, const TensorView& p,
                           std::vector<std::string> fragments, std::int64_t rotary = -1) {
    RopeOptions options;
    options.rotary_dim = rotary;
    expect_refused<InvalidArgument>([&] { rope_table(q, {}, c, s, p, out, {}, options); }, "rope_table", fragments,
                                    {&out});
  };
  TestTensor wide(f32, {6, 5}), narrow(f32, {6, 3}), half(DType::kFloat16, {6, 4}), short_table(f32, {3, 4}),
      per_token(f32, {1, 4, 4});
  TestTensor per_batch(f32, {3, 4, 4});
  refused(cos, sin, positions, {"positions[3]=6", "from 0 to 5"});
  positions.set(7, -1);
  refused(cos, sin, positions, {"positions[3]=-1", "from 0 to 5"});
  refused({}, sin, {}, {"cos is absent"});
  refused(cos, {}, {}, {"sin is absent"});
  refused(wide, wide, {}, {"cos.shape[1]=5", "at most half of head_dim=8"});
  refused(cos, narrow, {}, {"sin is", "shapes must match"});
  TestTensor whole(DType::kInt32, {6, 4});
  refused(whole, whole, {}, {"cos is int32", "needs float32, float16 or bfloat16"});
  refused(cos, half, {}, {"sin is float16", "needs float32"});
  refused(short_table, short_table, {}, {"cos.shape[0]=3", "4 tokens"});
  refused(per_token, per_token, positions, {"positions are given"});
  refused(per_batch, per_batch, {}, {"cos.shape[0]=3", "q's batch=2"});
  refused(cos, sin, {}, {"rotary_dim=4", "4 columns"}, 4);
}

}  // namespace
}  // namespace flashkernel
