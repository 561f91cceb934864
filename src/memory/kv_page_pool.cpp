// KvPagePool: a stack of free pages and a reference count per page over two allocations, keys and values (and two more,
// the scales of 8-bit ones).
// Invariant: a page is on the stack exactly when its count is 0.
#include "flashkernel/kv_page_pool.hpp"

#include <limits>
#include <string>
#include <vector>

#include "core/fork_safe.hpp"
#include "flashkernel/error.hpp"
#include "memory/sizes.hpp"

namespace flashkernel {
namespace {

[[noreturn]] void refuse(const char* name, const std::string& got, const char* needed) {
  throw InvalidArgument(std::string("KvPagePool: ") + name + "=" + got + "; needs " + needed);
}

void require_positive(const char* name, std::int64_t value) {
  if (value < 1) refuse(name, std::to_string(value), "1 or more");
}

KvPagePoolOptions checked(KvPagePoolOptions options) {
  require_positive("num_pages", options.num_pages);
  if (options.num_pages > std::numeric_limits<PageId>::max()) {
    refuse("num_pages", std::to_string(options.num_pages), "2147483647 or less");
  }
  require_positive("heads_kv", options.heads_kv);
  require_positive("head_dim", options.head_dim);
  if (options.head_dim_v == 0) options.head_dim_v = options.head_dim;
  require_positive("head_dim_v", options.head_dim_v);
  switch (options.page_size) {
    case 16:
    case 32:
    case 64:
    case 128:
    case 256: break;
    default: refuse("page_size", std::to_string(options.page_size), "16, 32, 64, 128 or 256");
  }
  require_positive("num_layers", options.num_layers);
  const bool int4 = options.dtype == DType::kInt4x2;
  if (!is_floating(options.dtype) && !is_quantized(options.dtype) && !int4)
    refuse("dtype", dtype_name(options.dtype), "float32, float16, bfloat16, float8_e4m3fn, int8 or int4");
  if (int4 && options.head_dim % 2 != 0)
    refuse("head_dim", std::to_string(options.head_dim), "an even number with int4");
  if (int4 && options.head_dim_v % 2 != 0)
    refuse("head_dim_v", std::to_string(options.head_dim_v), "an even number with int4");
  options.token_scales = int4 || (options.token_scales && is_quantized(options.dtype));
  return options;
}

std::int64_t elements_of_byte(DType dtype) { return is_packed(dtype) ? 2 : 1; }

/// float32 words of scales of a token and head: of int4 a scale and a zero for each group of elements.
std::int64_t scale_words(const KvPagePoolOptions& options, std::int64_t dim) {
  return options.dtype == DType::kInt4x2 ? (dim + kInt4Group - 1) / kInt4Group : 1;
}

/// Bytes of one page in one layer, of keys (head_dim) or of values (head_dim_v), times num_layers and num_pages.
std::int64_t storage_bytes(const KvPagePoolOptions& options, std::int64_t dim, const char* what) {
  std::int64_t bytes = static_cast<std::int64_t>(dtype_bytes(options.dtype));
  dim /= elements_of_byte(options.dtype);
  for (const std::int64_t extent : {dim, options.heads_kv, options.page_size, options.num_pages, options.num_layers}) {
    if (!detail::multiply(bytes, extent)) {
      throw InvalidArgument(std::string("KvPagePool: the ") + what + " of " + std::to_string(options.num_layers) +
                            " layers x " + std::to_string(options.num_pages) + " pages x " +
                            std::to_string(options.page_size) + " tokens x " + std::to_string(options.heads_kv) +
                            " heads x " + std::to_string(dim) + " " + dtype_name(options.dtype) +
                            "; their bytes must fit in 63 bits");
    }
  }
  return bytes;
}

/// Bytes of the scales of keys, or of values. No more than four times that of the elements.
std::int64_t scale_bytes(const KvPagePoolOptions& options, std::int64_t dim) {
  if (!options.token_scales) return 0;
  KvPagePoolOptions scales = options;
  scales.dtype = DType::kFloat32;
  return storage_bytes(scales, scale_words(options, dim), "scales");
}

}  // namespace

struct KvPagePool::Impl {
  Impl(const KvPagePoolOptions& given, MemoryResource* given_resource)
      : options(checked(given)),
        k_bytes(storage_bytes(options, options.head_dim, "keys")),
        v_bytes(storage_bytes(options, options.head_dim_v, "values")),
        k_scale_bytes(scale_bytes(options, options.head_dim)),
        v_scale_bytes(scale_bytes(options, options.head_dim_v)),
        resource(given_resource != nullptr ? *given_resource : default_resource(options.device)) {
    if (resource.device() != options.device) {
      const std::string needed = "options.device, " + to_string(options.device);
      refuse("resource.device()", to_string(resource.device()), needed.c_str());
    }
    // The storage first: the lists of a pool that is far too large would take seconds to fill.
    k_data = static_cast<std::byte*>(resource.allocate(static_cast<std::size_t>(k_bytes)));
    try {
      v_data = static_cast<std::byte*>(resource.allocate(static_cast<std::size_t>(v_bytes)));
      if (k_scale_bytes > 0) {
        k_scale_data = static_cast<std::byte*>(resource.allocate(static_cast<std::size_t>(k_scale_bytes)));
        v_scale_data = static_cast<std::byte*>(resource.allocate(static_cast<std::size_t>(v_scale_bytes)));
      }
      const auto num_pages = static_cast<std::size_t>(options.num_pages);
      references.assign(num_pages, 0);
      free_pages.resize(num_pages);
      // Page 0 on top.
      for (std::size_t i = 0; i < num_pages; ++i) free_pages[i] = static_cast<PageId>(num_pages - 1 - i);
    } catch (...) {
      release();
      throw;
    }
  }

  ~Impl() { release(); }

  void release() noexcept {
    if (k_scale_data != nullptr) resource.deallocate(k_scale_data, static_cast<std::size_t>(k_scale_bytes));
    if (v_scale_data != nullptr) resource.deallocate(v_scale_data, static_cast<std::size_t>(v_scale_bytes));
    if (v_data != nullptr) resource.deallocate(v_data, static_cast<std::size_t>(v_bytes));
    resource.deallocate(k_data, static_cast<std::size_t>(k_bytes));
  }

  std::size_t page_bytes() const noexcept {
    // Each addend is at most 2^63 / num_pages.
    return static_cast<std::size_t>(k_bytes / options.num_pages) +
           static_cast<std::size_t>(v_bytes / options.num_pages) +
           static_cast<std::size_t>(k_scale_bytes / options.num_pages) +
           static_cast<std::size_t>(v_scale_bytes / options.num_pages);
  }

  std::size_t check_page(const char* op, PageId page) const {
    if (page < 0 || page >= options.num_pages) {
      throw InvalidArgument(std::string("KvPagePool.") + op + ": page=" + std::to_string(page) + "; needs 0.." +
                            std::to_string(options.num_pages - 1));
    }
    return static_cast<std::size_t>(page);
  }

  void check_count(const char* op, std::int64_t count, const PageId* pages) const {
    if (count < 0 || (count > 0 && pages == nullptr)) {
      throw InvalidArgument(std::string("KvPagePool.") + op + ": count=" + std::to_string(count) +
                            (count < 0 ? "; needs 0 or more" : " and pages is null"));
    }
  }

  /// The count of a page that must be taken.
  std::int32_t& taken(const char* op, PageId page) {
    std::int32_t& count = references[check_page(op, page)];
    if (count == 0) {
      throw InvalidArgument(std::string("KvPagePool.") + op + ": page=" + std::to_string(page) +
                            " is free; needs a page that is taken");
    }
    return count;
  }

  void retain_one(PageId page) {
    std::int32_t& count = taken("retain", page);
    if (count == std::numeric_limits<std::int32_t>::max()) {
      throw InvalidArgument("KvPagePool.retain: page=" + std::to_string(page) +
                            " has 2147483647 references; needs fewer");
    }
    ++count;
  }

  void give_back_one(PageId page) {
    std::int32_t& count = taken("give_back", page);
    if (--count == 0) free_pages.push_back(page);  // never reallocates: its capacity is num_pages
  }

  TensorView view(const char* op, std::byte* data, std::int64_t bytes, std::int64_t dim, std::int64_t layer) const {
    if (layer < 0 || layer >= options.num_layers) {
      throw InvalidArgument(std::string("KvPagePool.") + op + ": layer=" + std::to_string(layer) + "; needs 0.." +
                            std::to_string(options.num_layers - 1));
    }
    return TensorView(data + bytes / options.num_layers * layer, options.dtype,
                      {options.num_pages, options.page_size, options.heads_kv, dim / elements_of_byte(options.dtype)},
                      options.device);
  }

  /// Layers lie one after another.
  TensorView all_layers(const TensorView& first) const {
    TensorView view = first;
    view.ndim = first.ndim + 1;
    for (int d = 0; d < first.ndim; ++d) view.shape[d + 1] = first.shape[d], view.strides[d + 1] = first.strides[d];
    view.shape[0] = options.num_layers;
    view.strides[0] = first.shape[0] * first.strides[0];
    return view;
  }

  /// The scales beside a view of pages.
  TensorView scale_view(std::byte* data, std::int64_t bytes, std::int64_t dim, std::int64_t layer) const {
    std::byte* const begin = data + bytes / options.num_layers * layer;
    if (options.dtype == DType::kInt4x2)
      return TensorView(begin, DType::kFloat16,
                        {options.num_pages, options.heads_kv, options.page_size, scale_words(options, dim), 2},
                        options.device);
    return TensorView(begin, DType::kFloat32, {options.num_pages, options.heads_kv, options.page_size}, options.device);
  }

  const KvPagePoolOptions options;
  const std::int64_t k_bytes;
  const std::int64_t v_bytes;
  const std::int64_t k_scale_bytes, v_scale_bytes;  // both 0: none
  MemoryResource& resource;
  std::byte* k_data = nullptr;
  std::byte* v_data = nullptr;
  std::byte* k_scale_data = nullptr;
  std::byte* v_scale_data = nullptr;

  mutable ForkSafeMutex mutex;
  std::vector<std::int32_t> references;
  std::vector<PageId> free_pages;
};

KvPagePool::KvPagePool(const KvPagePoolOptions& options, MemoryResource* resource)
    : impl_(std::make_unique<Impl>(options, resource)) {}
KvPagePool::~KvPagePool() = default;

const KvPagePoolOptions& KvPagePool::options() const noexcept { return impl_->options; }
std::size_t KvPagePool::page_bytes() const noexcept { return impl_->page_bytes(); }

std::int64_t KvPagePool::num_free() const {
  const ForkSafeLock lock(impl_->mutex);
  return static_cast<std::int64_t>(impl_->free_pages.size());
}

std::int64_t KvPagePool::num_used() const { return impl_->options.num_pages - num_free(); }

PageId KvPagePool::take() {
  PageId page = 0;
  take(1, &page);
  return page;
}

void KvPagePool::take(std::int64_t count, PageId* pages) {
  Impl& impl = *impl_;
  impl.check_count("take", count, pages);
  const ForkSafeLock lock(impl.mutex);
  const std::size_t num_free = impl.free_pages.size();
  if (static_cast<std::uint64_t>(count) > num_free) {
    throw OutOfPages("KvPagePool: out of pages; requested " + std::to_string(count) + ", free " +
                         std::to_string(num_free) + " of " + std::to_string(impl.options.num_pages),
                     static_cast<std::size_t>(count), num_free, static_cast<std::size_t>(impl.options.num_pages),
                     impl.page_bytes());
  }
  for (std::int64_t i = 0; i < count; ++i) {
    pages[i] = impl.free_pages.back();
    impl.free_pages.pop_back();
    impl.references[static_cast<std::size_t>(pages[i])] = 1;
  }
}

void KvPagePool::retain(PageId page) { retain(1, &page); }

void KvPagePool::retain(std::int64_t count, const PageId* pages) {
  Impl& impl = *impl_;
  impl.check_count("retain", count, pages);
  const ForkSafeLock lock(impl.mutex);
  std::int64_t i = 0;
  try {
    for (; i < count; ++i) impl.retain_one(pages[i]);
  } catch (...) {
    while (i-- > 0) --impl.references[static_cast<std::size_t>(pages[i])];
    throw;
  }
}

void KvPagePool::give_back(PageId page) { give_back(1, &page); }

void KvPagePool::give_back(std::int64_t count, const PageId* pages) {
  Impl& impl = *impl_;
  impl.check_count("give_back", count, pages);
  const ForkSafeLock lock(impl.mutex);
  std::int64_t i = 0;
  try {
    for (; i < count; ++i) impl.give_back_one(pages[i]);
  } catch (...) {
    while (i-- > 0) {  // the stack undoes itself from the top
      if (impl.references[static_cast<std::size_t>(pages[i])]++ == 0) impl.free_pages.pop_back();
    }
    throw;
  }
}

std::int32_t KvPagePool::num_references(PageId page) const {
  const std::size_t index = impl_->check_page("num_references", page);
  const ForkSafeLock lock(impl_->mutex);
  return impl_->references[index];
}

TensorView KvPagePool::k_pages(std::int64_t layer) const {
  return impl_->view("k_pages", impl_->k_data, impl_->k_bytes, impl_->options.head_dim, layer);
}

TensorView KvPagePool::v_pages(std::int64_t layer) const {
  return impl_->view("v_pages", impl_->v_data, impl_->v_bytes, impl_->options.head_dim_v, layer);
}

TensorView KvPagePool::k_layers() const { return impl_->all_layers(k_pages()); }
TensorView KvPagePool::v_layers() const { return impl_->all_layers(v_pages()); }

KvScales KvPagePool::scales(std::int64_t layer) const {
  (void)k_pages(layer);  // a layer that there is
  const Impl& impl = *impl_;
  if (impl.k_scale_bytes == 0) return {};
  return {impl.scale_view(impl.k_scale_data, impl.k_scale_bytes, impl.options.head_dim, layer),
          impl.scale_view(impl.v_scale_data, impl.v_scale_bytes, impl.options.head_dim_v, layer)};
}

}  // namespace flashkernel
