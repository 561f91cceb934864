// See zeroed_memory.hpp: the library's cache over an allocator that clears what it takes. Freed blocks are zero, so the
// cache may split, join and hand them out as it likes.
#include "cuda/host/zeroed_memory.hpp"

#include <cuda_runtime.h>

#include <memory>
#include <string>

#include "core/fork_safe.hpp"
#include "cuda/host/cuda_check.hpp"
#include "cuda/host/device.hpp"
#include "flashkernel/error.hpp"
#include "flashkernel/memory_resource.hpp"

namespace flashkernel::cuda {
namespace {

/// Allocation and clearing are legal beside a capture in relaxed mode only.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class ClearedMemory final : public MemoryResource {
 public:
  explicit ClearedMemory(int index) : index_(index) {}

  void* allocate(std::size_t bytes, std::size_t, Stream) override {
    const CudaDeviceGuard guard(index_);
    const RelaxedCapture relaxed;
    void* pointer = nullptr;
    const cudaError_t status = cudaMalloc(&pointer, bytes);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw OutOfMemory("counters: out of memory on cuda:" + std::to_string(index_) + "; requested " +
                            std::to_string(bytes) + " bytes",
                        bytes, 0, 0);
    }
    cuda_check(status, "cudaMalloc");
    // On a stream of its own: one that is captured would record it, the default one waits for captured ones.
    cudaStream_t stream = nullptr;
    cuda_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    cuda_check(cudaMemsetAsync(pointer, 0, bytes, stream), "cudaMemsetAsync");
    cuda_check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    cuda_check(cudaStreamDestroy(stream), "cudaStreamDestroy");
    return pointer;
  }
  void deallocate(void* pointer, std::size_t, std::size_t, Stream) noexcept override {
    if (cuda_lost_in_fork()) return;
    const RelaxedCapture relaxed;
    if (pointer && cudaFree(pointer) != cudaSuccess) cudaGetLastError();
  }
  Device device() const noexcept override { return Device::cuda(index_); }
  MemoryStats stats() const override { return {}; }

 private:
  const int index_;
};

/// One a device, made at first use and never destroyed.
MemoryResource& zeroed_resource(int index) {
  static MadeOncePerKey<int, ClearedMemory> upstreams;
  static MadeOncePerKey<int, CachingResource> resources;
  return resources.get(index, [index] {
    MemoryResource& upstream = upstreams.get(index, [index] { return std::make_unique<ClearedMemory>(index); });
    return std::make_unique<CachingResource>(upstream);
  });
}

}  // namespace

ZeroedMemory::ZeroedMemory(int device, std::size_t bytes, Stream stream)
    : resource_(zeroed_resource(device)), bytes_(bytes), stream_(stream), data_(resource_.allocate(bytes, stream)) {}

ZeroedMemory::~ZeroedMemory() { resource_.deallocate(data_, bytes_, stream_); }

}  // namespace flashkernel::cuda
