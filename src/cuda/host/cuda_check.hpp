// Turns a failed CUDA runtime call into a CudaError that names the call. Used by everything under src/cuda and by
// memory/cuda_resource.cpp.
#pragma once

#include <cuda_runtime.h>

namespace flashkernel {

/// In device.cpp: strings and exceptions are much to read for every file of device code.
[[noreturn]] void throw_cuda_error(cudaError_t status, const char* what);

inline void cuda_check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw_cuda_error(status, what);
}

}  // namespace flashkernel
