// See device.hpp. Never throws on a machine without driver or GPU: the library must import there.
#include "cuda/host/device.hpp"

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/cuda_devices.hpp"
#include "cuda/host/cuda_check.hpp"
#include "flashkernel/device.hpp"
#include "flashkernel/error.hpp"

namespace flashkernel {
namespace {

struct Devices {
  std::vector<CudaDeviceProperties> properties;
  std::string why_none;
};

Devices read_devices() {
  Devices devices;
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    cudaGetLastError();
    devices.why_none = std::string("cudaGetDeviceCount: ") + cudaGetErrorString(status);
    return devices;
  }
  if (count == 0) devices.why_none = "the driver reports no device";
  for (int i = 0; i < count; ++i) {
    const auto attribute = [i](cudaDeviceAttr name) {
      int value = 0;
      if (cudaDeviceGetAttribute(&value, name, i) != cudaSuccess) cudaGetLastError();
      return value;
    };
    CudaDeviceProperties p;
    p.compute_capability =
        10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor);
    p.num_sms = attribute(cudaDevAttrMultiProcessorCount);
    p.max_shared_bytes_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    p.l2_bytes = attribute(cudaDevAttrL2CacheSize);
    devices.properties.push_back(p);
  }
  return devices;
}

// Read at first use, kept for the process, never destroyed.
const Devices& devices() noexcept {
  static const Devices* const instance = new Devices(read_devices());
  return *instance;
}

}  // namespace

int num_cuda_devices() noexcept { return static_cast<int>(devices().properties.size()); }

int cuda_compute_capability(int index) noexcept {
  return index >= 0 && index < num_cuda_devices()
             ? devices().properties[static_cast<std::size_t>(index)].compute_capability
             : 0;
}

const char* why_no_cuda() noexcept { return num_cuda_devices() > 0 ? nullptr : devices().why_none.c_str(); }

const CudaDeviceProperties& cuda_device_properties(int index) {
  if (num_cuda_devices() == 0)
    throw Unsupported("cuda:" + std::to_string(index) + ": no CUDA device can be used: " + devices().why_none);
  if (index < 0 || index >= num_cuda_devices())
    throw InvalidArgument("cuda:" + std::to_string(index) + ": there are " + std::to_string(num_cuda_devices()) +
                          " CUDA devices");
  return devices().properties[static_cast<std::size_t>(index)];
}

namespace {

// What is known of a kernel's code on one device; devices may run different code. Each question to the runtime costs
// some 0.3 us of every launch.
struct KernelState {
  std::size_t shared_bytes = 0;  // allowed
  bool wide_clusters = false;    // allowed
  bool has_version = false, waits = false;
};

}  // namespace

bool allow_launch(const void* kernel, std::size_t shared_bytes, unsigned cluster, bool early, const char* name) {
  // Up to 48 KB need no asking, but the kernel's static arrays count too.
  const bool asks_memory = shared_bytes > 32 * 1024, asks_cluster = cluster > 8;
  if (!asks_memory && !asks_cluster && !early) return false;
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, KernelState> known;
  int device = 0;
  cuda_check(cudaGetDevice(&device), name);
  const std::lock_guard<std::mutex> lock(mutex);
  KernelState& state = known[{device, kernel}];
  if (asks_memory && shared_bytes > state.shared_bytes) {
    cuda_check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
        name);
    state.shared_bytes = shared_bytes;
  }
  if (asks_cluster && !state.wide_clusters) {
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), name);
    state.wide_clusters = true;
  }
  if (early && !state.has_version) {
    cudaFuncAttributes attributes{};
    cuda_check(cudaFuncGetAttributes(&attributes, kernel), name);
    state.has_version = true;
    state.waits = attributes.ptxVersion >= 90;
  }
  return early && state.waits;
}

void throw_cuda_error(cudaError_t status, const char* what) {
  cudaGetLastError();  // a sticky error stays; an ordinary one must not surface in a later, innocent call
  throw CudaError(std::string(what) + ": " + cudaGetErrorName(status) + ": " + cudaGetErrorString(status),
                  static_cast<int>(status));
}

CudaDeviceGuard::CudaDeviceGuard(int index) {
  int current = 0;
  cuda_check(cudaGetDevice(&current), "cudaGetDevice");
  if (current == index) return;
  cuda_check(cudaSetDevice(index), "cudaSetDevice");
  previous_ = current;
}

CudaDeviceGuard::~CudaDeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

}  // namespace flashkernel
