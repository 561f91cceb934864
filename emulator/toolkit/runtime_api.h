// The runtime API: one emulated device on which everything is done by the time a call returns. Part of the emulator's
// cuda_runtime.h; runtime.cpp defines it. FK_EMULATOR_CC (default 90) says which device it is.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <tuple>
#include <utility>

#include "simt/simt.hpp"
#include "vector_types.h"

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorNotReady = 600,
  cudaErrorLaunchFailure = 719,
};

enum cudaDeviceAttr {
  cudaDevAttrL2CacheSize,
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxPitch,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
};

enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributePreferredSharedMemoryCarveout,
  cudaFuncAttributeNonPortableClusterSizeAllowed,
};

enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed };
enum { cudaEventDisableTiming = 2 };

using cudaStream_t = struct SimtStream*;
using cudaEvent_t = struct SimtEvent*;
using cudaGraph_t = struct SimtGraph*;
using cudaGraphNode_t = struct SimtGraphNode*;
using cudaUserObject_t = struct SimtUserObject*;
using cudaHostFn_t = void (*)(void*);
struct cudaGraphEdgeData;
#define CUDART_VERSION 13000

enum { cudaUserObjectNoDestructorSync = 1, cudaGraphUserObjectMove = 1, cudaEnableDefault = 0 };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess, cudaDriverEntryPointSymbolNotFound };

enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6,
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  union {
    struct {
      unsigned x, y, z;
    } clusterDim;
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

const char* cudaGetErrorName(cudaError_t);
/// After cudaErrorLaunchFailure: what went wrong, in which block, thread and line.
const char* cudaGetErrorString(cudaError_t);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();

cudaError_t cudaGetDeviceCount(int*);
cudaError_t cudaGetDevice(int*);
cudaError_t cudaSetDevice(int);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int device);
cudaError_t cudaDeviceSynchronize();

cudaError_t cudaMalloc(void**, std::size_t);
cudaError_t cudaFree(void*);
cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes);
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t, cudaMemcpyKind);
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t, cudaMemcpyKind, cudaStream_t = nullptr);
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                              std::size_t width, std::size_t height, cudaMemcpyKind, cudaStream_t = nullptr);
cudaError_t cudaMemset(void*, int value, std::size_t);
cudaError_t cudaMemsetAsync(void*, int value, std::size_t, cudaStream_t = nullptr);

enum { cudaStreamNonBlocking = 1 };
cudaError_t cudaStreamCreateWithFlags(cudaStream_t*, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t);
cudaError_t cudaStreamSynchronize(cudaStream_t);
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus*);
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned flags = 0);
// No stream is ever captured here.
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus*, unsigned long long* id = nullptr,
                                     cudaGraph_t* = nullptr, const cudaGraphNode_t** = nullptr,
                                     const cudaGraphEdgeData** = nullptr, std::size_t* = nullptr);
cudaError_t cudaUserObjectCreate(cudaUserObject_t*, void*, cudaHostFn_t, unsigned count, unsigned flags);
cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned count = 1, unsigned flags = 0);
/// Knows cuTensorMapEncodeTiled.
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                             unsigned long long flags, cudaDriverEntryPointQueryResult* = nullptr);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t*, unsigned flags);
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t = nullptr);
cudaError_t cudaEventQuery(cudaEvent_t);
cudaError_t cudaEventDestroy(cudaEvent_t);

namespace simt {
/// Dynamic shared memory of a kernel that has not asked for any. A GPU gives 48 KB less what the kernel's static arrays
/// take; those are not known here, so every kernel is taken to have 40 KB of them.
inline constexpr std::size_t kUnaskedSharedBytes = 8 * 1024;
cudaError_t set_kernel_attribute(const void* kernel, cudaFuncAttribute, int value);
cudaError_t launch(const void* kernel, const cudaLaunchConfig_t&, const std::function<void()>& body);
}  // namespace simt

struct cudaFuncAttributes {
  int maxDynamicSharedSizeBytes, ptxVersion;
};
/// Kernels are what a compiler for 9.0 would have made.
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  attributes->maxDynamicSharedSizeBytes = static_cast<int>(simt::kUnaskedSharedBytes);
  attributes->ptxVersion = 90;
  return cudaSuccess;
}

inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  return simt::set_kernel_attribute(kernel, attribute, value);
}
template <class... Params>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Params...), cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}

/// One block a multiprocessor and two clusters on the GPU: little, so that small cases go through every loop.
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, std::size_t) {
  *blocks = 1;
  return cudaSuccess;
}
inline cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t* config) {
  const char* const largest = std::getenv("FK_EMULATOR_LARGEST_CLUSTER");
  const auto blocks = static_cast<int>(config->attrs[0].val.clusterDim.x);
  *clusters = largest && blocks > std::atoi(largest) ? 0 : 2;
  return cudaSuccess;
}

template <class... Params, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Arguments&&... arguments) {
  const std::tuple<std::decay_t<Params>...> values(std::forward<Arguments>(arguments)...);
  return simt::launch(reinterpret_cast<const void*>(kernel), *config, [&] { std::apply(kernel, values); });
}
