// Counters by which blocks find out who of them is the last to arrive somewhere, and how they become zero again without
// a launch of their own (cuda/host/zeroed_memory.hpp). Used by split-KV decode on sm_80 and sm_90a.
#pragma once

#include <cstddef>

#include "cuda/ptx/atomic.cuh"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda {

/// How a block takes leave of the counters. Every block of the grid does once, whatever lengths it read, and the last
/// of all leaves everything zero: lengths that somebody writes during a call may spoil that call, in which blocks then
/// wait for arrivals that do not come, and no later one.
class Departure {
 public:
  __device__ Departure(int* counters, int count) : counters_(counters), count_(count) {}

  /// After the block's last use of a counter, and after somebody knew its result.
  __device__ void announce() {
    if (threadIdx.x == 0) before_ = ptx::fetch_add_release(counters_ + count_, 1);
  }
  /// In a block that uses no counter, at any time: it has nothing to order, and a release would wait for its loads.
  __device__ void announce_without_use() {
    if (threadIdx.x == 0) before_ = ptx::fetch_add_relaxed(counters_ + count_, 1);
  }
  /// Warp 0, some work later: the answer takes its time.
  __device__ void finish() {
    const int blocks = static_cast<int>(gridDim.x * gridDim.y * gridDim.z);
    if (threadIdx.x >= kWarp || __shfl_sync(kFullMask, before_, 0) != blocks - 1) return;
    ptx::load_acquire(counters_ + count_);
    __syncwarp();
    for (int at = static_cast<int>(threadIdx.x); at <= count_; at += kWarp) counters_[at] = 0;
  }
  /// For `count` counters, and the number of those that have left.
  static constexpr std::size_t bytes(std::int64_t count) { return (static_cast<std::size_t>(count) + 1) * sizeof(int); }

 private:
  int* counters_;
  int count_, before_ = -1;
};

}  // namespace flashkernel::cuda
