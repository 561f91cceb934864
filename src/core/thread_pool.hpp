// The threads that CPU kernels run on: one pool per process, fed by one op at a time.
// Called by src/cpu. Kernels hand in a plain function pointer, so nothing here is instantiated in files that are compiled for
// newer instruction sets. Which thread runs which task is not fixed: a kernel's result must not depend on it.
#pragma once

#include <cstdint>

namespace flashkernel {

/// Runs tasks [begin, end); `worker` is in [0, num_workers()) and no two calls with one worker index run at the same time.
using TaskFunction = void (*)(void* context, std::int64_t begin, std::int64_t end, int worker);

/// Upper bound of worker indices for the current setting: scratch memory is planned with it.
/// A launch that plans workspace and then runs sees the same number unless set_num_threads is called in between;
/// `parallel_for` takes the planned number to be safe against that.
int num_workers() noexcept;

/// Calls `function` on runs of at most `grain` tasks until all of [0, count) are done; returns when they are. Uses at most
/// `max_workers` threads, the caller's among them. Runs in the caller alone when it is called from inside a task, when the pool
/// is busy with another caller's op, or when there is one run of tasks only. The first exception of a task is thrown again here.
void parallel_for(std::int64_t count, std::int64_t grain, int max_workers, TaskFunction function, void* context);

/// The same for a callable f(begin, end, worker) with all workers.
template <class F>
inline void parallel_for(std::int64_t count, std::int64_t grain, F& f) {
  parallel_for(
      count, grain, num_workers(),
      [](void* context, std::int64_t begin, std::int64_t end, int worker) { (*static_cast<F*>(context))(begin, end, worker); }, &f);
}

}  // namespace flashkernel
