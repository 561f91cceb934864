// Named ranges around kernels in a profiler's timeline, on request: FLASHKERNEL_NVTX=1 makes dispatch (ops/select.hpp)
// push an NVTX range with the kernel's id around each launch. Without the request: one branch a call.
#pragma once

namespace flashkernel {

struct RangeHooks {
  void (*begin)(const char* name) = nullptr;
  void (*end)() = nullptr;
};

/// NVTX's push and pop, from src/cuda/host/nvtx.cpp; null without the request and in a build without CUDA.
const RangeHooks& range_hooks() noexcept;

/// A range from here to the end of the scope. `name` outlives it.
class KernelRange {
 public:
  explicit KernelRange(const char* name) : hooks_(range_hooks()) {
    if (hooks_.begin) hooks_.begin(name);
  }
  ~KernelRange() {
    if (hooks_.end) hooks_.end();
  }
  KernelRange(const KernelRange&) = delete;
  KernelRange& operator=(const KernelRange&) = delete;

 private:
  const RangeHooks& hooks_;
};

}  // namespace flashkernel
