// See simt.hpp: the block that runs now, who of its threads may go on, and what the others wait for.
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <stdexcept>
#include <vector>

#include "simt/fiber.hpp"
#include "simt/shared.hpp"
#include "simt/simt.hpp"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

simt::Index3 threadIdx, blockIdx, blockDim, gridDim;

namespace simt {

Thread* current = nullptr;

namespace {

// Lanes that wait for each other at one collective.
struct Meeting {
  const char* what;
  Where where;
  std::uint32_t mask, arrived;
  CollectiveFunction run;
  void* data[32];
};

struct Barrier {
  unsigned arrived = 0, threads = 0;  // threads: 0 until the first comes
  Where where{};
  int count = 0;  // of true predicates
  BlockVote result{};
  std::vector<Thread*> waiting;
};

enum class Order { kForward, kReverse, kRandom };

}  // namespace

struct Warp {
  std::uint32_t lanes = 0, runnable = 0, exited = 0;
  Thread* threads[32] = {};
  std::vector<Meeting> meetings;
};

namespace {

constexpr int kNamedBarriers = 16;

struct Block {
  std::vector<std::unique_ptr<Thread>> threads;  // stacks are kept from launch to launch
  std::vector<Warp> warps;
  unsigned num_warps = 0, num_threads = 0, num_exited = 0, warp_of_turn = 0;
  Barrier barriers[kNamedBarriers];
  std::vector<Thread*> spinning;
  std::deque<std::function<void()>> deferred;
  std::size_t shared_bytes = 0;
  const std::function<void()>* kernel = nullptr;
  void* outside = nullptr;  // the launching code's stack pointer
  std::string fault;
  Order order = Order::kForward;
  std::uint64_t random = 0;
};

Block& block() {
  static Block& only = *new Block;
  return only;
}

std::uint64_t next_random() {
  std::uint64_t z = block().random += 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

std::string text(Index3 i) {
  return "(" + std::to_string(i.x) + ", " + std::to_string(i.y) + ", " + std::to_string(i.z) + ")";
}
std::string text(Where where) {
  const char* const src = std::strstr(where.file, "/src/");
  return std::string(src ? src + 1 : where.file) + ":" + std::to_string(where.line);
}
std::string here_text(const Thread& thread) { return "block " + text(blockIdx) + ", thread " + text(thread.index); }

// Who goes on: the warp of the turn as long as one of its lanes can, so that warps run far apart from each other.
Thread* pick() {
  Block& b = block();
  unsigned warp = b.warp_of_turn;
  if (b.order == Order::kRandom) warp = static_cast<unsigned>(next_random() % b.num_warps);
  for (unsigned tried = 0; tried < b.num_warps; ++tried) {
    Warp& w = b.warps[warp];
    if (w.runnable) {
      unsigned lane;
      if (b.order == Order::kForward) {
        lane = static_cast<unsigned>(__builtin_ctz(w.runnable));
      } else if (b.order == Order::kReverse) {
        lane = 31 - static_cast<unsigned>(__builtin_clz(w.runnable));
      } else {
        lane = static_cast<unsigned>(next_random() % 32);
        while (!(w.runnable >> lane & 1)) lane = (lane + 1) % 32;
      }
      w.runnable &= ~(1u << lane);
      b.warp_of_turn = warp;
      return w.threads[lane];
    }
    warp = b.order == Order::kReverse ? (warp + b.num_warps - 1) % b.num_warps : (warp + 1) % b.num_warps;
  }
  return nullptr;
}

// To another thread of the block, or to the launching code when `to` is null.
void switch_from(Thread* from, Thread* to) {
  Block& b = block();
  current = to;
  if (to) threadIdx = to->index;
  void** save = from ? &from->stack_pointer : &b.outside;
  void* const target = to ? to->stack_pointer : b.outside;
#ifdef __SANITIZE_ADDRESS__
  static const void* outside_bottom = nullptr;
  static std::size_t outside_size = 0;
  static void* outside_fake = nullptr;
  void** const fake = from ? &from->fake_stack : &outside_fake;
  __sanitizer_start_switch_fiber(fake, to ? to->stack : outside_bottom, to ? kStackBytes : outside_size);
  simt_switch(save, target);
  const void* bottom = nullptr;
  std::size_t size = 0;
  __sanitizer_finish_switch_fiber(*fake, &bottom, &size);
#else
  simt_switch(save, target);
#endif
}

// The current thread waits for something: others run.
void suspend() {
  Thread* const self = current;
  Thread* const next = pick();
  if (next != self) switch_from(self, next);
  self->waits_at = nullptr;
}

void make_runnable(Thread* thread) { thread->warp->runnable |= 1u << thread->lane; }

// Runs the meeting if everybody is there. True: it is over.
bool try_to_meet(Warp& warp, std::size_t at) {
  Meeting& meeting = warp.meetings[at];
  const std::uint32_t needed = meeting.mask & warp.lanes & ~warp.exited;
  if ((meeting.arrived & needed) != needed) return false;
  meeting.run(meeting.data, meeting.arrived);
  std::uint32_t others = meeting.arrived;
  if (current && current->warp == &warp) others &= ~(1u << current->lane);
  warp.runnable |= others;
  warp.meetings.erase(warp.meetings.begin() + static_cast<std::ptrdiff_t>(at));
  return true;
}

void fiber_main() {
#ifdef __SANITIZE_ADDRESS__
  const void* bottom = nullptr;
  std::size_t size = 0;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
#endif
  Block& b = block();
  (*b.kernel)();
  Thread* const self = current;
  Warp& warp = *self->warp;
  warp.exited |= 1u << self->lane;
  ++b.num_exited;
  for (std::size_t at = 0; at < warp.meetings.size();)  // those left may be all there now
    if (!try_to_meet(warp, at)) ++at;
  switch_from(self, pick());
  std::abort();  // nobody returns to a thread that has left
}

// Threads and what they wait for, in groups.
std::string deadlock_text() {
  Block& b = block();
  std::map<std::string, std::vector<unsigned>> groups;
  for (unsigned t = 0; t < b.num_threads; ++t) {
    const Thread& thread = *b.threads[t];
    if (thread.warp->exited >> thread.lane & 1)
      groups["left the kernel"].push_back(t);
    else
      groups[std::string("wait at ") + (thread.waits_at ? thread.waits_at : "?") + " in " + text(thread.where)]
          .push_back(t);
  }
  std::string all = "deadlock in block " + text(blockIdx) + ": nobody can go on;";
  for (const auto& [what, members] : groups) {
    all += "\n  " + std::to_string(members.size()) + " of " + std::to_string(b.num_threads) + " threads " + what +
           " (threads";
    for (std::size_t i = 0; i < members.size();) {  // as ranges
      std::size_t end = i + 1;
      while (end < members.size() && members[end] == members[end - 1] + 1) ++end;
      all += " " + std::to_string(members[i]);
      if (end > i + 1) all += "-" + std::to_string(members[end - 1]);
      i = end;
      if (all.size() > 4000) break;
    }
    all += ")";
  }
  return all;
}

void run_block() {
  Block& b = block();
  for (unsigned w = 0; w < b.num_warps; ++w) {
    Warp& warp = b.warps[w];
    warp.runnable = warp.lanes;
    warp.exited = 0;
    warp.meetings.clear();
  }
  for (unsigned t = 0; t < b.num_threads; ++t) {
    Thread& thread = *b.threads[t];
    thread.stack_pointer = prepare_stack(thread.stack, fiber_main);
    thread.waits_at = nullptr;
    clear_copies(thread);
  }
  for (Barrier& barrier : b.barriers) barrier = Barrier{};
  b.spinning.clear();
  b.deferred.clear();
  b.num_exited = 0;
  b.warp_of_turn = b.order == Order::kReverse ? b.num_warps - 1 : 0;
  fresh_shared_memory(b.shared_bytes);

  constexpr int kMostRounds = 1000000;  // of nothing but spinning
  for (int rounds = 0; rounds < kMostRounds;) {
    if (Thread* const next = pick()) {
      switch_from(nullptr, next);
      if (!b.fault.empty()) return;
    }
    if (b.num_exited == b.num_threads) return;
    if (!b.deferred.empty()) {
      const auto work = std::move(b.deferred.front());
      b.deferred.pop_front();
      work();
      if (!b.fault.empty()) return;
      rounds = 0;
    } else if (!b.spinning.empty()) {
      for (Thread* thread : b.spinning) make_runnable(thread);
      b.spinning.clear();
      ++rounds;
    } else {
      break;
    }
  }
  b.fault = deadlock_text();
}

// An access to a page that nobody owns ends the launch, not the program.
void on_bad_access(int signal, siginfo_t* info, void*) {
  if (current) {
    const std::string what = describe_address(info->si_addr);
    if (!what.empty()) fault("an access to " + what);
  }
  ::signal(signal, SIG_DFL);  // happens again, and ends the program
}

void catch_bad_accesses() {
#ifndef __SANITIZE_ADDRESS__  // which has its own report
  static const bool done = [] {
    static unsigned char alternative[64 * 1024];
    const stack_t stack{alternative, 0, sizeof(alternative)};
    sigaltstack(&stack, nullptr);
    struct sigaction action {};
    action.sa_sigaction = on_bad_access;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    return true;
  }();
  static_cast<void>(done);
#endif
}

void set_order() {
  Block& b = block();
  const char* const order = std::getenv("FK_EMULATOR_ORDER");
  if (!order || std::strcmp(order, "forward") == 0) {
    b.order = Order::kForward;
  } else if (std::strcmp(order, "reverse") == 0) {
    b.order = Order::kReverse;
  } else {
    b.order = Order::kRandom;
    b.random = std::strtoull(order, nullptr, 10);
  }
}

}  // namespace

void fault(const std::string& text) {
  Block& b = block();
  b.fault = (current ? here_text(*current) : "block " + simt::text(blockIdx)) + ": " + text;
  if (!current) throw std::logic_error(b.fault);
  switch_from(current, nullptr);
  std::abort();
}

std::string run_grid(Index3 grid, Index3 block_shape, std::size_t shared_bytes, const std::function<void()>& kernel) {
  Block& b = block();
  const unsigned num_threads = block_shape.x * block_shape.y * block_shape.z;
  gridDim = grid;
  blockDim = block_shape;
  b.num_threads = num_threads;
  b.num_warps = (num_threads + 31) / 32;
  b.shared_bytes = shared_bytes;
  b.kernel = &kernel;
  b.fault.clear();
  set_order();
  catch_bad_accesses();
  if (b.warps.empty()) b.warps.resize(32);
  for (unsigned w = 0; w < b.num_warps; ++w) b.warps[w].lanes = 0;
  for (unsigned t = 0; t < num_threads; ++t) {
    if (t >= b.threads.size()) {
      b.threads.push_back(std::make_unique<Thread>());
      b.threads.back()->stack = new_stack();
    }
    Thread& thread = *b.threads[t];
    thread.index = {t % block_shape.x, t / block_shape.x % block_shape.y, t / block_shape.x / block_shape.y};
    thread.linear = t;
    thread.lane = t % 32;
    thread.warp = &b.warps[t / 32];
    thread.warp->threads[thread.lane] = &thread;
    thread.warp->lanes |= 1u << thread.lane;
  }
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = {x, y, z};
        run_block();
        current = nullptr;
        if (!b.fault.empty()) return b.fault;
      }
  return "";
}

void collective(const char* what, std::uint32_t mask, Where where, void* data, CollectiveFunction run) {
  Thread& self = *current;
  Warp& warp = *self.warp;
  const std::uint32_t bit = 1u << self.lane;
  if (!(mask & bit)) fault(std::string(what) + " in " + text(where) + ": the lane is not in its own mask");
  std::size_t at = 0;
  for (; at < warp.meetings.size(); ++at) {
    const Meeting& other = warp.meetings[at];
    if (other.what == what && other.mask == mask && other.where == where && !(other.arrived & bit)) break;
    if ((other.mask & bit) && other.mask == mask)
      fault(std::string("divergent warp: this lane is at ") + what + " in " + text(where) + ", others wait for it at " +
            other.what + " in " + text(other.where));
  }
  if (at == warp.meetings.size()) warp.meetings.push_back(Meeting{what, where, mask, 0, run, {}});
  warp.meetings[at].arrived |= bit;
  warp.meetings[at].data[self.lane] = data;
  if (try_to_meet(warp, at)) return;
  self.waits_at = what;
  self.where = where;
  suspend();
}

BlockVote block_barrier(const char* what, bool predicate, Where where) {
  Block& b = block();
  Barrier& barrier = b.barriers[0];
  if (barrier.arrived == 0) {
    barrier.where = where;
    barrier.count = 0;
  } else if (!(barrier.where == where)) {
    fault(std::string("divergent barrier: this thread is at ") + what + " in " + text(where) +
          ", others wait for it at the one in " + text(barrier.where));
  }
  barrier.count += predicate;
  if (++barrier.arrived == b.num_threads) {
    barrier.result = {barrier.count, barrier.count == static_cast<int>(b.num_threads), barrier.count > 0};
    barrier.arrived = 0;
    for (Thread* thread : barrier.waiting) make_runnable(thread);
    barrier.waiting.clear();
    return barrier.result;
  }
  barrier.waiting.push_back(current);
  current->waits_at = what;
  current->where = where;
  suspend();
  return barrier.result;  // the next round cannot end before this thread comes to it
}

void named_barrier(unsigned id, unsigned threads, bool wait, Where where) {
  Block& b = block();
  if (id >= kNamedBarriers || threads == 0 || threads % 32 != 0 || threads > b.num_threads)
    fault("named barrier " + std::to_string(id) + " of " + std::to_string(threads) + " threads in " + text(where) +
          ": ids are below 16, counts whole warps of the block");
  Barrier& barrier = b.barriers[id];
  if (barrier.arrived > 0 && barrier.threads != threads)
    fault("named barrier " + std::to_string(id) + " in " + text(where) + ": others gave another thread count");
  barrier.threads = threads;
  if (wait) {
    barrier.waiting.push_back(current);
    current->waits_at = "a named barrier";
    current->where = where;
  }
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    for (Thread* thread : barrier.waiting)
      if (thread != current) make_runnable(thread);
    barrier.waiting.clear();
    current->waits_at = nullptr;
    return;
  }
  if (wait) suspend();
}

void spin(const char* what, Where where) {
  block().spinning.push_back(current);
  current->waits_at = what;
  current->where = where;
  suspend();
}

void defer(std::function<void()> work) { block().deferred.push_back(std::move(work)); }

}  // namespace simt
