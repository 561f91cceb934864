// Workers sleep between ops and spin a little before they do, so that a run of small ops does not pay a wake-up for
// each. While an AwakeThreads lives (a decode step as one op) they do not sleep. A child process after fork() starts a
// pool of its own.
#include "core/thread_pool.hpp"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/awake_threads.hpp"
#include "core/call_workers.hpp"
#include "core/fork_safe.hpp"
#include "flashkernel/device.hpp"
#include "flashkernel/error.hpp"

#if !defined(_WIN32)
#include <pthread.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__) || defined(_M_X64)
#include <emmintrin.h>  // all of immintrin.h is half of what this file takes to compile
#endif

namespace flashkernel {
namespace {

constexpr int kMaxThreads = 1024;

inline void relax() noexcept {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

int usable_cores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
#endif
  const unsigned cores = std::thread::hardware_concurrency();
  return cores ? static_cast<int>(cores) : 1;
}

// OMP_NUM_THREADS is a comma-separated list, one entry per nesting level; the first counts.
int initial_threads() {
  if (const char* text = std::getenv("OMP_NUM_THREADS")) {
    const long count = std::strtol(text, nullptr, 10);
    if (count >= 1) return static_cast<int>(count < kMaxThreads ? count : kMaxThreads);
  }
  return usable_cores();
}

std::atomic<double> g_steps_per_thread{-1};  // nobody has asked yet

double steps_per_thread() noexcept {
  double steps = g_steps_per_thread.load(std::memory_order_relaxed);
  if (steps >= 0) return steps;
  const char* const text = std::getenv("FLASHKERNEL_STEPS_PER_THREAD");
  char* end = nullptr;
  steps = text ? std::strtod(text, &end) : 0;
  if (!text || end == text || !(steps >= 0)) steps = 32768;    // NaN is not >= 0
  g_steps_per_thread.store(steps, std::memory_order_relaxed);  // whoever else has asked has found the same
  return steps;
}

std::atomic<int> g_num_threads{0};  // 0: not set, and nobody has asked yet

thread_local bool t_inside_task = false;
thread_local int t_planned_workers = 0;  // 0: no plan

class ThreadPool {
 public:
  // False when another caller's op is running: the caller then works alone.
  bool try_run(std::int64_t count, std::int64_t grain, int workers, TaskFunction function, void* context) {
    std::unique_lock<std::mutex> submit(submit_mutex_, std::try_to_lock);
    if (!submit.owns_lock()) return false;
    start_threads(workers - 1);
    if (workers > threads_ + 1) workers = threads_ + 1;
    function_ = function;
    context_ = context;
    count_ = count;
    grain_ = grain;
    next_.store(0, std::memory_order_relaxed);
    error_ = nullptr;
    running_.store(workers - 1, std::memory_order_relaxed);
    {
      const std::lock_guard<std::mutex> lock(wake_mutex_);
      const std::uint64_t number = job_.load(std::memory_order_relaxed) / kJob + 1;
      job_.store(number * kJob + static_cast<std::uint64_t>(workers), std::memory_order_release);
    }
    wake_.notify_all();
    run_tasks(0);
    for (int spins = 0; running_.load(std::memory_order_acquire) != 0; ++spins) {
      if (spins < kSpins) {
        relax();
      } else {
        std::this_thread::yield();
      }
    }
    if (error_) std::rethrow_exception(error_);
    return true;
  }

  // Workers with an index below `workers` do not sleep until it is 0 again. False when others have asked for that.
  bool keep_awake(int workers) noexcept {
    int nobody = 0;
    return awake_.compare_exchange_strong(nobody, workers, std::memory_order_relaxed);
  }
  void let_sleep() noexcept { awake_.store(0, std::memory_order_relaxed); }

 private:
  static constexpr int kSpins = 2000;  // about 30 us on current processors, the price of a wake-up
  static constexpr int kOpsBeforeRetry = 1000;

  // Where the system gives no more threads (a limit on processes, no memory for a stack), those that are there do the
  // work: which thread runs which task is not fixed anyway. A refusal costs some microseconds, so not every op asks.
  void start_threads(int count) noexcept {
    if (threads_ >= count || (ops_before_retry_ > 0 && --ops_before_retry_ > 0)) return;
    try {
      for (; threads_ < count; ++threads_)
        std::thread(&ThreadPool::work, this, threads_ + 1, job_.load(std::memory_order_relaxed)).detach();
    } catch (const std::exception&) {  // std::system_error or std::bad_alloc
      ops_before_retry_ = kOpsBeforeRetry;
    }
  }

  void run_tasks(int worker) noexcept {
    t_inside_task = true;
    for (;;) {
      const std::int64_t begin = next_.fetch_add(grain_, std::memory_order_relaxed);
      if (begin >= count_) break;
      const std::int64_t end = begin + grain_ < count_ ? begin + grain_ : count_;
      try {
        function_(context_, begin, end, worker);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(error_mutex_);
        if (!error_) error_ = std::current_exception();
        next_.store(count_, std::memory_order_relaxed);
      }
    }
    t_inside_task = false;
  }

  void work(int worker, std::uint64_t seen) {
    for (;;) {
      for (int spins = 0; job_.load(std::memory_order_acquire) == seen;) {
        if (spins < kSpins) {
          relax(), ++spins;
        } else if (worker < awake_.load(std::memory_order_relaxed)) {
          std::this_thread::yield();
        } else {
          break;
        }
      }
      if (job_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> lock(wake_mutex_);
        wake_.wait(lock, [&] { return job_.load(std::memory_order_acquire) != seen; });
      }
      seen = job_.load(std::memory_order_acquire);
      // A job that does not count on this worker is none of its business: nobody waits for it, and it must not look.
      if (static_cast<std::uint64_t>(worker) >= seen % kJob) continue;
      run_tasks(worker);
      running_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::mutex submit_mutex_, wake_mutex_, error_mutex_;
  std::condition_variable wake_;
  // The job's number times kJob, plus the workers that take part: one value, so that a worker which wakes late can't
  // mix two jobs.
  static constexpr std::uint64_t kJob = 1 << 16;
  std::atomic<std::uint64_t> job_{0};
  std::atomic<std::int64_t> next_{0};
  std::atomic<int> running_{0};  // workers of the current job that have not finished it
  std::atomic<int> awake_{0};    // workers with an index below it do not sleep
  int threads_ = 0;              // workers besides the caller
  int ops_before_retry_ = 0;     // after a thread that could not be had
  // The current job; written before job_ moves, read after, by those that take part.
  TaskFunction function_ = nullptr;
  void* context_ = nullptr;
  std::int64_t count_ = 0, grain_ = 1;
  std::exception_ptr error_;
};

std::atomic<ThreadPool*> g_pool{nullptr};

// Never destroyed: workers are detached and may outlive static destructors.
ThreadPool& pool() {
  ThreadPool* current = g_pool.load(std::memory_order_acquire);
  if (current) return *current;
  static MadeOnce<ForkSafeMutex> mutex;
  const ForkSafeLock lock(mutex.get());
  current = g_pool.load(std::memory_order_acquire);
  if (!current) {
#if !defined(_WIN32)
    static bool registered = false;  // under the lock
    const auto in_child = [] {
      g_pool.store(nullptr);  // the parent's threads do not exist here; what they were doing stays undone
      t_inside_task = false;
    };
    if (!registered) registered = pthread_atfork(nullptr, nullptr, in_child) == 0;
#endif
    current = new ThreadPool;
    g_pool.store(current, std::memory_order_release);
  }
  return *current;
}

}  // namespace

int num_threads() noexcept {
  int count = g_num_threads.load(std::memory_order_relaxed);
  if (count > 0) return count;
  const int initial = initial_threads();
  return g_num_threads.compare_exchange_strong(count, initial, std::memory_order_relaxed) ? initial : count;
}

void set_num_threads(int count) {
  if (count < 1 || count > kMaxThreads)
    throw InvalidArgument("set_num_threads: count=" + std::to_string(count) + "; needs 1 to " +
                          std::to_string(kMaxThreads));
  g_num_threads.store(count, std::memory_order_relaxed);
}

int num_workers() noexcept { return t_planned_workers > 0 ? t_planned_workers : num_threads(); }

void limit_workers(int most) noexcept {
  if (most < t_planned_workers) t_planned_workers = most;
}

int workers_for(double steps) noexcept {
  const double each = steps_per_thread();
  const int workers = num_workers();
  if (steps >= workers * each) return workers;
  return steps < 2 * each ? 1 : static_cast<int>(steps / each);
}

WorkerPlan::WorkerPlan() noexcept : previous_(t_planned_workers) { t_planned_workers = num_workers(); }

WorkerPlan::~WorkerPlan() { t_planned_workers = previous_; }

AwakeThreads::AwakeThreads() {
  const int workers = num_workers();
  if (workers < 2 || t_inside_task) return;
  ThreadPool& own = pool();
  if (own.keep_awake(workers)) pool_ = &own;
}

AwakeThreads::~AwakeThreads() {
  if (pool_) static_cast<ThreadPool*>(pool_)->let_sleep();
}

void parallel_for(std::int64_t count, std::int64_t grain, int max_workers, TaskFunction function, void* context) {
  if (count <= 0) return;
  if (grain < 1) grain = 1;
  const std::int64_t runs = (count + grain - 1) / grain;
  const int workers = static_cast<int>(runs < max_workers ? runs : max_workers);
  if (workers > 1 && !t_inside_task && pool().try_run(count, grain, workers, function, context)) return;
  function(context, 0, count, 0);
}

}  // namespace flashkernel
