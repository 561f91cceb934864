// The list of all mutexes, and what fork() does with them.
#include "core/fork_safe.hpp"

#include <chrono>
#include <thread>

#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace flashkernel {
namespace {

std::mutex g_list_mutex;  // held from before fork() until after it, so that the list stands still
ForkSafeMutex* g_youngest = nullptr;
bool g_registered = false;

constexpr int kMostWaits = 2000;  // about 0.2 s
void wait() { std::this_thread::sleep_for(std::chrono::microseconds(50)); }

}  // namespace

class ForkHandlers {
 public:
  static void add(ForkSafeMutex& added) {
    const std::lock_guard<std::mutex> lock(g_list_mutex);
#if !defined(_WIN32)
    if (!g_registered) g_registered = pthread_atfork(before, after, after) == 0;
#endif
    added.older_ = g_youngest;
    if (g_youngest) g_youngest->younger_ = &added;
    g_youngest = &added;
  }

  static void remove(ForkSafeMutex& removed) noexcept {
    const std::lock_guard<std::mutex> lock(g_list_mutex);
    (removed.younger_ ? removed.younger_->older_ : g_youngest) = removed.older_;
    if (removed.older_) removed.older_->younger_ = removed.younger_;
  }

 private:
  // Whoever holds a mutex waits for older ones only, and those are free until the younger ones are ours: each will
  // come. A memory resource of a user's own may break that rule (it is called under the lock of a cache above it). So
  // this gives everything back when a mutex does not come for a while, and starts again: slow, but never stuck.
  static void before() {
    for (;;) {
      g_list_mutex.lock();
      ForkSafeMutex* mutex = g_youngest;
      while (mutex && lock_soon(*mutex)) mutex = mutex->older_;
      if (!mutex) return;
      unlock(mutex);
      g_list_mutex.unlock();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  static void after() {
    unlock(nullptr);
    g_list_mutex.unlock();
  }

  static bool lock_soon(ForkSafeMutex& mutex) {
    if (mutex.try_lock()) return true;
    mutex.wanted_.store(true, std::memory_order_relaxed);
    bool locked = false;
    for (int i = 0; i < kMostWaits && !(locked = mutex.try_lock()); ++i) wait();
    mutex.wanted_.store(false, std::memory_order_relaxed);
    return locked;
  }

  /// From the youngest to the one before `end`.
  static void unlock(const ForkSafeMutex* end) {
    for (ForkSafeMutex* mutex = g_youngest; mutex != end; mutex = mutex->older_) mutex->unlock();
  }
};

ForkSafeMutex::ForkSafeMutex() { ForkHandlers::add(*this); }
ForkSafeMutex::~ForkSafeMutex() { ForkHandlers::remove(*this); }

void ForkSafeMutex::let_fork_pass() noexcept {
  for (int i = 0; i < kMostWaits && wanted_.load(std::memory_order_relaxed); ++i) wait();
}

}  // namespace flashkernel
