// CUDA's plain allocator of one device, and events on its streams: what CachingResource stands on for GPUs.
// Freeing synchronises the device (cudaFree does), which is why nothing uses this resource without the cache.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "core/fork_safe.hpp"
#include "cuda/host/cuda_check.hpp"
#include "cuda/host/device.hpp"
#include "flashkernel/error.hpp"
#include "memory/device_resources.hpp"
#include "memory/sizes.hpp"

namespace flashkernel {
namespace {

constexpr std::size_t kCudaAlignment = 256;  // what cudaMalloc promises

// cudaMalloc is legal while a stream of this thread is captured only in relaxed mode.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class CudaResource final : public MemoryResource {
 public:
  explicit CudaResource(int index) : index_(index) {}

  void* allocate(std::size_t bytes, std::size_t alignment, Stream) override {
    if (!detail::is_power_of_two(alignment) || alignment > kCudaAlignment)
      throw InvalidArgument("CudaResource: alignment=" + std::to_string(alignment) +
                            "; needs a power of two, at most " + std::to_string(kCudaAlignment));
    const CudaDeviceGuard guard(index_);
    const RelaxedCapture relaxed;
    void* pointer = nullptr;
    const cudaError_t status = cudaMalloc(&pointer, std::max<std::size_t>(bytes, 1));
    const ForkSafeLock lock(mutex_);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      std::size_t free_bytes = 0, total_bytes = 0;
      if (cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess) cudaGetLastError();
      throw OutOfMemory("CudaResource: out of memory on cuda:" + std::to_string(index_) + "; requested " +
                            std::to_string(bytes) + " bytes, free " + std::to_string(free_bytes) + " of " +
                            std::to_string(total_bytes) + ", peak " + std::to_string(stats_.peak_allocated_bytes),
                        bytes, free_bytes, stats_.peak_allocated_bytes);
    }
    cuda_check(status, "cudaMalloc");
    stats_.allocated_bytes += bytes;
    stats_.reserved_bytes = stats_.allocated_bytes;
    stats_.peak_allocated_bytes = std::max(stats_.peak_allocated_bytes, stats_.allocated_bytes);
    stats_.peak_reserved_bytes = stats_.peak_allocated_bytes;
    ++stats_.num_allocations;
    ++stats_.num_upstream_allocations;
    return pointer;
  }

  void deallocate(void* pointer, std::size_t bytes, std::size_t, Stream) noexcept override {
    if (!pointer) return;
    if (!cuda_lost_in_fork()) {
      const RelaxedCapture relaxed;
      // Fails harmlessly when the driver is gone at exit.
      if (cudaFree(pointer) != cudaSuccess) cudaGetLastError();
    }
    const ForkSafeLock lock(mutex_);
    stats_.allocated_bytes -= bytes;
    stats_.reserved_bytes = stats_.allocated_bytes;
    ++stats_.num_deallocations;
  }

  Device device() const noexcept override { return Device::cuda(index_); }

  MemoryStats stats() const override {
    const ForkSafeLock lock(mutex_);
    return stats_;
  }

 private:
  const int index_;
  mutable ForkSafeMutex mutex_;
  MemoryStats stats_;
};

// In a child process that has lost CUDA nothing here calls the driver: memory is given back to the cache's records, and
// whoever asks for more hears of it from CudaDeviceGuard.
class CudaStreamEvents final : public detail::StreamEvents {
 public:
  explicit CudaStreamEvents(int index) : index_(index) {}

  std::uintptr_t key(Stream stream) const noexcept override {
    const auto handle = reinterpret_cast<std::uintptr_t>(stream.handle);
    // 0 and 1 (cudaStreamLegacy) are one stream. 2 (cudaStreamPerThread) is another one in every thread.
    if (handle <= 1) return 0;
    if (handle != 2) return handle;
    static thread_local char this_thread;
    return reinterpret_cast<std::uintptr_t>(&this_thread);
  }

  bool record(void*& event, Stream stream) noexcept override {
    if (cuda_lost_in_fork()) return false;
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    const auto native = static_cast<cudaStream_t>(stream.handle);
    if (cudaStreamIsCapturing(native, &capture) != cudaSuccess || capture != cudaStreamCaptureStatusNone) {
      cudaGetLastError();
      return false;
    }
    const DeviceScope scope(index_);
    if (!event) {
      cudaEvent_t made = nullptr;
      if (cudaEventCreateWithFlags(&made, cudaEventDisableTiming) != cudaSuccess) return failed();
      event = made;
    }
    return cudaEventRecord(static_cast<cudaEvent_t>(event), native) == cudaSuccess || failed();
  }

  bool done(void* event) noexcept override {
    if (cuda_lost_in_fork()) return false;
    const RelaxedCapture relaxed;  // a query is not allowed beside a capture in the stricter modes
    return cudaEventQuery(static_cast<cudaEvent_t>(event)) == cudaSuccess || failed();
  }

  bool wait(Stream stream, void* event) noexcept override {
    if (cuda_lost_in_fork()) return false;
    const DeviceScope scope(index_);
    return cudaStreamWaitEvent(static_cast<cudaStream_t>(stream.handle), static_cast<cudaEvent_t>(event), 0) ==
               cudaSuccess ||
           failed();
  }

  std::uint64_t capture(Stream stream) noexcept override {
    const CaptureInfo info(stream);
    return info.graph != nullptr ? info.id : 0;
  }

  // The graph, its clones and executables hold a reference to the user object; the last one to go calls `gone`.
  bool when_graph_is_gone(Stream stream, void (*gone)(void*), void* argument) noexcept override {
    const CaptureInfo info(stream);
    cudaUserObject_t object = nullptr;
    if (info.graph == nullptr ||
        cudaUserObjectCreate(&object, argument, gone, 1, cudaUserObjectNoDestructorSync) != cudaSuccess)
      return failed();
    // Should the graph refuse it, the object stays: its destructor would call `gone` with an argument that we take
    // back.
    return cudaGraphRetainUserObject(info.graph, object, 1, cudaGraphUserObjectMove) == cudaSuccess || failed();
  }

  void destroy(void* event) noexcept override {
    if (event && !cuda_lost_in_fork() && cudaEventDestroy(static_cast<cudaEvent_t>(event)) != cudaSuccess) failed();
  }

 private:
  // The capture that a stream is part of, if any.
  struct CaptureInfo {
    explicit CaptureInfo(Stream stream) noexcept {
      if (cuda_lost_in_fork()) return;
      cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
      const auto native = static_cast<cudaStream_t>(stream.handle);
      unsigned long long number = 0;
#if CUDART_VERSION >= 13000
      const cudaError_t error = cudaStreamGetCaptureInfo(native, &status, &number, &graph, nullptr, nullptr, nullptr);
#else
      const cudaError_t error = cudaStreamGetCaptureInfo_v2(native, &status, &number, &graph, nullptr, nullptr);
#endif
      if (error != cudaSuccess || status != cudaStreamCaptureStatusActive) {
        if (error != cudaSuccess) cudaGetLastError();  // the default stream beside a capture of another one, say
        graph = nullptr;
      }
      id = number;
    }
    std::uint64_t id = 0;
    cudaGraph_t graph = nullptr;
  };

  // CudaDeviceGuard for functions that must not throw.
  class DeviceScope {
   public:
    explicit DeviceScope(int index) noexcept {
      if (cudaGetDevice(&previous_) != cudaSuccess || previous_ == index || cudaSetDevice(index) != cudaSuccess)
        previous_ = -1;
    }
    ~DeviceScope() {
      if (previous_ >= 0) cudaSetDevice(previous_);
    }

   private:
    int previous_ = -1;
  };

  static bool failed() noexcept {
    cudaGetLastError();
    return false;
  }

  const int index_;
};

}  // namespace

namespace detail {

MemoryResource* cuda_resource(int index) {
  cuda_device_properties(index);  // refuses a device that does not exist
  static MadeOncePerKey<int, CudaResource> resources;
  return &resources.get(index, [index] { return std::make_unique<CudaResource>(index); });
}

std::unique_ptr<StreamEvents> cuda_stream_events(int index) { return std::make_unique<CudaStreamEvents>(index); }

void cuda_copy_rows(int index, void* dst, const void* src, std::size_t pitch_bytes, std::size_t row_bytes,
                    std::size_t num_rows, Stream stream) {
  if (num_rows == 0 || row_bytes == 0) return;
  const CudaDeviceGuard guard(index);
  const auto native = static_cast<cudaStream_t>(stream.handle);
  constexpr std::size_t kMostPitch = 0x7fffffff;  // cudaDevAttrMaxPitch on every device so far
  if (pitch_bytes <= kMostPitch) {
    cuda_check(
        cudaMemcpy2DAsync(dst, pitch_bytes, src, pitch_bytes, row_bytes, num_rows, cudaMemcpyDeviceToDevice, native),
        "cudaMemcpy2DAsync");
    return;
  }
  for (std::size_t row = 0; row < num_rows; ++row)
    cuda_check(
        cudaMemcpyAsync(static_cast<char*>(dst) + row * pitch_bytes, static_cast<const char*>(src) + row * pitch_bytes,
                        row_bytes, cudaMemcpyDeviceToDevice, native),
        "cudaMemcpyAsync");
}

}  // namespace detail
}  // namespace flashkernel
