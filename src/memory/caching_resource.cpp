// CachingResource: the public face of BlockCache, with the stream events of upstream's device.
#include "flashkernel/memory_resource.hpp"
#include "memory/block_cache.hpp"
#include "memory/device_resources.hpp"

namespace flashkernel {
namespace {

std::unique_ptr<detail::StreamEvents> stream_events_of(Device device) {
  if (device.is_cuda()) return detail::cuda_stream_events(device.index);
  return std::make_unique<detail::HostStreamEvents>();
}

}  // namespace

struct CachingResource::Impl {
  Impl(MemoryResource& upstream, std::size_t limit_bytes)
      : device(upstream.device()), events(stream_events_of(device)), cache(upstream, *events, limit_bytes) {}

  const Device device;
  const std::unique_ptr<detail::StreamEvents> events;
  detail::BlockCache cache;
};

CachingResource::CachingResource(MemoryResource& upstream, std::size_t limit_bytes)
    : impl_(std::make_unique<Impl>(upstream, limit_bytes)) {}
CachingResource::~CachingResource() = default;

void* CachingResource::allocate(std::size_t bytes, std::size_t alignment, Stream stream) {
  return impl_->cache.allocate(bytes, alignment, stream);
}

void CachingResource::deallocate(void* pointer, std::size_t /*bytes*/, std::size_t /*alignment*/,
                                 Stream stream) noexcept {
  impl_->cache.deallocate(pointer, stream);
}

Device CachingResource::device() const noexcept { return impl_->device; }
MemoryStats CachingResource::stats() const { return impl_->cache.stats(); }
std::size_t CachingResource::trim() { return impl_->cache.trim(); }

}  // namespace flashkernel
