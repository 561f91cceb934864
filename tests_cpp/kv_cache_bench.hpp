// A pool, a cache and the kernels' part for the tests of KvCache: the row of a token holds a hash of the token and of
// all tokens before it, so that a page shared under a wrong prefix, a lost copy or a stale row shows.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "flashkernel/kv_cache.hpp"
#include "flashkernel/kv_page_pool.hpp"

namespace flashkernel::testing {

using Tokens = std::vector<std::int32_t>;

inline constexpr std::int64_t kPageSize = 16;
inline constexpr std::int64_t kLayers = 3;

inline KvPagePoolOptions options_of(std::int64_t num_pages) {
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

inline std::uint32_t next_hash(std::uint32_t hash, std::int32_t token) {
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

  std::vector<PageId> pages(SequenceId id) { return cache.pages(id); }

  /// The sequence has these tokens, but for the rows of its first `num_dropped` pages, which have no page.
  bool holds(SequenceId id, const Tokens& all, std::size_t num_dropped = 0) {
    if (cache.length(id) != static_cast<std::int64_t>(all.size())) return false;
    const std::vector<PageId> table = pages(id);
    std::uint32_t hash = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      hash = next_hash(hash, all[i]);
      if (i / kPageSize < num_dropped) {
        if (table[i / kPageSize] != -1) return false;
        continue;
      }
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

inline Tokens iota(std::size_t count, std::int32_t first = 0) {
  Tokens tokens(count);
  for (std::size_t i = 0; i < count; ++i) tokens[i] = first + static_cast<std::int32_t>(i);
  return tokens;
}

}  // namespace flashkernel::testing
