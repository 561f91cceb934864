// The activations of `linear` and their derivatives, in fp32: with the accurate library functions (fp32 results), and
// by the special-function unit for results in 16 bits (`..._fast`: relative error about 1e-6, far below their
// rounding).
#pragma once

#include <type_traits>

#include "cuda/ptx/math.cuh"
#include "flashkernel/types.hpp"

namespace flashkernel::cuda {

inline constexpr float kSqrtTwoOverPi = 0.79788456080286535588f;
inline constexpr float kGeluCubic = 0.044715f;  // Hendrycks and Gimpel, 2016
inline constexpr float kSqrtHalf = 0.70710678118654752440f;
inline constexpr float kInverseSqrtTwoPi = 0.39894228040143267794f;

__device__ inline float activate(Activation activation, float x) {
  switch (activation) {
    case Activation::kGeluTanh: return 0.5f * x * (1.0f + tanhf(kSqrtTwoOverPi * (x + kGeluCubic * x * x * x)));
    case Activation::kGelu: return 0.5f * x * (1.0f + erff(x * kSqrtHalf));
    case Activation::kSilu: return x / (1.0f + expf(-x));
    default: return x;
  }
}

/// At infinity the derivatives are their limits, 0 and 1 (the formulas would give inf * 0).
__device__ inline float activation_gradient(Activation activation, float x) {
  if (isinf(x) && activation != Activation::kNone) return x > 0.0f ? 1.0f : 0.0f;
  switch (activation) {
    case Activation::kGeluTanh: {
      const float t = tanhf(kSqrtTwoOverPi * (x + kGeluCubic * x * x * x));
      return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * kSqrtTwoOverPi * (1.0f + 3.0f * kGeluCubic * x * x);
    }
    case Activation::kGelu: return 0.5f * (1.0f + erff(x * kSqrtHalf)) + x * kInverseSqrtTwoPi * expf(-0.5f * x * x);
    case Activation::kSilu: {
      const float s = 1.0f / (1.0f + expf(-x));
      return s + x * s * (1.0f - s);
    }
    default: return 1.0f;
  }
}

// Each activation is x * gate(x).
inline constexpr float kLog2OfE = 1.44269504088896340736f;

/// 1 / (1 + exp(-x)).
__device__ inline float sigmoid_fast(float x) { return ptx::reciprocal_approx(1.0f + ptx::exp2_approx(-kLog2OfE * x)); }

/// erfc(|x| / sqrt(2)), Abramowitz and Stegun 7.1.26 (absolute error 1.5e-7): a polynomial in 1 / (1 + p z), times
/// exp(-z^2).
__device__ inline float erfc_fast(float x) {
  const float t = ptx::reciprocal_approx(fmaf(0.3275911f * kSqrtHalf, fabsf(x), 1.0f));
  const float polynomial =
      t * fmaf(t, fmaf(t, fmaf(t, fmaf(t, 1.061405429f, -1.453152027f), 1.421413741f), -0.284496736f), 0.254829592f);
  return polynomial * ptx::exp2_approx(-0.5f * kLog2OfE * x * x);
}

template <Activation kActivation>
__device__ inline float activate_fast(float x) {
  if constexpr (kActivation == Activation::kGeluTanh) {  // (1 + tanh(u)) / 2 = sigmoid(2 u) = 1 / (1 + exp(-2 u))
    constexpr float kLinear = -2.0f * kLog2OfE * kSqrtTwoOverPi;
    return x * ptx::reciprocal_approx(1.0f + ptx::exp2_approx(x * fmaf(kLinear * kGeluCubic * x, x, kLinear)));
  }
  if constexpr (kActivation == Activation::kGelu) {
    const float q = 0.5f * erfc_fast(x);
    return x * (x >= 0.0f ? 1.0f - q : q);
  }
  if constexpr (kActivation == Activation::kSilu) return x * sigmoid_fast(x);
  return x;
}

/// At infinity the derivatives are their limits, 0 and 1.
template <Activation kActivation>
__device__ inline float activation_gradient_fast(float x) {
  if constexpr (kActivation == Activation::kNone) return 1.0f;
  if (isinf(x)) return x > 0.0f ? 1.0f : 0.0f;
  if constexpr (kActivation == Activation::kGelu) {
    const float q = 0.5f * erfc_fast(x);
    return fmaf(x * kInverseSqrtTwoPi, ptx::exp2_approx(-0.5f * kLog2OfE * x * x), x >= 0.0f ? 1.0f - q : q);
  }
  constexpr bool kTanh = kActivation == Activation::kGeluTanh;
  const float cube = kGeluCubic * x * x;
  const float s = sigmoid_fast(kTanh ? 2.0f * kSqrtTwoOverPi * x * (1.0f + cube) : x);
  const float slope = kTanh ? 2.0f * kSqrtTwoOverPi * fmaf(3.0f, cube, 1.0f) : 1.0f;  // of the sigmoid's argument
  const float bell = s * (1.0f - s);  // 0 far out, where x * slope may overflow
  return bell == 0.0f ? s : fmaf(x * slope, bell, s);
}

/// f(constant) with the activation as a compile-time constant: one branch for many elements.
template <class F>
__device__ inline void with_activation(Activation activation, F f) {
  switch (activation) {
    case Activation::kGeluTanh: f(std::integral_constant<Activation, Activation::kGeluTanh>{}); return;
    case Activation::kGelu: f(std::integral_constant<Activation, Activation::kGelu>{}); return;
    case Activation::kSilu: f(std::integral_constant<Activation, Activation::kSilu>{}); return;
    default: f(std::integral_constant<Activation, Activation::kNone>{}); return;
  }
}

}  // namespace flashkernel::cuda
