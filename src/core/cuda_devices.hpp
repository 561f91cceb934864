// What the core may ask about CUDA devices; answered by src/cuda/host or, in a build without CUDA, by src/no_cuda.
#pragma once

#include "core/device_facts.hpp"

namespace flashkernel {

/// The facts of a GPU. All numbers are 0 for a device that does not exist. Cached, never throws.
const DeviceFacts& cuda_device_facts(int index) noexcept;

/// 75 for compute capability 7.5; 0 when there is no such device. Cached, never throws.
int cuda_compute_capability(int index) noexcept;

/// Null when CUDA devices can be used, else a sentence: no CUDA in this build, no driver, no device.
const char* why_no_cuda() noexcept;

}  // namespace flashkernel
