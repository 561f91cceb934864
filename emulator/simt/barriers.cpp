// Barriers of a block and of a cluster: who has arrived, and who goes on when the last thread comes. See simt.hpp.
#include <string>
#include <utility>

#include "simt/machine.hpp"
#include "simt/race.hpp"
#include "simt/simt.hpp"

namespace simt {

BlockVote block_barrier(const char* what, bool predicate, Where where) {
  Machine& m = machine();
  const unsigned threads = m.threads_per_block;
  Barrier& barrier = m.blocks[current->rank].barriers[0];
  if (barrier.arrived == 0) {
    barrier.where = where;
    barrier.count = 0;
  } else if (!(barrier.where == where)) {
    fault(std::string("divergent barrier: this thread is at ") + what + " in " + text(where) +
          ", others wait for it at the one in " + text(barrier.where));
  }
  barrier.count += predicate;
  race::release(barrier.clock);
  if (++barrier.arrived == threads) {
    barrier.result = {barrier.count, barrier.count == static_cast<int>(threads), barrier.count > 0};
    barrier.arrived = 0;
    race::acquire(barrier.clock);
    for (Thread* thread : barrier.waiting) {
      race::acquire(*thread, barrier.clock);
      make_runnable(thread);
    }
    barrier.waiting.clear();
    barrier.clock.clear();
    return barrier.result;
  }
  barrier.waiting.push_back(current);
  current->waits_at = what;
  current->where = where;
  suspend();
  return barrier.result;  // the next round cannot end before this thread comes to it
}

void named_barrier(unsigned id, unsigned threads, bool wait, Where where) {
  Machine& m = machine();
  if (id >= kNamedBarriers || threads == 0 || threads % 32 != 0 || threads > m.threads_per_block)
    fault("named barrier " + std::to_string(id) + " of " + std::to_string(threads) + " threads in " + text(where) +
          ": ids are below 16, counts whole warps of the block");
  Barrier& barrier = m.blocks[current->rank].barriers[id];
  if (barrier.arrived > 0 && barrier.threads != threads)
    fault("named barrier " + std::to_string(id) + " in " + text(where) + ": others gave another thread count");
  barrier.threads = threads;
  race::release(barrier.clock);
  if (wait) {
    barrier.waiting.push_back(current);
    current->waits_at = "a named barrier";
    current->where = where;
  }
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    for (Thread* thread : barrier.waiting) {
      race::acquire(*thread, barrier.clock);
      if (thread != current) make_runnable(thread);
    }
    barrier.waiting.clear();
    barrier.clock.clear();
    current->waits_at = nullptr;
    return;
  }
  if (wait) suspend();
}

// The barrier of the current thread's cluster.
static Barrier& cluster_barrier() { return machine().blocks[current->rank - cluster_rank()].cluster_barrier; }

void cluster_arrive(Where where) {
  Barrier& barrier = cluster_barrier();
  if (current->in_cluster_barrier) fault("barrier.cluster.arrive twice without a wait, in " + text(where));
  current->in_cluster_barrier = true;
  race::release(barrier.open_clock);
  if (++barrier.arrived < machine().threads_per_block * machine().cluster) return;
  barrier.arrived = 0;
  std::swap(barrier.clock, barrier.open_clock);
  barrier.open_clock.clear();
  ++barrier.count;  // rounds
  for (Thread* thread : barrier.waiting) {
    race::acquire(*thread, barrier.clock);
    make_runnable(thread);
  }
  barrier.waiting.clear();
}

void cluster_wait(Where where) {
  Barrier& barrier = cluster_barrier();
  if (!current->in_cluster_barrier) fault("barrier.cluster.wait without an arrive, in " + text(where));
  current->in_cluster_barrier = false;
  // This thread's arrivals are the rounds that it waits for.
  if (barrier.count > static_cast<int>(current->cluster_rounds++)) return race::acquire(barrier.clock);
  barrier.waiting.push_back(current);
  current->waits_at = "barrier.cluster.wait";
  current->where = where;
  suspend();
}

}  // namespace simt
