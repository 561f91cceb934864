// The host's aligned allocator with a byte limit and statistics. Upstream of the CPU's default_resource.
// Invariant: committed (what counts against the limit) >= allocated, the difference being calls under way.
#include <algorithm>
#include <new>
#include <string>

#include "core/fork_safe.hpp"
#include "flashkernel/error.hpp"
#include "flashkernel/memory_resource.hpp"
#include "memory/sizes.hpp"

namespace flashkernel {

struct HostResource::Impl {
  explicit Impl(std::size_t limit) : limit_bytes(limit) {}

  [[noreturn]] void throw_out_of_memory(std::size_t bytes, std::size_t free_bytes, std::size_t peak_bytes) const {
    std::string message = "HostResource: out of memory; requested " + std::to_string(bytes) + " bytes, ";
    if (limit_bytes != 0) {
      message += "free " + std::to_string(free_bytes) + " of limit_bytes=" + std::to_string(limit_bytes) + ", ";
    }
    message += "peak " + std::to_string(peak_bytes);
    throw OutOfMemory(message, bytes, free_bytes, peak_bytes);
  }

  const std::size_t limit_bytes;
  mutable ForkSafeMutex mutex;
  std::size_t committed_bytes = 0;
  MemoryStats stats;
};

HostResource::HostResource(std::size_t limit_bytes) : impl_(std::make_unique<Impl>(limit_bytes)) {}
HostResource::~HostResource() = default;

void* HostResource::allocate(std::size_t bytes, std::size_t alignment, Stream /*stream*/) {
  if (!detail::is_power_of_two(alignment)) {
    throw InvalidArgument("HostResource: alignment=" + std::to_string(alignment) + "; needs a power of two");
  }
  Impl& impl = *impl_;
  {
    const ForkSafeLock lock(impl.mutex);
    const std::size_t free_bytes = impl.limit_bytes == 0 ? 0 : impl.limit_bytes - impl.committed_bytes;
    const bool too_large = alignment > detail::kMaxBytes || bytes > detail::kMaxBytes - alignment;
    if (too_large || (impl.limit_bytes != 0 && bytes > free_bytes)) {
      impl.throw_out_of_memory(bytes, free_bytes, impl.stats.peak_allocated_bytes);
    }
    impl.committed_bytes += bytes;
  }
  // The system's allocator runs outside the lock. One byte where none is asked for: each pointer is its own.
  void* pointer = ::operator new (std::max<std::size_t>(bytes, 1), std::align_val_t{alignment}, std::nothrow);
  const ForkSafeLock lock(impl.mutex);
  if (pointer == nullptr) {
    impl.committed_bytes -= bytes;
    const std::size_t free_bytes = impl.limit_bytes == 0 ? 0 : impl.limit_bytes - impl.committed_bytes;
    impl.throw_out_of_memory(bytes, free_bytes, impl.stats.peak_allocated_bytes);
  }
  MemoryStats& stats = impl.stats;
  stats.allocated_bytes += bytes;
  stats.reserved_bytes = stats.allocated_bytes;
  stats.peak_allocated_bytes = std::max(stats.peak_allocated_bytes, stats.allocated_bytes);
  stats.peak_reserved_bytes = stats.peak_allocated_bytes;
  ++stats.num_allocations;
  ++stats.num_upstream_allocations;
  return pointer;
}

void HostResource::deallocate(void* pointer, std::size_t bytes, std::size_t alignment, Stream /*stream*/) noexcept {
  if (pointer == nullptr) return;
  ::operator delete (pointer, std::align_val_t{alignment});
  Impl& impl = *impl_;
  const ForkSafeLock lock(impl.mutex);
  impl.committed_bytes -= bytes;
  impl.stats.allocated_bytes -= bytes;
  impl.stats.reserved_bytes = impl.stats.allocated_bytes;
  ++impl.stats.num_deallocations;
}

MemoryStats HostResource::stats() const {
  const ForkSafeLock lock(impl_->mutex);
  return impl_->stats;
}

}  // namespace flashkernel
