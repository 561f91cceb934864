// See simt.hpp and shared.hpp. __shared__ variables are thread_local objects of the kernels' object files, which are
// linked between shared_begin.cpp and shared_end.cpp: so their place in memory is known, and they can be poisoned.
#include "simt/shared.hpp"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

#include "simt/device_memory.hpp"
#include "simt/simt.hpp"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes)
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes)
#endif

namespace simt {

extern __thread char shared_begin, shared_end;

namespace {

// Dynamic shared memory ends where an unreadable page begins. As shared-memory addresses it lies below 2^18, like
// the device's; the static variables, which are elsewhere in the program, at kStaticAddress.
constexpr std::size_t kStrictest = 1024;  // alignment that a layout asks for
constexpr std::size_t kRoom = (kMostSharedBytes + 2 * kStrictest + 0xffff) & ~std::size_t{0xffff};
constexpr std::uint32_t kStaticAddress = 0x80000;

unsigned char* room() {
  static unsigned char* const memory = [] {
    constexpr std::size_t kGuard = 0x10000;
    void* const all = mmap(nullptr, kRoom + 2 * kGuard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    unsigned char* const inner = static_cast<unsigned char*>(all) + kGuard;
    if (all == MAP_FAILED || mprotect(inner, kRoom, PROT_READ | PROT_WRITE) != 0) std::abort();
    return inner;
  }();
  return memory;
}

std::size_t dynamic_bytes = 0;
unsigned char* dynamic_base = nullptr;  // null until a thread of the block asks
std::size_t dynamic_alignment = 0;

}  // namespace

struct AsyncCopies {
  struct Copy {
    std::uint32_t to;
    const void* from;
    unsigned bytes, bytes_read;
  };
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};

void fresh_shared_memory(std::size_t bytes) {
  if (&shared_end < &shared_begin) std::abort();  // the link order is wrong
  std::memset(&shared_begin, kPoison, static_cast<std::size_t>(&shared_end - &shared_begin));
  dynamic_bytes = bytes;
  dynamic_base = nullptr;
  ASAN_POISON_MEMORY_REGION(room(), kRoom);
}

void* dynamic_shared(std::size_t alignment) {
  if (!dynamic_base) {
    // As near to the end as the alignment allows, and no better aligned than asked for.
    const std::size_t past = (dynamic_bytes + alignment - 1) / alignment * alignment;
    dynamic_base = room() + kRoom - past;
    if (alignment < kStrictest && reinterpret_cast<std::uintptr_t>(dynamic_base) % (2 * alignment) == 0)
      dynamic_base -= alignment;
    dynamic_alignment = alignment;
    ASAN_UNPOISON_MEMORY_REGION(dynamic_base, dynamic_bytes);
    std::memset(dynamic_base, kPoison, dynamic_bytes);
  }
  if (dynamic_alignment != alignment) fault("dynamic shared memory is declared with two alignments in one kernel");
  return dynamic_base;
}

std::string describe_address(const void* address) {
  const std::ptrdiff_t offset = static_cast<const unsigned char*>(address) - room();
  if (offset >= -0x10000 && offset < std::ptrdiff_t{kRoom} + 0x10000)
    return "byte " + std::to_string(static_cast<const unsigned char*>(address) - dynamic_base) + " of " +
           std::to_string(dynamic_bytes) + " bytes of dynamic shared memory";
  return describe_device_address(address);
}

std::uint32_t shared_address(const void* pointer) {
  const auto* const at = static_cast<const unsigned char*>(pointer);
  if (at >= room() && at <= room() + kRoom) return static_cast<std::uint32_t>(at - room());
  const auto* const begin = reinterpret_cast<const unsigned char*>(&shared_begin);
  if (at < begin || at > reinterpret_cast<const unsigned char*>(&shared_end))
    fault("the shared-memory address of something that does not lie in shared memory");
  return kStaticAddress + static_cast<std::uint32_t>(at - begin);
}

void* shared_pointer(std::uint32_t address) {
  if (address >= kStaticAddress) return &shared_begin + (address - kStaticAddress);
  return room() + address;
}

namespace {
AsyncCopies& copies_of(Thread& thread) {
  if (!thread.copies) thread.copies = new AsyncCopies;
  return *thread.copies;
}
}  // namespace

void clear_copies(Thread& thread) {
  if (!thread.copies) return;
  thread.copies->open.clear();
  thread.copies->groups.clear();
}

void async_copy(std::uint32_t to, const void* from, unsigned bytes, unsigned bytes_read) {
  if (to % bytes != 0) fault("cp.async: the shared address is not a multiple of " + std::to_string(bytes));
  if (bytes_read > bytes) fault("cp.async: more bytes to read than to write");
  if (bytes_read > 0 && reinterpret_cast<std::uintptr_t>(from) % bytes != 0)
    fault("cp.async: the global address is not a multiple of " + std::to_string(bytes));
  std::memset(shared_pointer(to), kPoison, bytes);
  copies_of(*current).open.push_back({to, from, bytes, bytes_read});
}

void async_commit() {
  AsyncCopies& copies = copies_of(*current);
  copies.groups.push_back(std::move(copies.open));
  copies.open.clear();
}

void async_wait(unsigned groups_left) {
  AsyncCopies& copies = copies_of(*current);
  while (copies.groups.size() > groups_left) {
    for (const AsyncCopies::Copy& copy : copies.groups.front()) {
      auto* const to = static_cast<unsigned char*>(shared_pointer(copy.to));
      if (copy.bytes_read > 0) std::memcpy(to, copy.from, copy.bytes_read);
      std::memset(to + copy.bytes_read, 0, copy.bytes - copy.bytes_read);
    }
    copies.groups.pop_front();
  }
}

}  // namespace simt
