// A vector of a norm's weight as floats, for the kernels of norm backward: 1 where there is no weight. Invariant: the
// weight is of the rows' dtype T or fp32, and on a 16-byte boundary (the callers' supports functions ask for it).
#pragma once

#include <cstdint>

#include "cuda/tile/vector.cuh"
#include "ops/norm_params.hpp"

namespace flashkernel::cuda {

template <class T>
__device__ inline void read_norm_weight(const TypedPointer& from, std::int64_t column,
                                        float (&weight)[kVectorElements<T>]) {
#pragma unroll
  for (float& one : weight) one = 1.0f;
  if (!from) return;
  if (from.dtype == dtype_of<T>) {
    load_floats(weight, static_cast<const T*>(from.data) + column);
  } else {
    load_wide(weight, static_cast<const float*>(from.data) + column);
  }
}

}  // namespace flashkernel::cuda
