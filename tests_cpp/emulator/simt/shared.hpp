// Shared memory and the copies into it, as the scheduler sees them. See simt.hpp for what kernels see.
#pragma once

#include <cstddef>
#include <string>

namespace simt {

struct Thread;

inline constexpr std::size_t kMostSharedBytes = 227 * 1024;

/// A new block: everything that is __shared__ becomes poison, and the dynamic part gets its exact size.
void fresh_shared_memory(std::size_t dynamic_bytes);

/// Empty, or a sentence on an address in shared or global memory that no thread may touch.
std::string describe_address(const void* address);

/// Forgets the copies that a thread of the last block never waited for.
void clear_copies(Thread& thread);

}  // namespace simt
