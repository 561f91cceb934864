// The opaque handles of the C API. Each shares what it was made from, so that handles may be destroyed in any order.
#pragma once

#include <memory>
#include <vector>

#include "flashkernel/execution.hpp"
#include "flashkernel/flashkernel_types.h"
#include "flashkernel/kernels.hpp"
#include "flashkernel/kv_cache.hpp"
#include "flashkernel/kv_page_pool.hpp"
#include "flashkernel/memory_resource.hpp"

namespace flashkernel::c {

struct PoolOnMemory {
  std::shared_ptr<MemoryResource> memory;  // null: the device's default
  KvPagePool pool;
  PoolOnMemory(const KvPagePoolOptions& options, std::shared_ptr<MemoryResource> given)
      : memory(std::move(given)), pool(options, memory.get()) {}
};

}  // namespace flashkernel::c

struct fk_memory {
  std::shared_ptr<flashkernel::MemoryResource> resource;
};

struct fk_explanation {
  flashkernel::Explanation value;
};

struct fk_kernel_list {
  std::vector<flashkernel::KernelInfo> kernels;
};

struct fk_kv_page_pool {
  std::shared_ptr<flashkernel::c::PoolOnMemory> shared;
};

struct fk_kv_cache {
  std::shared_ptr<flashkernel::c::PoolOnMemory> pool;
  flashkernel::KvCache cache;
  explicit fk_kv_cache(std::shared_ptr<flashkernel::c::PoolOnMemory> given)
      : pool(std::move(given)), cache(pool->pool) {}
};
