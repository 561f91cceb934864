// Binds kv_cache.hpp: SequenceId, KvCacheStats, KvCache.
#include "bindings.hpp"
#include "kv_cache_types.hpp"

namespace flashkernel::python {
namespace {

// A new NumPy array and where its elements are.
template <class Element>
std::pair<nb::object, Element*> numpy_array(const char* dtype, const nb::tuple& shape) {
  nb::object array = numpy_attribute("empty")(shape, dtype);
  auto* data = static_cast<Element*>(numpy_data(array));
  return {std::move(array), data};
}

// Token ids from a list or an integer array of any framework that iterates.
std::vector<std::int32_t> parse_tokens(const char* op, nb::handle tokens) {
  std::vector<std::int32_t> ids;
  const nb::object list = nb::hasattr(tokens, "tolist") ? nb::object(tokens.attr("tolist")()) : nb::borrow(tokens);
  if (!nb::try_cast(list, ids))
    throw InvalidArgument(std::string(op) + ": tokens are not a sequence of int32 token ids");
  return ids;
}

std::vector<SequenceId> parse_sequences(nb::handle sequences) {
  std::vector<SequenceId> ids;
  for (const nb::handle item : nb::iter(sequences)) ids.push_back(nb::cast<SequenceId>(item));
  return ids;
}

std::int64_t pages_needed(const KvCache& cache, const std::vector<SequenceId>& sequences) {
  std::int64_t most = 0;
  for (const SequenceId id : sequences) most = std::max(most, cache.num_pages(id));
  return most;
}

// A width that no sequence needs must not become the size of an allocation: a sequence has at most 2^31 - 1 tokens.
void check_width(const PyKvCache& self, std::int64_t width, std::int64_t needed) {
  const std::int64_t page_size = self.pool->options().page_size, most = (0x7fffffff + page_size - 1) / page_size;
  if (width < needed)
    throw InvalidArgument("KvCache.block_table: max_pages=" + std::to_string(width) + "; a sequence has " +
                          std::to_string(needed) + " pages");
  if (width > most)
    throw InvalidArgument("KvCache.block_table: max_pages=" + std::to_string(width) + "; needs " +
                          std::to_string(most) + " or less, the pages of 2147483647 tokens");
}

ExecutionContext context_of(const PyKvCache& self, nb::handle stream) {
  ExecutionContext context;
  if (stream.is_none() || self.pool->options().device.is_cpu()) return context;
  context.stream = parse_stream("KvCache.append", stream);
  return context;
}

void bind_stats(nb::module_& module) {
  nb::class_<KvCacheStats>(module, "KvCacheStats", "Counts of a KvCache; see `KvCache.stats`.")
      .def_ro("num_sequences", &KvCacheStats::num_sequences, "Sequences that exist.")
      .def_ro("num_pages_used", &KvCacheStats::num_pages_used, "Distinct pages held by sequences.")
      .def_ro("num_pages_shared", &KvCacheStats::num_pages_shared, "Those held by two sequences or more.")
      .def_ro("num_pages_cached", &KvCacheStats::num_pages_cached, "Pages held by the prefix index only.")
      .def_ro("num_pages_free", &KvCacheStats::num_pages_free, "Pages that can be taken.")
      .def_ro("num_prefix_hits", &KvCacheStats::num_prefix_hits, "Pages that `create` found.")
      .def_ro("num_copies_on_write", &KvCacheStats::num_copies_on_write,
              "Shared pages that were copied before a write.")
      .def_ro("num_evictions", &KvCacheStats::num_evictions, "Cached pages that were given up for new ones.")
      .def("__repr__", [](const KvCacheStats& stats) {
        return "KvCacheStats(num_sequences=" + std::to_string(stats.num_sequences) +
               ", num_pages_used=" + std::to_string(stats.num_pages_used) +
               ", num_pages_shared=" + std::to_string(stats.num_pages_shared) +
               ", num_pages_cached=" + std::to_string(stats.num_pages_cached) +
               ", num_pages_free=" + std::to_string(stats.num_pages_free) +
               ", num_prefix_hits=" + std::to_string(stats.num_prefix_hits) +
               ", num_copies_on_write=" + std::to_string(stats.num_copies_on_write) +
               ", num_evictions=" + std::to_string(stats.num_evictions) + ")";
      });
}

}  // namespace

void bind_kv_cache(nb::module_& module) {
  nb::class_<SequenceId>(
      module, "SequenceId",
      "Handle of a sequence in a KvCache; one that was freed, or that is another cache's, is recognised.")
      .def_ro("slot", &SequenceId::slot, "Index of the sequence's entry.")
      .def_ro("generation", &SequenceId::generation, "How often the entry was used before.")
      .def_ro("cache", &SequenceId::cache, "Number of the cache that made it, in this process.")
      .def(
          "__eq__",
          [](SequenceId a, nb::handle b) { return nb::isinstance<SequenceId>(b) && a == nb::cast<SequenceId>(b); },
          nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__",
           [](SequenceId id) {
             const std::uint64_t own = std::uint64_t{id.generation} << 32 | id.slot;
             return (own ^ id.cache * 0x9E3779B97F4A7C15u) % 0x7fffffffffffffff;
           })
      // A value that never changes: copies are as good as it is. It can't be pickled: another process has other caches.
      .def("__copy__", [](SequenceId id) { return id; })
      .def(
          "__deepcopy__", [](SequenceId id, nb::handle) { return id; }, "memo"_a,
          nb::sig("def __deepcopy__(self, memo: typing.Any) -> SequenceId"))
      .def("__repr__", [](SequenceId id) {
        return "SequenceId(slot=" + std::to_string(id.slot) + ", generation=" + std::to_string(id.generation) +
               ", cache=" + std::to_string(id.cache) + ")";
      });
  bind_stats(module);

  nb::class_<PyKvCache>(
      module, "KvCache",
      R"doc(Sequences on top of a KvPagePool: append, fork, truncate, free, shared prefixes, block tables.

pool: the KvPagePool that holds the keys and values; the cache keeps it alive.

Bookkeeping is on the host: `append` says where new tokens go (`kv_append` writes them there), `block_table` tells
`attention_paged` where to find them. A call that needs pages takes all of them, or raises OutOfPagesError and changes
nothing. A sequence that was freed, or that is another cache's, raises ValueError. Thread-safe.

Source: Kwon et al., PagedAttention (2023); prefix sharing: Zheng et al., RadixAttention (2024).

Example:

>>> import numpy as np, flashkernel as fk
>>> pool = fk.KvPagePool(8, heads_kv=1, head_dim=4, page_size=16, dtype="float32")
>>> cache = fk.KvCache(pool)
>>> sequence = cache.create()
>>> slots = cache.append(sequence, 20)
>>> k = v = np.ones((20, 1, 4), np.float32)
>>> fk.kv_append(k, v, pool.k_pages(), pool.v_pages(), slots)
>>> table, lengths = cache.block_table([sequence])
>>> table.shape, lengths.tolist()
((1, 2), [20])
>>> q = np.ones((1, 1, 1, 4), np.float32)
>>> fk.attention_paged(q, pool.k_pages(), pool.v_pages(), table, lengths, causal=True).ravel().tolist()
[1.0, 1.0, 1.0, 1.0]
>>> cache.free(sequence)
)doc")
      .def(
          "__init__",
          [](PyKvCache* self, const PyKvPagePool& pool) {
            new (self) PyKvCache{pool.pool, std::make_unique<KvCache>(*pool.pool)};
          },
          "pool"_a)
      .def_prop_ro(
          "pool", [](const PyKvCache& self) { return PyKvPagePool{self.pool}; },
          "The pool (a new object for the same pages).")
      .def(
          "create",
          [](PyKvCache& self, nb::handle tokens) {
            if (tokens.is_none()) return self.cache->create();
            const std::vector<std::int32_t> ids = parse_tokens("KvCache.create", tokens);
            std::int64_t num_cached = 0;
            return self.cache->create(ids.data(), static_cast<std::int64_t>(ids.size()), &num_cached);
          },
          "tokens"_a = nb::none(), nb::sig("def create(self, tokens: typing.Any = None) -> SequenceId"),
          "A new sequence: empty, or, given the token ids it will have, already holding the longest run of full pages "
          "that `publish` "
          "offered under exactly these tokens (never all of them: the last token is left to compute). `length` says "
          "how many.")
      .def(
          "publish",
          [](PyKvCache& self, SequenceId sequence, nb::handle tokens) {
            const std::vector<std::int32_t> ids = parse_tokens("KvCache.publish", tokens);
            self.cache->publish(sequence, ids.data(), static_cast<std::int64_t>(ids.size()));
          },
          "sequence"_a, "tokens"_a, nb::sig("def publish(self, sequence: SequenceId, tokens: typing.Any) -> None"),
          "Offers the sequence's full pages, which hold `tokens`, to later `create` calls.")
      .def(
          "fork", [](PyKvCache& self, SequenceId sequence) { return self.cache->fork(sequence); }, "sequence"_a,
          "A second sequence with the same tokens that shares every page; whoever appends to a shared, partly filled "
          "page gets a "
          "copy of it first.")
      .def(
          "truncate",
          [](PyKvCache& self, SequenceId sequence, std::int64_t length) { self.cache->truncate(sequence, length); },
          "sequence"_a, "length"_a,
          "Forgets tokens from `length` on; pages no longer needed are given back. Not past what `drop_before` gave "
          "back.")
      .def(
          "drop_before",
          [](PyKvCache& self, SequenceId sequence, std::int64_t position) {
            return self.cache->drop_before(sequence, position);
          },
          "sequence"_a, "position"_a,
          "Gives back the pages that hold only tokens before `position` and returns how many: for models whose queries "
          "look back no further (sliding window). The length stays; the blocks given back have page -1 in `pages` and "
          "`block_table`, which `attention_paged` does not use with a window that begins at `position` or later.")
      .def(
          "free", [](PyKvCache& self, SequenceId sequence) { self.cache->free(sequence); }, "sequence"_a,
          "Gives the sequence's pages back.")
      .def(
          "append",
          [](PyKvCache& self, SequenceId sequence, std::int64_t num_tokens, nb::handle stream) {
            if (num_tokens < 0)
              throw InvalidArgument("KvCache.append: num_tokens=" + std::to_string(num_tokens) +
                                    "; must not be negative");
            const KvPagePoolOptions& options = self.pool->options();
            // More tokens than the pool can ever hold: no array of slots is made for them, the cache refuses.
            const bool can_fit = num_tokens <= options.num_pages * options.page_size;
            auto [array, slots] = numpy_array<std::int64_t>("int64", nb::make_tuple(can_fit ? num_tokens : 0));
            const ExecutionContext context = context_of(self, stream);
            const nb::gil_scoped_release release;
            self.cache->append(sequence, num_tokens, slots, context);
            return array;
          },
          "sequence"_a, "num_tokens"_a = 1, nb::kw_only(), "stream"_a = nb::none(),
          nb::sig("def append(self, sequence: SequenceId, num_tokens: int = 1, *, stream: typing.Any = None) -> "
                  "numpy.ndarray"),
          "Room for more tokens: extends the sequence and returns their slots (page * page_size + offset), int64 "
          "[num_tokens], for "
          "`kv_append`. Copies a shared last page (all layers, on `stream`).")
      .def(
          "length", [](const PyKvCache& self, SequenceId sequence) { return self.cache->length(sequence); },
          "sequence"_a, "Tokens of a sequence.")
      .def(
          "num_pages", [](const PyKvCache& self, SequenceId sequence) { return self.cache->num_pages(sequence); },
          "sequence"_a, "Pages of a sequence.")
      .def(
          "pages",
          [](const PyKvCache& self, SequenceId sequence) {
            const std::vector<PageId> pages = self.cache->pages(sequence);
            auto [array, ids] = numpy_array<PageId>("int32", nb::make_tuple(pages.size()));
            std::copy(pages.begin(), pages.end(), ids);
            return array;
          },
          "sequence"_a, nb::sig("def pages(self, sequence: SequenceId) -> numpy.ndarray"),
          "Page of every block of a sequence, int32 [num_pages(sequence)]; -1 for those that `drop_before` gave back.")
      .def(
          "block_table",
          [](const PyKvCache& self, nb::handle sequences, std::optional<std::int64_t> max_pages) {
            const std::vector<SequenceId> ids = parse_sequences(sequences);
            for (;;) {
              const std::int64_t needed = pages_needed(*self.cache, ids), width = max_pages.value_or(needed);
              check_width(self, width, needed);
              const auto count = static_cast<std::int64_t>(ids.size());
              auto [table, entries] = numpy_array<std::int32_t>("int32", nb::make_tuple(count, width));
              auto [lengths, values] = numpy_array<std::int32_t>("int32", nb::make_tuple(count));
              try {
                self.cache->block_table(ids.data(), count, width, entries, values);
                return nb::make_tuple(table, lengths);
              } catch (const InvalidArgument&) {
                // Another thread's append, which runs without the GIL, may have come between: look once more.
                if (pages_needed(*self.cache, ids) <= width) throw;
              }
            }
          },
          "sequences"_a, "max_pages"_a = nb::none(),
          nb::sig(
              "def block_table(self, sequences: collections.abc.Iterable[SequenceId], max_pages: int | None = None) -> "
              "tuple[numpy.ndarray, numpy.ndarray]"),
          "(table, lengths) of some sequences for `attention_paged`: int32 [count, max_pages] with -1 in unused "
          "entries and dropped blocks, and int32 "
          "[count]. max_pages defaults to the largest that is needed.")
      .def(
          "drop_cached", [](PyKvCache& self) { return self.cache->drop_cached(); },
          "Drops every page that only the prefix index holds; returns how many.")
      .def(
          "stats", [](const PyKvCache& self) { return self.cache->stats(); },
          "Counts: sequences, pages, prefix hits, copies.");
}

}  // namespace flashkernel::python
