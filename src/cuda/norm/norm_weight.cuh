// A vector of a norm's weight or bias as floats, for the kernels of norms forward and backward, of any floating dtype.
// Invariant: it is on a 16-byte boundary (the callers' supports functions ask for it).
#pragma once

#include <cstdint>

#include "cuda/tile/vector.cuh"
#include "ops/norm_params.hpp"

namespace flashkernel::cuda {

/// N elements from `column` on; all are `missing` where there is no vector.
template <int N>
__device__ inline void read_norm_vector(const TypedPointer& from, std::int64_t column, float missing,
                                        float (&values)[N]) {
#pragma unroll
  for (float& value : values) value = missing;
  if (!from) return;
  switch (from.dtype) {
    case DType::kFloat16: load_wide(values, static_cast<const __half*>(from.data) + column); break;
    case DType::kBFloat16: load_wide(values, static_cast<const __nv_bfloat16*>(from.data) + column); break;
    default: load_wide(values, static_cast<const float*>(from.data) + column);
  }
}

/// By what a row is scaled: weight + offset, or 1 where there is no weight.
template <int N>
__device__ inline void read_norm_weight(const TypedPointer& from, float offset, std::int64_t column,
                                        float (&weight)[N]) {
  read_norm_vector(from, column, 1.0f, weight);
  if (!from) return;
#pragma unroll
  for (float& value : weight) value += offset;
}

}  // namespace flashkernel::cuda
