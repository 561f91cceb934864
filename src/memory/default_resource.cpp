// default_resource: one CachingResource per device, made at first use and never destroyed, so that an array that
// outlives main() can still give its memory back.
#include <map>
#include <mutex>
#include <string>

#include "flashkernel/error.hpp"
#include "flashkernel/memory_resource.hpp"
#include "memory/device_resources.hpp"

namespace flashkernel {
namespace {

MemoryResource& host_default_resource() {
  static CachingResource& resource = *new CachingResource(*new HostResource);
  return resource;
}

MemoryResource& cuda_default_resource(int index) {
  static std::mutex& mutex = *new std::mutex;
  static auto& resources = *new std::map<int, CachingResource>;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = resources.find(index);
  if (found != resources.end()) return found->second;
  return resources.try_emplace(index, *detail::cuda_resource(index)).first->second;
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
