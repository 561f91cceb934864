// See device.hpp. Never throws on a machine without driver or GPU: the library must import there.
#include "cuda/host/device.hpp"

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/cuda_devices.hpp"
#include "core/fork_safe.hpp"
#include "cuda/host/cuda_check.hpp"
#include "flashkernel/device.hpp"
#include "flashkernel/error.hpp"

#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace flashkernel {
namespace {

struct Devices {
  std::vector<CudaDeviceProperties> properties;
  std::vector<DeviceFacts> facts;
  std::string why_none;
};

std::atomic<bool> g_lost_in_fork{false};
constexpr int kInitializationError = 3;  // cudaErrorInitializationError: what the driver answers in such a process

std::unique_ptr<const Devices> read_devices() {
  auto read = std::make_unique<Devices>();
  Devices& devices = *read;
#if !defined(_WIN32)
  // A child that is forked from here on can't use the driver, which may even hang there.
  pthread_atfork(nullptr, nullptr, [] { g_lost_in_fork.store(true, std::memory_order_relaxed); });
#endif
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    cudaGetLastError();
    devices.why_none = std::string("cudaGetDeviceCount: ") + cudaGetErrorString(status);
    return read;
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
    DeviceFacts facts;
    facts.index = i;
    facts.compute_capability = p.compute_capability;
    facts.num_sms = p.num_sms;
    facts.max_shared_bytes_per_block = p.max_shared_bytes_per_block;
    devices.facts.push_back(facts);
  }
  return read;
}

// Read at first use, kept for the process, never destroyed.
const Devices& devices() noexcept {
  static MadeOnce<const Devices> instance;
  return instance.get(read_devices);
}

}  // namespace

int num_cuda_devices() noexcept { return static_cast<int>(devices().properties.size()); }

int cuda_compute_capability(int index) noexcept {
  return index >= 0 && index < num_cuda_devices()
             ? devices().properties[static_cast<std::size_t>(index)].compute_capability
             : 0;
}

const DeviceFacts& cuda_device_facts(int index) noexcept {
  static const DeviceFacts none;
  return index >= 0 && index < num_cuda_devices() ? devices().facts[static_cast<std::size_t>(index)] : none;
}

const char* why_no_cuda() noexcept { return num_cuda_devices() > 0 ? nullptr : devices().why_none.c_str(); }

bool cuda_lost_in_fork() noexcept { return g_lost_in_fork.load(std::memory_order_relaxed); }

void check_cuda_after_fork() {
  if (cuda_lost_in_fork())
    throw CudaError(
        "CUDA was used before fork(), so this child process can't use it; start processes by \"spawn\", or "
        "use CUDA in children only",
        kInitializationError);
}

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
  bool is_known = false;
  std::size_t shared_bytes = 0;  // allowed beside the kernel's static arrays
  bool wide_clusters = false;    // allowed
  bool waits = false;
};

}  // namespace

bool allow_launch(const void* kernel, std::size_t shared_bytes, unsigned cluster, bool early, const char* name) {
  const bool asks_memory = shared_bytes > 0, asks_cluster = cluster > 8;
  if (!asks_memory && !asks_cluster && !early) return false;
  struct Known {
    ForkSafeMutex mutex;
    std::map<std::pair<int, const void*>, KernelState> kernels;
  };
  static MadeOnce<Known> once;
  Known& known = once.get();
  int device = 0;
  cuda_check(cudaGetDevice(&device), name);
  const ForkSafeLock lock(known.mutex);
  KernelState& state = known.kernels[{device, kernel}];
  if (!state.is_known) {
    cudaFuncAttributes attributes{};
    cuda_check(cudaFuncGetAttributes(&attributes, kernel), name);
    // 48 KB need no asking, less what static arrays take.
    state.shared_bytes = static_cast<std::size_t>(attributes.maxDynamicSharedSizeBytes);
    state.waits = attributes.ptxVersion >= 90;
    state.is_known = true;
  }
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
  return early && state.waits;
}

void throw_cuda_error(cudaError_t status, const char* what) {
  cudaGetLastError();  // a sticky error stays; an ordinary one must not surface in a later, innocent call
  throw CudaError(std::string(what) + ": " + cudaGetErrorName(status) + ": " + cudaGetErrorString(status),
                  static_cast<int>(status));
}

CudaDeviceGuard::CudaDeviceGuard(int index) {
  check_cuda_after_fork();
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
