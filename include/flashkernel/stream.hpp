// The order in which a device runs work: a borrowed native handle (cudaStream_t), null for the default stream and on
// the CPU.
#pragma once

namespace flashkernel {

struct Stream {
  void* handle = nullptr;

  friend constexpr bool operator==(Stream a, Stream b) noexcept { return a.handle == b.handle; }
  friend constexpr bool operator!=(Stream a, Stream b) noexcept { return a.handle != b.handle; }
};

}  // namespace flashkernel
