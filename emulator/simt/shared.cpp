// See simt.hpp and shared.hpp. __shared__ variables are thread_local objects of the kernels' object files, which are
// linked between shared_begin.cpp and shared_end.cpp: so their place in memory is known, and they can be poisoned.
#include "simt/shared.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

#include "simt/device_memory.hpp"
#include "simt/race.hpp"
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

constexpr std::size_t kGuard = 0x10000, kRoomPitch = kRoom + kGuard;
constexpr std::uint32_t kClusterAddress = 0x10000000;  // plus kRankPitch a block: an address that mapa has made
constexpr std::uint32_t kRankPitch = 0x1000000;        // 16 MB: the static variables of all kernels of a program

// One behind the other, an unreadable stretch before and behind each.
unsigned char* room(unsigned rank) {
  static unsigned char* const memory = [] {
    void* const all =
        mmap(nullptr, kMostClusterBlocks * kRoomPitch + kGuard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) std::abort();
    unsigned char* const first = static_cast<unsigned char*>(all) + kGuard;
    for (unsigned i = 0; i < kMostClusterBlocks; ++i)
      if (mprotect(first + i * kRoomPitch, kRoom, PROT_READ | PROT_WRITE) != 0) std::abort();
    return first;
  }();
  return memory + rank * kRoomPitch;
}

struct BlockMemory {
  unsigned char* dynamic_base = nullptr;     // null until a thread of the block asks
  std::vector<unsigned char> static_memory;  // while another block of the cluster runs
  std::vector<bool> written;                 // which chunks of it hold more than poison
  bool reached = false;                      // by another block since: any chunk may
};

std::size_t dynamic_bytes = 0, dynamic_alignment = 0;
BlockMemory memories[kMostClusterBlocks];
unsigned rank_inside = 0;  // whose static variables are in place

std::size_t static_bytes() { return static_cast<std::size_t>(&shared_end - &shared_begin); }
// A program's static variables are a megabyte, those of a kernel a few KB: chunks with nothing but poison are not moved
// when another block runs on.
constexpr std::size_t kChunk = 4096;
bool is_poison(const unsigned char* memory, std::size_t bytes) {
  return bytes == 0 || (memory[0] == kPoison && std::memcmp(memory, memory + 1, bytes - 1) == 0);
}

unsigned current_rank() { return current ? current->rank : 0; }

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

void fresh_shared_memory(unsigned blocks, std::size_t bytes) {
  if (&shared_end < &shared_begin) std::abort();  // the link order is wrong
  std::memset(&shared_begin, kPoison, static_bytes());
  dynamic_bytes = bytes;
  rank_inside = 0;
  for (unsigned rank = 0; rank < blocks; ++rank) {
    memories[rank].dynamic_base = nullptr;
    if (blocks > 1) memories[rank].static_memory.assign(static_bytes(), kPoison);
    memories[rank].written.assign(static_bytes() / kChunk + 1, false);
    memories[rank].reached = false;
    ASAN_POISON_MEMORY_REGION(room(rank), kRoom);
  }
}

void enter_shared_memory(unsigned rank) {
  if (rank == rank_inside) return;
  auto* const place = reinterpret_cast<unsigned char*>(&shared_begin);
  BlockMemory &before = memories[rank_inside], &next = memories[rank];
  for (std::size_t chunk = 0; chunk < next.written.size(); ++chunk) {
    const std::size_t at = chunk * kChunk, bytes = std::min(kChunk, static_bytes() - at);
    const bool written = !is_poison(place + at, bytes);
    if (written || before.written[chunk]) std::memcpy(before.static_memory.data() + at, place + at, bytes);
    before.written[chunk] = written;
    if (next.written[chunk] || (next.reached && !is_poison(next.static_memory.data() + at, bytes))) {
      std::memcpy(place + at, next.static_memory.data() + at, bytes);
      next.written[chunk] = true;
    } else if (written) {
      std::memset(place + at, kPoison, bytes);
    }
  }
  next.reached = false;
  rank_inside = rank;
}

void* dynamic_shared(std::size_t alignment) {
  unsigned char*& base = memories[current_rank()].dynamic_base;
  if (!base) {
    // As near to the end as the alignment allows, and no better aligned than asked for.
    const std::size_t past = (dynamic_bytes + alignment - 1) / alignment * alignment;
    base = room(current_rank()) + kRoom - past;
    if (alignment < kStrictest && reinterpret_cast<std::uintptr_t>(base) % (2 * alignment) == 0) base -= alignment;
    dynamic_alignment = alignment;
    ASAN_UNPOISON_MEMORY_REGION(base, dynamic_bytes);
    std::memset(base, kPoison, dynamic_bytes);
  }
  if (dynamic_alignment != alignment) fault("dynamic shared memory is declared with two alignments in one kernel");
  return base;
}

std::string describe_address(const void* address) {
  const auto* const at = static_cast<const unsigned char*>(address);
  const unsigned char* const first = room(0) - kGuard;
  if (at >= first && at < first + kMostClusterBlocks * kRoomPitch + kGuard)
    return "byte " + std::to_string(at - memories[current_rank()].dynamic_base) + " of " +
           std::to_string(dynamic_bytes) + " bytes of dynamic shared memory";
  return describe_device_address(address);
}

std::uint32_t shared_address(const void* pointer) {
  const auto* const at = static_cast<const unsigned char*>(pointer);
  const unsigned char* const dynamic = room(current_rank());
  if (at >= dynamic && at <= dynamic + kRoom) return static_cast<std::uint32_t>(at - dynamic);
  const auto* const begin = reinterpret_cast<const unsigned char*>(&shared_begin);
  if (at < begin || at > begin + static_bytes())
    fault("the shared-memory address of something that does not lie in this block's shared memory");
  if (static_bytes() > kRankPitch - kStaticAddress) fault("the program's static shared memory outgrows kRankPitch");
  return kStaticAddress + static_cast<std::uint32_t>(at - begin);
}

void* shared_pointer(std::uint32_t address) {
  unsigned rank = current_rank();
  if (address >= kClusterAddress) {
    rank = (address - kClusterAddress) / kRankPitch;
    address %= kRankPitch;
    if (rank >= running_blocks()) fault("an address in a block that the cluster does not have");
  }
  if (address < kStaticAddress) return room(rank) + address;
  address -= kStaticAddress;
  if (rank == rank_inside) return &shared_begin + address;
  memories[rank].reached = true;
  return memories[rank].static_memory.data() + address;
}

std::uint32_t map_shared(std::uint32_t address, unsigned rank) {
  if (address >= kClusterAddress) return address;  // names its block already
  return kClusterAddress + rank * kRankPitch + address;
}

std::size_t shadow_cells() { return kMostClusterBlocks * ((kRoomPitch + static_bytes()) / 2 + 1); }

namespace {
// Blocks one behind the other, their dynamic memory first.
SharedPlace place_in(unsigned rank, bool is_dynamic, std::size_t at) {
  const std::size_t per_block = (kRoomPitch + static_bytes()) / 2 + 1;
  SharedPlace place;
  place.cell = rank * per_block + (is_dynamic ? at : kRoomPitch + at) / 2;
  place.offset = static_cast<std::uint32_t>(
      is_dynamic && memories[rank].dynamic_base ? room(rank) + at - memories[rank].dynamic_base : at);
  place.is_dynamic = is_dynamic;
  place.odd = at % 2;
  return place;
}
}  // namespace

bool find_shared(const void* address, SharedPlace* place) {
  static unsigned char* const rooms = room(0);
  const auto in_rooms = static_cast<std::size_t>(static_cast<const unsigned char*>(address) - rooms);
  if (in_rooms < kMostClusterBlocks * kRoomPitch) {
    *place = place_in(static_cast<unsigned>(in_rooms / kRoomPitch), true, in_rooms % kRoomPitch);
    return true;
  }
  const auto in_static = static_cast<std::size_t>(static_cast<const char*>(address) - &shared_begin);
  if (in_static >= static_bytes()) return false;
  *place = place_in(rank_inside, false, in_static);
  return true;
}

SharedPlace place_of(std::uint32_t address) {
  unsigned rank = current_rank();
  if (address >= kClusterAddress) {
    rank = (address - kClusterAddress) / kRankPitch;
    address %= kRankPitch;
  }
  return place_in(rank, address < kStaticAddress, address < kStaticAddress ? address : address - kStaticAddress);
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
  race::begin_copy(to, bytes, __builtin_return_address(0));
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
      race::landed(copy.to, copy.bytes);
    }
    copies.groups.pop_front();
  }
}

}  // namespace simt
