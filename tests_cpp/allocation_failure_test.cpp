// The records of the allocator, the pool and the cache are memory too: each call is run with operator new failing at
// its first, second, third ... use, and must have changed nothing when it throws. This file replaces operator new for
// its executable.
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <new>
#include <vector>

#include "failing_resource.hpp"
#include "flashkernel/error.hpp"
#include "flashkernel/kv_cache.hpp"

namespace {
bool g_armed = false;
std::size_t g_countdown = 0;

void* allocate_or_fail(std::size_t bytes) {
  if (g_armed && g_countdown-- == 0) {
    g_armed = false;
    throw std::bad_alloc();
  }
  void* pointer = std::malloc(bytes == 0 ? 1 : bytes);
  if (pointer == nullptr) throw std::bad_alloc();
  return pointer;
}

// Not inlined, so that the compiler does not take the pair new/free for a mistake.
#if defined(__GNUC__)
__attribute__((noinline))
#endif
void release(void* pointer) noexcept {
  std::free(pointer);
}
}  // namespace

void* operator new(std::size_t bytes) { return allocate_or_fail(bytes); }
void* operator new[](std::size_t bytes) { return allocate_or_fail(bytes); }
void operator delete(void* pointer) noexcept { release(pointer); }
void operator delete[](void* pointer) noexcept { release(pointer); }
void operator delete(void* pointer, std::size_t) noexcept { release(pointer); }
void operator delete[](void* pointer, std::size_t) noexcept { release(pointer); }

namespace flashkernel::testing {
namespace {

/// Runs `call` with each of its allocations failing in turn until it gets through; `unchanged` runs after each failure.
/// Returns the number of failures.
int with_failures(const std::function<void()>& call, const std::function<void()>& unchanged) {
  for (std::size_t n = 0;; ++n) {
    g_countdown = n;
    g_armed = true;
    bool failed = false;
    try {
      call();
    } catch (const std::bad_alloc&) {
      failed = true;
    } catch (const OutOfMemory&) {
      failed = true;
    }
    g_armed = false;
    if (!failed) return static_cast<int>(n);
    unchanged();
  }
}

TEST(AllocationFailure, CachingResource) {
  HostResource host;
  FailingResource upstream(host);
  {
    CachingResource resource(upstream);
    std::vector<void*> pieces(1000);
    std::size_t allocated_bytes = 0;
    int num_failures = 0;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const std::size_t bytes = i % 100 == 99 ? 3000000 : 100 + i;
      num_failures += with_failures([&] { pieces[i] = resource.allocate(bytes); },
                                    [&] {
                                      ASSERT_EQ(resource.stats().allocated_bytes, allocated_bytes);
                                      ASSERT_EQ(resource.stats().num_allocations, i);
                                    });
      allocated_bytes += bytes;
    }
    EXPECT_GT(num_failures, 10);
    for (void* piece : pieces) {
      g_countdown = 0;
      g_armed = true;  // giving back needs no memory
      resource.deallocate(piece, 0);
      EXPECT_TRUE(g_armed);
      g_armed = false;
    }
    EXPECT_EQ(resource.stats().allocated_bytes, 0u);
    EXPECT_EQ(resource.stats().num_invalid_frees, 0u);
  }
  EXPECT_EQ(upstream.num_given(), 0u);
  EXPECT_EQ(upstream.num_mismatches(), 0u);
}

KvPagePoolOptions options_of(std::int64_t num_pages) {
  KvPagePoolOptions options;
  options.num_pages = num_pages;
  options.heads_kv = options.head_dim = 1;
  options.page_size = 16;
  return options;
}

TEST(AllocationFailure, KvPagePool) {
  HostResource host;
  std::unique_ptr<KvPagePool> pool;
  const int num_failures = with_failures([&] { pool = std::make_unique<KvPagePool>(options_of(9), &host); },
                                         [&] { EXPECT_EQ(host.stats().allocated_bytes, 0u); });
  EXPECT_GT(num_failures, 1);
  std::vector<PageId> pages(9);
  EXPECT_EQ(with_failures([&] { pool->take(9, pages.data()); }, [] {}), 0);  // taking and giving back need no memory
  EXPECT_EQ(with_failures([&] { pool->retain(9, pages.data()); }, [] {}), 0);
  EXPECT_EQ(with_failures([&] { pool->give_back(9, pages.data()); }, [] {}), 0);
}

/// Everything that can be seen of a cache.
struct Snapshot {
  std::vector<std::int64_t> numbers;
  std::vector<std::vector<PageId>> pages;
  std::vector<std::int32_t> references;
  friend bool operator==(const Snapshot& a, const Snapshot& b) {
    return a.numbers == b.numbers && a.pages == b.pages && a.references == b.references;
  }
};

Snapshot snapshot(const KvCache& cache, const std::vector<SequenceId>& ids) {
  Snapshot s;
  const KvCacheStats stats = cache.stats();
  s.numbers = {stats.num_sequences,
               stats.num_pages_used,
               stats.num_pages_shared,
               stats.num_pages_cached,
               stats.num_pages_free,
               static_cast<std::int64_t>(stats.num_prefix_hits),
               static_cast<std::int64_t>(stats.num_copies_on_write),
               static_cast<std::int64_t>(stats.num_evictions)};
  for (const SequenceId id : ids) {
    s.numbers.push_back(cache.length(id));
    s.pages.push_back(cache.pages(id));
  }
  for (PageId page = 0; page < cache.pool().options().num_pages; ++page) {
    s.references.push_back(cache.pool().num_references(page));
  }
  return s;
}

TEST(AllocationFailure, KvCache) {
  KvPagePool pool(options_of(64));
  KvCache cache(pool);
  std::vector<SequenceId> ids;
  std::vector<std::int64_t> slots(200);
  std::vector<std::int32_t> tokens(200);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::int32_t>(i);
  const auto check = [&](const std::function<void()>& call) {
    const Snapshot before = snapshot(cache, ids);
    return with_failures(call, [&] { EXPECT_TRUE(snapshot(cache, ids) == before); });
  };
  SequenceId id;
  for (int round = 0; round < 3; ++round) {
    EXPECT_GE(check([&] { id = cache.create(); }), round == 0 ? 1 : 0);
    ids.push_back(id);
    EXPECT_GE(check([&] { cache.append(ids.back(), 40, slots.data()); }), 2);
    EXPECT_GE(check([&] { cache.publish(ids.back(), tokens.data(), 40); }), round == 0 ? 2 : 0);
    EXPECT_GE(check([&] { id = cache.fork(ids.back()); }), 1);
    ids.push_back(id);
    const std::uint64_t num_copies = cache.stats().num_copies_on_write;
    EXPECT_GE(check([&] { cache.append(ids.back(), 100, slots.data()); }), 2);
    EXPECT_EQ(cache.stats().num_copies_on_write, num_copies + 1);
    std::int64_t num_cached = 0;
    EXPECT_GE(check([&] { id = cache.create(tokens.data(), 40, &num_cached); }), 1);
    EXPECT_EQ(num_cached, 32);
    ids.push_back(id);
    EXPECT_EQ(check([&] { cache.truncate(ids.back(), 20); }), 0);
    EXPECT_GE(check([&] { cache.append(ids.back(), 1, slots.data()); }), 1);  // a copy of a published page
  }
  while (!ids.empty()) {
    id = ids.back();
    ids.pop_back();
    EXPECT_EQ(with_failures([&] { cache.free(id); }, [] {}), 0);
  }
  cache.drop_cached();
  EXPECT_EQ(pool.num_free(), 64);
}

}  // namespace
}  // namespace flashkernel::testing
