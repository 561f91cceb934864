// Order between streams, and waiting for them (see flashkernel/stream_order.hpp).
#include "flashkernel/stream_order.hpp"

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/host/cuda_check.hpp"
#include "cuda/host/device.hpp"

namespace flashkernel {
namespace {

cudaStream_t native(Stream stream) noexcept { return static_cast<cudaStream_t>(stream.handle); }

/// 0 and 1 (cudaStreamLegacy) are one stream.
bool same(Stream a, Stream b) noexcept {
  const auto key = [](Stream stream) {
    const auto handle = reinterpret_cast<std::uintptr_t>(stream.handle);
    return handle == 1 ? 0 : handle;
  };
  return key(a) == key(b);
}

}  // namespace

void order_streams(Device device, Stream earlier, Stream later) {
  if (device.is_cpu() || same(earlier, later)) return;
  const CudaDeviceGuard guard(device.index);
  cudaEvent_t event = nullptr;
  cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  cudaError_t status = cudaEventRecord(event, native(earlier));
  if (status == cudaSuccess) status = cudaStreamWaitEvent(native(later), event, 0);
  const cudaError_t destroyed = cudaEventDestroy(event);  // the driver keeps it until nobody waits for it
  cuda_check(status, "order_streams");
  cuda_check(destroyed, "cudaEventDestroy");
}

void synchronize(Device device, Stream stream) {
  if (device.is_cpu()) return;
  const CudaDeviceGuard guard(device.index);
  cuda_check(cudaStreamSynchronize(native(stream)), "cudaStreamSynchronize");
}

void synchronize(Device device) {
  if (device.is_cpu()) return;
  const CudaDeviceGuard guard(device.index);
  cuda_check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

}  // namespace flashkernel
