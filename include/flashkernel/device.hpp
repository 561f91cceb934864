// Where a tensor lives: the host, or one CUDA device.
#pragma once

#include <cstdint>
#include <string>

#include "flashkernel/export.hpp"

namespace flashkernel {

enum class DeviceType : std::uint8_t { kCpu, kCuda };

struct Device {
  DeviceType type = DeviceType::kCpu;
  std::int32_t index = 0;

  static constexpr Device cpu() noexcept { return {DeviceType::kCpu, 0}; }
  static constexpr Device cuda(std::int32_t index) noexcept { return {DeviceType::kCuda, index}; }
  constexpr bool is_cpu() const noexcept { return type == DeviceType::kCpu; }
  constexpr bool is_cuda() const noexcept { return type == DeviceType::kCuda; }
  friend constexpr bool operator==(Device a, Device b) noexcept { return a.type == b.type && a.index == b.index; }
  friend constexpr bool operator!=(Device a, Device b) noexcept { return !(a == b); }
};

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
