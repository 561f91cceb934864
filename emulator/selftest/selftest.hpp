// What the emulator's own tests share: device vectors, and launches that give back what went wrong.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace selftest {

/// A vector in the emulated device's memory.
template <class T>
class DeviceVector {
 public:
  explicit DeviceVector(const std::vector<T>& values) : size_(values.size()) {
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, size_ * sizeof(T)), cudaSuccess);
    data_ = static_cast<T*>(memory);
    cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice);
  }
  /// As cudaMalloc leaves it.
  explicit DeviceVector(std::size_t size) : size_(size) {
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, size_ * sizeof(T)), cudaSuccess);
    data_ = static_cast<T*>(memory);
  }
  ~DeviceVector() { cudaFree(data_); }
  DeviceVector(const DeviceVector&) = delete;
  DeviceVector& operator=(const DeviceVector&) = delete;

  T* data() const { return data_; }
  std::vector<T> values() const { return std::vector<T>(data_, data_ + size_); }

 private:
  T* data_ = nullptr;
  std::size_t size_;
};

/// Empty, or the error's text. In clusters of so many blocks; 0: the launch asks for none.
template <class... Params, class... Arguments>
std::string launch_in_clusters(unsigned blocks, dim3 grid, dim3 block, std::size_t shared_bytes,
                               void (*kernel)(Params...), Arguments... arguments) {
  if (shared_bytes > 0)
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = blocks;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = blocks > 0 ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error == cudaSuccess) return "";
  cudaGetLastError();
  return std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error);
}

template <class... Params, class... Arguments>
std::string launch(dim3 grid, dim3 block, std::size_t shared_bytes, void (*kernel)(Params...), Arguments... arguments) {
  return launch_in_clusters(0, grid, block, shared_bytes, kernel, arguments...);
}

/// For a scope: the order in which threads run.
class Order {
 public:
  explicit Order(const char* order) { setenv("FK_EMULATOR_ORDER", order, 1); }
  ~Order() { unsetenv("FK_EMULATOR_ORDER"); }
};

/// For a scope: how many blocks, or clusters, run at the same time.
class Resident {
 public:
  explicit Resident(int blocks) { setenv("FK_EMULATOR_RESIDENT", std::to_string(blocks).c_str(), 1); }
  ~Resident() { unsetenv("FK_EMULATOR_RESIDENT"); }
};

inline const char* const kOrders[] = {"forward", "reverse", "1", "2"};

inline void expect_mentions(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

}  // namespace selftest
