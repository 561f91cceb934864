// exp, the activations and their derivatives on vectors, to fp32 accuracy; and what every op's loop shares.
// Included once per file under avx2/, avx512/, amx/, after that folder's vector type is chosen by the compiler's flags.
// Invariant: internal linkage only; no std:: inline function, since the linker might keep this file's copy for an older
// CPU. NaN in, NaN out everywhere; the derivation of each bound stands beside it.
#pragma once

#if defined(__AVX512F__)
#include "cpu/simd/vec_more_avx512.hpp"
#else
#include "cpu/simd/vec_more_avx2.hpp"
#endif

#include <cstdint>

#include "core/thread_pool.hpp"
#include "flashkernel/dtype.hpp"
#include "flashkernel/linear.hpp"
#include "ops/params_common.hpp"

namespace flashkernel::cpu {
namespace {

using Reg = Simd::Reg;

/// exp(x), 1 ulp over the whole range: x = n ln 2 + r, |r| <= 0.347.
inline Reg vec_exp(Reg x) {
  // exp(-104) rounds to 0 and exp(89) to infinity. The second operand of max and min is returned when one is NaN.
  x = Simd::min(Simd::set1(89.0f), Simd::max(Simd::set1(-104.0f), x));
  const Reg n = Simd::round(Simd::mul(x, Simd::set1(1.44269504088896341f)));
  // ln 2 in two parts: the first has 15 bits, so that n times it is exact.
  Reg r = Simd::fnma(n, Simd::set1(0.693145751953125f), x);
  r = Simd::fnma(n, Simd::set1(1.42860682030941723e-6f), r);
  // 1 + r + r^2 P(r), P of degree 5: the classic single-precision coefficients (Cephes expf).
  Reg p = Simd::set1(1.9875691500e-4f);
  p = Simd::fma(p, r, Simd::set1(1.3981999507e-3f));
  p = Simd::fma(p, r, Simd::set1(8.3334519073e-3f));
  p = Simd::fma(p, r, Simd::set1(4.1665795894e-2f));
  p = Simd::fma(p, r, Simd::set1(1.6666665459e-1f));
  p = Simd::fma(p, r, Simd::set1(5.0000001201e-1f));
  p = Simd::add(Simd::fma(p, Simd::mul(r, r), r), Simd::set1(1.0f));
  return Simd::times_power_of_two(p, n);
}

/// erfc(|x| / sqrt 2) and exp(-x^2 / 2): erfc(z) = exp(-z^2) R(t), t = (z - 2) / (z + 2), R a least-maximum fit of
/// degree 9 on z in [0, 9.6] (3.1e-8 relative); beyond, exp(-z^2) is 0.
inline Reg vec_half_erfc(Reg x, Reg* gauss) {
  const Reg z = Simd::mul(Simd::abs(x), Simd::set1(0.70710678118654752f));
  const Reg limited = Simd::min(Simd::set1(9.6f), z);
  const Reg t = Simd::div(Simd::sub(limited, Simd::set1(2.0f)), Simd::add(limited, Simd::set1(2.0f)));
  Reg p = Simd::set1(0.00010610315803205594f);
  p = Simd::fma(p, t, Simd::set1(6.110336107667536e-05f));
  p = Simd::fma(p, t, Simd::set1(-0.0009263745159842074f));
  p = Simd::fma(p, t, Simd::set1(-0.0008528224425390363f));
  p = Simd::fma(p, t, Simd::set1(0.006978534162044525f));
  p = Simd::fma(p, t, Simd::set1(0.003734294790774584f));
  p = Simd::fma(p, t, Simd::set1(-0.07897602766752243f));
  p = Simd::fma(p, t, Simd::set1(0.24165800213813782f));
  p = Simd::fma(p, t, Simd::set1(-0.42718595266342163f));
  p = Simd::fma(p, t, Simd::set1(0.25539568066596985f));
  *gauss = vec_exp(Simd::mul(Simd::set1(-0.5f), Simd::mul(x, x)));
  return Simd::mul(Simd::set1(0.5f), Simd::mul(p, *gauss));
}

constexpr float kGeluTanhScale = 0.79788456080286536f;  // sqrt(2 / pi)
constexpr float kGeluTanhCubic = 0.044715f;
constexpr float kInvSqrtTwoPi = 0.39894228040143268f;

/// x * sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3): the tanh form, without its cancellation at negative x.
inline Reg vec_gelu_tanh(Reg x) {
  const Reg cubic = Simd::fma(Simd::mul(x, x), Simd::set1(kGeluTanhCubic), Simd::set1(1.0f));
  const Reg minus_two_u = Simd::mul(Simd::mul(Simd::set1(-2.0f * kGeluTanhScale), x), cubic);
  return Simd::div(x, Simd::add(Simd::set1(1.0f), vec_exp(minus_two_u)));
}

/// x Phi(x): Phi(-|x|) = erfc(|x| / sqrt 2) / 2 keeps its relative accuracy in the tail.
inline Reg vec_gelu(Reg x) {
  Reg gauss;
  const Reg tail = vec_half_erfc(x, &gauss);
  const Reg phi = Simd::select(Simd::less(x, Simd::zero()), tail, Simd::sub(Simd::set1(1.0f), tail));
  return Simd::mul(x, phi);
}

inline Reg vec_silu(Reg x) { return Simd::div(x, Simd::add(Simd::set1(1.0f), vec_exp(Simd::negate(x)))); }

inline Reg vec_activation(Activation activation, Reg x) {
  switch (activation) {
    case Activation::kNone: return x;
    case Activation::kGeluTanh: return vec_gelu_tanh(x);
    case Activation::kGelu: return vec_gelu(x);
    case Activation::kSilu: return vec_silu(x);
  }
  return x;
}

/// d/dx of x sigmoid(t(x)) = s + x t'(x) s (1 - s), with s (1 - s) = e / (1 + e)^2, e = exp(-|t|): 1 - s would cancel.
inline Reg vec_gate_gradient(Reg x, Reg t, Reg t_slope) {
  const Reg e = vec_exp(Simd::negate(Simd::abs(t)));
  const Reg r = Simd::div(Simd::set1(1.0f), Simd::add(Simd::set1(1.0f), e));
  const Reg small = Simd::mul(e, r);
  const Reg s = Simd::select(Simd::less(t, Simd::zero()), small, r);
  return Simd::fma(Simd::mul(x, t_slope), Simd::mul(small, r), s);
}
// x is limited where s has long settled at 0 or 1.
inline Reg vec_silu_gradient(Reg x) {
  const Reg v = Simd::min(Simd::set1(120.0f), Simd::max(Simd::set1(-120.0f), x));
  return vec_gate_gradient(v, v, Simd::set1(1.0f));
}
inline Reg vec_gelu_tanh_gradient(Reg x) {
  const Reg v = Simd::min(Simd::set1(30.0f), Simd::max(Simd::set1(-30.0f), x));
  const Reg square = Simd::mul(v, v);
  const Reg two_u = Simd::mul(Simd::mul(Simd::set1(2.0f * kGeluTanhScale), v),
                              Simd::fma(square, Simd::set1(kGeluTanhCubic), Simd::set1(1.0f)));
  const Reg slope = Simd::mul(Simd::set1(2.0f * kGeluTanhScale),
                              Simd::fma(square, Simd::set1(3.0f * kGeluTanhCubic), Simd::set1(1.0f)));
  return vec_gate_gradient(v, two_u, slope);
}
/// Phi(x) + x phi(x); x limited where phi has long been 0, so that infinity gives the limit and not inf * 0.
inline Reg vec_gelu_gradient(Reg unlimited) {
  const Reg x = Simd::min(Simd::set1(30.0f), Simd::max(Simd::set1(-30.0f), unlimited));
  Reg gauss;
  const Reg tail = vec_half_erfc(x, &gauss);
  const Reg phi = Simd::select(Simd::less(x, Simd::zero()), tail, Simd::sub(Simd::set1(1.0f), tail));
  return Simd::fma(Simd::mul(x, Simd::set1(kInvSqrtTwoPi)), gauss, phi);
}

inline Reg vec_activation_gradient(Activation activation, Reg x) {
  switch (activation) {
    case Activation::kNone: return Simd::set1(1.0f);
    case Activation::kGeluTanh: return vec_gelu_tanh_gradient(x);
    case Activation::kGelu: return vec_gelu_gradient(x);
    case Activation::kSilu: return vec_silu_gradient(x);
  }
  return x;
}

/// Calls f with a value of the element type of a floating dtype.
template <class F>
inline void visit_type(DType dtype, F&& f) {
  if (dtype == DType::kFloat32) {
    f(float{});
  } else if (dtype == DType::kFloat16) {
    f(Half{});
  } else {
    f(BFloat{});
  }
}

/// Loads vector `v` lanes at column c of a row of n: whole, or the tail with zeros behind it.
template <class T>
inline Reg load_columns(const T* row, std::int64_t c, std::int64_t n) {
  return n - c >= Simd::kWidth ? Simd::load(row + c) : Simd::load_first(row + c, static_cast<int>(n - c));
}
template <class T>
inline void save_columns(T* row, std::int64_t c, std::int64_t n, Reg x) {
  if (n - c >= Simd::kWidth) {
    Simd::save(row + c, x);
  } else {
    Simd::store_first(row + c, x, static_cast<int>(n - c));
  }
}

/// load_columns from an fp32-or-T vector (weights and biases of norms).
struct MixedVector {
  const void* data;
  DType dtype;
  inline Reg at(std::int64_t c, std::int64_t n) const {
    if (dtype == DType::kFloat32) return load_columns(static_cast<const float*>(data), c, n);
    if (dtype == DType::kFloat16) return load_columns(static_cast<const Half*>(data), c, n);
    return load_columns(static_cast<const BFloat*>(data), c, n);
  }
};

/// fp32 value of one element.
inline float scalar_value(float x) { return x; }
template <class T>
inline float scalar_value(T x) {
  float lanes[Simd::kWidth];
  Simd::save(lanes, Simd::load_first(&x, 1));
  return lanes[0];
}

inline std::int64_t index_at(const IndexArray& array, std::int64_t i) {
  return array.is_int64 ? static_cast<const std::int64_t*>(array.data)[i]
                        : static_cast<const std::int32_t*>(array.data)[i];
}

/// Rows a task takes so that it moves about 128 KiB: long beside the 1 us that handing out a task costs.
inline std::int64_t rows_per_task(std::int64_t bytes_per_row) {
  return imax<std::int64_t>(1, (std::int64_t{128} << 10) / imax<std::int64_t>(1, bytes_per_row));
}

}  // namespace
}  // namespace flashkernel::cpu
