// Turns a failed CUDA runtime call into a CudaError that names the call. Used by everything under src/cuda and by
// memory/cuda_resource.cpp.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "flashkernel/error.hpp"

namespace flashkernel {

inline void cuda_check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // a sticky error stays; an ordinary one must not surface in a later, innocent call
  throw CudaError(std::string(what) + ": " + cudaGetErrorName(status) + ": " + cudaGetErrorString(status),
                  static_cast<int>(status));
}

}  // namespace flashkernel
