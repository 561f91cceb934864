// See device_memory.hpp: a build without CUDA has no such device, and no kernel that would ask for one.
#include <stdexcept>

#include "conformance/device_memory.hpp"

namespace flashkernel::conformance {
namespace {
[[noreturn]] void refuse(Device device) {
  throw std::runtime_error("these tests were built without CUDA; no memory on " + to_string(device));
}
}  // namespace

void* device_allocate(Device device, std::size_t) { refuse(device); }
void device_free(Device, void*) {}
void copy_to_device(Device device, void*, const void*, std::size_t) { refuse(device); }
void copy_from_device(Device device, void*, const void*, std::size_t) { refuse(device); }
int multiprocessors() { return 0; }

}  // namespace flashkernel::conformance
