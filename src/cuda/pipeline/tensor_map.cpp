// See tensor_map.hpp.
#include "cuda/pipeline/tensor_map.hpp"

#include <string>

#include "core/fork_safe.hpp"
#include "cuda/host/cuda_check.hpp"
#include "flashkernel/error.hpp"

namespace flashkernel::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// Null where the driver is older than CUDA 12.
Encode encoder() {
  static MadeOnce<const Encode> function;
  return function.get([] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    if (status != cudaSuccess) cudaGetLastError();
    const bool is_found = status == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return std::make_unique<const Encode>(is_found ? reinterpret_cast<Encode>(found) : nullptr);
  });
}

CUtensorMapDataType data_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kBFloat16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::kFloat8E4M3:
    case DType::kInt8:
    case DType::kUInt8: return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    default: return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  }
}

CUtensorMapSwizzle swizzle(int bytes) {
  return bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
         : bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
         : bytes == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                       : CU_TENSOR_MAP_SWIZZLE_NONE;
}

constexpr std::int64_t kMostExtent = std::int64_t{1} << 32, kMostStrideBytes = std::int64_t{1} << 40;

}  // namespace

bool fits_tensor_map(const TensorMapSpec& spec) noexcept {
  const auto element = static_cast<std::int64_t>(dtype_bytes(spec.dtype));
  if (reinterpret_cast<std::uintptr_t>(spec.data) % 16 != 0) return false;
  for (int i = 0; i < spec.rank; ++i) {
    const TensorMapDim& dim = spec.dims[i];
    if (dim.extent < 1 || dim.extent > kMostExtent) return false;
    if (i == 0 || dim.extent == 1) continue;
    const std::int64_t bytes = dim.stride * element;
    if (dim.stride <= 0 || bytes >= kMostStrideBytes || bytes % 16 != 0) return false;
  }
  return true;
}

CUtensorMap make_tensor_map(const char* what, const TensorMapSpec& spec) {
  const Encode encode = encoder();
  if (!encode)
    throw CudaError(std::string(what) + ": the driver has no cuTensorMapEncodeTiled; CUDA 12 or later is needed", 0);
  cuuint64_t extents[TensorMapSpec::kMostDims], strides[TensorMapSpec::kMostDims];
  cuuint32_t box[TensorMapSpec::kMostDims], steps[TensorMapSpec::kMostDims];
  const auto element = static_cast<std::int64_t>(dtype_bytes(spec.dtype));
  for (int i = 0; i < spec.rank; ++i) {
    const TensorMapDim& dim = spec.dims[i];
    extents[i] = static_cast<cuuint64_t>(dim.extent);
    box[i] = dim.box;
    steps[i] = 1;
    // A dimension of one element is never stepped over, whatever its stride.
    if (i > 0) strides[i - 1] = static_cast<cuuint64_t>(dim.extent == 1 ? 16 : dim.stride * element);
  }
  CUtensorMap map;
  const CUresult status =
      encode(&map, data_type(spec.dtype), static_cast<cuuint32_t>(spec.rank), const_cast<void*>(spec.data), extents,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle(spec.swizzle_bytes),
             spec.fetch_bytes == 256 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    throw CudaError(
        std::string(what) + ": cuTensorMapEncodeTiled failed with " + std::to_string(static_cast<int>(status)),
        static_cast<int>(status));
  return map;
}

}  // namespace flashkernel::cuda
