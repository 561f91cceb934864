// kv_page_pool.hpp: options, storage, exhaustion, misuse, a random test against a model, and many threads.
#include "flashkernel/kv_page_pool.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <thread>
#include <vector>

#include "failing_resource.hpp"
#include "flashkernel/error.hpp"
#include "random_steps.hpp"

namespace flashkernel::testing {
namespace {

KvPagePoolOptions small_options(std::int64_t num_pages = 4) {
  KvPagePoolOptions options;
  options.num_pages = num_pages;
  options.heads_kv = 2;
  options.head_dim = 8;
  options.page_size = 16;
  return options;
}

std::string refusal(const KvPagePoolOptions& options) {
  HostResource resource(1 << 20);
  try {
    KvPagePool pool(options, &resource);
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(resource.stats().num_allocations, 0u);
    return error.what();
  }
  return "accepted";
}

template <typename Field, typename Value>
KvPagePoolOptions with(Field field, Value value) {
  KvPagePoolOptions options = small_options();
  options.*field = value;
  return options;
}

TEST(KvPagePool, RefusesOptions) {
  using O = KvPagePoolOptions;
  for (const std::int64_t size : {100, 0, -16, 8, 17, 512}) {
    EXPECT_EQ(refusal(with(&O::page_size, size)),
              "KvPagePool: page_size=" + std::to_string(size) + "; needs 16, 32, 64, 128 or 256");
  }
  EXPECT_EQ(refusal(with(&O::num_pages, 0)), "KvPagePool: num_pages=0; needs 1 or more");
  EXPECT_EQ(refusal(with(&O::num_pages, std::int64_t{1} << 31)),
            "KvPagePool: num_pages=2147483648; needs 2147483647 or less");
  EXPECT_EQ(refusal(with(&O::heads_kv, -1)), "KvPagePool: heads_kv=-1; needs 1 or more");
  EXPECT_EQ(refusal(with(&O::head_dim, 0)), "KvPagePool: head_dim=0; needs 1 or more");
  EXPECT_EQ(refusal(with(&O::head_dim_v, -8)), "KvPagePool: head_dim_v=-8; needs 1 or more");
  EXPECT_EQ(refusal(with(&O::num_layers, 0)), "KvPagePool: num_layers=0; needs 1 or more");
  EXPECT_EQ(refusal(with(&O::dtype, DType::kInt32)),
            "KvPagePool: dtype=int32; needs float32, float16, bfloat16, float8_e4m3fn, int8 or int4");
}

TEST(KvPagePool, BytesThatOverflowAreRefused) {
  KvPagePoolOptions options = small_options(2147483647);
  options.page_size = 256;
  options.heads_kv = std::int64_t{1} << 12;
  options.head_dim = std::int64_t{1} << 12;
  options.num_layers = 100;
  EXPECT_NE(refusal(options).find("must fit in 63 bits"), std::string::npos) << refusal(options);
  options.head_dim = 1;
  options.heads_kv = std::int64_t{1} << 40;
  EXPECT_NE(refusal(options).find("the keys of 100 layers x 2147483647 pages"), std::string::npos) << refusal(options);
}

TEST(KvPagePool, OtherDeviceIsRefused) {
  KvPagePoolOptions options = small_options();
  options.device = Device::cuda(0);
  EXPECT_EQ(refusal(options), "KvPagePool: resource.device()=cpu; needs options.device, cuda:0");
}

TEST(KvPagePool, MemoryFailureLeaksNothing) {
  HostResource host;
  FailingResource upstream(host);
  for (const std::size_t fail_at : {0, 1}) {
    upstream.fail_at(fail_at);
    EXPECT_THROW(KvPagePool(small_options(), &upstream), OutOfMemory);
    EXPECT_EQ(host.stats().allocated_bytes, 0u);
  }
  upstream.never_fail();
  { KvPagePool pool(small_options(), &upstream); }
  EXPECT_EQ(host.stats().allocated_bytes, 0u);
  EXPECT_EQ(upstream.num_mismatches(), 0u);
}

// Memory is asked for before the lists of pages are made: 16 GB of them here, which would take seconds.
TEST(KvPagePool, AnAbsurdPoolIsRefusedAtOnce) {
  HostResource host;
  FailingResource upstream(host);
  upstream.fail_at(0);
  EXPECT_THROW(KvPagePool(small_options(std::numeric_limits<PageId>::max()), &upstream), OutOfMemory);
  EXPECT_EQ(host.stats().allocated_bytes, 0u);
}

TEST(KvPagePool, StorageIsLayersOfPages) {
  HostResource resource;
  KvPagePoolOptions options = small_options(3);
  options.head_dim_v = 4;
  options.num_layers = 5;
  options.dtype = DType::kFloat32;
  KvPagePool pool(options, &resource);
  EXPECT_EQ(pool.page_bytes(), 5u * 16 * 2 * (8 + 4) * 4);
  EXPECT_EQ(resource.stats().allocated_bytes, 3 * pool.page_bytes());
  for (int layer = 0; layer < 5; ++layer) {
    const TensorView k = pool.k_pages(layer), v = pool.v_pages(layer);
    ASSERT_EQ(k.ndim, 4);
    EXPECT_EQ(k.shape[0], 3);
    EXPECT_EQ(k.shape[1], 16);
    EXPECT_EQ(k.shape[2], 2);
    EXPECT_EQ(k.shape[3], 8);
    EXPECT_EQ(v.shape[3], 4);
    EXPECT_TRUE(k.is_contiguous());
    EXPECT_EQ(static_cast<float*>(k.data) - static_cast<float*>(pool.k_pages(0).data), layer * k.numel());
    EXPECT_EQ(static_cast<float*>(v.data) - static_cast<float*>(pool.v_pages(0).data), layer * v.numel());
    std::fill_n(static_cast<float*>(k.data), k.numel(), 1.0f);
    std::fill_n(static_cast<float*>(v.data), v.numel(), 2.0f);
  }
  EXPECT_EQ(*static_cast<float*>(pool.k_pages(4).data), 1.0f);
  EXPECT_THROW(pool.k_pages(5), InvalidArgument);
  EXPECT_THROW(pool.v_pages(-1), InvalidArgument);
}

TEST(KvPagePool, AMillionPages) {
  KvPagePoolOptions options = small_options(1 << 20);
  options.heads_kv = options.head_dim = 1;
  KvPagePool pool(options);
  std::vector<PageId> pages(1 << 20);
  pool.take(1 << 20, pages.data());
  EXPECT_EQ(*std::max_element(pages.begin(), pages.end()), (1 << 20) - 1);
  EXPECT_EQ(pool.num_free(), 0);
  pool.give_back(1 << 20, pages.data());
  EXPECT_EQ(pool.num_free(), 1 << 20);
}

TEST(KvPagePool, TakesAllOrNone) {
  KvPagePool pool(small_options(4));
  PageId pages[4] = {-7, -7, -7, -7};
  const PageId first = pool.take();
  try {
    pool.take(4, pages);
    FAIL();
  } catch (const OutOfPages& error) {
    EXPECT_EQ(error.requested_pages, 4u);
    EXPECT_EQ(error.free_pages, 3u);
    EXPECT_EQ(error.num_pages, 4u);
    EXPECT_EQ(error.requested_bytes, 4 * pool.page_bytes());
    EXPECT_STREQ(error.what(), "KvPagePool: out of pages; requested 4, free 3 of 4");
  }
  EXPECT_EQ(pages[0], -7);
  EXPECT_EQ(pool.num_used(), 1);
  EXPECT_THROW(pool.take(-1, pages), InvalidArgument);
  EXPECT_THROW(pool.take(1, nullptr), InvalidArgument);
  pool.take(0, nullptr);
  pool.take(3, pages);
  EXPECT_THROW(pool.take(), OutOfPages);
  pool.give_back(first);
  EXPECT_EQ(pool.take(), first);
}

TEST(KvPagePool, MisuseIsRefusedAndChangesNothing) {
  KvPagePool pool(small_options(4));
  for (const PageId page : {-1, 4, 1 << 30}) {
    EXPECT_THROW(pool.give_back(page), InvalidArgument);
    EXPECT_THROW(pool.retain(page), InvalidArgument);
    EXPECT_THROW(pool.num_references(page), InvalidArgument);
  }
  EXPECT_THROW(pool.give_back(0), InvalidArgument);  // never taken
  EXPECT_THROW(pool.retain(0), InvalidArgument);
  const PageId a = pool.take(), b = pool.take();
  pool.retain(a);
  const PageId three_times[] = {b, a, a, a};
  EXPECT_THROW(pool.give_back(4, three_times), InvalidArgument);
  EXPECT_EQ(pool.num_references(a), 2);
  EXPECT_EQ(pool.num_references(b), 1);
  EXPECT_EQ(pool.num_used(), 2);
  const PageId one_free[] = {a, b, 3};
  EXPECT_THROW(pool.retain(3, one_free), InvalidArgument);
  EXPECT_EQ(pool.num_references(a), 2);
  pool.give_back(a);
  pool.give_back(a);
  EXPECT_THROW(pool.give_back(a), InvalidArgument);  // twice
  pool.give_back(b);
  EXPECT_EQ(pool.num_free(), 4);
}

TEST(KvPagePool, RandomStepsAgainstAModel) {
  const std::uint64_t seed = seed_or(4711);
  SCOPED_TRACE(replay(seed));
  Random random(seed);
  constexpr std::size_t kPages = 50;
  KvPagePool pool(small_options(kPages));
  std::vector<int> references(kPages, 0);
  const auto num_free = [&] { return static_cast<std::int64_t>(std::count(references.begin(), references.end(), 0)); };
  const int steps = num_steps(50000);
  for (int step = 0; step < steps; ++step) {
    std::vector<PageId> pages(random.below(6));
    const auto count = static_cast<std::int64_t>(pages.size());
    switch (random.below(4)) {
      case 0:
      case 1: {
        if (count > num_free()) {
          ASSERT_THROW(pool.take(count, pages.data()), OutOfPages);
          break;
        }
        pool.take(count, pages.data());
        for (const PageId page : pages) {
          ASSERT_EQ(references[static_cast<std::size_t>(page)]++, 0) << "page " << page << " has two owners";
        }
        break;
      }
      default: {
        const bool retains = random.below(3) == 0;
        std::vector<int> after = references;
        bool valid = true;
        for (PageId& page : pages) {
          page = static_cast<PageId>(random.below(kPages));
          while (!random.one_in(8) && references[static_cast<std::size_t>(page)] == 0 && num_free() < 50) {
            page = static_cast<PageId>(random.below(kPages));  // mostly pages that are taken
          }
          int& count_after = after[static_cast<std::size_t>(page)];
          valid = valid && count_after > 0;
          count_after += retains ? 1 : -1;
        }
        const auto act = [&] { retains ? pool.retain(count, pages.data()) : pool.give_back(count, pages.data()); };
        if (valid) {
          act();
          references = after;
        } else {
          ASSERT_THROW(act(), InvalidArgument);
        }
      }
    }
    ASSERT_EQ(pool.num_free(), num_free());
    ASSERT_EQ(pool.num_used() + pool.num_free(), static_cast<std::int64_t>(kPages));
    if (step % 16 == 0) {
      for (std::size_t page = 0; page < kPages; ++page) {
        ASSERT_EQ(pool.num_references(static_cast<PageId>(page)), references[page]) << "page " << page;
      }
    }
  }
}

TEST(KvPagePool, ManyThreads) {
  constexpr std::int64_t kPages = 64;
  KvPagePool pool(small_options(kPages));
  std::vector<std::atomic<int>> owners(kPages);
  std::atomic<int> num_shared{0};
  const int steps = num_steps(20000);
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      Random random(static_cast<std::uint64_t>(t));
      std::vector<PageId> mine;
      const TensorView k = pool.k_pages();
      auto* rows = static_cast<std::uint16_t*>(k.data);
      const std::int64_t row = k.strides[0];
      for (int step = 0; step < steps; ++step) {
        if (random.one_in(2)) {
          std::vector<PageId> pages(1 + random.below(8));
          try {
            pool.take(static_cast<std::int64_t>(pages.size()), pages.data());
          } catch (const OutOfPages&) {
            continue;
          }
          for (const PageId page : pages) {
            if (owners[static_cast<std::size_t>(page)].exchange(t + 1) != 0) ++num_shared;
            rows[page * row] = static_cast<std::uint16_t>(t);  // TSan sees two owners here
            mine.push_back(page);
          }
        } else if (!mine.empty()) {
          const PageId page = mine.back();
          mine.pop_back();
          if (rows[page * row] != t) ++num_shared;
          pool.retain(page);
          pool.give_back(page);
          if (owners[static_cast<std::size_t>(page)].exchange(0) != t + 1) ++num_shared;
          pool.give_back(page);
        }
      }
      for (const PageId page : mine) {
        owners[static_cast<std::size_t>(page)] = 0;
        pool.give_back(page);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_shared, 0);
  EXPECT_EQ(pool.num_free(), kPages);
}

}  // namespace
}  // namespace flashkernel::testing
