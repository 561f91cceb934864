// The runtime API of the emulated device: see toolkit/runtime_api.h. Device memory comes from malloc, so that
// AddressSanitizer watches it; fresh memory is poison.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>

#include "cuda.h"
#include "cuda_runtime.h"
#include "simt/device_memory.hpp"
#include "simt/shared.hpp"

struct SimtEvent {};

namespace simt {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
std::string& fault_text() {
  static thread_local std::string text;
  return text;
}

cudaError_t set_error(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

int number_from_environment(const char* name, int otherwise) {
  const char* const text = std::getenv(name);
  return text ? std::atoi(text) : otherwise;
}

int compute_capability() {
  static const int value = number_from_environment("FK_EMULATOR_CC", 90);
  return value;
}

// Shared memory of one block that opted in (CUDA C++ programming guide, technical specifications per compute
// capability).
int most_shared_bytes() {
  switch (compute_capability()) {
    case 75: return 64 * 1024;
    case 80:
    case 87: return 163 * 1024;
    case 86:
    case 89: return 99 * 1024;
    default: return 227 * 1024;
  }
}

std::recursive_mutex& launch_mutex() {
  static std::recursive_mutex& mutex = *new std::recursive_mutex;
  return mutex;
}

// Bytes of dynamic shared memory that a kernel was allowed.
std::map<const void*, int>& shared_limits() {
  static auto& limits = *new std::map<const void*, int>;
  return limits;
}

// Kernels that were allowed clusters that not every GPU has.
std::set<const void*>& large_clusters() {
  static auto& kernels = *new std::set<const void*>;
  return kernels;
}

}  // namespace

cudaError_t set_kernel_attribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  const std::lock_guard<std::recursive_mutex> lock(launch_mutex());
  if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed && value != 0) large_clusters().insert(kernel);
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || value > most_shared_bytes()) return set_error(cudaErrorInvalidValue);
  shared_limits()[kernel] = value;
  return cudaSuccess;
}

// Every shape that a kernel was launched with, for scripts/kernel_resources.py: FK_EMULATOR_LAUNCHES names a file that
// gets lines of `kernel's address in this program <tab> threads <tab> dynamic shared bytes <tab> compute capability` at
// exit.
extern "C" char __executable_start;

class LaunchRecord {
 public:
  ~LaunchRecord() {
    const char* const file = std::getenv("FK_EMULATOR_LAUNCHES");
    if (!file) return;
    if (std::FILE* out = std::fopen(file, "w")) {
      for (const auto& [address, threads, bytes] : shapes_)
        std::fprintf(out, "%llx\t%llu\t%llu\t%d\n", static_cast<unsigned long long>(address),
                     static_cast<unsigned long long>(threads), static_cast<unsigned long long>(bytes),
                     compute_capability());
      std::fclose(out);
    }
  }
  void add(const void* kernel, std::uint64_t threads, std::uint64_t bytes) {
    const auto start = reinterpret_cast<std::uintptr_t>(&__executable_start);
    shapes_.insert({reinterpret_cast<std::uintptr_t>(kernel) - start, threads, bytes});
  }

 private:
  std::set<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>> shapes_;
};

cudaError_t launch(const void* kernel, const cudaLaunchConfig_t& config, const std::function<void()>& body) {
  const std::lock_guard<std::recursive_mutex> lock(launch_mutex());
  unsigned cluster = 1;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (attribute.id != cudaLaunchAttributeClusterDimension) continue;
    const auto& shape = attribute.val.clusterDim;
    const unsigned most = large_clusters().count(kernel) > 0 ? kMostClusterBlocks : kPortableClusterBlocks;
    if (shape.x < 1 || shape.x > most || shape.y != 1 || shape.z != 1 || config.gridDim.x % shape.x != 0)
      return set_error(cudaErrorInvalidConfiguration);
    cluster = shape.x;
  }
  const auto limit = shared_limits().find(kernel);
  const std::size_t most =
      limit == shared_limits().end() ? kUnaskedSharedBytes : static_cast<std::size_t>(limit->second);
  const dim3 grid = config.gridDim, block = config.blockDim;
  const std::uint64_t threads = std::uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > 1024 || block.z > 64 || grid.x == 0 || grid.y == 0 || grid.z == 0 ||
      grid.x > 0x7fffffff || grid.y > 0xffff || grid.z > 0xffff)
    return set_error(cudaErrorInvalidConfiguration);
  if (config.dynamicSmemBytes > most) return set_error(cudaErrorInvalidValue);
  static LaunchRecord record;
  record.add(kernel, threads, config.dynamicSmemBytes);
  fault_text() =
      run_grid({grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, cluster, config.dynamicSmemBytes, body);
  return set_error(fault_text().empty() ? cudaSuccess : cudaErrorLaunchFailure);
}

}  // namespace simt

using simt::set_error;

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
  }
  return "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? simt::fault_text().c_str() : cudaGetErrorName(error);
}
cudaError_t cudaGetLastError() { return std::exchange(simt::last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return simt::last_error; }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return set_error(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != 0) return set_error(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrL2CacheSize: *value = 64 << 10; return cudaSuccess;  // small: some cases' keys don't fit
    case cudaDevAttrMultiProcessorCount:
      // Few, so that persistent and split kernels give a block several pieces of work in small cases too.
      *value = simt::number_from_environment("FK_EMULATOR_SMS", 4);
      return cudaSuccess;
    case cudaDevAttrMaxPitch: *value = 0x7fffffff; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: *value = simt::compute_capability() / 10; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = simt::compute_capability() % 10; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = simt::most_shared_bytes(); return cudaSuccess;
  }
  return set_error(cudaErrorInvalidValue);
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

cudaError_t cudaMalloc(void** pointer, std::size_t bytes) {
  *pointer = simt::device_allocate(bytes);
  return set_error(*pointer ? cudaSuccess : cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void* pointer) {
  simt::device_free(pointer);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  *free_bytes = page * static_cast<std::size_t>(sysconf(_SC_AVPHYS_PAGES));
  *total_bytes = page * static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES));
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                              std::size_t width, std::size_t height, cudaMemcpyKind, cudaStream_t) {
  if (width > to_pitch || width > from_pitch) return set_error(cudaErrorInvalidValue);
  for (std::size_t row = 0; row < height; ++row)
    std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t) {
  return cudaMemset(to, value, bytes);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = nullptr;  // there is but one
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                     std::size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (graph) *graph = nullptr;
  return cudaSuccess;
}
cudaError_t cudaUserObjectCreate(cudaUserObject_t*, void*, cudaHostFn_t, unsigned, unsigned) {
  return set_error(cudaErrorInvalidValue);
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) {
  return set_error(cudaErrorInvalidValue);
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool known = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *function = known ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
  if (result) *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new SimtEvent;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
