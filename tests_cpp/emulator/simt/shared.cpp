// See simt.hpp and shared.hpp. __shared__ variables are thread_local objects of the kernels' object files, which are
// linked between shared_begin.cpp and shared_end.cpp: so their place in memory is known, and they can be poisoned.
#include "simt/shared.hpp"

#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

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

constexpr std::size_t kAlignment = 1024;           // the strictest that a layout asks for
constexpr std::uint32_t kArenaAddress = 0x100000;  // as a shared-memory address; static variables lie round it

// Room for a displacement of less than kAlignment.
alignas(kAlignment) thread_local unsigned char arena[kMostSharedBytes + kAlignment];
std::size_t dynamic_bytes = 0;
unsigned char* dynamic_base = nullptr;  // null until a thread of the block asks

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
  ASAN_POISON_MEMORY_REGION(arena, sizeof(arena));
}

void* dynamic_shared(std::size_t alignment) {
  // Exactly as aligned as asked for and no better.
  unsigned char* const base = arena + (alignment < kAlignment ? alignment : 0);
  if (!dynamic_base) {
    dynamic_base = base;
    ASAN_UNPOISON_MEMORY_REGION(base, dynamic_bytes);
    std::memset(base, kPoison, dynamic_bytes);
  }
  if (dynamic_base != base) fault("dynamic shared memory is declared with two alignments in one kernel");
  return base;
}

std::uint32_t shared_address(const void* pointer) {
  const std::ptrdiff_t offset = static_cast<const unsigned char*>(pointer) - arena;
  if (offset < -std::ptrdiff_t{kArenaAddress} || offset > std::ptrdiff_t{kArenaAddress})
    fault("__cvta_generic_to_shared of an address that is not in shared memory");
  return static_cast<std::uint32_t>(kArenaAddress + offset);
}

void* shared_pointer(std::uint32_t address) {
  return arena + (static_cast<std::ptrdiff_t>(address) - std::ptrdiff_t{kArenaAddress});
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
