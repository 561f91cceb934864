// Memory resources of the C API, the caller's own allocator among them.
#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "c/call.hpp"
#include "c/handles.hpp"
#include "flashkernel/flashkernel.h"

namespace flashkernel::c {
namespace {

/// The caller's allocator. It counts what passes through it.
class CallbackResource final : public MemoryResource {
 public:
  CallbackResource(const fk_memory_callbacks& callbacks, Device device) : callbacks_(callbacks), device_(device) {}

  void* allocate(std::size_t bytes, std::size_t alignment, Stream stream) override {
    void* const pointer = callbacks_.allocate(callbacks_.user, asked(bytes), alignment, stream.handle);
    if (!pointer)
      throw OutOfMemory("the caller's allocator has no " + std::to_string(bytes) + " bytes", bytes, 0, peak_);
    const std::size_t now = allocated_ += bytes;
    for (std::size_t peak = peak_; peak < now && !peak_.compare_exchange_weak(peak, now);) {
    }
    ++num_allocations_;
    return pointer;
  }

  void deallocate(void* pointer, std::size_t bytes, std::size_t alignment, Stream stream) noexcept override {
    if (!pointer) return;
    callbacks_.deallocate(callbacks_.user, pointer, asked(bytes), alignment, stream.handle);
    allocated_ -= bytes;
    ++num_deallocations_;
  }

  Device device() const noexcept override { return device_; }

  MemoryStats stats() const override {
    MemoryStats stats;
    stats.allocated_bytes = stats.reserved_bytes = allocated_;
    stats.peak_allocated_bytes = stats.peak_reserved_bytes = peak_;
    stats.num_allocations = stats.num_upstream_allocations = num_allocations_;
    stats.num_deallocations = num_deallocations_;
    return stats;
  }

 private:
  // Zero bytes are a pointer that is not null, which many allocators do not give.
  static std::size_t asked(std::size_t bytes) noexcept { return std::max<std::size_t>(bytes, 1); }

  const fk_memory_callbacks callbacks_;
  const Device device_;
  std::atomic<std::size_t> allocated_{0}, peak_{0};
  std::atomic<std::uint64_t> num_allocations_{0}, num_deallocations_{0};
};

struct CacheOverMemory {
  std::shared_ptr<MemoryResource> upstream;
  CachingResource cache;
  CacheOverMemory(std::shared_ptr<MemoryResource> given, std::size_t limit_bytes)
      : upstream(std::move(given)), cache(*upstream, limit_bytes) {}
};

std::size_t alignment_of(std::size_t alignment) {
  if (alignment == 0) return kDefaultAlignment;
  if ((alignment & (alignment - 1)) != 0)
    throw InvalidArgument("alignment is " + std::to_string(alignment) + "; it must be a power of two, or 0");
  return alignment;
}

}  // namespace
}  // namespace flashkernel::c

using namespace flashkernel::c;

fk_status fk_memory_default_create(fk_device device, fk_memory** memory) {
  return guarded([&] {
    check_pointer("memory", memory);
    flashkernel::MemoryResource& resource = flashkernel::default_resource(device_of("memory", device));
    *memory = new fk_memory{{std::shared_ptr<void>(), &resource}};  // owned by the library
  });
}

fk_status fk_memory_host_create(uint64_t limit_bytes, fk_memory** memory) {
  return guarded([&] {
    check_pointer("memory", memory);
    *memory = new fk_memory{std::make_shared<flashkernel::HostResource>(static_cast<std::size_t>(limit_bytes))};
  });
}

fk_status fk_memory_caching_create(fk_memory* upstream, uint64_t limit_bytes, fk_memory** memory) {
  return guarded([&] {
    check_pointer("upstream", upstream);
    check_pointer("memory", memory);
    const auto made = std::make_shared<CacheOverMemory>(upstream->resource, static_cast<std::size_t>(limit_bytes));
    *memory = new fk_memory{{made, &made->cache}};
  });
}

fk_status fk_memory_custom_create(const fk_memory_callbacks* callbacks, fk_memory** memory) {
  return guarded([&] {
    check_pointer("callbacks", callbacks);
    check_pointer("memory", memory);
    const fk_memory_callbacks known = take("memory_callbacks", *callbacks, fk_memory_callbacks{});
    if (!known.allocate || !known.deallocate)
      throw flashkernel::InvalidArgument("memory_callbacks: allocate or deallocate is NULL; both are needed");
    *memory = new fk_memory{std::make_shared<CallbackResource>(known, device_of("memory_callbacks", known.device))};
  });
}

void fk_memory_destroy(fk_memory* memory) { delete memory; }

fk_status fk_memory_allocate(fk_memory* memory, size_t bytes, size_t alignment, void* stream, void** pointer) {
  return guarded([&] {
    check_pointer("memory", memory);
    check_pointer("pointer", pointer);
    *pointer = memory->resource->allocate(bytes, alignment_of(alignment), flashkernel::Stream{stream});
  });
}

fk_status fk_memory_deallocate(fk_memory* memory, void* pointer, size_t bytes, size_t alignment, void* stream) {
  return guarded([&] {
    check_pointer("memory", memory);
    memory->resource->deallocate(pointer, bytes, alignment_of(alignment), flashkernel::Stream{stream});
  });
}

fk_status fk_memory_get_stats(const fk_memory* memory, fk_memory_stats* stats, size_t size) {
  return guarded([&] {
    check_pointer("memory", memory);
    const flashkernel::MemoryStats s = memory->resource->stats();
    give("memory_stats",
         fk_memory_stats{0, s.allocated_bytes, s.reserved_bytes, s.peak_allocated_bytes, s.peak_reserved_bytes,
                         s.num_allocations, s.num_deallocations, s.num_upstream_allocations, s.num_invalid_frees},
         stats, size);
  });
}

fk_status fk_memory_trim(fk_memory* memory, uint64_t* bytes) {
  return guarded([&] {
    check_pointer("memory", memory);
    const std::size_t trimmed = memory->resource->trim();
    if (bytes) *bytes = trimmed;
  });
}
