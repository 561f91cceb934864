// Counters by which blocks find out which of them arrives last, and how the counters become zero again without a launch
// of their own (cuda/host/zeroed_memory.hpp). Used by split-KV decode on sm_80 and sm_90a.
#pragma once

#include <cstddef>

#include "cuda/ptx/atomic.cuh"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda {

/// How a block leaves the counters. Every block of the grid leaves once, whatever lengths it has read, and the last one
/// of all sets everything to zero. If lengths are overwritten during a call, that call may be wrong, since blocks miss
/// arrivals that do not come; but no later call is.
class Departure {
 public:
  /// `first_thread`: of the warp that leaves for the block.
  __device__ Departure(int* counters, int count, unsigned first_thread = 0)
      : counters_(counters), count_(count), first_thread_(first_thread) {}

  /// Must be called after the block's last use of a counter, and after its result is known.
  __device__ void announce() {
    if (threadIdx.x == first_thread_) before_ = ptx::fetch_add_release(counters_ + count_, 1);
  }
  /// For a block that uses no counter, at any time. It has nothing to order, and a release would wait for its loads.
  __device__ void announce_without_use() {
    if (threadIdx.x == first_thread_) before_ = ptx::fetch_add_relaxed(counters_ + count_, 1);
  }
  /// Its warp should do some work between announce() and this, since the answer takes a while.
  __device__ void finish() {
    const int blocks = static_cast<int>(gridDim.x * gridDim.y * gridDim.z);
    if (threadIdx.x / kWarp != first_thread_ / kWarp || __shfl_sync(kFullMask, before_, 0) != blocks - 1) return;
    ptx::load_acquire(counters_ + count_);
    __syncwarp();
    for (int at = static_cast<int>(threadIdx.x % kWarp); at <= count_; at += kWarp) counters_[at] = 0;
  }
  /// For `count` counters, and the number of those that have left.
  static constexpr std::size_t bytes(std::int64_t count) { return (static_cast<std::size_t>(count) + 1) * sizeof(int); }

 private:
  int* counters_;
  int count_, before_ = -1;
  unsigned first_thread_;
};

}  // namespace flashkernel::cuda
