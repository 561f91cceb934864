// The floating dtypes with the suffixes that case names carry.
#pragma once

#include "flashkernel/dtype.hpp"

namespace flashkernel::conformance {

/// f(dtype, "_fp32"), ...
template <class F>
void each_dtype(F&& f) {
  f(DType::kFloat32, "_fp32");
  f(DType::kFloat16, "_fp16");
  f(DType::kBFloat16, "_bf16");
}

/// Element stride that puts the second row past 2^31 elements; the memory between is reserved, never touched.
inline constexpr long long kFarStride = (1ll << 31) + 64;

}  // namespace flashkernel::conformance
