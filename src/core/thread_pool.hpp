// The threads that CPU kernels run on: one pool per process, fed by one op at a time.
// Called by src/cpu. Kernels hand in a plain function pointer, so nothing here is instantiated in files that are
// compiled for newer instruction sets. Which thread runs which task is not fixed: a kernel's result must not depend on
// it.
#pragma once

#include <cstdint>

namespace flashkernel {

/// Runs tasks [begin, end); `worker` is in [0, num_workers()) and no two calls with one worker index run at the same
/// time.
using TaskFunction = void (*)(void* context, std::int64_t begin, std::int64_t end, int worker);

/// Upper bound of worker indices: scratch memory is planned with it. The number of threads set, or, in a thread that
/// holds a WorkerPlan, the number at the time of the plan.
int num_workers() noexcept;

/// Keeps num_workers() still while it lives: an op plans its workspace and runs with one number, whatever another
/// thread sets in between. Held by the dispatcher.
class WorkerPlan {
 public:
  WorkerPlan() noexcept;
  ~WorkerPlan();
  WorkerPlan(const WorkerPlan&) = delete;
  WorkerPlan& operator=(const WorkerPlan&) = delete;

 private:
  int previous_;
};

/// Calls `function` on runs of at most `grain` tasks until all of [0, count) are done; returns when they are. Uses at
/// most `max_workers` threads, the caller's among them, and fewer where the system gives no more. Runs in the caller
/// alone when it is called from inside a task, when the pool is busy with another caller's op, or when there is one run
/// of tasks only. The first exception of a task is thrown again here.
void parallel_for(std::int64_t count, std::int64_t grain, int max_workers, TaskFunction function, void* context);

/// The same for a callable f(begin, end, worker) with all workers.
template <class F>
inline void parallel_for(std::int64_t count, std::int64_t grain, F& f) {
  parallel_for(
      count, grain, num_workers(),
      [](void* context, std::int64_t begin, std::int64_t end, int worker) {
        (*static_cast<F*>(context))(begin, end, worker);
      },
      &f);
}

}  // namespace flashkernel
