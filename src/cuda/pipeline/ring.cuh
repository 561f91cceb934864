// The place of producers and consumers in a ring of slots in shared memory, each with a full and an empty mbarrier.
#pragma once

#include <cstdint>

namespace flashkernel::cuda {

/// Counts what went through a ring of slots. From the count follow the next slot and the parity of the phase that its
/// barriers are in.
template <int kSlots>
struct Ring {
  std::uint32_t count = 0;
  __device__ std::uint32_t slot() const { return count % kSlots; }
  __device__ std::uint32_t parity() const { return count / kSlots & 1; }
  __device__ Ring before() const { return {count - 1}; }
};

}  // namespace flashkernel::cuda
