// Devices, threads and processor features that this process can use.
#pragma once

#include <string>

#include "flashkernel/export.hpp"
#include "flashkernel/types.hpp"

namespace flashkernel {

/// "cpu" or "cuda:0".
FK_API std::string to_string(Device device);

/// Number of CUDA devices that this build can use: 0 without CUDA, without a driver, or without a GPU. Never throws.
FK_API int num_cuda_devices() noexcept;

/// Threads that CPU kernels use, the caller's included. Starts as OMP_NUM_THREADS, else the cores this process may run
/// on.
FK_API int num_threads() noexcept;

/// Set the threads that CPU kernels use; `count` >= 1 (InvalidArgument otherwise). Takes effect at the next op.
FK_API void set_num_threads(int count);

/// Space-separated CPU features that the library found and may use: "avx2 avx512 avx512_bf16 amx_bf16".
FK_API std::string cpu_features();

}  // namespace flashkernel
