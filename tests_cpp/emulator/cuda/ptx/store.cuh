// Emulates src/cuda/ptx/store.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstring>

namespace flashkernel::cuda::ptx {

inline void store_16(void* global, const uint4& v, bool there) {
  if (there) std::memcpy(global, &v, 16);
}

}  // namespace flashkernel::cuda::ptx
