// The CPU kernels' thread pool: every task once, exceptions, nesting, callers side by side, fork(), and the number of
// threads.
#include "core/awake_threads.hpp"
#include "core/thread_pool.hpp"
#include "flashkernel/attention.hpp"
#include "flashkernel/linear.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <stdexcept>
#include <thread>
#include <vector>

#include "flashkernel/device.hpp"
#include "flashkernel/error.hpp"

#if defined(__linux__)
#include <sys/wait.h>
#include <unistd.h>
#endif

namespace flashkernel {
namespace {

class ThreadPoolTest : public ::testing::Test {
 protected:
  void SetUp() override { before_ = num_threads(); }
  void TearDown() override { set_num_threads(before_); }

 private:
  int before_ = 1;
};

// Runs `count` tasks and says whether each ran exactly once, in runs within the grain, with worker indices in bounds.
void check_coverage(std::int64_t count, std::int64_t grain) {
  std::vector<std::atomic<int>> runs(static_cast<std::size_t>(count));
  std::atomic<int> bad{0};
  const int workers = num_workers();
  auto task = [&](std::int64_t begin, std::int64_t end, int worker) {
    if (worker < 0 || worker >= workers || begin < 0 || end > count || begin >= end) bad.fetch_add(1);
    for (std::int64_t i = begin; i < end; ++i) runs[static_cast<std::size_t>(i)].fetch_add(1);
  };
  parallel_for(count, grain, task);
  EXPECT_EQ(bad.load(), 0);
  for (const auto& n : runs) ASSERT_EQ(n.load(), 1);
}

TEST_F(ThreadPoolTest, RunsEveryTaskOnce) {
  for (const int threads : {1, 2, 3, 8}) {
    set_num_threads(threads);
    EXPECT_EQ(num_threads(), threads);
    EXPECT_EQ(num_workers(), threads);
    for (const std::int64_t count : {0, 1, 2, 7, 64, 1000})
      for (const std::int64_t grain : {1, 3, 64, 5000}) check_coverage(count, grain);
  }
}

TEST_F(ThreadPoolTest, AGrainBelowOneIsOne) {
  set_num_threads(2);
  check_coverage(10, 0);
  check_coverage(10, -5);
}

TEST_F(ThreadPoolTest, ManySmallOpsInARow) {
  set_num_threads(3);
  std::atomic<std::int64_t> sum{0};
  auto task = [&](std::int64_t begin, std::int64_t end, int) { sum.fetch_add(end - begin); };
  for (int i = 0; i < 20000; ++i) parallel_for(4, 1, task);
  EXPECT_EQ(sum.load(), 80000);
}

TEST_F(ThreadPoolTest, AwakeThreadsRunEveryTaskOnce) {
  for (const int threads : {1, 2, 3, 8}) {
    set_num_threads(threads);
    const AwakeThreads awake;
    const AwakeThreads second;  // does nothing
    for (int i = 0; i < 20; ++i) check_coverage(1 + i, 1);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // they have spun their while, and yield
    check_coverage(100, 1);
    auto outer = [&](std::int64_t, std::int64_t, int) {
      const AwakeThreads inside;  // a task of the pool: does nothing
      check_coverage(5, 1);
    };
    parallel_for(4, 1, outer);
  }
  check_coverage(100, 1);
}

TEST_F(ThreadPoolTest, CallersSideBySideWithAwakeThreads) {
  set_num_threads(3);
  std::vector<std::thread> callers;
  std::atomic<std::int64_t> sum{0};
  for (int c = 0; c < 4; ++c)
    callers.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        const AwakeThreads awake;
        auto task = [&](std::int64_t begin, std::int64_t end, int) { sum.fetch_add(end - begin); };
        for (int op = 0; op < 5; ++op) parallel_for(16, 1, task);
      }
    });
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(sum.load(), 4 * 50 * 5 * 16);
}

#if defined(__linux__)

double processor_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

TEST_F(ThreadPoolTest, ThreadsSleepAgainBehindAwakeOnes) {
  set_num_threads(3);
  const auto idle = [] {  // seconds of processors in 100 ms of nothing
    check_coverage(100, 1);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const double before = processor_seconds();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    return processor_seconds() - before;
  };
  double awake_for = 0;
  {
    const AwakeThreads awake;
    for (int i = 0; i < 50 && awake_for < 0.005; ++i) awake_for += idle();  // others may want the processors
  }
  EXPECT_GT(awake_for, 0.005);
  EXPECT_LT(idle(), 0.005);
}

#endif

TEST_F(ThreadPoolTest, OneWorkerIndexIsNeverUsedTwiceAtOnce) {
  set_num_threads(4);
  std::vector<std::atomic<int>> inside(4);
  std::atomic<int> clashes{0};
  auto task = [&](std::int64_t, std::int64_t, int worker) {
    if (inside[static_cast<std::size_t>(worker)].fetch_add(1) != 0) clashes.fetch_add(1);
    std::this_thread::yield();
    inside[static_cast<std::size_t>(worker)].fetch_sub(1);
  };
  for (int i = 0; i < 50; ++i) parallel_for(64, 1, task);
  EXPECT_EQ(clashes.load(), 0);
}

TEST_F(ThreadPoolTest, NeverMoreWorkersThanPlanned) {
  set_num_threads(4);
  std::atomic<int> highest{0};
  struct Context {
    std::atomic<int>* highest;
  } context{&highest};
  parallel_for(
      200, 1, 2,
      [](void* c, std::int64_t, std::int64_t, int worker) {
        auto& most = *static_cast<Context*>(c)->highest;
        int seen = most.load();
        while (worker > seen && !most.compare_exchange_weak(seen, worker)) {
        }
      },
      &context);
  EXPECT_LE(highest.load(), 1);
}

TEST_F(ThreadPoolTest, ExceptionsComeOutAndThePoolLivesOn) {
  for (const int threads : {1, 2, 4}) {
    set_num_threads(threads);
    for (int round = 0; round < 20; ++round) {
      auto task = [&](std::int64_t begin, std::int64_t end, int) {
        for (std::int64_t i = begin; i < end; ++i)
          if (i == 13) throw std::runtime_error("task 13");
      };
      try {
        parallel_for(100, 1, task);
        ADD_FAILURE() << "the exception was lost";
      } catch (const std::runtime_error& error) {
        EXPECT_STREQ(error.what(), "task 13");
      }
      check_coverage(50, 1);
    }
  }
}

TEST_F(ThreadPoolTest, NestedCallsRunInTheirCaller) {
  set_num_threads(3);
  std::atomic<std::int64_t> sum{0};
  std::atomic<int> elsewhere{0};
  auto outer = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) {
      const auto caller = std::this_thread::get_id();
      auto inner = [&](std::int64_t b, std::int64_t e, int) {
        if (std::this_thread::get_id() != caller) elsewhere.fetch_add(1);
        sum.fetch_add(e - b);
      };
      parallel_for(10, 1, inner);
    }
  };
  parallel_for(30, 1, outer);
  EXPECT_EQ(sum.load(), 300);
  EXPECT_EQ(elsewhere.load(), 0);
}

TEST_F(ThreadPoolTest, CallersSideBySide) {
  set_num_threads(3);
  std::vector<std::thread> callers;
  std::atomic<std::int64_t> sum{0};
  for (int c = 0; c < 4; ++c)
    callers.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        auto task = [&](std::int64_t begin, std::int64_t end, int) { sum.fetch_add(end - begin); };
        parallel_for(16, 1, task);
      }
    });
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(sum.load(), 4 * 500 * 16);
}

TEST_F(ThreadPoolTest, TheNumberOfThreadsMayChangeWhileOthersRun) {
  std::atomic<bool> stop{false};
  std::thread changer([&] {
    for (int n = 1; !stop.load(); n = n % 5 + 1) set_num_threads(n);
  });
  for (int i = 0; i < 500; ++i) {
    std::atomic<std::int64_t> sum{0};
    auto task = [&](std::int64_t begin, std::int64_t end, int) { sum.fetch_add(end - begin); };
    parallel_for(20, 1, task);
    ASSERT_EQ(sum.load(), 20);
  }
  stop.store(true);
  changer.join();
}

TEST_F(ThreadPoolTest, APlanKeepsTheNumberOfWorkers) {
  set_num_threads(3);
  {
    const WorkerPlan plan;
    set_num_threads(7);
    EXPECT_EQ(num_workers(), 3);
    EXPECT_EQ(num_threads(), 7);
    std::thread([] { EXPECT_EQ(num_workers(), 7); }).join();  // a plan is its thread's own
    const WorkerPlan inner;
    EXPECT_EQ(num_workers(), 3);
  }
  EXPECT_EQ(num_workers(), 7);
}

TEST_F(ThreadPoolTest, OpsSurviveAChangingNumberOfThreads) {
  // Workspace is planned and used with one number of workers, or this writes past it (AddressSanitizer sees that).
  std::atomic<bool> stop{false};
  std::thread changer([&] {
    for (int i = 0; !stop.load(); ++i) set_num_threads(1 + i % 5);
  });
  constexpr std::int64_t kSeq = 96, kDim = 32;
  std::vector<float> x(kSeq * kDim, 0.5f), weight(kDim * kDim, 0.25f), out(kSeq * kDim), attended(kSeq * kDim);
  const TensorView rows(x.data(), DType::kFloat32, {1, 1, kSeq, kDim});
  for (int i = 0; i < 100; ++i) {
    linear({x.data(), DType::kFloat32, {kSeq, kDim}}, {weight.data(), DType::kFloat32, {kDim, kDim}}, {},
           {out.data(), DType::kFloat32, {kSeq, kDim}}, {});
    attention(rows, rows, rows, {attended.data(), DType::kFloat32, {1, 1, kSeq, kDim}}, {});
  }
  stop = true;
  changer.join();
  EXPECT_FLOAT_EQ(out.front(), 0.5f * 0.25f * kDim);
  EXPECT_FLOAT_EQ(attended.back(), 0.5f);
}

TEST_F(ThreadPoolTest, RefusesImpossibleNumbersOfThreads) {
  set_num_threads(2);
  for (const int count : {0, -1, 1000000}) {
    try {
      set_num_threads(count);
      ADD_FAILURE() << "accepted " << count;
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("set_num_threads: count=" + std::to_string(count)), std::string::npos)
          << error.what();
    }
    EXPECT_EQ(num_threads(), 2);
  }
}

#if defined(__linux__) && !defined(__SANITIZE_THREAD__)

constexpr const char* kReportThreads = "FK_TEST_EXIT_WITH_NUM_THREADS";
const bool reports_threads = std::getenv(kReportThreads) ? (_exit(num_threads()), true) : false;

// Runs `body` in a child process; its exit status.
template <class F>
int in_child(F body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);  // a child that hangs is a failure, not a wait
    _exit(body());
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST_F(ThreadPoolTest, AForkedChildHasAPoolOfItsOwn) {
  set_num_threads(3);
  check_coverage(100, 1);  // the parent's threads exist
  const int status = in_child([] {
    std::atomic<std::int64_t> sum{0};
    auto task = [&](std::int64_t begin, std::int64_t end, int) { sum.fetch_add(end - begin); };
    for (int i = 0; i < 100; ++i) parallel_for(64, 1, task);
    return sum.load() == 6400 ? 0 : 1;
  });
  EXPECT_EQ(status, 0);
  check_coverage(100, 1);
}

TEST_F(ThreadPoolTest, OmpNumThreadsIsTheStart) {
  ASSERT_FALSE(reports_threads);
  const struct {
    const char* value;
    int expected;  // 0: the cores of this process
  } cases[] = {{"3", 3}, {"5,2", 5}, {"0", 0}, {"-4", 0}, {"junk", 0}, {"", 0}};
  for (const auto& [value, expected] : cases) {
    // Only a fresh process reads it: this program once more, to exit with its number at once.
    const std::string variable = value;
    const int status = in_child([&] {
      setenv("OMP_NUM_THREADS", variable.c_str(), 1);
      setenv(kReportThreads, "1", 1);
      execl("/proc/self/exe", "thread_pool_test", static_cast<char*>(nullptr));
      return 255;
    });
    cpu_set_t set;
    ASSERT_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
    EXPECT_EQ(status, expected ? expected : CPU_COUNT(&set)) << "OMP_NUM_THREADS=" << value;
  }
}

#endif

}  // namespace
}  // namespace flashkernel
