// fp16 and bf16 conversions, exhaustively: all 65536 patterns both ways, every midpoint between neighbours, and its two
// sides.
#include "core/float_types.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace flashkernel {
namespace {

struct Format {
  int mantissa_bits, exponent_bits;
};
constexpr Format format_of(Half) { return {10, 5}; }
constexpr Format format_of(BFloat16) { return {7, 8}; }

// The value of a pattern by the definition of IEEE 754 formats.
double value_of(std::uint16_t bits, Format format) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1),
            exponent = (bits >> format.mantissa_bits) & ((1 << format.exponent_bits) - 1);
  const double sign = bits >> 15 ? -1 : 1;
  if (exponent == (1 << format.exponent_bits) - 1)
    return mantissa ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - format.mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << format.mantissa_bits), exponent - bias - format.mantissa_bits);
}

template <class T>
class FloatTypesTest : public ::testing::Test {};
using Types = ::testing::Types<Half, BFloat16>;
TYPED_TEST_SUITE(FloatTypesTest, Types);

TYPED_TEST(FloatTypesTest, EveryPatternWidensToItsValueAndComesBack) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const TypeParam pattern{static_cast<std::uint16_t>(bits)};
    const double expected = value_of(pattern.bits, format_of(TypeParam{}));
    const float widened = to_float(pattern);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(widened)) << bits;
      ASSERT_TRUE(std::isnan(to_float(from_float<TypeParam>(widened)))) << bits;
      ASSERT_EQ(from_float<TypeParam>(widened).bits >> 15, bits >> 15) << "the sign of a NaN";
      continue;
    }
    ASSERT_EQ(static_cast<double>(widened), expected) << bits;
    ASSERT_EQ(std::signbit(widened), (bits >> 15) != 0) << bits;
    ASSERT_EQ(from_float<TypeParam>(widened).bits, pattern.bits) << bits;
  }
}

TYPED_TEST(FloatTypesTest, RoundsToNearestEvenBetweenAllNeighbours) {
  const Format format = format_of(TypeParam{});
  const auto infinity = static_cast<std::uint16_t>(((1u << format.exponent_bits) - 1) << format.mantissa_bits);
  for (std::uint16_t bits = 0; bits < infinity; ++bits) {
    const double low = value_of(bits, format);
    // The neighbour of the largest finite number is what would come next, were the exponents not at their end.
    const double high = bits + 1 < infinity ? value_of(static_cast<std::uint16_t>(bits + 1), format)
                                            : low + (low - value_of(static_cast<std::uint16_t>(bits - 1), format));
    const double middle = (low + high) / 2;
    const auto even = static_cast<std::uint16_t>(bits & 1 ? bits + 1 : bits);
    const float at = static_cast<float>(middle);
    ASSERT_EQ(static_cast<double>(at), middle) << "fp32 holds every midpoint";
    for (const int sign : {0, 1}) {
      const auto narrowed = [&](float x) { return from_float<TypeParam>(sign ? -x : x).bits; };
      const auto with_sign = [&](std::uint16_t pattern) { return static_cast<std::uint16_t>(pattern | sign << 15); };
      ASSERT_EQ(narrowed(at), with_sign(even)) << bits;
      ASSERT_EQ(narrowed(std::nextafter(at, 0.0f)), with_sign(bits)) << bits;
      ASSERT_EQ(narrowed(std::nextafter(at, std::numeric_limits<float>::infinity())),
                with_sign(static_cast<std::uint16_t>(bits + 1)))
          << bits;
    }
  }
}

TYPED_TEST(FloatTypesTest, TheEndsOfTheRange) {
  const Format format = format_of(TypeParam{});
  const auto infinity = static_cast<std::uint16_t>(((1u << format.exponent_bits) - 1) << format.mantissa_bits);
  EXPECT_EQ(from_float<TypeParam>(std::numeric_limits<float>::max()).bits, infinity);
  EXPECT_EQ(from_float<TypeParam>(-std::numeric_limits<float>::infinity()).bits, infinity | 0x8000);
  EXPECT_EQ(from_float<TypeParam>(0.0f).bits, 0);
  EXPECT_EQ(from_float<TypeParam>(-0.0f).bits, 0x8000);
  EXPECT_EQ(from_float<TypeParam>(-std::numeric_limits<float>::denorm_min()).bits, 0x8000);
  // A signalling NaN whose payload sits in the bits that are cut off must not become infinity.
  for (const std::uint32_t nan : {0x7f800001u, 0xff800001u, 0x7fc00000u, 0x7fffffffu})
    EXPECT_TRUE(std::isnan(to_float(from_float<TypeParam>(bits_to_float(nan))))) << std::hex << nan;
}

}  // namespace
}  // namespace flashkernel
