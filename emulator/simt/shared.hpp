// Shared memory and the copies into it, as the scheduler sees them. See simt.hpp for what kernels see.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace simt {

struct Thread;

inline constexpr std::size_t kMostSharedBytes = 227 * 1024;

inline constexpr unsigned kMostClusterBlocks = 16, kPortableClusterBlocks = 8;  // beyond 8 a kernel must be allowed

/// New blocks: everything that is __shared__ becomes poison, and the dynamic part gets its exact size.
void fresh_shared_memory(unsigned blocks, std::size_t dynamic_bytes);

/// A thread of this block of the cluster runs next: the __shared__ variables hold its block's values.
void enter_shared_memory(unsigned rank);

/// Forgets the last cluster's mbarriers: who waited for them, and which count bytes (mbarrier.cpp).
void clear_mbarriers();
/// Empty, or a sentence on mbarriers whose bytes have been announced and have not come.
std::string bytes_not_come();

/// Empty, or a sentence on an address in shared or global memory that no thread may touch.
std::string describe_address(const void* address);

/// Where a byte of shared memory lies: in its block, and in the shadow memory of race.cpp, a cell for two bytes.
struct SharedPlace {
  std::size_t cell;
  std::uint32_t offset;  // in the block's dynamic memory, or among all static variables
  bool is_dynamic, odd;
};
std::size_t shadow_cells();
bool find_shared(const void* address, SharedPlace*);
/// For a 32-bit address of the current thread's block, or one that map_shared made.
SharedPlace place_of(std::uint32_t shared_address);

/// Forgets the copies that a thread of the last block never waited for.
void clear_copies(Thread& thread);

}  // namespace simt
