// fork() while other threads are inside the library: a child finds every mutex free and everything whole, and ends.
#include <gtest/gtest.h>

#include "core/fork_safe.hpp"

#if !defined(_WIN32) && !defined(__SANITIZE_THREAD__)  // TSan's runtime has mutexes of its own, and no story for fork()

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "flashkernel/error.hpp"
#include "flashkernel/kernels.hpp"
#include "flashkernel/kv_cache.hpp"
#include "flashkernel/memory_resource.hpp"
#include "flashkernel/norm.hpp"
#include "fork_allocator.hpp"
#include "kv_cache_bench.hpp"
#include "random_steps.hpp"

namespace flashkernel::testing {
namespace {

constexpr unsigned kSecondsOfAChild = 20;

// Runs `body` in a child process, which is killed when it hangs; its exit status, 128 + the signal where one ended it.
int in_child(const std::function<bool()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGALRM, SIG_DFL);
    alarm(kSecondsOfAChild);
    _exit(body() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Threads that run until this is destroyed. Each of them has run its body once when it is made: the C library and a
// sanitizer's runtime take locks of their own while a thread starts.
class Background {
 public:
  explicit Background(const std::vector<std::function<void()>>& bodies) {
    for (const auto& body : bodies)
      threads_.emplace_back([this, body] {
        body();
        ++running_;
        while (!stop_) body();
      });
    while (running_ < static_cast<int>(bodies.size())) std::this_thread::yield();
  }
  ~Background() {
    stop_ = true;
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  std::atomic<bool> stop_{false};
  std::atomic<int> running_{0};
  std::vector<std::thread> threads_;
};

TEST(Fork, AChildUsesWhatOtherThreadsWereUsing) {
  Bench b(64);
  CachingResource own(default_resource(Device::cpu()));
  constexpr std::int64_t kRows = 64, kDim = 64;
  std::vector<float> x(kRows * kDim, 2.0f);
  const auto normalise = [&] {
    std::vector<float> out(x.size());
    rms_norm({x.data(), DType::kFloat32, {kRows, kDim}}, {}, {}, {out.data(), DType::kFloat32, {kRows, kDim}});
    return out.back() > 0.99f && out.back() < 1.01f;
  };
  const auto use_cache = [&] {
    const SequenceId parent = b.make(iota(20));
    const SequenceId child = b.cache.fork(parent);
    b.fill(child, iota(24));
    const bool good = b.holds(parent, iota(20)) && b.holds(child, iota(24));
    b.cache.free(parent);
    b.cache.free(child);
    return good;
  };
  const auto use_memory = [&] {
    for (MemoryResource* const resource : {&default_resource(Device::cpu()), static_cast<MemoryResource*>(&own)})
      resource->deallocate(resource->allocate(1000), 1000);
    own.trim();
  };
  const auto use_registry = [&] {
    force_kernels(forced_kernels());
    return !kernels().empty();
  };
  const Background threads({[&] { normalise(); }, [&] { use_cache(); }, [&] { use_memory(); }, [&] { use_memory(); },
                            [&] { use_registry(); }, [&] { const HostResource made_and_destroyed; }});
  int hung = 0, wrong = 0;
  for (int i = 0; i < num_steps(100) && hung == 0; ++i) {
    const int status = in_child([&] {
      use_memory();
      bool good = use_registry() && normalise() && use_cache();
      for (PageId page = 0; page < 64; ++page) good = good && b.pool.num_references(page) >= 0;
      return good && b.cache.stats().num_pages_used <= 64;
    });
    hung += status == 128 + SIGALRM ? 1 : 0;
    wrong += status != 0 ? 1 : 0;
  }
  EXPECT_EQ(hung, 0);
  EXPECT_EQ(wrong, 0);
}

TEST(Fork, WaitsForWhoeverHoldsAMutex) {
  ForkSafeMutex older, younger;
  int guarded = 0;  // even while nobody is inside
  const auto change = [&] {
    const ForkSafeLock first(younger), second(older);
    ++guarded;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    ++guarded;
  };
  const Background threads({change, change});
  for (int i = 0; i < 50; ++i) {
    ASSERT_EQ(in_child([&] {
                const ForkSafeLock first(younger), second(older);
                return guarded % 2 == 0;
              }),
              0);
  }
}

// The order that fork_safe.hpp forbids, as a user's own memory resource may bring it about: slow, but nobody is stuck.
TEST(Fork, IsNotStuckWhereMutexesAreTakenInTheWrongOrder) {
  ForkSafeMutex older, younger;
  std::atomic<bool> held{false};
  std::thread wrong([&] {
    const ForkSafeLock first(older);
    held = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // fork() has the younger one by now
    const ForkSafeLock second(younger);
    const ForkSafeMutex made;
  });
  while (!held) std::this_thread::yield();
  EXPECT_EQ(in_child([&] {
              const ForkSafeLock first(younger), second(older);
              return true;
            }),
            0);
  wrong.join();
}

TEST(Fork, AChildsChildWorksToo) {
  EXPECT_EQ(in_child([] {
              return in_child([] {
                       MemoryResource& resource = default_resource(Device::cpu());
                       resource.deallocate(resource.allocate(100), 100);
                       return true;
                     }) == 0;
            }),
            0);
}

}  // namespace
}  // namespace flashkernel::testing

#endif
