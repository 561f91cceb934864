// Answers about CUDA devices in a build without CUDA.
#include "core/cuda_devices.hpp"
#include "flashkernel/device.hpp"

namespace flashkernel {

int cuda_compute_capability(int) noexcept { return 0; }

const DeviceFacts& cuda_device_facts(int) noexcept {
  static const DeviceFacts none;
  return none;
}

const char* why_no_cuda() noexcept { return "this build has no CUDA"; }

int num_cuda_devices() noexcept { return 0; }

}  // namespace flashkernel
