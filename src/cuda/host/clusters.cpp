// See clusters.hpp.
#include "cuda/host/clusters.hpp"

#include <cuda_runtime.h>

#include <cstddef>
#include <memory>
#include <tuple>

#include "core/fork_safe.hpp"
#include "cuda/host/cuda_check.hpp"
#include "cuda/host/device.hpp"

namespace flashkernel::cuda {
namespace {

int ask(const char* name, const void* kernel, int num_blocks, int threads, int shared_bytes, int device) {
  const auto bytes = static_cast<std::size_t>(shared_bytes);
  allow_launch(kernel, bytes, static_cast<unsigned>(num_blocks), false, name);
  int count = 0;
  if (num_blocks == 1) {
    cuda_check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, threads, bytes), name);
    return count * cuda_device_properties(device).num_sms;
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(num_blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(num_blocks);
  config.blockDim = static_cast<unsigned>(threads);
  config.dynamicSmemBytes = bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  cuda_check(cudaOccupancyMaxActiveClusters(&count, kernel, &config), name);
  return count;
}

}  // namespace

int clusters_at_once(const char* name, const void* kernel, int num_blocks, int threads, int shared_bytes, int device) {
  static MadeOncePerKey<std::tuple<const void*, int, int, int>, const int> known;
  return known.get({kernel, num_blocks, shared_bytes, device}, [&] {
    return std::make_unique<const int>(ask(name, kernel, num_blocks, threads, shared_bytes, device));
  });
}

}  // namespace flashkernel::cuda
