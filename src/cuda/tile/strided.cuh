// Where an element of a strided array lies, by its number among merged dims. Used by reductions and softmax.
#pragma once

#include <cstdint>

namespace flashkernel::cuda {

/// Element offset of number `index` of `ndim` merged dims; an unsigned one where 32 bits count all of them. The loop
/// stays one: unrolled, its 64-bit division, by a number that is not known, was half of the machine code of the kernels
/// that call this once a row.
template <class Index>
__device__ inline std::int64_t strided_offset(Index index, int ndim, const std::int64_t* shape,
                                              const std::int64_t* strides) {
  std::int64_t offset = 0;
#pragma unroll 1
  for (int d = ndim - 1; d > 0; --d) {
    const auto size = static_cast<Index>(shape[d]), rest = index / size;
    offset += static_cast<std::int64_t>(index - rest * size) * strides[d];
    index = rest;
  }
  return ndim > 0 ? offset + static_cast<std::int64_t>(index) * strides[0] : offset;
}

}  // namespace flashkernel::cuda
