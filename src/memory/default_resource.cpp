// default_resource: one CachingResource per device, made at first use and never destroyed, so that an array that
// outlives main() can still give its memory back.
#include <memory>
#include <string>

#include "core/fork_safe.hpp"
#include "flashkernel/error.hpp"
#include "flashkernel/memory_resource.hpp"
#include "memory/device_resources.hpp"

namespace flashkernel {
namespace {

MemoryResource& host_default_resource() {
  static MadeOnce<HostResource> upstream;
  static MadeOnce<CachingResource> resource;
  return resource.get([] { return std::make_unique<CachingResource>(upstream.get()); });
}

MemoryResource& cuda_default_resource(int index) {
  static MadeOncePerKey<int, CachingResource> resources;
  return resources.get(index, [index] { return std::make_unique<CachingResource>(*detail::cuda_resource(index)); });
}

}  // namespace

MemoryResource& default_resource(Device device) {
  if (device.index < 0 || (device.is_cpu() && device.index != 0)) {
    throw InvalidArgument("default_resource: device.index=" + std::to_string(device.index) + " of " +
                          (device.is_cpu() ? "the cpu; needs 0" : "cuda; needs 0 or more"));
  }
  return device.is_cpu() ? host_default_resource() : cuda_default_resource(device.index);
}

}  // namespace flashkernel
