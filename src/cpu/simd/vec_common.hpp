// Pieces that the vector types of all CPU architectures share: element types, integer helpers, polynomial coefficients.
// Included by the files under avx2/, avx512/ and amx/ only. Invariant: everything here has internal linkage, because
// each including file is compiled with its own instruction set and the linker must never choose one copy for all.
#pragma once

#include <cstdint>

namespace flashkernel::cpu {
namespace {

struct Half {
  std::uint16_t bits;
};  // IEEE binary16
struct BFloat {
  std::uint16_t bits;
};  // bfloat16
struct Float8 {
  std::uint8_t bits;
};  // float8_e4m3fn
struct Int8 {
  std::int8_t value;
};

// Elements of an 8-bit KV-cache: numbers only together with a scale.
template <class T>
constexpr bool kQuantized = false;
template <>
constexpr bool kQuantized<Float8> = true;
template <>
constexpr bool kQuantized<Int8> = true;

constexpr float kNegInf = -__builtin_inff();
constexpr float kLog2E = 1.44269504088896340736f;
constexpr double kLn2 = 0.69314718055994530942;

template <class T>
inline T imin(T a, T b) {
  return a < b ? a : b;
}
template <class T>
inline T imax(T a, T b) {
  return a < b ? b : a;
}
inline std::int64_t round_up(std::int64_t x, std::int64_t to) { return (x + to - 1) / to * to; }
inline std::int64_t ceil_div(std::int64_t x, std::int64_t by) { return (x + by - 1) / by; }

// 2^f = 1 + f * (c0 + f * (c1 + ...)) on [0, 1): minimax in relative error with the constant term held at 1, so that
// 2^0 is exact. Degree 4: 2.9e-6, 5: 8.2e-8, 6: 2.0e-9 before rounding (6.4e-8 = half an ulp after it).
template <int kDegree>
struct Exp2Coefficients;
template <>
struct Exp2Coefficients<4> {
  static constexpr float c[4] = {0.693044841f, 0.241280198f, 0.0522424728f, 0.0134266848f};
};
template <>
struct Exp2Coefficients<5> {
  static constexpr float c[5] = {0.693151295f, 0.240164444f, 0.0557999127f, 0.00901703071f, 0.00186713005f};
};
template <>
struct Exp2Coefficients<6> {
  static constexpr float c[6] = {0.693147063f,   0.240229309f,  0.0554852821f,
                                 0.00967545155f, 0.0012467847f, 0.000216129149f};
};

// tanh(x) = x + x * z * (c0 + z * (c1 + ...)), z = x^2, for |x| <= 0.6: 2.6e-9 relative to x^3.
constexpr float kTanhSmall = 0.6f;
constexpr float kTanhCoefficients[5] = {-0.333332986f, 0.133319587f, -0.0537866838f, 0.020805385f, -0.00590586849f};

}  // namespace
}  // namespace flashkernel::cpu
