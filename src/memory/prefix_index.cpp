#include "memory/prefix_index.hpp"

#include <algorithm>

namespace flashkernel::detail {

std::uint64_t PrefixIndex::default_hash(std::uint64_t parent_hash, const std::int32_t* tokens,
                                        std::int64_t num_tokens) {
  std::uint64_t hash = parent_hash + 0x9E3779B97F4A7C15u;  // so that the root's 0 moves too
  for (std::int64_t i = 0; i < num_tokens; ++i) {
    // A multiplier of MurmurHash3's finaliser.
    hash = (hash ^ static_cast<std::uint32_t>(tokens[i])) * 0xFF51AFD7ED558CCDu;
    hash ^= hash >> 32;
  }
  return hash;
}

PrefixIndex::PrefixIndex(std::int64_t num_pages, std::int64_t page_size, Hash hash)
    : page_size_(page_size), hash_(hash), nodes_(static_cast<std::size_t>(num_pages)) {
  std::size_t num_buckets = 16;
  while (num_buckets < nodes_.size()) num_buckets *= 2;
  buckets_.assign(num_buckets, kNoPage);
}

std::uint64_t PrefixIndex::hash_of(PageId parent, const std::int32_t* tokens) const {
  return hash_(parent == kNoPage ? 0 : node(parent).hash, tokens, page_size_);
}

PageId PrefixIndex::find(PageId parent, const std::int32_t* tokens) const {
  const std::uint64_t hash = hash_of(parent, tokens);
  PageId page = buckets_[static_cast<std::size_t>(hash) & (buckets_.size() - 1)];
  for (; page != kNoPage; page = node(page).next_in_bucket) {
    const Node& candidate = node(page);
    if (candidate.hash == hash && candidate.parent == parent &&
        std::equal(candidate.tokens.begin(), candidate.tokens.end(), tokens)) {
      break;
    }
  }
  return page;
}

void PrefixIndex::insert(PageId parent, const std::int32_t* tokens, PageId page) {
  Node& added = node(page);
  added.tokens.assign(tokens, tokens + page_size_);  // nothing after this throws
  added.hash = hash_of(parent, tokens);
  added.parent = parent;
  added.is_indexed = true;
  PageId& head = bucket(added.hash);
  added.next_in_bucket = head;
  head = page;
  if (parent != kNoPage) {
    added.next_sibling = node(parent).first_child;
    if (added.next_sibling != kNoPage) node(added.next_sibling).previous_sibling = page;
    node(parent).first_child = page;
  }
}

void PrefixIndex::remove_leaf(PageId page) noexcept {
  set_evictable(page, false);
  Node& removed = node(page);
  PageId* link = &bucket(removed.hash);
  while (*link != page) link = &node(*link).next_in_bucket;
  *link = removed.next_in_bucket;
  if (removed.next_sibling != kNoPage) node(removed.next_sibling).previous_sibling = removed.previous_sibling;
  if (removed.previous_sibling != kNoPage) {
    node(removed.previous_sibling).next_sibling = removed.next_sibling;
  } else if (removed.parent != kNoPage) {
    node(removed.parent).first_child = removed.next_sibling;
  }
  removed = Node{};
}

void PrefixIndex::set_evictable(PageId page, bool evictable) noexcept {
  Node& changed = node(page);
  if (changed.is_evictable == evictable) return;
  changed.is_evictable = evictable;
  if (evictable) {
    changed.older = newest_;
    (newest_ != kNoPage ? node(newest_).newer : oldest_) = page;
    newest_ = page;
    ++num_evictable_;
    return;
  }
  (changed.older != kNoPage ? node(changed.older).newer : oldest_) = changed.newer;
  (changed.newer != kNoPage ? node(changed.newer).older : newest_) = changed.older;
  changed.older = changed.newer = kNoPage;
  --num_evictable_;
}

}  // namespace flashkernel::detail
