// Properties of CUDA devices, read once, and the current-device guard of every launch.
#pragma once

#include <cstddef>

namespace flashkernel {

struct CudaDeviceProperties {
  int compute_capability = 0;  // 90 for 9.0
  int num_sms = 0;
  int max_shared_bytes_per_block = 0;  // with the opt-in
  int l2_bytes = 0;
};

/// Shared memory that every GPU from 8.0 on gives a block, with the opt-in: what 8.6, 8.9 and 12.0 have, in bytes.
inline constexpr int kLeastSharedBytes = 99 * 1024;

/// Cached. Unsupported where no device can be used, InvalidArgument for an index that does not exist.
const CudaDeviceProperties& cuda_device_properties(int index);

/// Whether this is a child process of one that had used CUDA: the driver does not work here, and may hang.
bool cuda_lost_in_fork() noexcept;
/// CudaError in such a process, which says so.
void check_cuda_after_fork();

/// Gets what a launch asks of a kernel's code on the current device: dynamic shared memory beyond what is
/// left of 48 KB beside its static arrays, clusters of more than 8 blocks. Returns whether an early start, if asked
/// for, is granted: only to code that was compiled for 9.0 or later, which knows how to wait for the kernel before it.
/// Cached. `name` is for errors.
bool allow_launch(const void* kernel, std::size_t shared_bytes, unsigned cluster, bool early, const char* name);

/// Makes a device current for a scope and puts the caller's back.
class CudaDeviceGuard {
 public:
  explicit CudaDeviceGuard(int index);
  ~CudaDeviceGuard();
  CudaDeviceGuard(const CudaDeviceGuard&) = delete;
  CudaDeviceGuard& operator=(const CudaDeviceGuard&) = delete;

 private:
  int previous_ = -1;  // -1: nothing to put back
};

}  // namespace flashkernel
