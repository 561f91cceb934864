// KvCache: sequences of pages over a KvPagePool, and the prefix index over published pages.
// Invariant: this cache has one reference in the pool for each sequence that holds a page and one for each page in the
// index; a page with more than one reference is never written. The blocks [0, num_dropped) of a sequence have no page
// and end at or before its length, so that a partly filled last page is never among them. Everything that can throw
// comes before the first change.
#include "flashkernel/kv_cache.hpp"

#include <algorithm>
#include <atomic>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/fork_safe.hpp"
#include "flashkernel/error.hpp"
#include "memory/copy_rows.hpp"
#include "memory/prefix_index.hpp"

namespace flashkernel {
namespace {

using detail::kNoPage;

struct Sequence {
  std::uint32_t generation = 0;  // odd while it is alive
  std::int64_t length = 0;
  std::vector<PageId> pages;
  std::int64_t num_dropped = 0;  // leading blocks that were given back: kNoPage in `pages`
};

[[noreturn]] void refuse(const char* op, const std::string& what) {
  throw InvalidArgument(std::string("KvCache.") + op + ": " + what);
}

void check_array(const char* op, const char* name, std::int64_t count, const void* array) {
  if (count < 0) refuse(op, std::string(name) + "=" + std::to_string(count) + "; needs 0 or more");
  if (count > 0 && array == nullptr) {
    refuse(op, std::string(name) + "=" + std::to_string(count) + " but the array is null; needs an array of as many");
  }
}

std::int64_t size_of(const std::vector<PageId>& pages) { return static_cast<std::int64_t>(pages.size()); }

/// Like `vector.reserve`, but a run of small steps costs amortised constant time.
template <typename T>
void reserve(std::vector<T>& vector, std::size_t size) {
  if (size > vector.capacity()) vector.reserve(std::max(size, 2 * vector.capacity()));
}

/// A number that no other cache of this process has had: it tells a sequence's handle from those of other caches, also
/// of one that lay at the same address. No cache has 0.
std::uint64_t next_number() noexcept {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace

struct KvCache::Impl {
  explicit Impl(KvPagePool& given)
      : pool(given),
        page_size(pool.options().page_size),
        index(pool.options().num_pages, page_size),
        holders(static_cast<std::size_t>(pool.options().num_pages), 0) {}

  // ---- Sequences ----

  [[noreturn]] void refuse_sequence(const char* op, SequenceId id) const {
    const std::string text =
        "sequence {slot " + std::to_string(id.slot) + ", generation " + std::to_string(id.generation) + "} ";
    if (id.cache != 0 && id.cache != number) {
      refuse(op,
             text + "is of cache " + std::to_string(id.cache) + "; needs one of this cache, " + std::to_string(number));
    }
    refuse(op, text + "was freed or never made; needs one that is alive");
  }

  const Sequence& find(const char* op, SequenceId id) const {
    if (id.cache != number || id.slot >= sequences.size() || id.generation % 2 == 0 ||
        sequences[id.slot].generation != id.generation) {
      refuse_sequence(op, id);
    }
    return sequences[id.slot];
  }
  Sequence& find(const char* op, SequenceId id) { return const_cast<Sequence&>(std::as_const(*this).find(op, id)); }

  /// A slot for a new sequence; it is used by `start`, or forgotten.
  std::uint32_t reserve_slot() {
    if (free_slots.empty()) {
      reserve(free_slots, sequences.size() + 1);  // so that `free` never allocates
      sequences.emplace_back();
      free_slots.push_back(static_cast<std::uint32_t>(sequences.size() - 1));
    }
    return free_slots.back();
  }

  /// The sequence takes over references to `pages` from `num_dropped` on that were already taken from the pool.
  SequenceId start(std::uint32_t slot, std::vector<PageId>&& pages, std::int64_t num_dropped,
                   std::int64_t length) noexcept {
    free_slots.pop_back();
    Sequence& sequence = sequences[slot];
    ++sequence.generation;
    sequence.length = length;
    sequence.pages = std::move(pages);
    sequence.num_dropped = num_dropped;
    for (std::int64_t i = num_dropped; i < size_of(sequence.pages); ++i)
      hold(sequence.pages[static_cast<std::size_t>(i)]);
    ++stats.num_sequences;
    return {slot, sequence.generation, number};
  }

  std::int32_t& holders_of(PageId page) { return holders[static_cast<std::size_t>(page)]; }

  void hold(PageId page) noexcept {
    const std::int32_t count = ++holders_of(page);
    if (count == 1) {
      ++stats.num_pages_used;
      if (index.contains(page)) index.set_evictable(page, false);
    } else if (count == 2) {
      ++stats.num_pages_shared;
    }
  }

  /// The opposite of `hold`; the reference in the pool is another matter.
  void let_go(PageId page) noexcept {
    const std::int32_t count = --holders_of(page);
    if (count == 0) {
      --stats.num_pages_used;
      if (index.contains(page)) index.set_evictable(page, true);
    } else if (count == 1) {
      --stats.num_pages_shared;
    }
  }

  /// Pages from `keep` on go, the last first: of two pages of a prefix the longer one is evicted first.
  void shrink(Sequence& sequence, std::int64_t keep) {
    const std::int64_t first = std::max(keep, sequence.num_dropped);
    pool.give_back(size_of(sequence.pages) - first, sequence.pages.data() + first);
    while (size_of(sequence.pages) > first) {
      let_go(sequence.pages.back());
      sequence.pages.pop_back();
    }
    sequence.pages.resize(static_cast<std::size_t>(keep));
    sequence.num_dropped = std::min(sequence.num_dropped, keep);
  }

  // ---- Pages ----

  /// Takes a page and what follows it out of the index; returns the pages that became free.
  std::int64_t unindex(PageId top) {
    std::int64_t num_freed = 0;
    index.remove_with_descendants(top, [&](PageId page) {
      num_freed += pool.num_references(page) == 1 ? 1 : 0;
      pool.give_back(page);
    });
    return num_freed;
  }

  /// Pages that eviction could free, counted up to `enough`. (Pages that someone outside holds too would not become
  /// free.)
  std::int64_t count_evictable(std::int64_t enough) const {
    std::int64_t count = 0;
    for (PageId page = index.oldest_evictable(); page != kNoPage && count < enough; page = index.next_evictable(page)) {
      count += pool.num_references(page) == 1 ? 1 : 0;
    }
    return count;
  }

  bool can_take(std::int64_t count) const {
    const std::int64_t missing = count - pool.num_free();
    return missing <= 0 || count_evictable(missing) == missing;
  }

  /// Evicts, least recently used first, until the pool has `count` free pages; OutOfPages, and nothing evicted, if it
  /// can't.
  void make_room(std::int64_t count) {
    const std::int64_t num_free = pool.num_free();
    if (num_free >= count) return;
    const std::int64_t evictable = count_evictable(count - num_free);
    if (num_free + evictable < count) {
      const auto available = static_cast<std::size_t>(num_free + evictable);
      throw OutOfPages("KvCache: out of pages; requested " + std::to_string(count) + ", free " +
                           std::to_string(num_free) + " and evictable " + std::to_string(evictable) + " of " +
                           std::to_string(pool.options().num_pages),
                       static_cast<std::size_t>(count), available, static_cast<std::size_t>(pool.options().num_pages),
                       pool.page_bytes());
    }
    PageId page = index.oldest_evictable();
    while (page != kNoPage && pool.num_free() < count) {
      if (pool.num_references(page) > 1) {
        page = index.next_evictable(page);
        continue;
      }
      stats.num_evictions += static_cast<std::uint64_t>(unindex(page));
      page = index.oldest_evictable();
    }
  }

  void take(std::int64_t count, PageId* pages) {
    for (;;) {
      make_room(count);
      try {
        return pool.take(count, pages);
      } catch (const OutOfPages&) {  // another user of the pool was quicker: evict more, or give up in make_room
      }
    }
  }

  /// Rows 0 .. num_rows - 1 of a page, keys and values, in all layers.
  void copy_page(PageId src, PageId dst, std::int64_t num_rows, Stream stream) const {
    for (const TensorView& view : {pool.k_pages(), pool.v_pages()}) {
      const std::size_t element = dtype_bytes(view.dtype);
      const auto bytes = [element](std::int64_t elements) { return static_cast<std::size_t>(elements) * element; };
      auto* data = static_cast<std::byte*>(view.data);
      detail::copy_rows(view.device, data + bytes(dst * view.strides[0]), data + bytes(src * view.strides[0]),
                        bytes(view.numel()), bytes(num_rows * view.strides[1]),
                        static_cast<std::size_t>(pool.options().num_layers), stream);
    }
    const KvScales scales = pool.scales();
    for (const TensorView& view : {scales.k, scales.v}) {
      if (!view.defined()) continue;
      // A head's scales lie together, so the whole page's go along: what is past num_rows is never read.
      const std::size_t element = dtype_bytes(view.dtype);
      const std::size_t page_bytes = static_cast<std::size_t>(view.strides[0]) * element;
      auto* data = static_cast<std::byte*>(view.data);
      detail::copy_rows(view.device, data + static_cast<std::size_t>(dst) * page_bytes,
                        data + static_cast<std::size_t>(src) * page_bytes,
                        static_cast<std::size_t>(view.numel()) * element, page_bytes,
                        static_cast<std::size_t>(pool.options().num_layers), stream);
    }
  }

  std::int64_t pages_for(std::int64_t length) const { return (length + page_size - 1) / page_size; }

  KvPagePool& pool;
  const std::uint64_t number = next_number();
  const std::int64_t page_size;
  mutable ForkSafeMutex mutex;
  std::vector<Sequence> sequences;
  std::vector<std::uint32_t> free_slots;
  detail::PrefixIndex index;
  std::vector<std::int32_t> holders;  // sequences that hold each page
  KvCacheStats stats;
};

KvCache::KvCache(KvPagePool& pool) : impl_(std::make_unique<Impl>(pool)) {}

KvCache::~KvCache() {
  try {
    for (Sequence& sequence : impl_->sequences) impl_->shrink(sequence, 0);
    drop_cached();
  } catch (const Error&) {  // someone gave back pages that were not theirs
  }
}

KvPagePool& KvCache::pool() const noexcept { return impl_->pool; }

SequenceId KvCache::create() { return create(nullptr, 0, nullptr); }

SequenceId KvCache::create(const std::int32_t* tokens, std::int64_t num_tokens, std::int64_t* num_cached) {
  check_array("create", "num_tokens", num_tokens, tokens);
  Impl& impl = *impl_;
  const ForkSafeLock lock(impl.mutex);
  const std::uint32_t slot = impl.reserve_slot();
  std::vector<PageId> pages;
  // The last token is left over, even when it ends a page: a caller needs its output.
  for (std::int64_t start = 0; start + impl.page_size < num_tokens; start += impl.page_size) {
    const PageId page = impl.index.find(pages.empty() ? kNoPage : pages.back(), tokens + start);
    if (page == kNoPage) break;
    pages.push_back(page);
  }
  const std::int64_t num_hits = size_of(pages);
  impl.pool.retain(num_hits, pages.data());
  impl.stats.num_prefix_hits += static_cast<std::uint64_t>(num_hits);
  if (num_cached != nullptr) *num_cached = num_hits * impl.page_size;
  return impl.start(slot, std::move(pages), 0, num_hits * impl.page_size);
}

void KvCache::publish(SequenceId id, const std::int32_t* tokens, std::int64_t num_tokens) {
  check_array("publish", "num_tokens", num_tokens, tokens);
  Impl& impl = *impl_;
  const ForkSafeLock lock(impl.mutex);
  const Sequence& sequence = impl.find("publish", id);
  if (num_tokens > sequence.length) {
    refuse("publish", "num_tokens=" + std::to_string(num_tokens) + " but the sequence has " +
                          std::to_string(sequence.length) + " tokens; needs as many or fewer");
  }
  const std::int64_t num_full = num_tokens / impl.page_size;
  const auto page_at = [&](std::int64_t i) { return sequence.pages[static_cast<std::size_t>(i)]; };

  // What is known already stays as it is, also where this sequence has its own copy of it, or none any more.
  const std::int64_t num_dropped = sequence.num_dropped;
  std::int64_t num_known = 0;
  PageId parent = kNoPage;
  for (; num_known < num_full; ++num_known) {
    const PageId found = impl.index.find(parent, tokens + num_known * impl.page_size);
    if (found == kNoPage) break;
    const bool own = num_known >= num_dropped && found != page_at(num_known);
    if (own && impl.index.contains(page_at(num_known))) break;  // refused below
    parent = found;
  }
  for (std::int64_t i = std::max(num_known, num_dropped); i < num_full; ++i) {
    // A published page is never written again, so what it was published under is what it holds.
    if (impl.index.contains(page_at(i))) {
      refuse("publish", "tokens " + std::to_string(i * impl.page_size) + ".." +
                            std::to_string((i + 1) * impl.page_size - 1) +
                            " or those before them differ from what page " + std::to_string(page_at(i)) +
                            " was published under; needs the same tokens");
    }
  }
  if (num_known == num_full || num_known < num_dropped) return;  // a prefix with a gap is of no use to anybody

  const PageId* first_new = sequence.pages.data() + num_known;
  impl.pool.retain(num_full - num_known, first_new);
  try {
    for (std::int64_t i = num_known; i < num_full; ++i) {
      impl.index.insert(parent, tokens + i * impl.page_size, page_at(i));
      parent = page_at(i);
    }
  } catch (...) {
    if (impl.index.contains(*first_new)) impl.index.remove_with_descendants(*first_new, [](PageId) {});
    impl.pool.give_back(num_full - num_known, first_new);
    throw;
  }
}

SequenceId KvCache::fork(SequenceId id) {
  Impl& impl = *impl_;
  const ForkSafeLock lock(impl.mutex);
  impl.find("fork", id);
  const std::uint32_t slot = impl.reserve_slot();
  const Sequence& source = impl.sequences[id.slot];  // reserve_slot may have moved it
  std::vector<PageId> pages = source.pages;
  const std::int64_t num_dropped = source.num_dropped, length = source.length;
  impl.pool.retain(size_of(pages) - num_dropped, pages.data() + num_dropped);
  return impl.start(slot, std::move(pages), num_dropped, length);
}

void KvCache::truncate(SequenceId id, std::int64_t length) {
  Impl& impl = *impl_;
  const ForkSafeLock lock(impl.mutex);
  Sequence& sequence = impl.find("truncate", id);
  if (length < 0 || length > sequence.length) {
    refuse("truncate", "length=" + std::to_string(length) + "; needs 0.." + std::to_string(sequence.length));
  }
  if (length < sequence.num_dropped * impl.page_size) {
    refuse("truncate", "length=" + std::to_string(length) + " but the pages of tokens 0.." +
                           std::to_string(sequence.num_dropped * impl.page_size - 1) +
                           " were given back by drop_before; needs as many or more");
  }
  impl.shrink(sequence, impl.pages_for(length));
  sequence.length = length;
}

std::int64_t KvCache::drop_before(SequenceId id, std::int64_t position) {
  Impl& impl = *impl_;
  const ForkSafeLock lock(impl.mutex);
  Sequence& sequence = impl.find("drop_before", id);
  if (position < 0 || position > sequence.length) {
    refuse("drop_before", "position=" + std::to_string(position) + "; needs 0.." + std::to_string(sequence.length));
  }
  const std::int64_t num_dropped = sequence.num_dropped, keep = position / impl.page_size;
  if (keep <= num_dropped) return 0;
  impl.pool.give_back(keep - num_dropped, sequence.pages.data() + num_dropped);
  for (std::int64_t i = keep; i-- > num_dropped;) {  // the last first, as in `shrink`
    PageId& page = sequence.pages[static_cast<std::size_t>(i)];
    impl.let_go(page);
    page = kNoPage;
  }
  sequence.num_dropped = keep;
  return keep - num_dropped;
}

void KvCache::free(SequenceId id) {
  Impl& impl = *impl_;
  const ForkSafeLock lock(impl.mutex);
  Sequence& sequence = impl.find("free", id);
  impl.shrink(sequence, 0);
  sequence.pages = {};
  sequence.length = 0;
  --impl.stats.num_sequences;
  // A slot whose generations are used up is never used again.
  if (++sequence.generation != std::numeric_limits<std::uint32_t>::max() - 1) impl.free_slots.push_back(id.slot);
}

void KvCache::append(SequenceId id, std::int64_t num_tokens, std::int64_t* slots, const ExecutionContext& context) {
  check_array("append", "num_tokens", num_tokens, slots);
  Impl& impl = *impl_;
  const ForkSafeLock lock(impl.mutex);
  Sequence& sequence = impl.find("append", id);
  if (num_tokens > std::numeric_limits<std::int32_t>::max() - sequence.length) {
    refuse("append", "num_tokens=" + std::to_string(num_tokens) + " after " + std::to_string(sequence.length) +
                         "; needs at most 2147483647 in all");
  }
  if (num_tokens == 0) return;

  const std::int64_t num_rows = sequence.length % impl.page_size;  // in use in a partly filled last page
  const PageId last = sequence.pages.empty() ? kNoPage : sequence.pages.back();
  bool copies = num_rows != 0 && impl.pool.num_references(last) > 1;
  const std::int64_t num_more = impl.pages_for(sequence.length + num_tokens) - size_of(sequence.pages);
  if (copies && impl.index.contains(last) && impl.pool.num_references(last) == 2 && !impl.can_take(num_more + 1) &&
      impl.can_take(num_more)) {
    impl.unindex(last);  // the index alone shares it, and no page is left to copy it to
    copies = false;
  }

  std::vector<PageId> taken(static_cast<std::size_t>(num_more + (copies ? 1 : 0)));
  reserve(sequence.pages, sequence.pages.size() + static_cast<std::size_t>(num_more));
  impl.take(size_of(taken), taken.data());
  if (copies) {
    try {
      impl.copy_page(last, taken.back(), num_rows, context.stream);
      impl.pool.give_back(last);
    } catch (...) {
      impl.pool.give_back(size_of(taken), taken.data());
      throw;
    }
    impl.let_go(last);
    sequence.pages.back() = taken.back();
    impl.hold(taken.back());
    taken.pop_back();
    ++impl.stats.num_copies_on_write;
  }
  for (const PageId page : taken) {
    sequence.pages.push_back(page);
    impl.hold(page);
  }
  for (std::int64_t i = 0; i < num_tokens; ++i) {
    const std::int64_t position = sequence.length + i;
    const PageId page = sequence.pages[static_cast<std::size_t>(position / impl.page_size)];
    slots[i] = page * impl.page_size + position % impl.page_size;
  }
  sequence.length += num_tokens;
}

std::int64_t KvCache::length(SequenceId id) const {
  const ForkSafeLock lock(impl_->mutex);
  return impl_->find("length", id).length;
}

std::int64_t KvCache::num_pages(SequenceId id) const {
  const ForkSafeLock lock(impl_->mutex);
  return size_of(impl_->find("num_pages", id).pages);
}

std::vector<PageId> KvCache::pages(SequenceId id) const {
  const ForkSafeLock lock(impl_->mutex);
  return impl_->find("pages", id).pages;
}

void KvCache::block_table(const SequenceId* sequences, std::int64_t count, std::int64_t max_pages, std::int32_t* table,
                          std::int32_t* lengths) const {
  check_array("block_table", "count", count, sequences);
  check_array("block_table", "count", count, lengths);
  check_array("block_table", "max_pages", max_pages, count == 0 ? static_cast<const void*>(this) : table);
  const ForkSafeLock lock(impl_->mutex);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t num_pages = size_of(impl_->find("block_table", sequences[i]).pages);
    if (num_pages > max_pages) {
      refuse("block_table", "max_pages=" + std::to_string(max_pages) + " but sequences[" + std::to_string(i) +
                                "] has " + std::to_string(num_pages) + " pages; needs as many");
    }
  }
  for (std::int64_t i = 0; i < count; ++i) {
    const Sequence& sequence = impl_->sequences[sequences[i].slot];
    std::int32_t* row = table + i * max_pages;
    std::fill(std::copy(sequence.pages.begin(), sequence.pages.end(), row), row + max_pages, kNoPage);
    lengths[i] = static_cast<std::int32_t>(sequence.length);
  }
}

std::int64_t KvCache::drop_cached() {
  const ForkSafeLock lock(impl_->mutex);
  std::int64_t num_freed = 0;
  while (impl_->index.oldest_evictable() != kNoPage) num_freed += impl_->unindex(impl_->index.oldest_evictable());
  return num_freed;
}

KvCacheStats KvCache::stats() const {
  const ForkSafeLock lock(impl_->mutex);
  KvCacheStats stats = impl_->stats;
  stats.num_pages_cached = impl_->index.num_evictable();
  stats.num_pages_free = impl_->pool.num_free();
  return stats;
}

}  // namespace flashkernel
