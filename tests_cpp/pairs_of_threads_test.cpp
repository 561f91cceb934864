// What is called thread-safe, by pairs: every public method of a class (or function of a header) beside every other one
// and beside itself, two threads each. ThreadSanitizer sees what the expectations don't.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "core/thread_pool.hpp"
#include "flashkernel/error.hpp"
#include "flashkernel/kernels.hpp"
#include "flashkernel/kv_cache.hpp"
#include "flashkernel/kv_page_pool.hpp"
#include "flashkernel/memory_resource.hpp"
#include "flashkernel/norm.hpp"
#include "kv_cache_bench.hpp"
#include "random_steps.hpp"

namespace flashkernel::testing {
namespace {

struct Method {
  const char* name;
  std::function<void()> call;
};

// Runs `call` and lets pass what another thread may bring about: no page left, or less of a sequence than there was.
template <class F>
void allowed_to_fail(F call) {
  try {
    call();
  } catch (const OutOfMemory&) {
  } catch (const InvalidArgument&) {
  }
}

void every_pair(
    const std::vector<Method>& methods, int steps, const std::function<void()>& after_each = [] {}) {
  for (std::size_t i = 0; i < methods.size(); ++i) {
    for (std::size_t j = i; j < methods.size(); ++j) {
      SCOPED_TRACE(std::string(methods[i].name) + " beside " + methods[j].name);
      std::atomic<int> ready{0};
      const auto work = [&](const Method& method) {
        ready.fetch_add(1);
        while (ready.load() < 2) std::this_thread::yield();
        for (int step = 0; step < steps; ++step) method.call();
      };
      std::thread first(work, std::cref(methods[i])), second(work, std::cref(methods[j]));
      first.join();
      second.join();
      after_each();
      if (::testing::Test::HasFailure()) return;
    }
  }
}

TEST(PairsOfThreads, KvCacheAndItsPool) {
  constexpr std::int64_t kPages = 64, kMostTokens = 20 * kPageSize + 3;
  Bench b(kPages);
  const SequenceId shared = b.make(iota(5));
  const PageId page = b.pool.take();
  const Tokens prompt = iota(3 * kPageSize + 1);
  const auto of_sequence = [&] {
    std::vector<PageId> pages = b.cache.pages(shared);
    for (const PageId each : pages) EXPECT_TRUE(each >= -1 && each < kPages) << each;
  };
  const std::vector<Method> methods{
      {"append",
       [&] {
         std::vector<std::int64_t> slots(kMostTokens);
         try {
           b.cache.append(shared, kMostTokens, slots.data());
           for (const std::int64_t slot : slots) EXPECT_TRUE(slot >= 0 && slot < kPages * kPageSize) << slot;
         } catch (const OutOfPages&) {
           allowed_to_fail([&] { b.cache.truncate(shared, b.cache.length(shared) / 4); });
         }
       }},
      {"truncate", [&] { allowed_to_fail([&] { b.cache.truncate(shared, b.cache.length(shared) / 2); }); }},
      {"drop_before", [&] { allowed_to_fail([&] { b.cache.drop_before(shared, kPageSize); }); }},
      {"create, publish, free",
       [&] {
         std::int64_t num_cached = 0;
         const SequenceId own = b.create(prompt, &num_cached);
         EXPECT_EQ(b.cache.length(own), num_cached);
         std::vector<std::int64_t> slots(prompt.size());
         allowed_to_fail([&] {
           b.cache.append(own, static_cast<std::int64_t>(prompt.size()) - num_cached, slots.data());
           b.publish(own, prompt);
         });
         b.cache.free(own);
       }},
      {"fork", [&] { b.cache.free(b.cache.fork(shared)); }},
      {"create", [&] { b.cache.free(b.cache.create()); }},
      {"length", [&] { EXPECT_GE(b.cache.length(shared), 0); }},
      {"num_pages", [&] { EXPECT_LE(b.cache.num_pages(shared), kPages); }},
      {"pages", of_sequence},
      {"block_table",
       [&] {
         std::int32_t table[kPages], length = 0;
         b.cache.block_table(&shared, 1, kPages, table, &length);
         const std::int64_t used = (length + kPageSize - 1) / kPageSize;
         for (std::int64_t i = used; i < kPages; ++i) EXPECT_EQ(table[i], -1);
       }},
      {"drop_cached", [&] { EXPECT_GE(b.cache.drop_cached(), 0); }},
      {"stats", [&] { EXPECT_LE(b.cache.stats().num_pages_used, kPages); }},
      {"pool", [&] { EXPECT_EQ(&b.cache.pool(), &b.pool); }},
      {"pool.take, give_back",
       [&] {
         PageId pages[3];
         allowed_to_fail([&] {
           b.pool.take(3, pages);
           b.pool.give_back(3, pages);
           b.pool.give_back(b.pool.take());
         });
       }},
      {"pool.retain",
       [&] {
         b.pool.retain(page);
         b.pool.give_back(page);
       }},
      {"pool.num_references", [&] { EXPECT_GE(b.pool.num_references(page), 1); }},
      {"pool.num_free, num_used", [&] { EXPECT_TRUE(b.pool.num_free() <= kPages && b.pool.num_used() <= kPages); }},
      {"pool's constants",
       [&] {
         EXPECT_TRUE(b.pool.options().num_pages == kPages && b.pool.page_bytes() > 0);
         EXPECT_TRUE(b.pool.k_pages().defined() && b.pool.v_pages().defined() && !b.pool.scales().k.defined());
       }},
  };
  every_pair(methods, num_steps(1000), [&] {
    b.cache.drop_cached();
    const KvCacheStats stats = b.cache.stats();
    EXPECT_EQ(stats.num_sequences, 1);
    EXPECT_EQ(stats.num_pages_used + 1, b.pool.num_used());
  });
}

std::vector<Method> methods_of(MemoryResource& resource) {
  const auto use = [&resource](std::size_t bytes) {
    allowed_to_fail([&] {
      void* const data = resource.allocate(bytes);
      std::memset(data, 1, bytes);  // TSan sees two owners here
      resource.deallocate(data, bytes);
    });
  };
  return {
      {"allocate, little", [use] { use(300); }},
      {"allocate, much", [use] { use(std::size_t{3} << 20 >> 6); }},
      {"stats", [&] { EXPECT_GE(resource.stats().peak_allocated_bytes, resource.stats().allocated_bytes); }},
      {"trim", [&] { resource.trim(); }},
      {"device", [&] { EXPECT_TRUE(resource.device().is_cpu()); }},
  };
}

TEST(PairsOfThreads, HostResource) {
  HostResource resource(std::size_t{64} << 10);  // two threads' large blocks don't fit at once
  every_pair(methods_of(resource), num_steps(1000), [&] { EXPECT_EQ(resource.stats().allocated_bytes, 0u); });
}

TEST(PairsOfThreads, CachingResourceAndItsUpstream) {
  HostResource upstream;
  CachingResource resource(upstream);
  std::vector<Method> methods = methods_of(resource);
  for (const Method& method : methods_of(upstream)) methods.push_back(method);
  every_pair(methods, num_steps(1000), [&] { EXPECT_EQ(resource.stats().allocated_bytes, 0u); });
}

TEST(PairsOfThreads, RegistryThreadsAndOps) {
  const int before = num_threads();
  set_num_threads(2);
  constexpr std::int64_t kRows = 64, kDim = 64;
  const std::vector<float> x(kRows * kDim, 2.0f), weight(kDim, 1.0f);
  const std::vector<Method> methods{
      {"kernels", [] { EXPECT_FALSE(kernels().empty()); }},
      {"force_kernels", [] { force_kernels(num_threads() % 2 == 0 ? "" : "*/cpu"); }},
      {"forced_kernels", [] { EXPECT_LE(forced_kernels().size(), 5u); }},
      {"set_num_threads", [] { set_num_threads(1 + num_threads() % 3); }},
      {"cpu_features", [] { EXPECT_EQ(cpu_features(), cpu_features()); }},
      {"num_cuda_devices", [] { EXPECT_GE(num_cuda_devices(), 0); }},
      {"default_resource", [] { EXPECT_TRUE(default_resource(Device::cpu()).device().is_cpu()); }},
      {"memory stats", [] { EXPECT_GE(default_resource(Device::cpu()).stats().num_invalid_frees, 0u); }},
      {"trim", [] { default_resource(Device::cpu()).trim(); }},
      {"parallel_for",
       [] {
         std::atomic<int> sum{0};
         auto task = [&](std::int64_t begin, std::int64_t end, int) { sum += static_cast<int>(end - begin); };
         parallel_for(8, 1, task);
         EXPECT_EQ(sum, 8);
       }},
      {"rms_norm",
       [&] {
         std::vector<float> out(x.size());
         rms_norm({const_cast<float*>(x.data()), DType::kFloat32, {kRows, kDim}}, {},
                  {const_cast<float*>(weight.data()), DType::kFloat32, {kDim}},
                  {out.data(), DType::kFloat32, {kRows, kDim}}, {});
         EXPECT_NEAR(out.back(), 1.0f, 1e-4f);
       }},
  };
  every_pair(methods, num_steps(200));
  force_kernels("");
  set_num_threads(before);
}

}  // namespace
}  // namespace flashkernel::testing
