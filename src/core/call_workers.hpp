// How many threads a call on the CPU is worth. Held by the dispatcher while a call plans its workspace and runs.
#pragma once

#include "core/thread_pool.hpp"

namespace flashkernel {

/// How many of the num_workers() threads a call of so many steps is worth: one for each 32768 (the environment variable
/// FLASHKERNEL_STEPS_PER_THREAD). A step is a multiplication with an addition, or an element read and written; so many
/// take 2 to 10 us of a core. To wake a thread takes some 30, so a tiny call runs in its caller. No result depends on
/// it.
int workers_for(double steps) noexcept;

/// num_workers() is at most `most` until the thread's WorkerPlan ends.
void limit_workers(int most) noexcept;

/// A WorkerPlan with the threads that a call is worth.
class CallWorkers {
 public:
  explicit CallWorkers(double steps) noexcept { limit_workers(workers_for(steps)); }

 private:
  WorkerPlan plan_;
};

}  // namespace flashkernel
