// The activations of `linear` and their derivatives, in fp32 with the accurate library functions.
#pragma once

#include "flashkernel/linear.hpp"

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

}  // namespace flashkernel::cuda
