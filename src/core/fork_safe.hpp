// What fork() finds at rest. A child process has the thread that forked and no other: a mutex that another thread held
// stays locked there for ever, what it guarded stays half changed, and a function's static whose initialiser was
// running is waited for in vain. So the library has no std::mutex and no such static outside the thread pool, whose
// child starts a pool of its own, but what is here. Used by all of src; the handlers of fork() are in fork_safe.cpp.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>

namespace flashkernel {

/// A std::mutex that no other thread holds while the process forks: fork() takes all of them before, and gives them
/// back after, in the parent and in the child. A thread that holds one takes only older ones (those made before it),
/// and makes or destroys none: fork() takes the youngest first, so that it waits for no one who waits for it.
class ForkSafeMutex {
 public:
  ForkSafeMutex();
  ~ForkSafeMutex();
  ForkSafeMutex(const ForkSafeMutex&) = delete;
  ForkSafeMutex& operator=(const ForkSafeMutex&) = delete;

  void lock() {
    if (wanted_.load(std::memory_order_relaxed)) let_fork_pass();
    mutex_.lock();
  }
  bool try_lock() { return mutex_.try_lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  friend class ForkHandlers;
  void let_fork_pass() noexcept;

  std::mutex mutex_;
  std::atomic<bool> wanted_{
      false};  // by a thread that forks: one that takes and gives all the time would never let it in
  ForkSafeMutex* older_ = nullptr;  // of those alive
  ForkSafeMutex* younger_ = nullptr;
};

using ForkSafeLock = std::lock_guard<ForkSafeMutex>;

/// A T that is made at first use and never destroyed; for a function's static. Threads that come first together may
/// each make one: all but one of them are dropped. `make` returns a std::unique_ptr<T>.
template <class T>
class MadeOnce {
 public:
  template <class Make>
  T& get(Make make) {
    T* found = made_.load(std::memory_order_acquire);
    if (found) return *found;
    std::unique_ptr<T> fresh = make();
    if (made_.compare_exchange_strong(found, fresh.get(), std::memory_order_acq_rel, std::memory_order_acquire))
      return *fresh.release();
    return *found;
  }
  T& get() {
    return get([] { return std::make_unique<T>(); });
  }

 private:
  std::atomic<T*> made_{nullptr};
};

/// One T for each key, made at first use and never destroyed; for a function's static. As MadeOnce for each of them.
template <class Key, class T>
class MadeOncePerKey {
 public:
  template <class Make>
  T& get(const Key& key, Make make) {
    Map& map = map_.get();
    {
      const ForkSafeLock lock(map.mutex);
      const auto found = map.entries.find(key);
      if (found != map.entries.end()) return *found->second;
    }
    std::unique_ptr<T> fresh = make();  // not under the lock: it may take its time, or make a mutex
    const ForkSafeLock lock(map.mutex);
    std::unique_ptr<T>& entry = map.entries[key];
    if (!entry) entry = std::move(fresh);
    return *entry;
  }

 private:
  struct Map {
    ForkSafeMutex mutex;
    std::map<Key, std::unique_ptr<T>> entries;
  };
  MadeOnce<Map> map_;
};

}  // namespace flashkernel
