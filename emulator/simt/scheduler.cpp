// Which thread of the running blocks goes on, and the launch from its first block to its last. See machine.hpp and
// simt.hpp.
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "simt/fiber.hpp"
#include "simt/machine.hpp"
#include "simt/race.hpp"
#include "simt/shared.hpp"
#include "simt/simt.hpp"
#include "simt/warp.hpp"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) static_cast<void>(address)
#endif

simt::Index3 threadIdx, blockIdx, blockDim, gridDim;

namespace simt {

Thread* current = nullptr;

static Machine* const the_machine =
    new Machine;  // kernels run from main on: no initialiser of another file asks for it
Machine& machine() { return *the_machine; }

namespace {

struct Stopped {};  // thrown by a fault outside of any thread

std::uint64_t next_random() {
  std::uint64_t z = machine().random += 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
// The same as a number below `end`, without a division.
unsigned random_below(unsigned end) { return static_cast<unsigned>((next_random() >> 32) * end >> 32); }

std::string text(Index3 i) {
  return "(" + std::to_string(i.x) + ", " + std::to_string(i.y) + ", " + std::to_string(i.z) + ")";
}
std::string here_text(const Thread& thread) {
  return "block " + text(machine().blocks[thread.rank].index) + ", thread " + text(thread.index);
}

// Chooses a number of turns, from 1 to `most`, after which one of the running blocks stands still; 0: none does.
void plan_freeze() {
  Machine& m = machine();
  const char* const most = std::getenv("FK_EMULATOR_FREEZE");
  const std::uint64_t turns = most && m.blocks.size() > m.cluster ? std::strtoull(most, nullptr, 10) : 0;
  m.frozen = Machine::kNobody;
  m.turns_to_freeze = turns > 0 ? 1 + next_random() % turns : 0;
}

bool is_frozen(unsigned warp) {
  const Machine& m = machine();
  return m.frozen != Machine::kNobody && warp / (m.warps_per_block * m.cluster) == m.frozen;
}

// Who goes on: the warp of the turn as long as one of its lanes can, so that warps run far apart from each other.
Thread* pick() {
  Machine& m = machine();
  if (m.turns_to_freeze > 0 && --m.turns_to_freeze == 0)
    m.frozen = static_cast<unsigned>(next_random() % (m.blocks.size() / m.cluster));
  unsigned warp = m.warp_of_turn;
  if (m.order == Order::kRandom) {
    // Mostly of the same block: each change of blocks moves all static shared memory.
    const unsigned per_block = m.warps_per_block;
    const bool anywhere = m.blocks.size() == 1 || next_random() % 64 == 0;
    warp = anywhere ? random_below(m.num_warps) : warp / per_block * per_block + random_below(per_block);
  }
  for (unsigned tried = 0; tried < m.num_warps; ++tried) {
    Warp& w = m.warps[warp];
    if (w.runnable && !is_frozen(warp)) {
      unsigned lane;
      if (m.order == Order::kForward) {
        lane = static_cast<unsigned>(__builtin_ctz(w.runnable));
      } else if (m.order == Order::kReverse) {
        lane = 31 - static_cast<unsigned>(__builtin_clz(w.runnable));
      } else {
        lane = static_cast<unsigned>(next_random() % 32);  // or the next one that can
        const std::uint64_t twice = std::uint64_t{w.runnable} << 32 | w.runnable;
        lane = (lane + static_cast<unsigned>(__builtin_ctzll(twice >> lane))) % 32;
      }
      w.runnable &= ~(1u << lane);
      m.warp_of_turn = warp;
      return w.threads[lane];
    }
    if (m.order == Order::kReverse) {
      warp = warp == 0 ? m.num_warps - 1 : warp - 1;
    } else {
      warp = warp + 1 == m.num_warps ? 0 : warp + 1;
    }
  }
  return nullptr;
}

// To another thread of the block, or to the launching code when `to` is null.
void switch_from(Thread* from, Thread* to) {
  Machine& m = machine();
  current = to;
  if (to) {
    threadIdx = to->index;
    if (m.blocks.size() > 1) {
      blockIdx = m.blocks[to->rank].index;
      enter_shared_memory(to->rank);
    }
  }
  void** save = from ? &from->stack_pointer : &m.outside;
  void* const target = to ? to->stack_pointer : m.outside;
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

// Runs the meeting if everybody is there. True: it is over.
bool try_to_meet(Warp& warp, std::size_t at) {
  Meeting& meeting = warp.meetings[at];
  const std::uint32_t needed = meeting.mask & warp.lanes & ~warp.exited;
  if ((meeting.arrived & needed) != needed) return false;
  {
    const race::Pause pause;  // what it does to shared memory, it says itself
    meeting.run(meeting.data, meeting.arrived);
  }
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
  Machine& m = machine();
  (*m.kernel)();
  Thread* const self = current;
  Warp& warp = *self->warp;
  if (self->bulk && !(self->bulk->open.empty() && self->bulk->closed.empty()))
    fault("left the kernel without waiting for its bulk stores: their shared memory is given away");
  race::release(m.blocks[self->rank].at_exit);
  warp.exited |= 1u << self->lane;
  ++m.blocks[self->rank].num_exited;
  for (std::size_t at = 0; at < warp.meetings.size();)  // those left may be all there now
    if (!try_to_meet(warp, at)) ++at;
  switch_from(self, pick());
  std::abort();  // nobody returns to a thread that has left
}

// Threads and what they wait for, in groups.
std::string deadlock_text() {
  Machine& m = machine();
  std::map<std::string, std::vector<unsigned>> groups;
  for (unsigned t = 0; t < m.num_threads; ++t) {
    const Thread& thread = *m.threads[t];
    if (thread.warp->exited >> thread.lane & 1)
      groups["left the kernel"].push_back(t);
    else
      groups[std::string("wait at ") + (thread.waits_at ? thread.waits_at : "?") + " in " + text(thread.where)]
          .push_back(t);
  }
  std::string all = "deadlock in block " + text(m.blocks[0].index) +
                    (m.blocks.size() > m.cluster ? " and those beside it"
                     : m.cluster > 1             ? " and its cluster"
                                                 : "") +
                    ": nobody can go on;";
  for (const auto& [what, members] : groups) {
    all += "\n  " + std::to_string(members.size()) + " of " + std::to_string(m.num_threads) + " threads " + what +
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

void start_blocks() {
  Machine& m = machine();
  for (unsigned w = 0; w < m.num_warps; ++w) {
    Warp& warp = m.warps[w];
    warp.runnable = warp.lanes;
    warp.exited = 0;
    warp.meetings.clear();
    warp.wgmma = {};
  }
  for (unsigned t = 0; t < m.num_threads; ++t) {
    Thread& thread = *m.threads[t];
    ASAN_UNPOISON_MEMORY_REGION(thread.stack, kStackBytes);  // frames that nobody returned from
    thread.stack_pointer = prepare_stack(thread.stack, fiber_main);
    thread.waits_at = nullptr;
    thread.in_cluster_barrier = false;
    thread.cluster_rounds = 0;
    clear_copies(thread);
    if (thread.bulk) *thread.bulk = {};
  }
  for (Block& block : m.blocks) {
    block.num_exited = 0;
    for (Barrier& barrier : block.barriers) barrier.reset();
    block.cluster_barrier.reset();
  }
  m.spinning.clear();
  m.deferred.clear();
  m.warp_of_turn = m.order == Order::kReverse ? m.num_warps - 1 : 0;
  plan_freeze();
  clear_mbarriers();
  race::start_cluster(m.num_threads);
  fresh_shared_memory(static_cast<unsigned>(m.blocks.size()), m.shared_bytes);
}

// What an engine does beside the threads: in the order of issue, or not.
void do_deferred_work() {
  Machine& m = machine();
  std::size_t at = 0;
  if (m.order == Order::kReverse) at = m.deferred.size() - 1;
  if (m.order == Order::kRandom) at = static_cast<std::size_t>(next_random() % m.deferred.size());
  const auto work = std::move(m.deferred[at]);
  m.deferred.erase(m.deferred.begin() + static_cast<std::ptrdiff_t>(at));
  try {
    work();
  } catch (const Stopped&) {
  }
}

void run_blocks() {
  Machine& m = machine();
  start_blocks();
  constexpr int kMostRounds = 100000, kRoundsFrozen = 4;  // of nothing but spinning
  for (int rounds = 0; rounds < kMostRounds;) {
    if (Thread* const next = pick()) {
      switch_from(nullptr, next);
      if (!m.fault.empty()) return;
    }
    if (m.num_exited() == m.num_threads) {
      std::string left = bytes_not_come();
      if (left.empty() && !m.deferred.empty())
        left = "the kernel has ended, and copies are under way that nobody awaits";
      if (!left.empty()) m.fault = "block " + text(m.blocks[0].index) + ": " + left;
      return;
    }
    if (!m.deferred.empty()) {
      do_deferred_work();
      if (!m.fault.empty()) return;
      rounds = 0;
    } else if (!m.spinning.empty()) {
      for (Thread* thread : m.spinning) make_runnable(thread);
      m.spinning.clear();
      rounds = m.progress ? 0 : rounds + 1;
      m.progress = false;
      if (m.frozen != Machine::kNobody && rounds > kRoundsFrozen) plan_freeze();
    } else if (m.frozen != Machine::kNobody) {
      plan_freeze();
    } else {
      break;
    }
  }
  m.fault = deadlock_text();
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
  Machine& m = machine();
  const char* const order = std::getenv("FK_EMULATOR_ORDER");
  if (!order || std::strcmp(order, "forward") == 0) {
    m.order = Order::kForward;
  } else if (std::strcmp(order, "reverse") == 0) {
    m.order = Order::kReverse;
  } else {
    m.order = Order::kRandom;
    m.random = std::strtoull(order, nullptr, 10);
  }
}

// How many clusters run at once: FK_EMULATOR_RESIDENT, or fewer where shared memory does not hold so many.
unsigned clusters_at_once(unsigned cluster, std::uint64_t clusters) {
  const char* const wanted = std::getenv("FK_EMULATOR_RESIDENT");
  const std::uint64_t most = std::min<std::uint64_t>(kMostClusterBlocks / cluster, clusters);
  if (machine().all_at_once) return static_cast<unsigned>(most);
  return wanted ? std::clamp(std::atoi(wanted), 1, static_cast<int>(most)) : 1;
}

}  // namespace

void suspend(bool spinning) {
  if (!spinning) machine().progress = true;
  Thread* const self = current;
  Thread* const next = pick();
  if (next != self) switch_from(self, next);
  self->waits_at = nullptr;
}

std::string text(Where where) {
  const char* const src = std::strstr(where.file, "/src/");
  return std::string(src ? src + 1 : where.file) + ":" + std::to_string(where.line);
}

void fault(const std::string& what) {
  Machine& m = machine();
  m.fault = (current ? here_text(*current) : "block " + text(m.blocks[0].index)) + ": " + what;
  if (!current) throw Stopped{};
  switch_from(current, nullptr);
  std::abort();
}

std::string run_grid(Index3 grid, Index3 block_shape, unsigned cluster, std::size_t shared_bytes,
                     const std::function<void()>& kernel) {
  Machine& m = machine();
  gridDim = grid;
  blockDim = block_shape;
  m.threads_per_block = block_shape.x * block_shape.y * block_shape.z;
  m.cluster = cluster;
  m.warps_per_block = (m.threads_per_block + 31) / 32;
  const std::uint64_t clusters = std::uint64_t{grid.x} / cluster * grid.y * grid.z;
  const unsigned at_once = clusters_at_once(cluster, clusters);
  const auto set_blocks = [&](unsigned blocks) {
    m.num_threads = m.threads_per_block * blocks;
    m.num_warps = m.warps_per_block * blocks;
    m.blocks.assign(blocks, Block{});
  };
  set_blocks(at_once * cluster);
  m.shared_bytes = shared_bytes;
  m.kernel = &kernel;
  m.fault.clear();
  set_order();
  catch_bad_accesses();
  if (m.warps.size() < m.num_warps) m.warps.resize(m.num_warps);
  for (unsigned w = 0; w < m.num_warps; ++w) m.warps[w].lanes = 0;
  for (unsigned number = 0; number < m.num_threads; ++number) {
    if (number >= m.threads.size()) {
      m.threads.push_back(std::make_unique<Thread>());
      m.threads.back()->stack = new_stack();
    }
    Thread& thread = *m.threads[number];
    const unsigned t = number % m.threads_per_block;
    thread.index = {t % block_shape.x, t / block_shape.x % block_shape.y, t / block_shape.x / block_shape.y};
    thread.linear = t;
    thread.number = number;
    thread.lane = t % 32;
    thread.rank = number / m.threads_per_block;
    thread.warp = &m.warps[thread.rank * m.warps_per_block + t / 32];
    thread.warp->threads[thread.lane] = &thread;
    thread.warp->lanes |= 1u << thread.lane;
  }
  for (std::uint64_t first = 0; first < clusters; first += at_once) {
    if (clusters - first < at_once) set_blocks(static_cast<unsigned>(clusters - first) * cluster);
    for (unsigned i = 0; i < m.blocks.size(); ++i) {
      const std::uint64_t number = first * cluster + i, row = number / grid.x;
      m.blocks[i].index = {static_cast<unsigned>(number % grid.x), static_cast<unsigned>(row % grid.y),
                           static_cast<unsigned>(row / grid.y)};
    }
    blockIdx = m.blocks[0].index;
    run_blocks();
    current = nullptr;
    if (!m.fault.empty()) return m.fault;
  }
  return "";
}

void run_all_at_once(bool all) { machine().all_at_once = all; }
unsigned running_blocks() { return static_cast<unsigned>(machine().blocks.size()); }
unsigned blocks_of_cluster() { return machine().cluster; }
unsigned cluster_rank() { return current->rank % machine().cluster; }

std::uint32_t map_in_cluster(std::uint32_t address, unsigned rank) {
  if (rank >= machine().cluster) fault("mapa: the cluster has no block " + std::to_string(rank));
  return map_shared(address, current->rank - cluster_rank() + rank);
}

std::uint32_t bits_of_cluster(std::uint32_t blocks) {
  if (blocks == 0 || blocks >> machine().cluster) fault("TMA: a load to a block that the cluster does not have");
  return blocks << (current->rank - cluster_rank());
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
  self.code = __builtin_return_address(0);
  warp.meetings[at].arrived |= bit;
  warp.meetings[at].data[self.lane] = data;
  if (try_to_meet(warp, at)) return;
  self.waits_at = what;
  self.where = where;
  suspend();
}

void sleep(const char* what, Where where) {
  current->waits_at = what;
  current->where = where;
  suspend();
}

void wake(Thread* thread) { make_runnable(thread); }

void spin(const char* what, Where where) {
  machine().spinning.push_back(current);
  current->waits_at = what;
  current->where = where;
  suspend(true);
}

void defer(std::function<void()> work) { machine().deferred.push_back(std::move(work)); }

}  // namespace simt
