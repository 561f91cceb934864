// Every row of the CPU's table in several threads at once, over the same inputs: each op beside every other one and
// beside itself. Part of kernel_conformance, for ThreadSanitizer above all (`scripts/sanitize.sh tsan`); the results
// are those of a call alone, whoever looks. A new op or row is in here with its conformance cases.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "conformance/conformance.hpp"
#include "flashkernel/kernels.hpp"

namespace flashkernel::conformance {
namespace {

constexpr int kThreads = 4, kPasses = 2, kWorkersOfTheFirst = 3;
constexpr std::int64_t kEnoughElements = 600;  // that several workers have something to do

using Bytes = std::vector<std::vector<unsigned char>>;

struct Work {
  std::string kernel;
  const Case* test_case;
};

std::string name_of(const Work& work) { return work.kernel + "." + work.test_case->name; }
std::uint64_t seed_of(const Work& work) {
  return conformance::seed_of(work.kernel.substr(0, work.kernel.find('/')) + "/" + work.test_case->name);
}

Explanation explained(const Case& test_case) {
  Call call(0, Device::cpu(), /*blank=*/true);
  test_case.build(call);
  Explanation explanation;
  ExecutionContext context;
  context.explain = &explanation;
  call.run(context);
  return explanation;
}

// An op's cases from the least to the largest, those too little to be shared last.
std::vector<const Case*> by_size(const std::string& op) {
  std::vector<std::pair<std::int64_t, const Case*>> sized;
  for (const Case& test_case : cases_of(op)) {
    if (test_case.name.find("past_2_31") != std::string::npos) continue;  // gigabytes of addresses
    Call call(0, Device::cpu(), /*blank=*/true);
    test_case.build(call);
    std::int64_t size = 0;
    for (const TestTensor* input : call.inputs()) size += input->numel();
    for (const auto& output : call.outputs()) size += output.tensor->numel();
    sized.emplace_back(size < kEnoughElements ? INT64_MAX - size : size, &test_case);
  }
  std::stable_sort(sized.begin(), sized.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<const Case*> cases;
  for (const auto& [size, test_case] : sized) cases.push_back(test_case);
  return cases;
}

// One small case of every row that this machine runs, by op. To look for them takes longer than to run them.
std::map<std::string, std::vector<Work>> find_works() {
  std::map<std::string, std::vector<Work>> works;
  std::map<std::string, std::vector<const Case*>> cases;
  for (const KernelInfo& kernel : kernels()) {
    if (!kernel.available || kernel.device != DeviceType::kCpu) continue;
    const auto [known, missing] = cases.try_emplace(kernel.op);
    if (missing) known->second = by_size(kernel.op);
    force_kernels(kernel.id);
    for (const Case* const test_case : known->second) {
      if (explained(*test_case).kernel != kernel.id) continue;
      works[kernel.op].push_back({kernel.id, test_case});
      break;
    }
    force_kernels("");
  }
  return works;
}

const std::map<std::string, std::vector<Work>>& works_by_op() {
  static const auto found = find_works();
  return found;
}

Bytes bytes_of(const Call& call) {
  Bytes bytes;
  for (const auto& output : call.outputs()) bytes.push_back(output.tensor->snapshot());
  return bytes;
}

// The calls of one thread, and what came out of each pass.
struct Calls {
  std::deque<Call> calls;
  std::vector<Bytes> results[kPasses];
};

void run(Call& call, const Bytes& before, bool invariant) {
  for (std::size_t i = 0; i < before.size(); ++i) call.outputs()[i].tensor->restore(before[i]);
  ExecutionContext context;
  context.invariant = invariant;
  call.run(context);
}

void expect_close(const Work& work, Call& call, const Bytes& got, const Bytes& alone) {
  for (std::size_t i = 0; i < got.size(); ++i) {
    const auto& output = call.outputs()[i];
    output.tensor->restore(alone[i]);
    const std::vector<double> expected = output.tensor->values();
    output.tensor->restore(got[i]);
    EXPECT_EQ(difference(output.tensor->dtype(), output.tensor->values(), expected, output.factor), "")
        << name_of(work) << ": " << output.tensor->name();
  }
}

// All threads go through all works, each from another one on, and twice. What a first call makes and keeps is made
// here, by several at once.
void run_side_by_side(const std::vector<Work>& works, bool invariant) {
  std::deque<Call> first;
  std::vector<Bytes> before;
  for (const Work& work : works) {
    work.test_case->build(first.emplace_back(seed_of(work), Device::cpu()));
    before.push_back(bytes_of(first.back()));
  }
  std::deque<Calls> threads(kThreads);
  for (Calls& own : threads) {
    for (std::size_t i = 0; i < works.size(); ++i)
      works[i].test_case->build(own.calls.emplace_back(seed_of(works[i]), first[i]));
    for (auto& results : own.results) results.resize(works.size());
  }
  std::atomic<int> ready{0};
  std::vector<std::thread> running;
  for (int t = 0; t < kThreads; ++t) {
    running.emplace_back([&, t] {
      Calls& own = threads[static_cast<std::size_t>(t)];
      ready.fetch_add(1);
      while (ready.load() < kThreads) std::this_thread::yield();
      for (int pass = 0; pass < kPasses; ++pass) {
        for (std::size_t step = 0; step < works.size(); ++step) {
          const std::size_t i = (step + static_cast<std::size_t>(t) * works.size() / kThreads) % works.size();
          run(own.calls[i], before[i], invariant);
          own.results[pass][i] = bytes_of(own.calls[i]);
        }
      }
    });
  }
  for (std::thread& thread : running) thread.join();
  for (std::size_t i = 0; i < works.size(); ++i) {
    run(first[i], before[i], invariant);
    const Bytes alone = bytes_of(first[i]);
    for (Calls& own : threads)
      for (const auto& results : own.results) expect_close(works[i], own.calls[i], results[i], alone);
  }
}

class SideBySide : public ::testing::Test {
 protected:
  void SetUp() override { set_num_threads(kWorkersOfTheFirst); }
  void TearDown() override {
    set_num_threads(threads_);
    force_kernels(forced_);
  }

  const std::map<std::string, std::vector<Work>>& works_ = works_by_op();

 private:
  const int threads_ = num_threads();
  const std::string forced_ = forced_kernels();
};

TEST_F(SideBySide, EveryRowOfEveryOp) {
  std::size_t rounds = 0;
  for (const auto& [op, rows] : works_) rounds = std::max(rounds, rows.size());
  for (std::size_t round = 0; round < rounds && !HasFailure(); ++round) {  // an op's row in each; of few, one again
    std::vector<Work> chosen;
    std::string forced;
    for (const auto& [op, rows] : works_) {
      chosen.push_back(rows[round % rows.size()]);
      forced += (forced.empty() ? "" : ",") + chosen.back().kernel;
    }
    // Ops that are made of others call them in ways that one row may not serve.
    forced += ",linear/cpu/scalar,attention_fwd/cpu/scalar";
    SCOPED_TRACE(forced);
    force_kernels(forced);
    for (const Work& work : chosen) EXPECT_EQ(explained(*work.test_case).kernel, work.kernel);
    run_side_by_side(chosen, false);
  }
}

TEST_F(SideBySide, EveryOpInTheInvariantMode) {
  std::vector<Work> all;
  for (const auto& [op, rows] : works_) all.insert(all.end(), rows.begin(), rows.end());
  force_kernels("");
  run_side_by_side(all, true);
}

TEST_F(SideBySide, NoRowIsLeftOut) {
  for (const KernelInfo& kernel : kernels()) {
    if (!kernel.available || kernel.device != DeviceType::kCpu) continue;
    const auto rows = works_.find(kernel.op);
    ASSERT_TRUE(rows != works_.end()) << kernel.op;
    EXPECT_TRUE(std::any_of(rows->second.begin(), rows->second.end(), [&](const Work& work) {
      return work.kernel == kernel.id;
    })) << kernel.id;
  }
}

}  // namespace
}  // namespace flashkernel::conformance
