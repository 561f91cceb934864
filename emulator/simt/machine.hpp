// The multiprocessors of one launch, as the parts of the scheduler share them: the blocks that run now, their threads
// and barriers. scheduler.cpp runs them; barriers.cpp and bulk_groups.cpp say what threads wait for. See simt.hpp for
// what kernels see.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "simt/race.hpp"
#include "simt/simt.hpp"
#include "simt/warp.hpp"

namespace simt {

struct Barrier {
  unsigned arrived = 0, threads = 0;  // threads: 0 until the first comes
  Where where{};
  int count = 0;  // of true predicates
  BlockVote result{};
  std::vector<Thread*> waiting;
  race::Clock clock;       // what those that have arrived bring; of the cluster's barrier: those of the last round
  race::Clock open_clock;  // of the cluster's barrier: of this round

  void reset() {
    arrived = threads = 0;
    count = 0;
    waiting.clear();
    clock.clear();
    open_clock.clear();
  }
};

enum class Order { kForward, kReverse, kRandom };

struct BulkGroups {
  using Group = std::vector<std::function<void()>>;
  Group open;
  std::deque<Group> closed;
  race::Agent agent = 0;  // 0: none yet; and its groups so far, those that were waited for among them
  std::uint32_t num_closed = 0;
};

inline constexpr int kNamedBarriers = 16;

// One block of those that run now.
struct Block {
  Index3 index;
  unsigned num_exited = 0;
  Barrier barriers[kNamedBarriers];
  Barrier cluster_barrier;  // of the cluster whose first block this is
  race::Clock at_exit;      // nobody waits for it; but it is an event, at which a thread's last write is judged
};

// The multiprocessors.
struct Machine {
  std::vector<std::unique_ptr<Thread>> threads;  // block after block; stacks are kept from launch to launch
  std::vector<Warp> warps;
  std::vector<Block> blocks;
  unsigned num_warps = 0, num_threads = 0;  // of all blocks
  unsigned warps_per_block = 0, threads_per_block = 0, warp_of_turn = 0;
  unsigned cluster = 1;  // blocks of one; several clusters run now where blocks has more
  std::vector<Thread*> spinning;
  std::deque<std::function<void()>> deferred;
  std::size_t shared_bytes = 0;
  const std::function<void()>* kernel = nullptr;
  void* outside = nullptr;  // the launching code's stack pointer
  std::string fault;
  Order order = Order::kForward;
  std::uint64_t random = 0;
  bool all_at_once = false;  // the next launch is cooperative
  bool progress = false;     // somebody has waited for something else than a spin since the last round
  // FK_EMULATOR_FREEZE: a block (or cluster) that stands still until no other can go on, and the turns before it does.
  static constexpr unsigned kNobody = ~0u;
  unsigned frozen = kNobody;
  std::uint64_t turns_to_freeze = 0;

  unsigned num_exited() const {
    unsigned sum = 0;
    for (const Block& block : blocks) sum += block.num_exited;
    return sum;
  }
};

Machine& machine();

/// The current thread waits for something: others run. Returns when somebody has made it runnable again.
void suspend(bool spinning = false);
inline void make_runnable(Thread* thread) { thread->warp->runnable |= 1u << thread->lane; }

}  // namespace simt
