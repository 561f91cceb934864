// kv_cache.hpp: sequences, copy on write, prefix sharing, eviction, misuse, a random test against a model, and many
// threads. Contents are checked through the pages: the row of a token holds a hash of the token and of all tokens
// before it, so that a page shared under a wrong prefix, a lost copy or a stale row shows.
#include "flashkernel/kv_cache.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <set>
#include <thread>
#include <vector>

#include "flashkernel/error.hpp"
#include "memory/prefix_index.hpp"
#include "random_steps.hpp"

namespace flashkernel::testing {
namespace {

using Tokens = std::vector<std::int32_t>;

constexpr std::int64_t kPageSize = 16;
constexpr std::int64_t kLayers = 3;

KvPagePoolOptions options_of(std::int64_t num_pages) {
  KvPagePoolOptions options;
  options.num_pages = num_pages;
  options.heads_kv = 1;
  options.head_dim = 1;
  options.head_dim_v = 2;
  options.page_size = kPageSize;
  options.num_layers = kLayers;
  options.dtype = DType::kFloat32;
  return options;
}

std::uint32_t next_hash(std::uint32_t hash, std::int32_t token) {
  return (hash ^ static_cast<std::uint32_t>(token + 1)) * 16777619u + 12345u;
}

/// A pool, a cache, and the kernels' part: writing and reading rows.
struct Bench {
  explicit Bench(std::int64_t num_pages) : pool(options_of(num_pages)), cache(pool) {
    for (std::int64_t layer = 0; layer < kLayers; ++layer) {  // nothing to rely on
      std::memset(pool.k_pages(layer).data, 0xEE, static_cast<std::size_t>(pool.k_pages(layer).numel()) * 4);
      std::memset(pool.v_pages(layer).data, 0xEE, static_cast<std::size_t>(pool.v_pages(layer).numel()) * 4);
    }
  }

  std::uint32_t* k(std::int64_t layer, std::int64_t slot) {
    return static_cast<std::uint32_t*>(pool.k_pages(layer).data) + slot;
  }
  std::uint32_t* v(std::int64_t layer, std::int64_t slot) {
    return static_cast<std::uint32_t*>(pool.v_pages(layer).data) + slot * 2;
  }

  void write(const std::vector<std::int64_t>& slots, const Tokens& all, std::size_t first) {
    std::uint32_t hash = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      hash = next_hash(hash, all[i]);
      if (i < first) continue;
      for (std::int64_t layer = 0; layer < kLayers; ++layer) {
        const auto salt = static_cast<std::uint32_t>(layer);
        *k(layer, slots[i - first]) = hash + salt;
        v(layer, slots[i - first])[0] = ~hash + salt;
        v(layer, slots[i - first])[1] = hash * 3 + salt;
      }
    }
  }

  /// Appends the tokens of `all` that the sequence does not have yet.
  void fill(SequenceId id, const Tokens& all) {
    const auto first = static_cast<std::size_t>(cache.length(id));
    std::vector<std::int64_t> slots(all.size() - first);
    cache.append(id, static_cast<std::int64_t>(slots.size()), slots.data());
    write(slots, all, first);
  }

  SequenceId make(const Tokens& all) {
    const SequenceId id = cache.create();
    fill(id, all);
    return id;
  }

  std::vector<PageId> pages(SequenceId id) {
    std::vector<PageId> pages(static_cast<std::size_t>(cache.num_pages(id)));
    cache.pages(id, pages.data());
    return pages;
  }

  bool holds(SequenceId id, const Tokens& all) {
    if (cache.length(id) != static_cast<std::int64_t>(all.size())) return false;
    const std::vector<PageId> table = pages(id);
    std::uint32_t hash = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      hash = next_hash(hash, all[i]);
      const std::int64_t slot = table[i / kPageSize] * kPageSize + static_cast<std::int64_t>(i % kPageSize);
      for (std::int64_t layer = 0; layer < kLayers; ++layer) {
        const auto salt = static_cast<std::uint32_t>(layer);
        if (*k(layer, slot) != hash + salt || v(layer, slot)[0] != ~hash + salt) return false;
        if (v(layer, slot)[1] != hash * 3 + salt) return false;
      }
    }
    return true;
  }

  SequenceId create(const Tokens& tokens, std::int64_t* num_cached) {
    return cache.create(tokens.data(), static_cast<std::int64_t>(tokens.size()), num_cached);
  }
  void publish(SequenceId id, const Tokens& tokens) {
    cache.publish(id, tokens.data(), static_cast<std::int64_t>(tokens.size()));
  }

  KvPagePool pool;
  KvCache cache;
};

Tokens iota(std::size_t count, std::int32_t first = 0) {
  Tokens tokens(count);
  for (std::size_t i = 0; i < count; ++i) tokens[i] = first + static_cast<std::int32_t>(i);
  return tokens;
}

TEST(KvCache, AppendsAcrossPages) {
  Bench b(8);
  const SequenceId id = b.cache.create();
  EXPECT_EQ(b.cache.length(id), 0);
  EXPECT_EQ(b.cache.num_pages(id), 0);
  b.fill(id, iota(1));
  EXPECT_EQ(b.cache.num_pages(id), 1);
  b.fill(id, iota(16));
  EXPECT_EQ(b.cache.num_pages(id), 1);
  b.fill(id, iota(17));
  EXPECT_EQ(b.cache.num_pages(id), 2);
  b.fill(id, iota(60));
  EXPECT_TRUE(b.holds(id, iota(60)));
  EXPECT_EQ(b.pool.num_used(), 4);
  b.cache.append(id, 0, nullptr);
  b.cache.free(id);
  EXPECT_EQ(b.pool.num_used(), 0);
}

TEST(KvCache, ForksCopyOnWrite) {
  Bench b(8);
  const SequenceId parent = b.make(iota(20));
  const SequenceId child = b.cache.fork(parent);
  EXPECT_EQ(b.pages(parent), b.pages(child));
  EXPECT_EQ(b.pool.num_used(), 2);
  EXPECT_EQ(b.cache.stats().num_pages_shared, 2);
  Tokens left = iota(20), right = iota(20);
  left.push_back(100);
  right.push_back(200);
  b.fill(parent, left);
  EXPECT_EQ(b.cache.stats().num_copies_on_write, 1u);
  b.fill(child, right);  // the old page is its own now
  EXPECT_EQ(b.cache.stats().num_copies_on_write, 1u);
  EXPECT_TRUE(b.holds(parent, left));
  EXPECT_TRUE(b.holds(child, right));
  EXPECT_EQ(b.pages(parent)[0], b.pages(child)[0]);
  EXPECT_NE(b.pages(parent)[1], b.pages(child)[1]);
  b.cache.free(parent);
  EXPECT_TRUE(b.holds(child, right));
  EXPECT_EQ(b.cache.stats().num_pages_shared, 0);
  b.cache.free(child);
  EXPECT_EQ(b.pool.num_used(), 0);
}

TEST(KvCache, AFullLastPageIsNotCopied) {
  Bench b(4);
  const SequenceId parent = b.make(iota(16));
  const SequenceId child = b.cache.fork(parent);
  b.fill(child, iota(18));
  EXPECT_EQ(b.cache.stats().num_copies_on_write, 0u);
  EXPECT_EQ(b.pool.num_used(), 2);
  EXPECT_TRUE(b.holds(parent, iota(16)));
}

TEST(KvCache, TruncatesIntoASharedPage) {
  Bench b(8);
  const SequenceId parent = b.make(iota(40));
  const SequenceId child = b.cache.fork(parent);
  b.cache.truncate(child, 20);
  EXPECT_EQ(b.cache.num_pages(child), 2);
  EXPECT_EQ(b.pool.num_used(), 3);
  EXPECT_TRUE(b.holds(child, iota(20)));
  Tokens other = iota(20);
  other.push_back(7);
  b.fill(child, other);
  EXPECT_TRUE(b.holds(child, other));
  EXPECT_TRUE(b.holds(parent, iota(40)));
  b.cache.truncate(parent, 0);
  EXPECT_EQ(b.cache.num_pages(parent), 0);
  EXPECT_TRUE(b.holds(child, other));
}

TEST(KvCache, OutOfPagesChangesNothing) {
  Bench b(4);
  const SequenceId a = b.make(iota(40));
  const SequenceId forked = b.cache.fork(a);
  std::vector<std::int64_t> slots(100, -5);
  try {
    b.cache.append(forked, 20, slots.data());  // a copy and a page, and one page is left
    FAIL();
  } catch (const OutOfPages& error) {
    EXPECT_EQ(error.requested_pages, 2u);
    EXPECT_EQ(error.free_pages, 1u);
    EXPECT_STREQ(error.what(), "KvCache: out of pages; requested 2, free 1 and evictable 0 of 4");
  }
  EXPECT_EQ(slots[0], -5);
  EXPECT_TRUE(b.holds(forked, iota(40)));
  EXPECT_EQ(b.pages(forked), b.pages(a));
  EXPECT_EQ(b.pool.num_free(), 1);
  EXPECT_EQ(b.cache.stats().num_copies_on_write, 0u);
  b.fill(forked, iota(48));
  EXPECT_TRUE(b.holds(forked, iota(48)));
}

TEST(KvCache, FreedHandlesAreRecognised) {
  Bench b(4);
  const SequenceId a = b.make(iota(3));
  b.cache.free(a);
  EXPECT_THROW(b.cache.free(a), InvalidArgument);
  const SequenceId again = b.cache.create();
  EXPECT_EQ(again.slot, a.slot);
  EXPECT_THROW(b.cache.length(a), InvalidArgument);
  EXPECT_THROW(b.cache.fork(a), InvalidArgument);
  EXPECT_THROW(b.cache.truncate(a, 0), InvalidArgument);
  EXPECT_THROW(b.cache.append(a, 0, nullptr), InvalidArgument);
  EXPECT_THROW(b.cache.num_pages(a), InvalidArgument);
  EXPECT_THROW(b.cache.length(SequenceId{}), InvalidArgument);
  EXPECT_THROW(b.cache.length(SequenceId{77, 1}), InvalidArgument);
  EXPECT_EQ(b.cache.length(again), 0);
}

TEST(KvCache, MisuseIsRefused) {
  Bench b(4);
  const SequenceId a = b.make(iota(20));
  std::int64_t slot = 0;
  EXPECT_THROW(b.cache.append(a, -1, &slot), InvalidArgument);
  EXPECT_THROW(b.cache.append(a, 1, nullptr), InvalidArgument);
  EXPECT_THROW(b.cache.append(a, std::int64_t{1} << 31, &slot), InvalidArgument);
  EXPECT_THROW(b.cache.append(a, std::numeric_limits<std::int64_t>::max(), &slot), InvalidArgument);
  EXPECT_THROW(b.cache.truncate(a, 21), InvalidArgument);
  EXPECT_THROW(b.cache.truncate(a, -1), InvalidArgument);
  EXPECT_THROW(b.cache.create(nullptr, 3, nullptr), InvalidArgument);
  EXPECT_THROW(b.cache.create(nullptr, -1, nullptr), InvalidArgument);
  EXPECT_THROW(b.publish(a, iota(21)), InvalidArgument);
  EXPECT_TRUE(b.holds(a, iota(20)));
}

TEST(KvCache, BlockTables) {
  Bench b(8);
  const SequenceId ids[] = {b.make(iota(40)), b.cache.create(), b.make(iota(5))};
  std::vector<std::int32_t> table(3 * 4, -9), lengths(3, -9);
  EXPECT_THROW(b.cache.block_table(ids, 3, 2, table.data(), lengths.data()), InvalidArgument);
  EXPECT_EQ(table[0], -9);
  b.cache.block_table(ids, 3, 4, table.data(), lengths.data());
  const std::vector<PageId> first = b.pages(ids[0]), third = b.pages(ids[2]);
  EXPECT_EQ(table, (std::vector<std::int32_t>{first[0], first[1], first[2], -1, -1, -1, -1, -1, third[0], -1, -1, -1}));
  EXPECT_EQ(lengths, (std::vector<std::int32_t>{40, 0, 5}));
  b.cache.block_table(nullptr, 0, 0, nullptr, nullptr);
}

TEST(KvCache, SharesPublishedPrefixes) {
  Bench b(8);
  const Tokens prompt = iota(40);
  const SequenceId a = b.make(prompt);
  b.publish(a, prompt);
  std::int64_t num_cached = -1;
  const SequenceId same = b.create(prompt, &num_cached);
  EXPECT_EQ(num_cached, 32);  // the third page is not full
  EXPECT_TRUE(b.holds(same, iota(32)));
  b.fill(same, prompt);
  EXPECT_TRUE(b.holds(same, prompt));
  EXPECT_EQ(b.pool.num_used(), 4);

  Tokens other = prompt;
  other[16] = 999;  // differs in the second page
  b.create(other, &num_cached);
  EXPECT_EQ(num_cached, 16);
  other[0] = 999;
  b.create(other, &num_cached);
  EXPECT_EQ(num_cached, 0);
  b.create(iota(32), &num_cached);  // the last token is left over
  EXPECT_EQ(num_cached, 16);
  b.create(iota(33), &num_cached);
  EXPECT_EQ(num_cached, 32);
  b.create(iota(24, 16), &num_cached);  // the tokens of page 2, but at the start
  EXPECT_EQ(num_cached, 0);
  EXPECT_EQ(b.cache.stats().num_prefix_hits, 2u + 1 + 1 + 2);
}

TEST(KvCache, CachedPagesOutliveTheirSequence) {
  Bench b(8);
  const Tokens prompt = iota(50);
  const SequenceId a = b.make(prompt);
  b.publish(a, prompt);
  b.cache.free(a);
  EXPECT_EQ(b.cache.stats().num_pages_cached, 3);
  EXPECT_EQ(b.cache.stats().num_pages_used, 0);
  EXPECT_EQ(b.cache.stats().num_pages_free, 5);
  std::int64_t num_cached = 0;
  const SequenceId again = b.create(prompt, &num_cached);
  EXPECT_EQ(num_cached, 48);
  EXPECT_TRUE(b.holds(again, iota(48)));
  EXPECT_EQ(b.cache.stats().num_pages_cached, 0);
  b.cache.free(again);
  EXPECT_EQ(b.cache.drop_cached(), 3);
  EXPECT_EQ(b.pool.num_used(), 0);
  b.create(prompt, &num_cached);
  EXPECT_EQ(num_cached, 0);
}

TEST(KvCache, EvictsLeastRecentlyUsedFirstAndLeavesFirst) {
  Bench b(6);
  const Tokens old_prompt = iota(33), new_prompt = iota(33, 1000);
  for (const Tokens& prompt : {old_prompt, new_prompt}) {
    const SequenceId id = b.make(prompt);
    b.publish(id, prompt);
    b.cache.free(id);
  }
  EXPECT_EQ(b.cache.stats().num_pages_cached, 4);
  const SequenceId a = b.make(iota(16 * 3, 5000));  // two free pages and one of the old prompt: its last
  EXPECT_EQ(b.cache.stats().num_evictions, 1u);
  std::int64_t num_cached = 0;
  b.cache.free(b.create(new_prompt, &num_cached));
  EXPECT_EQ(num_cached, 32);
  const SequenceId old_again = b.create(old_prompt, &num_cached);
  EXPECT_EQ(num_cached, 16);
  EXPECT_THROW(b.make(iota(16 * 3, 9000)), OutOfPages);  // two could be evicted
  EXPECT_EQ(b.cache.stats().num_pages_cached, 2);        // and none was
  EXPECT_TRUE(b.holds(a, iota(16 * 3, 5000)));
  EXPECT_TRUE(b.holds(old_again, iota(16)));
}

TEST(KvCache, ATruncatedPublishedPageIsCopied) {
  Bench b(4);
  const SequenceId a = b.make(iota(32));
  b.publish(a, iota(32));
  b.cache.truncate(a, 20);
  Tokens other = iota(20);
  other.push_back(-3);
  b.fill(a, other);
  EXPECT_EQ(b.cache.stats().num_copies_on_write, 1u);
  EXPECT_TRUE(b.holds(a, other));
  std::int64_t num_cached = 0;
  const SequenceId c = b.create(iota(40), &num_cached);
  EXPECT_EQ(num_cached, 32);
  EXPECT_TRUE(b.holds(c, iota(32)));
}

TEST(KvCache, ADryPoolWritesInPlaceWhatOnlyTheIndexShares) {
  Bench b(1);
  const SequenceId a = b.make(iota(16));
  b.publish(a, iota(16));
  b.cache.truncate(a, 5);
  Tokens other = iota(5);
  other.push_back(50);
  b.fill(a, other);
  EXPECT_TRUE(b.holds(a, other));
  std::int64_t num_cached = 0;
  b.cache.free(b.create(iota(17), &num_cached));
  EXPECT_EQ(num_cached, 0);
}

TEST(KvCache, PublishingTwiceAndWrongly) {
  Bench b(8);
  const SequenceId a = b.make(iota(40)), twin = b.make(iota(40));
  b.publish(a, iota(20));
  b.publish(a, iota(40));
  b.publish(a, iota(40));
  b.publish(twin, iota(40));  // known already: it keeps its own pages
  EXPECT_NE(b.pages(a)[0], b.pages(twin)[0]);
  EXPECT_EQ(b.pool.num_references(b.pages(twin)[0]), 1);
  EXPECT_EQ(b.pool.num_references(b.pages(a)[1]), 2);
  EXPECT_THROW(b.publish(a, iota(40, 1)), InvalidArgument);
  Tokens late = iota(40);
  late[20] = 0;
  EXPECT_THROW(b.publish(a, late), InvalidArgument);
  EXPECT_EQ(b.pool.num_references(b.pages(a)[1]), 2);

  // A twin's page after the first one's prefix: evicting the prefix takes it out of the index, not out of the twin.
  b.cache.truncate(a, 16);
  b.fill(twin, iota(60));
  b.cache.drop_cached();
  b.publish(twin, iota(60));
  EXPECT_EQ(b.pool.num_references(b.pages(twin)[2]), 2);
  b.cache.free(a);
  b.cache.drop_cached();
  EXPECT_EQ(b.pool.num_references(b.pages(twin)[2]), 1);
  EXPECT_TRUE(b.holds(twin, iota(60)));
}

TEST(KvCache, PagesHeldOutsideAreNeitherEvictedNorWritten) {
  Bench b(2);
  const SequenceId a = b.make(iota(17));
  b.publish(a, iota(17));
  const PageId full = b.pages(a)[0], last = b.pages(a)[1];
  b.pool.retain(full);
  b.pool.retain(last);
  EXPECT_THROW(b.fill(a, iota(18)), OutOfPages);  // the last page would have to be copied
  b.cache.free(a);
  EXPECT_THROW(b.make(iota(1)), OutOfPages);
  EXPECT_EQ(b.cache.stats().num_pages_cached, 1);
  b.pool.give_back(full);
  b.make(iota(1));
  EXPECT_EQ(b.cache.stats().num_evictions, 1u);
  b.pool.give_back(last);
}

TEST(KvCache, TheCacheGivesEverythingBack) {
  KvPagePool pool(options_of(8));
  {
    KvCache cache(pool);
    const SequenceId a = cache.create();
    std::vector<std::int64_t> slots(40);
    cache.append(a, 40, slots.data());
    cache.publish(a, iota(40).data(), 40);
    cache.fork(a);
    cache.free(a);
  }
  EXPECT_EQ(pool.num_free(), 8);
}

TEST(PrefixIndex, CollidingHashesShareNothing) {
  const auto everything_collides = [](std::uint64_t, const std::int32_t*, std::int64_t) { return std::uint64_t{42}; };
  detail::PrefixIndex index(64, 2, everything_collides);
  PageId page = 0;
  std::map<std::vector<std::int32_t>, PageId> model;
  for (std::int32_t a = 0; a < 3; ++a) {
    const std::int32_t first[] = {a, a};
    index.insert(detail::kNoPage, first, page);
    model[{a, a}] = page;
    const PageId parent = page++;
    for (std::int32_t c = 0; c < 3; ++c) {
      const std::int32_t second[] = {c, 0};
      index.insert(parent, second, page);
      model[{a, a, c, 0}] = page++;
    }
  }
  for (const auto& [tokens, expected] : model) {
    const PageId parent = tokens.size() == 2 ? detail::kNoPage : model[{tokens[0], tokens[1]}];
    EXPECT_EQ(index.find(parent, tokens.data() + tokens.size() - 2), expected);
  }
  const std::int32_t absent[] = {0, 1};
  EXPECT_EQ(index.find(detail::kNoPage, absent), detail::kNoPage);
  std::vector<PageId> removed;
  index.remove_with_descendants(model[{1, 1}], [&](PageId gone) { removed.push_back(gone); });
  EXPECT_EQ(removed.size(), 4u);
  EXPECT_EQ(removed.back(), (model[{1, 1}]));
  const std::int32_t one[] = {1, 1}, two[] = {2, 2};
  EXPECT_EQ(index.find(detail::kNoPage, one), detail::kNoPage);
  EXPECT_EQ(index.find(detail::kNoPage, two), (model[{2, 2}]));
}

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
    const std::size_t choice = random_.below(20);
    if (choice < 3 || live_.empty()) {
      const Tokens prompt = random_tokens(random_.below(70));
      std::int64_t num_cached = -1;
      const SequenceId id = b_.create(prompt, &num_cached);
      ASSERT_EQ(num_cached % kPageSize, 0);
      ASSERT_TRUE(num_cached == 0 || num_cached < static_cast<std::int64_t>(prompt.size()));
      live_.push_back({id, Tokens(prompt.begin(), prompt.begin() + num_cached)});
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
      live_.push_back({b_.cache.fork(source.id), source.tokens});
      ASSERT_EQ(b_.pages(live_.back().id), b_.pages(source.id));
    } else if (choice < 13) {
      Live& live = any();
      live.tokens.resize(random_.below(live.tokens.size() + 1));
      b_.cache.truncate(live.id, static_cast<std::int64_t>(live.tokens.size()));
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
    } else if (random_.one_in(10)) {
      b_.cache.drop_cached();
      ASSERT_EQ(b_.cache.stats().num_pages_cached, 0);
    }
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
      const std::vector<PageId> pages = b_.pages(live.id);
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
      ASSERT_TRUE(b_.holds(live.id, live.tokens)) << "contents were lost";
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
        for (int i = 0; i < 3; ++i) {
          Tokens longer = tokens;
          longer.resize(tokens.size() + random.below(20), static_cast<std::int32_t>(random.below(5)));
          try {
            b.fill(id, longer);
            tokens = longer;
          } catch (const OutOfPages&) {
          }
          if (!b.holds(id, tokens)) ++num_wrong;
          if (random.one_in(3)) b.publish(id, tokens);
          if (random.one_in(3)) {
            tokens.resize(random.below(tokens.size() + 1));
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
