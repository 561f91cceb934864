// Where memory comes from: a stream-ordered interface, the host's allocator, and a cache on top of any of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "flashkernel/device.hpp"
#include "flashkernel/export.hpp"
#include "flashkernel/stream.hpp"

namespace flashkernel {

inline constexpr std::size_t kDefaultAlignment = 256;

struct MemoryStats {
  std::size_t allocated_bytes = 0;       ///< in use by callers now
  std::size_t reserved_bytes = 0;        ///< taken from upstream now (in use + cached)
  std::size_t peak_allocated_bytes = 0;  ///< most ever in use at once
  std::size_t peak_reserved_bytes = 0;
  std::uint64_t num_allocations = 0;  ///< calls that succeeded
  std::uint64_t num_deallocations = 0;
  std::uint64_t num_upstream_allocations = 0;  ///< those that a cache had to pass on
  std::uint64_t num_invalid_frees = 0;         ///< pointers given back that were not in use; each was ignored
};

/// Stream-ordered allocation. `allocate` returns memory that work on `stream` may use at once; `deallocate` gives it
/// back once the work queued on `stream` so far has run. Zero bytes: a non-null pointer that must not be read.
/// `alignment` is a power of two. Fails with OutOfMemory, and then nothing in use has changed. Null may be given back.
/// Thread-safe.
class FK_API MemoryResource {
 public:
  virtual ~MemoryResource() = default;
  virtual void* allocate(std::size_t bytes, std::size_t alignment, Stream stream) = 0;
  virtual void deallocate(void* pointer, std::size_t bytes, std::size_t alignment, Stream stream) noexcept = 0;
  virtual Device device() const noexcept = 0;
  virtual MemoryStats stats() const = 0;
  /// Give unused memory that is kept for later back to where it came from; returns the bytes given back.
  virtual std::size_t trim() { return 0; }

  void* allocate(std::size_t bytes, Stream stream = {}) { return allocate(bytes, kDefaultAlignment, stream); }
  void deallocate(void* pointer, std::size_t bytes, Stream stream = {}) noexcept {
    deallocate(pointer, bytes, kDefaultAlignment, stream);
  }
};

/// Memory of the host's aligned allocator. `limit_bytes` 0 means no limit.
class FK_API HostResource final : public MemoryResource {
 public:
  explicit HostResource(std::size_t limit_bytes = 0);
  ~HostResource() override;
  void* allocate(std::size_t bytes, std::size_t alignment, Stream stream) override;
  void deallocate(void* pointer, std::size_t bytes, std::size_t alignment, Stream stream) noexcept override;
  Device device() const noexcept override { return Device::cpu(); }
  MemoryStats stats() const override;
  using MemoryResource::allocate;
  using MemoryResource::deallocate;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// A cache over any upstream: size bins, blocks split and coalesced, free lists per stream with events between streams.
/// `upstream` must outlive it. `limit_bytes` bounds what it reserves (0: no bound). When upstream is out of memory the
/// cache is trimmed and the allocation tried once more before OutOfMemory is thrown.
/// A pointer that is not in use here (never given out, or given back already) is ignored and counted in
/// `num_invalid_frees`; the cache goes by its own record of a block, not by the `bytes` it is given back with. Memory
/// still in use when the cache is destroyed stays with upstream: a leak that a checker reports, rather than memory
/// pulled from under its user.
class FK_API CachingResource final : public MemoryResource {
 public:
  explicit CachingResource(MemoryResource& upstream, std::size_t limit_bytes = 0);
  ~CachingResource() override;
  void* allocate(std::size_t bytes, std::size_t alignment, Stream stream) override;
  void deallocate(void* pointer, std::size_t bytes, std::size_t alignment, Stream stream) noexcept override;
  Device device() const noexcept override;
  MemoryStats stats() const override;
  std::size_t trim() override;
  using MemoryResource::allocate;
  using MemoryResource::deallocate;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The library's own resource of a device: a CachingResource over the host's allocator or over CUDA's; lives as long as
/// the process. Unsupported when the build has no such device.
FK_API MemoryResource& default_resource(Device device);

}  // namespace flashkernel
