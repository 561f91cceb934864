// The activations of `linear` and their derivatives, in double, by their defining formulas.
#pragma once

#include <cmath>

#include "flashkernel/linear.hpp"

namespace flashkernel::cpu_scalar {

inline constexpr double kSqrt2OverPi = 0.79788456080286535588;  // sqrt(2 / pi)
inline constexpr double kInvSqrt2 = 0.70710678118654752440;
inline constexpr double kInvSqrt2Pi = 0.39894228040143267794;  // 1 / sqrt(2 pi)
inline constexpr double kGeluCubic = 0.044715;

inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

inline double activate(Activation activation, double x) {
  switch (activation) {
    case Activation::kGeluTanh: return 0.5 * x * (1.0 + std::tanh(kSqrt2OverPi * (x + kGeluCubic * x * x * x)));
    case Activation::kGelu: return 0.5 * x * (1.0 + std::erf(x * kInvSqrt2));
    case Activation::kSilu: return x * sigmoid(x);
    case Activation::kNone: break;
  }
  return x;
}

/// At infinity the derivatives are their limits, 0 and 1 (the formulas would give inf * 0).
inline double activation_derivative(Activation activation, double x) {
  if (std::isinf(x) && activation != Activation::kNone) return x > 0 ? 1.0 : 0.0;
  switch (activation) {
    case Activation::kGeluTanh: {
      const double t = std::tanh(kSqrt2OverPi * (x + kGeluCubic * x * x * x));
      return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * kSqrt2OverPi * (1.0 + 3.0 * kGeluCubic * x * x);
    }
    case Activation::kGelu: return 0.5 * (1.0 + std::erf(x * kInvSqrt2)) + x * kInvSqrt2Pi * std::exp(-0.5 * x * x);
    case Activation::kSilu: {
      const double s = sigmoid(x);
      return s * (1.0 + x * (1.0 - s));
    }
    case Activation::kNone: break;
  }
  return 1.0;
}

}  // namespace flashkernel::cpu_scalar
