// See device_memory.hpp: CUDA.
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "conformance/device_memory.hpp"

namespace flashkernel::conformance {
namespace {

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

}  // namespace

void* device_allocate(Device device, std::size_t bytes) {
  check(cudaSetDevice(device.index), "cudaSetDevice");
  void* pointer = nullptr;
  check(cudaMalloc(&pointer, bytes > 0 ? bytes : 1), "cudaMalloc");
  return pointer;
}

void device_free(Device, void* pointer) { cudaFree(pointer); }

void copy_to_device(Device device, void* to, const void* from, std::size_t bytes) {
  check(cudaSetDevice(device.index), "cudaSetDevice");
  check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "copy to the device");
}

void copy_from_device(Device device, void* to, const void* from, std::size_t bytes) {
  check(cudaSetDevice(device.index), "cudaSetDevice");
  check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "copy from the device");
}

int multiprocessors() {
  int count = 0;
  const bool known = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0) == cudaSuccess;
  return known ? count : 0;
}

}  // namespace flashkernel::conformance
