// Which full page holds which tokens after which prefix: a tree of pages in a hash table keyed by (parent page, tokens
// of the page), and the pages that nobody else holds in order of last use. Used by KvCache, under its lock.
// Invariant: two entries with one key don't exist, so that a page's path from the root spells its whole prefix; tokens
// are compared in full, so that a hash collision costs time and never shares a wrong page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "flashkernel/kv_page_pool.hpp"

namespace flashkernel::detail {

inline constexpr PageId kNoPage = -1;

class PrefixIndex {
 public:
  using Hash = std::uint64_t (*)(std::uint64_t parent_hash, const std::int32_t* tokens, std::int64_t num_tokens);
  static std::uint64_t default_hash(std::uint64_t parent_hash, const std::int32_t* tokens, std::int64_t num_tokens);

  PrefixIndex(std::int64_t num_pages, std::int64_t page_size, Hash hash = &default_hash);

  bool contains(PageId page) const { return node(page).is_indexed; }
  /// The page with these page_size tokens after `parent` (kNoPage: at the start); kNoPage if there is none.
  PageId find(PageId parent, const std::int32_t* tokens) const;
  /// Adds a page that isn't in the index, under a key that `find` did not find. `parent` is in the index. Strong
  /// guarantee.
  void insert(PageId parent, const std::int32_t* tokens, PageId page);

  /// Takes a page and everything after it out, leaves first; `removed(page)` is called for each. Never throws by
  /// itself.
  template <typename Function>
  void remove_with_descendants(PageId top, Function removed) {
    for (PageId page = top;;) {
      while (node(page).first_child != kNoPage) page = node(page).first_child;
      const PageId parent = node(page).parent;
      remove_leaf(page);
      removed(page);
      if (page == top) return;
      page = parent;
    }
  }

  /// Evictable pages are kept in the order in which they became so.
  void set_evictable(PageId page, bool evictable) noexcept;
  PageId oldest_evictable() const noexcept { return oldest_; }
  PageId next_evictable(PageId page) const { return node(page).newer; }
  std::int64_t num_evictable() const noexcept { return num_evictable_; }

 private:
  struct Node {
    std::vector<std::int32_t> tokens;
    std::uint64_t hash = 0;
    PageId parent = kNoPage, first_child = kNoPage, next_sibling = kNoPage, previous_sibling = kNoPage;
    PageId next_in_bucket = kNoPage;
    PageId older = kNoPage, newer = kNoPage;
    bool is_indexed = false;
    bool is_evictable = false;
  };

  Node& node(PageId page) { return nodes_[static_cast<std::size_t>(page)]; }
  const Node& node(PageId page) const { return nodes_[static_cast<std::size_t>(page)]; }
  PageId& bucket(std::uint64_t hash) { return buckets_[static_cast<std::size_t>(hash) & (buckets_.size() - 1)]; }
  std::uint64_t hash_of(PageId parent, const std::int32_t* tokens) const;
  void remove_leaf(PageId page) noexcept;

  const std::int64_t page_size_;
  const Hash hash_;
  std::vector<Node> nodes_;      // by page
  std::vector<PageId> buckets_;  // a power of two
  PageId oldest_ = kNoPage, newest_ = kNoPage;
  std::int64_t num_evictable_ = 0;
};

}  // namespace flashkernel::detail
