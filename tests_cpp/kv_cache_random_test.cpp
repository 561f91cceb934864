// kv_cache.hpp: a random test against a model, and many threads. What the pages hold: see kv_cache_bench.hpp.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <set>
#include <thread>
#include <vector>

#include "flashkernel/error.hpp"
#include "kv_cache_bench.hpp"
#include "random_steps.hpp"

namespace flashkernel::testing {
namespace {

/// Random calls against a model that knows each sequence's tokens; pages, counts and contents are compared.
class KvCacheModel {
 public:
  KvCacheModel(std::uint64_t seed, std::int64_t num_pages) : random_(seed), num_pages_(num_pages), b_(num_pages) {}

  void run(int steps) {
    for (int step = 0; step < steps && !::testing::Test::HasFatalFailure(); ++step) {
      SCOPED_TRACE("step " + std::to_string(step));
      one_step();
      check(step % 16 == 0);
    }
    while (!external_.empty()) drop_external();
    for (const Live& live : live_) b_.cache.free(live.id);
    b_.cache.drop_cached();
    ASSERT_EQ(b_.pool.num_free(), num_pages_);
  }

 private:
  struct Live {
    SequenceId id;
    Tokens tokens;
    std::size_t num_dropped = 0;  // leading pages that were given back
  };

  /// Few tokens and few prompts, so that prefixes meet.
  Tokens random_tokens(std::size_t count) {
    const auto kind = static_cast<std::int32_t>(random_.below(3));
    Tokens tokens(count);
    for (std::size_t i = 0; i < count; ++i) {
      tokens[i] = i % kPageSize == 0 ? static_cast<std::int32_t>(random_.below(2)) : kind;
    }
    return tokens;
  }

  Live& any() { return live_[random_.below(live_.size())]; }

  void one_step() {
    const std::size_t choice = random_.below(22);
    if (choice < 3 || live_.empty()) {
      const Tokens prompt = random_tokens(random_.below(70));
      std::int64_t num_cached = -1;
      const SequenceId id = b_.create(prompt, &num_cached);
      ASSERT_EQ(num_cached % kPageSize, 0);
      ASSERT_TRUE(num_cached == 0 || num_cached < static_cast<std::int64_t>(prompt.size()));
      live_.push_back({id, Tokens(prompt.begin(), prompt.begin() + num_cached), 0});
      ASSERT_TRUE(b_.holds(id, live_.back().tokens)) << "a wrong prefix was shared";
      append(live_.back(), prompt);
    } else if (choice < 9) {
      Live& live = any();
      Tokens all = live.tokens;
      const Tokens more = random_tokens(random_.log_uniform(6));
      all.insert(all.end(), more.begin(), more.end());
      append(live, all);
    } else if (choice < 11) {
      if (live_.size() > 12) return;
      const Live source = any();
      live_.push_back({b_.cache.fork(source.id), source.tokens, source.num_dropped});
      ASSERT_EQ(b_.pages(live_.back().id), b_.pages(source.id));
    } else if (choice < 13) {
      Live& live = any();
      const std::size_t length = random_.below(live.tokens.size() + 1);
      if (length < live.num_dropped * kPageSize) {
        ASSERT_THROW(b_.cache.truncate(live.id, static_cast<std::int64_t>(length)), InvalidArgument);
      } else {
        live.tokens.resize(length);
        b_.cache.truncate(live.id, static_cast<std::int64_t>(length));
      }
    } else if (choice < 16) {
      std::swap(any(), live_.back());
      const Live gone = live_.back();
      live_.pop_back();
      b_.cache.free(gone.id);
      ASSERT_THROW(b_.cache.length(gone.id), InvalidArgument);
    } else if (choice < 18) {
      const Live& live = any();
      Tokens tokens = live.tokens;
      tokens.resize(random_.below(tokens.size() + 1));
      b_.publish(live.id, tokens);
    } else if (choice < 19) {
      outsider();
    } else if (choice < 21) {
      drop_before(any());
    } else if (random_.one_in(10)) {
      b_.cache.drop_cached();
      ASSERT_EQ(b_.cache.stats().num_pages_cached, 0);
    }
  }

  void drop_before(Live& live) {
    // Often by as much as a window would, sometimes all of it.
    const std::size_t position = random_.below(live.tokens.size() + 1);
    const std::size_t num_dropped = std::max(live.num_dropped, position / kPageSize);
    const std::vector<PageId> before = b_.pages(live.id);
    const std::vector<std::int32_t> references = all_references();
    ASSERT_EQ(b_.cache.drop_before(live.id, static_cast<std::int64_t>(position)),
              static_cast<std::int64_t>(num_dropped - live.num_dropped));
    const std::vector<PageId> after = b_.pages(live.id);
    ASSERT_EQ(after.size(), before.size());
    for (std::size_t i = 0; i < before.size(); ++i) {
      ASSERT_EQ(after[i], i < num_dropped ? -1 : before[i]);
      if (before[i] < 0) continue;
      const bool gone = i >= live.num_dropped && i < num_dropped;
      ASSERT_EQ(b_.pool.num_references(before[i]), references[static_cast<std::size_t>(before[i])] - (gone ? 1 : 0));
    }
    live.num_dropped = num_dropped;
  }

  void append(Live& live, const Tokens& all) {
    const std::int64_t length = b_.cache.length(live.id);
    const std::vector<PageId> before = b_.pages(live.id);
    const auto pages_of = [](std::size_t n) { return static_cast<std::int64_t>((n + kPageSize - 1) / kPageSize); };
    const std::int64_t num_more = pages_of(all.size()) - pages_of(live.tokens.size());
    const std::int64_t available = num_available();
    const bool grows = all.size() > live.tokens.size();
    const bool is_shared = grows && length % kPageSize != 0 && b_.pool.num_references(before.back()) > 1;
    const std::vector<std::int32_t> references = all_references();
    try {
      b_.fill(live.id, all);
      live.tokens = all;
      ASSERT_GE(available, num_more);
      const std::vector<PageId> after = b_.pages(live.id);
      for (std::size_t i = static_cast<std::size_t>(length) / kPageSize; grows && i < after.size(); ++i) {
        ASSERT_EQ(b_.pool.num_references(after[i]), 1) << "a shared page was written";
      }
    } catch (const OutOfPages& error) {
      ASSERT_LT(available, num_more + (is_shared ? 1 : 0)) << error.what();
      ASSERT_EQ(b_.pages(live.id), before);
      ASSERT_EQ(all_references(), references);
    }
  }

  /// Someone else takes pages from the pool, or holds on to pages of the cache.
  void outsider() {
    if (!external_.empty() && random_.one_in(2)) return drop_external();
    const PageId page = static_cast<PageId>(random_.below(static_cast<std::size_t>(num_pages_)));
    if (b_.pool.num_references(page) > 0) {
      b_.pool.retain(page);
      external_.push_back(page);
    } else {
      external_.push_back(b_.pool.take());
    }
  }

  void drop_external() {
    std::swap(external_[random_.below(external_.size())], external_.back());
    b_.pool.give_back(external_.back());
    external_.pop_back();
  }

  std::vector<std::int32_t> all_references() const {
    std::vector<std::int32_t> all;
    for (PageId page = 0; page < num_pages_; ++page) all.push_back(b_.pool.num_references(page));
    return all;
  }

  /// References of each page that are neither a sequence's nor an outsider's: the index's.
  std::vector<std::int32_t> index_references(std::map<PageId, int>* holders) {
    std::vector<std::int32_t> rest = all_references();
    for (const Live& live : live_) {
      std::vector<PageId> pages = b_.pages(live.id);
      EXPECT_LE(live.num_dropped, pages.size());
      pages.erase(pages.begin(), pages.begin() + static_cast<std::ptrdiff_t>(live.num_dropped));
      EXPECT_EQ(std::set<PageId>(pages.begin(), pages.end()).size(), pages.size()) << "a page in two places";
      for (const PageId page : pages) {
        --rest[static_cast<std::size_t>(page)];
        ++(*holders)[page];
      }
    }
    for (const PageId page : external_) --rest[static_cast<std::size_t>(page)];
    return rest;
  }

  std::int64_t num_available() {
    std::map<PageId, int> holders;
    const std::vector<std::int32_t> index = index_references(&holders);
    std::int64_t count = b_.pool.num_free();
    for (PageId page = 0; page < num_pages_; ++page) {
      if (index[static_cast<std::size_t>(page)] == 1 && b_.pool.num_references(page) == 1) ++count;
    }
    return count;
  }

  void check(bool contents) {
    std::map<PageId, int> holders;
    const std::vector<std::int32_t> index = index_references(&holders);
    std::int64_t num_cached = 0, num_shared = 0;
    for (PageId page = 0; page < num_pages_; ++page) {
      const std::int32_t own = index[static_cast<std::size_t>(page)];
      ASSERT_TRUE(own == 0 || own == 1) << "page " << page << " has " << own << " references too many";
      if (own == 1 && holders.count(page) == 0) ++num_cached;
    }
    for (const auto& [page, count] : holders) num_shared += count > 1 ? 1 : 0;
    const KvCacheStats stats = b_.cache.stats();
    ASSERT_EQ(stats.num_sequences, static_cast<std::int64_t>(live_.size()));
    ASSERT_EQ(stats.num_pages_used, static_cast<std::int64_t>(holders.size()));
    ASSERT_EQ(stats.num_pages_shared, num_shared);
    ASSERT_EQ(stats.num_pages_cached, num_cached);
    ASSERT_EQ(stats.num_pages_free, b_.pool.num_free());
    if (!contents || live_.empty()) return;
    std::int64_t max_pages = 0;
    std::vector<SequenceId> ids;
    for (const Live& live : live_) {
      ASSERT_TRUE(b_.holds(live.id, live.tokens, live.num_dropped)) << "contents were lost";
      max_pages = std::max(max_pages, b_.cache.num_pages(live.id));
      ids.push_back(live.id);
    }
    max_pages += static_cast<std::int64_t>(random_.below(3));
    std::vector<std::int32_t> table(ids.size() * static_cast<std::size_t>(max_pages) + 1), lengths(ids.size());
    b_.cache.block_table(ids.data(), static_cast<std::int64_t>(ids.size()), max_pages, table.data(), lengths.data());
    for (std::size_t i = 0; i < ids.size(); ++i) {
      std::vector<PageId> row = b_.pages(ids[i]);
      row.resize(static_cast<std::size_t>(max_pages), -1);
      ASSERT_TRUE(std::equal(row.begin(), row.end(), table.begin() + static_cast<std::ptrdiff_t>(i * row.size())));
      ASSERT_EQ(lengths[i], static_cast<std::int32_t>(live_[i].tokens.size()));
    }
  }

  Random random_;
  const std::int64_t num_pages_;
  Bench b_;
  std::vector<Live> live_;
  std::vector<PageId> external_;
};

TEST(KvCache, RandomStepsAgainstAModel) {
  const std::uint64_t first = seed_or(1);
  for (std::uint64_t seed = first; seed < first + 8; ++seed) {
    SCOPED_TRACE(replay(seed));
    KvCacheModel model(seed, seed % 2 == 0 ? 12 : 40);
    model.run(num_steps(4000));
    if (HasFatalFailure()) return;
  }
}

TEST(KvCache, ManyThreads) {
  Bench b(64);
  const Tokens base_tokens = iota(40);
  const SequenceId base = b.make(base_tokens);
  b.publish(base, base_tokens);
  std::atomic<int> num_wrong{0};
  const int steps = num_steps(3000);
  std::vector<std::thread> threads;
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      Random random(static_cast<std::uint64_t>(t) + 99);
      for (int step = 0; step < steps; ++step) {
        Tokens tokens = base_tokens;
        SequenceId id;
        if (random.one_in(2)) {
          id = b.cache.fork(base);
        } else {
          tokens.resize(33 + random.below(20), static_cast<std::int32_t>(random.below(4)));
          std::int64_t num_cached = 0;
          id = b.create(tokens, &num_cached);
          tokens.resize(static_cast<std::size_t>(num_cached));
        }
        std::size_t num_dropped = 0;
        for (int i = 0; i < 3; ++i) {
          Tokens longer = tokens;
          longer.resize(tokens.size() + random.below(20), static_cast<std::int32_t>(random.below(5)));
          try {
            b.fill(id, longer);
            tokens = longer;
          } catch (const OutOfPages&) {
          }
          if (!b.holds(id, tokens, num_dropped)) ++num_wrong;
          if (random.one_in(3)) b.publish(id, tokens);
          if (random.one_in(4)) {
            const std::size_t position = random.below(tokens.size() + 1);
            b.cache.drop_before(id, static_cast<std::int64_t>(position));
            num_dropped = std::max(num_dropped, position / kPageSize);
          }
          if (random.one_in(3)) {
            const std::size_t least = num_dropped * kPageSize;
            tokens.resize(least + random.below(tokens.size() + 1 - least));
            b.cache.truncate(id, static_cast<std::int64_t>(tokens.size()));
          }
        }
        b.cache.free(id);
        if (random.one_in(100)) b.cache.drop_cached();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_wrong, 0);
  EXPECT_TRUE(b.holds(base, base_tokens));
  b.cache.free(base);
  b.cache.drop_cached();
  EXPECT_EQ(b.pool.num_free(), 64);
}

}  // namespace
}  // namespace flashkernel::testing
