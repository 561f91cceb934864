// Memory of a test tensor on a device other than the CPU: device_memory_cuda.cpp, or device_memory_none.cpp in a build
// without CUDA.
#pragma once

#include <cstddef>

#include "flashkernel/device.hpp"

namespace flashkernel::conformance {

/// Straight from the driver, not from the library under test. Throws std::runtime_error on failure.
void* device_allocate(Device device, std::size_t bytes);
void device_free(Device device, void* pointer);

/// Synchronous: work on the device is done before, the copy after. An error of an earlier kernel is thrown here.
void copy_to_device(Device device, void* to, const void* from, std::size_t bytes);
void copy_from_device(Device device, void* to, const void* from, std::size_t bytes);

/// Multiprocessors of the first GPU; 0 if there is none.
int multiprocessors();

}  // namespace flashkernel::conformance
