// Who may touch a byte of shared memory after whom: finds two accesses, one of them a write, that nothing orders.
// Vector clocks over the edges that CUDA promises (FastTrack: Flanagan and Freund, PLDI 2009). The scheduler, the
// copies and the matrix instructions call this; so do, in a program that links race_on.cpp, the hooks that
// -fsanitize=thread plants into the kernels (race_hooks.cpp). Without race_on.cpp it does nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace simt {

struct Thread;
struct Warp;

namespace race {

extern bool enabled;

/// What is known: how far each agent (threads, then engines) is known to have come; and up to where its writes are
/// known to the asynchronous proxy.
struct Clock {
  std::vector<std::uint32_t> seen, proxied;
  void clear() {
    seen.clear();
    proxied.clear();
  }
};

/// An engine beside the threads, whose accesses are over when somebody has waited for the numbered piece of its work.
using Agent = unsigned;
Agent new_agent();

void start_cluster(unsigned threads);

/// Everything that the current thread has done or knows goes into a clock; and back. Nothing without `enabled`.
void release(Clock&);
void acquire(const Clock&);
void acquire(const Thread&, const Clock&);
/// The current thread knows that the engine's pieces up to `piece` are done.
void engine_done(Agent, std::uint32_t piece);
void engine_done(const Thread&, Agent, std::uint32_t piece);
/// Into a clock, as a barrier that counts the engine's bytes does.
void engine_done(Clock&, Agent, std::uint32_t piece);

/// __syncwarp, run by the lane that comes last.
void sync_lanes(std::uint32_t lanes);
/// fence.proxy.async by the current thread.
void proxy_fence();

/// A thread's plain access; `from` is the address of its code.
void access(const Thread&, const void* address, std::size_t bytes, bool write, const void* from);
/// The same where it called the collective that it waits in.
void access(const Thread&, const void* address, std::size_t bytes, bool write);
/// The current thread's atomic, which no other atomic disturbs. It orders nothing.
void atomic(const void* address, std::size_t bytes);
/// By the current thread, in its block, on a 32-bit shared address: an mbarrier is looked at.
void look(std::uint32_t shared, std::size_t bytes, const void* from);

/// cp.async of the current thread: from issue until landed() nobody may touch the bytes.
void begin_copy(std::uint32_t shared, std::size_t bytes, const void* from);
void landed(std::uint32_t shared, std::size_t bytes);

/// The engine writes, or reads, from now on until its piece is done; by the current thread's order, or the warp's.
void engine_write(std::uint32_t shared, std::size_t bytes, Agent, std::uint32_t piece, const void* from);
void engine_read(std::uint32_t shared, std::size_t bytes, Agent, std::uint32_t piece, const void* from);
void engine_read(const Clock& of_warp, std::uint32_t shared, std::size_t bytes, Agent, std::uint32_t piece,
                 const void* from);
Clock of_warp(const Warp&);

/// No plain access counts in this scope: the emulator itself works on shared memory.
extern volatile bool paused;  // volatile: the hooks come after the compiler's last look at stores that nobody reads
struct Pause {
  bool before = paused;
  Pause() { paused = true; }
  ~Pause() { paused = before; }
};

/// What addr2line says of an address of code, without the emulator's own frames (race_report.cpp).
std::string describe_code(std::uint32_t offset);
/// FK_EMULATOR_RACES=list: says each pair of lines once, on stderr, and lets the launch go on (true).
bool report_only(std::uint32_t code, std::uint32_t other, const std::string& text);

}  // namespace race
}  // namespace simt
