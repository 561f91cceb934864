// Maps of global tensors for the copy engine of sm_90 (ptx/tma.cuh). The host makes them at each launch, in a fraction
// of a microsecond, and passes them to the kernel by value as `const __grid_constant__ CUtensorMap`. The encoder of the
// driver is found at run time: the library does not link libcuda.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "flashkernel/dtype.hpp"

namespace flashkernel::cuda {

/// One dimension of a tensor and of the box that a copy moves. The innermost one has stride 1 and a box of one line of
/// the swizzle at most (128, 64 or 32 bytes); each box extent is 256 at most.
struct TensorMapDim {
  std::int64_t extent = 1;
  std::int64_t stride = 1;  // in elements
  std::uint32_t box = 1;
};

struct TensorMapSpec {
  static constexpr int kMostDims = 5;
  const void* data = nullptr;
  DType dtype = DType::kFloat16;
  int rank = 0;
  TensorMapDim dims[kMostDims] = {};  // the innermost first
  int swizzle_bytes = 128;            // 0, 32, 64, 128
  int fetch_bytes = 256;              // that the L2 cache asks memory for at least: 128, 256
};

/// Whether the engine can address the tensor: data and strides at multiples of 16 bytes, strides positive (where the
/// extent is over 1) and below 2^40 bytes, extents of 1 to 2^32.
bool fits_tensor_map(const TensorMapSpec& spec) noexcept;

/// Throws CudaError naming `what` when the driver refuses; a tensor must fit (above).
CUtensorMap make_tensor_map(const char* what, const TensorMapSpec& spec);

}  // namespace flashkernel::cuda
