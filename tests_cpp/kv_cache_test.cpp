// kv_cache.hpp: sequences, copy on write, prefix sharing, eviction and misuse. Contents are checked through the pages,
// see kv_cache_bench.hpp; random steps and threads are in kv_cache_random_test.cpp.
#include "flashkernel/kv_cache.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "flashkernel/error.hpp"
#include "kv_cache_bench.hpp"
#include "memory/prefix_index.hpp"

namespace flashkernel::testing {
namespace {

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

TEST(KvCache, DropsPagesBehindAWindow) {
  Bench b(8);
  const SequenceId a = b.make(iota(60));
  EXPECT_EQ(b.cache.drop_before(a, 15), 0);
  EXPECT_EQ(b.cache.drop_before(a, 40), 2);
  EXPECT_EQ(b.cache.drop_before(a, 20), 0);  // nothing comes back, and nothing goes twice
  EXPECT_EQ(b.pool.num_used(), 2);
  EXPECT_EQ(b.cache.stats().num_pages_used, 2);
  EXPECT_EQ(b.cache.length(a), 60);
  EXPECT_EQ(b.cache.num_pages(a), 4);
  const std::vector<PageId> pages = b.pages(a);
  EXPECT_EQ(pages[0], -1);
  EXPECT_EQ(pages[1], -1);
  std::int32_t table[5], length = 0;
  b.cache.block_table(&a, 1, 5, table, &length);
  EXPECT_EQ(std::vector<std::int32_t>(table, table + 5), (std::vector<std::int32_t>{-1, -1, pages[2], pages[3], -1}));
  EXPECT_EQ(length, 60);
  b.fill(a, iota(75));
  EXPECT_TRUE(b.holds(a, iota(75), 2));

  const SequenceId child = b.cache.fork(a);  // with the same gap, and a copy of the last page
  b.fill(child, iota(78));
  EXPECT_TRUE(b.holds(child, iota(78), 2));
  EXPECT_TRUE(b.holds(a, iota(75), 2));
  EXPECT_EQ(b.cache.drop_before(child, 64), 2);
  EXPECT_TRUE(b.holds(a, iota(75), 2)) << "the fork's pages only";
  b.cache.truncate(a, 32);  // as far back as there are pages
  EXPECT_EQ(b.cache.num_pages(a), 2);
  b.fill(a, iota(33));
  EXPECT_TRUE(b.holds(a, iota(33), 2));
  try {
    b.cache.truncate(a, 31);
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(),
                 "KvCache.truncate: length=31 but the pages of tokens 0..31 were given back by drop_before; needs as "
                 "many or more");
  }
  EXPECT_THROW(b.cache.drop_before(a, 34), InvalidArgument);
  EXPECT_THROW(b.cache.drop_before(a, -1), InvalidArgument);

  const SequenceId full = b.make(iota(32));  // all of it may go, where the length ends a page
  EXPECT_EQ(b.cache.drop_before(full, 32), 2);
  b.fill(full, iota(40));
  EXPECT_TRUE(b.holds(full, iota(40), 2));
  for (const SequenceId id : {a, child, full}) b.cache.free(id);
  EXPECT_EQ(b.pool.num_used(), 0);
}

TEST(KvCache, APrefixIsPublishedBehindItsDroppedPages) {
  Bench b(6);
  const SequenceId a = b.make(iota(40));
  b.publish(a, iota(32));
  b.cache.drop_before(a, 32);
  EXPECT_EQ(b.cache.stats().num_pages_cached, 2);  // the index still has them
  b.fill(a, iota(64));
  b.publish(a, iota(64));
  std::int64_t num_cached = 0;
  const SequenceId again = b.create(iota(65), &num_cached);
  EXPECT_EQ(num_cached, 64);
  EXPECT_TRUE(b.holds(again, iota(64)));
  b.cache.free(again);
  Tokens other = iota(64);
  other[50] = 7;
  EXPECT_THROW(b.publish(a, other), InvalidArgument);

  // Once what was dropped is evicted, nothing behind it can be found or offered; the sequence itself goes on.
  const SequenceId taker = b.make(iota(64, 100));
  EXPECT_EQ(b.cache.stats().num_evictions, 2u);
  b.publish(a, iota(64));
  EXPECT_TRUE(b.holds(a, iota(64), 2));
  const SequenceId none = b.create(iota(65), &num_cached);
  EXPECT_EQ(num_cached, 0);
  for (const SequenceId id : {a, taker, none}) b.cache.free(id);
  EXPECT_EQ(b.pool.num_used(), 0);
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

TEST(KvCache, HandlesOfAnotherCacheAreRefused) {
  Bench b(4);
  const SequenceId mine = b.make(iota(3));
  std::optional<KvCache> other(b.pool);
  const SequenceId theirs = other->create();
  ASSERT_EQ(mine.slot, theirs.slot);
  ASSERT_EQ(mine.generation, theirs.generation);
  EXPECT_TRUE(mine != theirs);
  std::int64_t slot = 0;
  std::int32_t table = 0, length = 0;
  const SequenceId both[] = {mine, theirs};
  const std::function<void()> calls[] = {
      [&] { b.cache.free(theirs); },
      [&] { b.cache.fork(theirs); },
      [&] { b.cache.append(theirs, 1, &slot); },
      [&] { b.cache.truncate(theirs, 0); },
      [&] { b.cache.drop_before(theirs, 0); },
      [&] { b.cache.publish(theirs, nullptr, 0); },
      [&] { b.cache.length(theirs); },
      [&] { b.cache.num_pages(theirs); },
      [&] { b.cache.pages(theirs); },
      [&] { b.cache.block_table(both + 1, 1, 1, &table, &length); },
      [&] { b.cache.block_table(both, 2, 1, &table, &length); },
  };
  const auto refused = [&] {
    for (const auto& call : calls) {
      try {
        call();
        ADD_FAILURE() << "accepted a sequence of another cache";
      } catch (const InvalidArgument& error) {
        const std::string needed =
            "is of cache " + std::to_string(theirs.cache) + "; needs one of this cache, " + std::to_string(mine.cache);
        EXPECT_NE(std::string(error.what()).find(needed), std::string::npos) << error.what();
      }
    }
  };
  refused();
  EXPECT_TRUE(b.holds(mine, iota(3)));
  other.reset();
  refused();
  other.emplace(b.pool);  // where the one before lay
  EXPECT_THROW(other->length(theirs), InvalidArgument);
  other->create();
  EXPECT_THROW(other->length(theirs), InvalidArgument);
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

}  // namespace
}  // namespace flashkernel::testing
