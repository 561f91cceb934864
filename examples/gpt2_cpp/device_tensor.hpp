// A tensor that owns memory of the library's own resource of a device, and the copies between host and device.
// Used by gpt2.hpp. On the CPU, "device" memory is the host's and a copy is memcpy; a CUDA build adds cudaMemcpy.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <vector>

#include "flashkernel/flashkernel.hpp"

#ifdef GPT2_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace gpt2 {

namespace fk = flashkernel;

inline void copy_bytes(void* to, const void* from, std::size_t bytes, fk::Device device) {
  if (bytes == 0) return;
  if (device.is_cpu()) {
    std::memcpy(to, from, bytes);
    return;
  }
#ifdef GPT2_WITH_CUDA
  const cudaError_t status = cudaMemcpy(to, from, bytes, cudaMemcpyDefault);  // waits for the default stream's work
  if (status != cudaSuccess) throw std::runtime_error(std::string("cudaMemcpy: ") + cudaGetErrorString(status));
#else
  throw std::runtime_error("copy_bytes: " + fk::to_string(device) + " in a build without CUDA");
#endif
}

struct Tensor {
  fk::TensorView view;

  Tensor() = default;
  /// Uninitialised and contiguous. Memory returns to its resource with the last copy of this tensor.
  Tensor(fk::DType dtype, std::initializer_list<std::int64_t> shape, fk::Device device)
      : view(nullptr, dtype, shape, device) {
    fk::MemoryResource& resource = fk::default_resource(device);
    const std::size_t bytes = this->bytes();
    view.data = resource.allocate(bytes);
    memory_ = std::shared_ptr<void>(view.data, [&resource, bytes](void* data) { resource.deallocate(data, bytes); });
  }

  std::size_t bytes() const { return static_cast<std::size_t>(view.numel()) * fk::dtype_bytes(view.dtype); }

  template <typename T>
  void upload(const std::vector<T>& values) {
    if (values.size() * sizeof(T) != bytes()) throw std::runtime_error("upload: sizes differ");
    copy_bytes(view.data, values.data(), bytes(), view.device);
  }
  template <typename T>
  std::vector<T> download() const {
    std::vector<T> values(bytes() / sizeof(T));
    copy_bytes(values.data(), view.data, bytes(), view.device);
    return values;
  }

  operator const fk::TensorView&() const { return view; }

 private:
  std::shared_ptr<void> memory_;
};

}  // namespace gpt2
