// Sequences of a KV-cache in the C API.
#include <algorithm>
#include <string>

#include "c/call.hpp"
#include "c/handles.hpp"
#include "flashkernel/flashkernel.h"

using namespace flashkernel::c;

namespace {

flashkernel::KvCache& cache_of(fk_kv_cache* cache) {
  check_pointer("cache", cache);
  return cache->cache;
}

const flashkernel::KvCache& cache_of(const fk_kv_cache* cache) {
  check_pointer("cache", cache);
  return cache->cache;
}

flashkernel::SequenceId id_of(fk_sequence sequence) {
  flashkernel::SequenceId id;
  id.slot = sequence.slot;
  id.generation = sequence.generation;
  id.cache = sequence.cache;
  return id;
}

fk_sequence in_c(flashkernel::SequenceId id) { return {id.slot, id.generation, id.cache}; }

}  // namespace

fk_status fk_kv_cache_create(fk_kv_page_pool* pool, fk_kv_cache** cache) {
  return guarded([&] {
    check_pointer("pool", pool);
    check_pointer("cache", cache);
    *cache = new fk_kv_cache(pool->shared);
  });
}

void fk_kv_cache_destroy(fk_kv_cache* cache) { delete cache; }

fk_status fk_kv_cache_create_sequence(fk_kv_cache* cache, const int32_t* tokens, int64_t num_tokens,
                                      fk_sequence* sequence, int64_t* num_cached) {
  return guarded([&] {
    check_pointer("sequence", sequence);
    check_array("tokens", tokens, num_tokens);
    std::int64_t found = 0;
    *sequence = in_c(num_tokens == 0 ? cache_of(cache).create() : cache_of(cache).create(tokens, num_tokens, &found));
    if (num_cached) *num_cached = found;
  });
}

fk_status fk_kv_cache_publish(fk_kv_cache* cache, fk_sequence sequence, const int32_t* tokens, int64_t num_tokens) {
  return guarded([&] {
    check_array("tokens", tokens, num_tokens);
    cache_of(cache).publish(id_of(sequence), tokens, num_tokens);
  });
}

fk_status fk_kv_cache_fork(fk_kv_cache* cache, fk_sequence sequence, fk_sequence* fork) {
  return guarded([&] {
    check_pointer("fork", fork);
    *fork = in_c(cache_of(cache).fork(id_of(sequence)));
  });
}

fk_status fk_kv_cache_truncate(fk_kv_cache* cache, fk_sequence sequence, int64_t length) {
  return guarded([&] { cache_of(cache).truncate(id_of(sequence), length); });
}

fk_status fk_kv_cache_drop_before(fk_kv_cache* cache, fk_sequence sequence, int64_t position, int64_t* num_pages) {
  return guarded([&] {
    const std::int64_t dropped = cache_of(cache).drop_before(id_of(sequence), position);
    if (num_pages) *num_pages = dropped;
  });
}

fk_status fk_kv_cache_free_sequence(fk_kv_cache* cache, fk_sequence sequence) {
  return guarded([&] { cache_of(cache).free(id_of(sequence)); });
}

fk_status fk_kv_cache_append(fk_kv_cache* cache, fk_sequence sequence, int64_t num_tokens, void* stream,
                             int64_t* slots) {
  return guarded([&] {
    check_array("slots", slots, num_tokens);
    flashkernel::ExecutionContext context;
    context.stream.handle = stream;
    cache_of(cache).append(id_of(sequence), num_tokens, slots, context);
  });
}

fk_status fk_kv_cache_length(const fk_kv_cache* cache, fk_sequence sequence, int64_t* length) {
  return guarded([&] {
    check_pointer("length", length);
    *length = cache_of(cache).length(id_of(sequence));
  });
}

fk_status fk_kv_cache_num_pages(const fk_kv_cache* cache, fk_sequence sequence, int64_t* num_pages) {
  return guarded([&] {
    check_pointer("num_pages", num_pages);
    *num_pages = cache_of(cache).num_pages(id_of(sequence));
  });
}

fk_status fk_kv_cache_pages(const fk_kv_cache* cache, fk_sequence sequence, int64_t capacity, int32_t* pages,
                            int64_t* num_pages) {
  return guarded([&] {
    check_pointer("num_pages", num_pages);
    check_array("pages", pages, capacity);
    const auto ids = cache_of(cache).pages(id_of(sequence));
    *num_pages = static_cast<std::int64_t>(ids.size());
    if (capacity < *num_pages)
      throw flashkernel::InvalidArgument("fk_kv_cache_pages: capacity is " + std::to_string(capacity) +
                                         "; the sequence has " + std::to_string(*num_pages) + " pages");
    std::copy(ids.begin(), ids.end(), pages);
  });
}

fk_status fk_kv_cache_block_table(const fk_kv_cache* cache, const fk_sequence* sequences, int64_t count,
                                  int64_t max_pages, int32_t* table, int32_t* lengths) {
  return guarded([&] {
    check_array("sequences", sequences, count);
    check_array("table", table, max_pages > 0 ? count : 0);
    check_array("lengths", lengths, count);
    std::vector<flashkernel::SequenceId> ids;
    for (std::int64_t i = 0; i < count; ++i) ids.push_back(id_of(sequences[i]));
    cache_of(cache).block_table(ids.data(), count, max_pages, table, lengths);
  });
}

fk_status fk_kv_cache_drop_cached(fk_kv_cache* cache, int64_t* num_pages) {
  return guarded([&] {
    const std::int64_t freed = cache_of(cache).drop_cached();
    if (num_pages) *num_pages = freed;
  });
}

fk_status fk_kv_cache_get_stats(const fk_kv_cache* cache, fk_kv_cache_stats* stats, size_t size) {
  return guarded([&] {
    const flashkernel::KvCacheStats s = cache_of(cache).stats();
    give("kv_cache_stats",
         fk_kv_cache_stats{0, s.num_sequences, s.num_pages_used, s.num_pages_shared, s.num_pages_cached,
                           s.num_pages_free, s.num_prefix_hits, s.num_copies_on_write, s.num_evictions},
         stats, size);
  });
}
