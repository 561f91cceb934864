// A launch whose blocks all run at once, so that they may wait for each other. Device code of the op calls it; the
// emulator has a version of its own.
#pragma once

#include <utility>

#include "cuda/host/launch.hpp"

namespace flashkernel::cuda {

/// As `launch`. CudaError where the GPU does not run all blocks at once.
template <class... Params, class... Arguments>
void launch_cooperative(const char* name, void (*kernel)(Params...), const LaunchShape& shape,
                        Arguments&&... arguments) {
  allow_launch(reinterpret_cast<const void*>(kernel), shape.shared_bytes, 1, false, name);
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = shape.stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  cuda_check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), name);
}

}  // namespace flashkernel::cuda
