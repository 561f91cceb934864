// What the choice of a kernel, and the plan of a call, may ask of a device.
#pragma once

#include <array>
#include <cstdint>

namespace flashkernel {

/// Clusters of [n] blocks, each of which takes a multiprocessor, that a device runs at once.
using ClusterCounts = std::array<int, 9>;

/// What costs and plans ask of a device. Read once a device; `select.hpp` adds what it knows of the call.
struct DeviceFacts {
  int index = 0;
  std::uint32_t cpu_features = 0;  // bits of CpuFeature; 0 on a GPU
  int compute_capability = 0;      // 75 = 7.5; 0 on the CPU, and where there is no such device
  int num_sms = 0;
  int max_shared_bytes_per_block = 0;       // with the opt-in
  const ClusterCounts* clusters = nullptr;  // null: plans ask the runtime about the kernel that they are for
  /// Whether the call is made in the invariant mode: a fact about the call, not the device. A plan then cuts sums alike
  /// for all calls of a kind.
  bool invariant = false;
};

}  // namespace flashkernel
