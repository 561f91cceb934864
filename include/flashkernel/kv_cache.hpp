// Sequences on top of a KvPagePool: append, fork with copy on write, truncate, free, shared prefixes, block tables.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "flashkernel/execution.hpp"
#include "flashkernel/kv_page_pool.hpp"
#include "flashkernel/tensor_view.hpp"

namespace flashkernel {

/// Handle of a sequence. One that was freed is recognised (InvalidArgument), also after its slot was used again, and so
/// is one of another cache, also after that cache is gone. A default-constructed one never names a sequence.
struct SequenceId {
  std::uint32_t slot = 0;
  std::uint32_t generation = 0;
  std::uint64_t cache = 0;  ///< number of the cache that made it; no two caches of a process have the same
  friend bool operator==(SequenceId a, SequenceId b) noexcept {
    return a.slot == b.slot && a.generation == b.generation && a.cache == b.cache;
  }
  friend bool operator!=(SequenceId a, SequenceId b) noexcept { return !(a == b); }
};

struct KvCacheStats {
  std::int64_t num_sequences = 0;
  std::int64_t num_pages_used = 0;    ///< distinct pages held by sequences
  std::int64_t num_pages_shared = 0;  ///< those held by two sequences or more
  std::int64_t num_pages_cached = 0;  ///< held by the prefix index only; given up when the pool runs dry
  std::int64_t num_pages_free = 0;
  std::uint64_t num_prefix_hits = 0;  ///< pages that `create` found
  std::uint64_t num_copies_on_write = 0;
  std::uint64_t num_evictions = 0;  ///< pages that the prefix index gave up because the pool was dry
};

/// Bookkeeping is on the host; keys and values are moved by `kv_append` and read by `attention_paged`.
/// Every call either succeeds or throws and leaves sequences, lengths and pages as they were; one that needs pages
/// takes all of them or throws OutOfPages. When the pool is dry, the pages that only the prefix index holds go first,
/// least recently used first. Thread-safe; work that writes or reads the pages of one cache belongs on one stream, or
/// is ordered by the caller. What lies past the length of a sequence in its last page is never defined and never read.
class FK_API KvCache {
 public:
  /// `pool` must outlive the cache; others may take pages from it too.
  explicit KvCache(KvPagePool& pool);
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  KvPagePool& pool() const noexcept;

  /// An empty sequence.
  SequenceId create();
  /// A sequence for these tokens that already holds the longest run of full pages that `publish` has seen under exactly
  /// these tokens (never all of them: the last token is left to compute). `*num_cached` (may be null) gets the tokens
  /// found: the length of the new sequence.
  SequenceId create(const std::int32_t* tokens, std::int64_t num_tokens, std::int64_t* num_cached);
  /// Offers the full pages of `sequence`, whose first `num_tokens` tokens are `tokens`, to later `create` calls. A page
  /// that was published under other tokens before is InvalidArgument.
  void publish(SequenceId sequence, const std::int32_t* tokens, std::int64_t num_tokens);
  /// A second sequence with the same tokens that shares every page; whoever appends to a shared, partly filled page
  /// gets a copy of it first.
  SequenceId fork(SequenceId sequence);
  /// Forget tokens from `length` on; pages no longer needed are given back. Not past what `drop_before` gave back.
  void truncate(SequenceId sequence, std::int64_t length);
  /// Gives back the pages that hold only tokens before `position` (0 .. length), and returns how many: for models whose
  /// queries look back no further (sliding window). Length, positions and later pages stay as they are; the blocks
  /// given back have page -1 in `pages` and `block_table`, which attention with a window that begins at `position` or
  /// later does not use. Other sequences and the prefix index keep theirs; a fork has the same gap. `publish` goes on
  /// behind the gap as long as the index still has what was there.
  std::int64_t drop_before(SequenceId sequence, std::int64_t position);
  void free(SequenceId sequence);

  /// Room for `num_tokens` more tokens: extends the sequence and writes their slots (page * page_size + offset) to
  /// `slots` (int64 [num_tokens], host). Copies the rows in use of a shared last page (all layers, queued on
  /// context.stream; nothing else of `context` is used).
  void append(SequenceId sequence, std::int64_t num_tokens, std::int64_t* slots, const ExecutionContext& context = {});

  std::int64_t length(SequenceId sequence) const;
  /// ceil(length / page_size)
  std::int64_t num_pages(SequenceId sequence) const;
  /// Page of every block of the sequence, -1 for those that `drop_before` gave back. One look at the sequence: with
  /// another thread appending to it, no size asked for before would hold.
  std::vector<PageId> pages(SequenceId sequence) const;
  /// Block table int32 [count, max_pages] (unused entries and dropped blocks -1) and lengths int32 [count] of some
  /// sequences, written to host memory. `max_pages` must be at least the largest num_pages (InvalidArgument otherwise,
  /// also where another thread has made a sequence longer since `max_pages` was asked for; nothing is written then).
  void block_table(const SequenceId* sequences, std::int64_t count, std::int64_t max_pages, std::int32_t* table,
                   std::int32_t* lengths) const;

  /// Empty the prefix index of what no sequence holds; returns the pages that this made free.
  std::int64_t drop_cached();
  KvCacheStats stats() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace flashkernel
