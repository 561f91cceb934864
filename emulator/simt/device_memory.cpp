// See device_memory.hpp.
#include "simt/device_memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "simt/simt.hpp"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes)
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes)
#endif

namespace simt {

const unsigned char kPoison = [] {
  const char* const number = std::getenv("FK_EMULATOR_POISON");
  return static_cast<unsigned char>(number ? std::atoi(number) : 0xff);
}();

namespace {

constexpr std::size_t kAddressBytes = std::size_t{1}
                                      << 43;  // address space costs nothing; addresses are not used again
constexpr std::size_t kAlignment = 256;
constexpr std::size_t kMostPoisoned = std::size_t{1} << 28;  // larger ones stay untouched pages

struct Allocation {
  std::size_t bytes, pages_bytes;
  unsigned char* pages;
};

struct Device {
  std::mutex mutex;
  unsigned char* base = nullptr;
  std::size_t used = 0, page = 0;
  std::map<const unsigned char*, Allocation> allocations;  // by the pointer that was given out
};

Device& device() {
  static Device& only = *new Device;
  return only;
}

}  // namespace

void* device_allocate(std::size_t bytes) {
  Device& d = device();
  const std::lock_guard<std::mutex> lock(d.mutex);
  if (!d.base) {
    d.page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    void* const memory = mmap(nullptr, kAddressBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    d.base = static_cast<unsigned char*>(memory);
  }
  const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  const std::size_t pages_bytes = (rounded + d.page - 1) / d.page * d.page;
  if (bytes > kAddressBytes || d.used + pages_bytes + d.page > kAddressBytes) return nullptr;
  unsigned char* const pages = d.base + d.used;
  if (mprotect(pages, pages_bytes, PROT_READ | PROT_WRITE) != 0) return nullptr;
  d.used += pages_bytes + d.page;
  unsigned char* const pointer = pages + pages_bytes - rounded;
  d.allocations[pointer] = {bytes, pages_bytes, pages};
  if (bytes <= kMostPoisoned) std::memset(pointer, kPoison, bytes);
  ASAN_POISON_MEMORY_REGION(pages, pages_bytes);
  ASAN_UNPOISON_MEMORY_REGION(pointer, bytes);
  return pointer;
}

void device_free(void* pointer) {
  if (!pointer) return;
  Device& d = device();
  const std::lock_guard<std::mutex> lock(d.mutex);
  const auto found = d.allocations.find(static_cast<unsigned char*>(pointer));
  if (found == d.allocations.end()) return;
  const Allocation& a = found->second;
  ASAN_UNPOISON_MEMORY_REGION(a.pages, a.pages_bytes);
  mmap(a.pages, a.pages_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  d.allocations.erase(found);
}

std::string describe_device_address(const void* address) {
  Device& d = device();
  const auto* const at = static_cast<const unsigned char*>(address);
  if (!d.base || at < d.base || at >= d.base + kAddressBytes) return "";
  auto above = d.allocations.upper_bound(at);
  std::string text = "memory that is not allocated";
  if (above != d.allocations.begin()) {
    const auto& [pointer, allocation] = *std::prev(above);
    text += ", " + std::to_string(at - pointer) + " bytes after the begin of an allocation of " +
            std::to_string(allocation.bytes) + " bytes";
  }
  if (above != d.allocations.end())
    text += ", " + std::to_string(above->first - at) + " bytes before one of " + std::to_string(above->second.bytes);
  return text;
}

}  // namespace simt
