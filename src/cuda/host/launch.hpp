// Launching: native stream, checked launch, grid sizes, and the step from a run-time dtype to a C++ type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "cuda/host/ceil_div.hpp"
#include "cuda/host/cuda_check.hpp"
#include "cuda/host/device.hpp"
#include "flashkernel/dtype.hpp"
#include "flashkernel/stream.hpp"

namespace flashkernel::cuda {

inline cudaStream_t native(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

/// Grid, block, bytes of dynamic shared memory (what needs the opt-in gets it here) and stream of one launch.
/// `early`: the kernel may start before the previous one on the stream has ended; it waits itself, by
/// ptx::wait_for_previous_kernel, before it reads what that one writes. Granted only to code that was compiled for 9.0
/// or later, whatever the GPU: older PTX has no such wait. `cluster` neighbours in the grid's x are one cluster (9.0
/// and later).
struct LaunchShape {
  dim3 grid, block;
  std::size_t shared_bytes;
  cudaStream_t stream;
  bool early = false;
  unsigned cluster = 1;
};

#ifdef __CUDACC__
/// kernel<<<shape>>>(arguments...). `name` stands in the CudaError of a refused launch; faults inside the kernel
/// surface at the caller's next synchronisation.
template <class... Params, class... Arguments>
void launch(const char* name, void (*kernel)(Params...), const LaunchShape& shape, Arguments&&... arguments) {
  const auto* const code = reinterpret_cast<const void*>(kernel);
  const bool early = allow_launch(code, shape.shared_bytes, shape.cluster, shape.early, name);
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = shape.stream;
  cudaLaunchAttribute attributes[2] = {};
  if (early) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {shape.cluster, 1, 1};
  }
  config.attrs = attributes;
  cuda_check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), name);
}
#endif

/// Blocks for `count` independent units walked by a grid-stride loop: enough to fill the device `waves` times over.
inline unsigned grid_size(std::int64_t blocks_wanted, int device, int blocks_per_sm) {
  const std::int64_t most = static_cast<std::int64_t>(cuda_device_properties(device).num_sms) * blocks_per_sm;
  return static_cast<unsigned>(std::max<std::int64_t>(1, std::min(blocks_wanted, most)));
}

inline bool is_aligned(const void* pointer, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

/// f(T{}) with T = float, __half or __nv_bfloat16.
template <class F>
void visit_floating(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16: f(__half{}); return;
    case DType::kBFloat16: f(__nv_bfloat16{}); return;
    default: f(float{}); return;
  }
}

}  // namespace flashkernel::cuda
