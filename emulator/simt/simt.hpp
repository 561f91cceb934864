// The emulated GPU as its kernels see it: one fiber a CUDA thread, blocks one after another, switches only where a
// thread waits. The toolkit's headers (toolkit/) and the PTX wrappers (cuda/ptx/) of the emulator stand on this.
// Invariant: everything here happens on the one host thread that launched; `current` is the CUDA thread that runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>

// For what asks for its caller's address: that has to be the kernel.
#define SIMT_INLINE inline __attribute__((always_inline))

namespace simt {

/// A line of a kernel, for messages and to tell whether threads wait at the same place.
struct Where {
  const char* file;
  int line;
  static constexpr Where here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
  bool operator==(const Where& other) const {
    return line == other.line && (file == other.file || std::strcmp(file, other.file) == 0);
  }
};

struct Index3 {  // uint3 and dim3 to kernels
  unsigned x = 1, y = 1, z = 1;
};

struct Warp;
struct AsyncCopies;
struct BulkGroups;

/// What a switch to it reads comes first: one line of the processor's cache, mostly not in the nearest one.
struct alignas(64) Thread {
  void* stack_pointer = nullptr;  // of its fiber
  Index3 index;
  unsigned linear = 0, lane = 0, rank = 0;  // rank: of its block among those that run now
  unsigned number = 0;                      // among all threads of those
  Warp* warp = nullptr;
  const char* waits_at = nullptr;  // what stands in messages; null while it runs
  const void* code = nullptr;      // where it called the last collective
  Where where{};
  AsyncCopies* copies = nullptr;  // its cp.async
  BulkGroups* bulk = nullptr;     // its TMA stores
  bool in_cluster_barrier = false;
  unsigned cluster_rounds = 0;
  unsigned char* stack = nullptr;  // the fiber's
  void* fake_stack = nullptr;      // AddressSanitizer's
};

extern Thread* current;

/// One launch: runs every block to its end, a cluster (neighbours in x) at a time, or FK_EMULATOR_RESIDENT of them.
/// Empty, or what went wrong in which block and where.
std::string run_grid(Index3 grid, Index3 block, unsigned cluster, std::size_t dynamic_shared_bytes,
                     const std::function<void()>& kernel);

/// Ends the launch of the current thread: run_grid returns `text`.
[[noreturn]] void fault(const std::string& text);

/// All lanes of `mask` that have not left the kernel meet here; the last to come runs `run(data of each lane, lanes)`.
using CollectiveFunction = void (*)(void* const* data, std::uint32_t lanes);
void collective(const char* what, std::uint32_t mask, Where where, void* data, CollectiveFunction run);

/// __syncthreads and its relatives: every thread of the block, at the same line.
struct BlockVote {
  int count, all, any;
};
BlockVote block_barrier(const char* what, bool predicate, Where where);

/// bar.sync and bar.arrive: the barrier `id` opens when `threads` threads have come.
void named_barrier(unsigned id, unsigned threads, bool wait, Where where);

/// All threads of the cluster; arrival and wait apart.
void cluster_arrive(Where where);
void cluster_wait(Where where);
/// Blocks of the thread's own cluster: 1 where the launch asks for none.
unsigned blocks_of_cluster();
/// What the thread's own cluster calls its block.
unsigned cluster_rank();
/// Blocks that run at the same time, of this cluster and of those beside it.
unsigned running_blocks();

/// The current thread waits until another thread or a deferred piece of work calls wake() on it.
void sleep(const char* what, Where where);
void wake(Thread* thread);

/// Inside a loop that waits for another thread or block to write memory: lets the others run.
void spin(const char* what, Where where);

/// The block's dynamic shared memory, placed on exactly this alignment.
void* dynamic_shared(std::size_t alignment);

/// Shared-memory addresses are 32-bit numbers in PTX.
std::uint32_t shared_address(const void* pointer);
void* shared_pointer(std::uint32_t address);
/// The same place in another of the blocks that run now, as an address that shared_pointer knows; one that this gave
/// stays as it is.
std::uint32_t map_shared(std::uint32_t address, unsigned rank);
/// The same for a block of the thread's own cluster (mapa), and the bits of such blocks among all that run now.
std::uint32_t map_in_cluster(std::uint32_t address, unsigned rank);
std::uint32_t bits_of_cluster(std::uint32_t blocks);

/// Every byte of fresh memory: 255 (NaN in every floating dtype, -1 in integers), or FK_EMULATOR_POISON.
extern const unsigned char kPoison;

/// cp.async: a copy happens when its group is waited for; until then its destination holds poison.
void async_copy(std::uint32_t to, const void* from, unsigned bytes, unsigned bytes_read);
void async_commit();
void async_wait(unsigned groups_left);

/// Work that an engine beside the threads does (TMA): done when no thread can go on.
void defer(std::function<void()> work);

/// Bulk groups of the current thread: work (TMA stores) that is done when its group is waited for.
void bulk_add(std::function<void()> work);
/// For race.hpp: the engine of the current thread's bulk groups, and the number of the open one.
struct BulkPiece {
  unsigned agent;
  std::uint32_t piece;
};
BulkPiece bulk_piece();
void bulk_commit();
void bulk_wait(unsigned groups_left);

std::string text(Where where);

}  // namespace simt

// CUDA's names for the thread of the moment.
extern simt::Index3 threadIdx, blockIdx, blockDim, gridDim;
