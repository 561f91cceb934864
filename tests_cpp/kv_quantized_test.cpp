// 8-bit KV-caches: the elements' conversions exhaustively, what the ops refuse, the pool's scales, and that a cache's
// copies take them along. That kernels agree is conformance's part.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "core/float_types.hpp"
#include "flashkernel/attention.hpp"
#include "flashkernel/error.hpp"
#include "flashkernel/kv_cache.hpp"
#include "flashkernel/kv_ops.hpp"

namespace flashkernel {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// By the definition of OCP's E4M3.
double value_of(int bits) {
  const int field = bits >> 3 & 15, mantissa = bits & 7;
  const double magnitude = field == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, field - 10);
  return bits & 0x80 ? -magnitude : magnitude;
}

float e4m3(float value) { return to_float(from_float<Float8E4M3>(value)); }

TEST(Float8E4M3, EveryPatternWidensToItsValueAndComesBack) {
  for (int bits = 0; bits < 256; ++bits) {
    const Float8E4M3 pattern{static_cast<std::uint8_t>(bits)};
    if ((bits & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(to_float(pattern)));
      EXPECT_EQ(from_float<Float8E4M3>(to_float(pattern)).bits & 0x7f, 0x7f);
      continue;
    }
    EXPECT_EQ(static_cast<double>(to_float(pattern)), value_of(bits)) << bits;
    EXPECT_EQ(from_float<Float8E4M3>(to_float(pattern)).bits, bits);
  }
}

TEST(Float8E4M3, RoundsToNearestEvenAndSaturates) {
  for (int bits = 0; bits < 0x7e; ++bits) {
    const auto low = static_cast<float>(value_of(bits)), high = static_cast<float>(value_of(bits + 1));
    const float middle = (low + high) / 2;
    EXPECT_EQ(e4m3(middle), bits % 2 == 0 ? low : high) << bits;
    EXPECT_EQ(e4m3(-middle), bits % 2 == 0 ? -low : -high) << bits;
    EXPECT_EQ(e4m3(std::nextafter(middle, 0.0f)), low) << bits;
    EXPECT_EQ(e4m3(std::nextafter(middle, kInfinity)), high) << bits;
  }
  for (const float large : {448.0f, 463.9f, 464.0f, 480.0f, 1e30f, kInfinity}) {
    EXPECT_EQ(e4m3(large), 448.0f);
    EXPECT_EQ(e4m3(-large), -448.0f);
  }
  EXPECT_TRUE(std::signbit(e4m3(-1e-30f)));
}

TEST(Int8, RoundsToNearestEvenAndSaturates) {
  for (int i = -127; i <= 127; ++i) EXPECT_EQ(to_float(from_float<Int8>(static_cast<float>(i))), i);
  EXPECT_EQ(to_float(from_float<Int8>(2.5f)), 2);
  EXPECT_EQ(to_float(from_float<Int8>(-3.5f)), -4);
  EXPECT_EQ(to_float(from_float<Int8>(kInfinity)), 127);
  EXPECT_EQ(to_float(from_float<Int8>(-1e9f)), -127);
  EXPECT_EQ(to_float(from_float<Int8>(kNan)), 0);
}

KvPagePoolOptions options_of(DType dtype, bool token_scales = true) {
  KvPagePoolOptions options;
  options.num_pages = 4;
  options.heads_kv = 2;
  options.head_dim = 8;
  options.page_size = 16;
  options.num_layers = 3;
  options.dtype = dtype;
  options.token_scales = token_scales;
  return options;
}

TEST(KvPagePoolScales, AreBesideThePagesOf8Bits) {
  for (const DType dtype : {DType::kFloat8E4M3, DType::kInt8}) {
    const KvPagePool pool(options_of(dtype));
    EXPECT_EQ(pool.page_bytes(), 3u * 2u * 16u * 2u * (8u + 4u));
    const KvScales scales = pool.scales(2);
    EXPECT_EQ(to_string(scales.k), "float32[4, 2, 16] on cpu");
    EXPECT_EQ(to_string(scales.v), "float32[4, 2, 16] on cpu");
    EXPECT_NE(scales.k.data, scales.v.data);
    EXPECT_NE(scales.k.data, pool.scales(1).k.data);
    EXPECT_THROW((void)pool.scales(3), InvalidArgument);
    const KvPagePool bare(options_of(dtype, false));
    EXPECT_FALSE(bare.scales().k.defined());
    EXPECT_EQ(bare.page_bytes(), 3u * 2u * 16u * 2u * 8u);
  }
  const KvPagePool wide(options_of(DType::kFloat16));
  EXPECT_FALSE(wide.scales().k.defined());
  EXPECT_FALSE(wide.options().token_scales);
  EXPECT_THROW(KvPagePool(options_of(DType::kUInt8)), InvalidArgument);
}

// Tokens of a sequence by the ops, layer by layer; then a fork that writes copies the page, scales included.
TEST(KvCacheScales, CopyOnWriteAndReadGiveWhatWasAppended) {
  for (const DType dtype : {DType::kFloat8E4M3, DType::kInt8}) {
    KvPagePool pool(options_of(dtype));
    KvCache cache(pool);
    const auto append = [&](SequenceId sequence, std::int64_t tokens, float start) {
      std::vector<std::int64_t> slots(static_cast<std::size_t>(tokens));
      cache.append(sequence, tokens, slots.data());
      std::vector<float> k(static_cast<std::size_t>(tokens * 2 * 8)), v(k.size());
      for (std::size_t i = 0; i < k.size(); ++i) {
        k[i] = start + std::sin(static_cast<float>(i)) * static_cast<float>(1 + i / 8);  // each row has its own scale
        v[i] = -k[i];
      }
      for (int layer = 0; layer < 3; ++layer)
        kv_append(TensorView(k.data(), DType::kFloat32, {tokens, 2, 8}),
                  TensorView(v.data(), DType::kFloat32, {tokens, 2, 8}), pool.k_pages(layer), pool.v_pages(layer),
                  pool.scales(layer), TensorView(slots.data(), DType::kInt64, {tokens}));
      return k;
    };
    const auto read = [&](SequenceId sequence, int layer) {
      std::int32_t table[2], length;
      cache.block_table(&sequence, 1, 2, table, &length);
      std::vector<float> k(static_cast<std::size_t>(length * 2 * 8)), v(k.size());
      kv_read(pool.k_pages(layer), pool.v_pages(layer), pool.scales(layer), TensorView(table, DType::kInt32, {1, 2}),
              TensorView(&length, DType::kInt32, {1}), TensorView(k.data(), DType::kFloat32, {1, length, 2, 8}),
              TensorView(v.data(), DType::kFloat32, {1, length, 2, 8}));
      for (std::size_t i = 0; i < k.size(); ++i) EXPECT_EQ(v[i], -k[i]);
      return k;
    };
    const SequenceId first = cache.create();
    const std::vector<float> ten = append(first, 10, 1);
    const SequenceId second = cache.fork(first);
    std::vector<float> expected = ten;
    const std::vector<float> three = append(second, 3, 50);
    expected.insert(expected.end(), three.begin(), three.end());
    append(first, 2, -9);  // into the page that is the fork's no more
    cache.truncate(first, 10);
    EXPECT_EQ(cache.stats().num_copies_on_write, 1u);
    for (int layer = 0; layer < 3; ++layer) {
      const std::vector<float> of_first = read(first, layer), of_second = read(second, layer);
      ASSERT_EQ(of_first.size(), ten.size());
      ASSERT_EQ(of_second.size(), expected.size());
      for (std::size_t i = 0; i < expected.size(); ++i) {
        // Half a step of the row: 2^-4 of an e4m3 element, 1 / 254 of the largest of int8.
        float largest = 0;
        for (std::size_t j = i / 8 * 8; j < i / 8 * 8 + 8; ++j) largest = std::max(largest, std::abs(expected[j]));
        const float error =
            dtype == DType::kInt8 ? largest / 253 : std::max(std::abs(expected[i]) / 16, largest / 4e5f);
        EXPECT_NEAR(of_second[i], expected[i], error) << i;
        if (i < ten.size()) {
          EXPECT_EQ(of_first[i], of_second[i]);
        }
      }
    }
  }
}

TEST(KvScales, Refusals) {
  KvPagePool pool(options_of(DType::kInt8)), wide(options_of(DType::kFloat32));
  std::vector<float> data(2 * 2 * 8, 1.0f), out(4 * 16 * 2 * 8);
  std::vector<float> head_scales(2, 1.0f);
  std::int64_t slots[2] = {0, 1};
  std::int32_t table[1] = {0}, length[1] = {2};
  const TensorView k(data.data(), DType::kFloat32, {2, 2, 8}), slot(slots, DType::kInt64, {2});
  const TensorView per_head(head_scales.data(), DType::kFloat32, {2});
  const TensorView one(head_scales.data(), DType::kFloat32, {1});
  const auto says = [&](const KvPagePool& of, const KvScales& scales, const std::string& fragment) {
    const auto expect = [&](auto&& call) {
      try {
        call();
        ADD_FAILURE() << "accepted; expected " << fragment;
      } catch (const InvalidArgument& error) {
        EXPECT_NE(std::string(error.what()).find(fragment), std::string::npos) << error.what();
      }
    };
    const TensorView blocks(table, DType::kInt32, {1, 1}), lengths(length, DType::kInt32, {1});
    expect([&] { kv_append(k, k, of.k_pages(), of.v_pages(), scales, slot); });
    expect([&] {
      const TensorView to(out.data(), DType::kFloat32, {1, 2, 2, 8});
      kv_read(of.k_pages(), of.v_pages(), scales, blocks, lengths, to,
              TensorView(out.data() + 64, DType::kFloat32, {1, 2, 2, 8}));
    });
    expect([&] {
      AttentionOptions options;
      options.kv_scales = scales;
      attention_paged(TensorView(data.data(), DType::kFloat32, {1, 2, 2, 8}), of.k_pages(), of.v_pages(), blocks,
                      lengths, {}, 2, TensorView(out.data(), DType::kFloat32, {1, 2, 2, 8}), {}, options);
    });
  };
  says(pool, {}, "k_scales is absent but k_pages is int8; needs float32 [heads_kv]");
  says(pool, {per_head, {}}, "v_scales is absent");
  says(wide, {per_head, per_head},
       "k_pages is float32; they are for pages of float8_e4m3fn, int8, int4 and float4_e2m1fn_x2");
  says(pool, {one, per_head}, "k_scales.shape[0]=1");
  says(pool, {pool.scales().k, per_head}, "both need one scale a head");
  says(pool, {k, k}, "k_scales.shape[0]=2");
  EXPECT_THROW(kv_append(pool.k_pages(), pool.v_pages(), pool.k_pages(), pool.v_pages(), pool.scales(), slot),
               InvalidArgument);  // tokens are not 8-bit
  AttentionOptions options;
  options.kv_scales = {per_head, per_head};
  const TensorView q(data.data(), DType::kFloat32, {1, 2, 2, 8});
  EXPECT_THROW(attention(q, q, q, TensorView(out.data(), DType::kFloat32, {1, 2, 2, 8}), {}, options),
               InvalidArgument);  // dense
}

}  // namespace
}  // namespace flashkernel
