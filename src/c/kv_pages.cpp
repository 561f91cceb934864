// The page pool of the C API.
#include <utility>

#include "c/call.hpp"
#include "c/handles.hpp"
#include "flashkernel/flashkernel.h"

using namespace flashkernel::c;

namespace {

fk_kv_page_pool_options default_options() noexcept {
  const flashkernel::KvPagePoolOptions options;
  return {sizeof(fk_kv_page_pool_options),
          options.num_pages,
          options.heads_kv,
          options.head_dim,
          options.head_dim_v,
          options.page_size,
          options.num_layers,
          static_cast<fk_dtype>(options.dtype),
          options.token_scales,
          {FK_CPU, 0}};
}

flashkernel::KvPagePool& pool_of(const fk_kv_page_pool* pool) {
  check_pointer("pool", pool);
  return pool->shared->pool;
}

}  // namespace

fk_status fk_kv_page_pool_options_init(fk_kv_page_pool_options* options, size_t size) {
  return guarded([&] { give("kv_page_pool_options", default_options(), options, size); });
}

fk_status fk_kv_page_pool_create(const fk_kv_page_pool_options* options, fk_memory* memory, fk_kv_page_pool** pool) {
  return guarded([&] {
    check_pointer("options", options);
    check_pointer("pool", pool);
    const fk_kv_page_pool_options c = take("kv_page_pool_options", *options, default_options());
    flashkernel::KvPagePoolOptions known;
    known.num_pages = c.num_pages;
    known.heads_kv = c.heads_kv;
    known.head_dim = c.head_dim;
    known.head_dim_v = c.head_dim_v;
    known.page_size = c.page_size;
    known.num_layers = c.num_layers;
    known.dtype = dtype_of("kv_page_pool_options", c.dtype);
    known.token_scales = flag_of("kv_page_pool_options.token_scales", c.token_scales);
    known.device = device_of("kv_page_pool_options", c.device);
    *pool = new fk_kv_page_pool{std::make_shared<PoolOnMemory>(known, memory ? memory->resource : nullptr)};
  });
}

void fk_kv_page_pool_destroy(fk_kv_page_pool* pool) { delete pool; }

uint64_t fk_kv_page_pool_page_bytes(const fk_kv_page_pool* pool) { return pool ? pool->shared->pool.page_bytes() : 0; }

int64_t fk_kv_page_pool_num_free(const fk_kv_page_pool* pool) {
  int64_t count = 0;
  if (pool) guarded([&] { count = pool->shared->pool.num_free(); });
  return count;
}

int64_t fk_kv_page_pool_num_used(const fk_kv_page_pool* pool) {
  int64_t count = 0;
  if (pool) guarded([&] { count = pool->shared->pool.num_used(); });
  return count;
}

fk_status fk_kv_page_pool_take(fk_kv_page_pool* pool, int64_t count, int32_t* pages) {
  return guarded([&] {
    check_array("pages", pages, count);
    pool_of(pool).take(count, pages);
  });
}

fk_status fk_kv_page_pool_retain(fk_kv_page_pool* pool, int64_t count, const int32_t* pages) {
  return guarded([&] {
    check_array("pages", pages, count);
    pool_of(pool).retain(count, pages);
  });
}

fk_status fk_kv_page_pool_give_back(fk_kv_page_pool* pool, int64_t count, const int32_t* pages) {
  return guarded([&] {
    check_array("pages", pages, count);
    pool_of(pool).give_back(count, pages);
  });
}

fk_status fk_kv_page_pool_num_references(const fk_kv_page_pool* pool, int32_t page, int32_t* count) {
  return guarded([&] {
    check_pointer("count", count);
    *count = pool_of(pool).num_references(page);
  });
}

fk_status fk_kv_page_pool_k_pages(const fk_kv_page_pool* pool, int64_t layer, fk_tensor* k_pages) {
  return guarded([&] {
    check_pointer("k_pages", k_pages);
    *k_pages = tensor_in_c(pool_of(pool).k_pages(layer));
  });
}

fk_status fk_kv_page_pool_v_pages(const fk_kv_page_pool* pool, int64_t layer, fk_tensor* v_pages) {
  return guarded([&] {
    check_pointer("v_pages", v_pages);
    *v_pages = tensor_in_c(pool_of(pool).v_pages(layer));
  });
}

fk_status fk_kv_page_pool_scales(const fk_kv_page_pool* pool, int64_t layer, fk_tensor* k, fk_tensor* v) {
  return guarded([&] {
    check_pointer("k", k);
    check_pointer("v", v);
    const flashkernel::KvScales scales = pool_of(pool).scales(layer);
    if (!scales.k.defined())
      throw flashkernel::InvalidArgument(
          "fk_kv_page_pool_scales: the pool has no scales; only 8-bit pages with "
          "token_scales have");
    *k = tensor_in_c(scales.k);
    *v = tensor_in_c(scales.v);
  });
}
