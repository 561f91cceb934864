// Shared by every params struct: plain data, legal on host and device.
#pragma once

#include <cstdint>

#include "flashkernel/device.hpp"
#include "flashkernel/dtype.hpp"

#if defined(__CUDACC__)
#define FK_HOST_DEVICE __host__ __device__
#else
#define FK_HOST_DEVICE
#endif

namespace flashkernel {

/// A contiguous or strided run of int32 or int64 values; null when absent.
struct IndexArray {
  const void* data = nullptr;
  bool is_int64 = false;

  FK_HOST_DEVICE std::int64_t operator[](std::int64_t i) const {
    return is_int64 ? static_cast<const std::int64_t*>(data)[i] : static_cast<const std::int32_t*>(data)[i];
  }
  FK_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
};

/// A read-only vector or matrix in fp32 or the op's dtype; null when absent.
struct TypedPointer {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  FK_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
};

}  // namespace flashkernel
