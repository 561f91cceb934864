// The Python objects behind KvPagePool and KvCache. Shared by bind_kv_page_pool.cpp and bind_kv_cache.cpp.
// Invariant: whatever reads a pool's pages (a cache, an array) owns a share of it, so order of destruction can't
// matter.
#pragma once

#include <memory>

#include "flashkernel/kv_cache.hpp"
#include "flashkernel/kv_page_pool.hpp"

namespace flashkernel::python {

struct PyKvPagePool {
  std::shared_ptr<KvPagePool> pool;
};

struct PyKvCache {
  std::shared_ptr<KvPagePool> pool;  // outlives the cache: destroyed after it
  std::unique_ptr<KvCache> cache;
};

}  // namespace flashkernel::python
