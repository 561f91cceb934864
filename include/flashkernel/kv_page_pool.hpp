// A fixed set of fixed-size pages for keys and values, taken and given back in O(1), with reference counts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "flashkernel/kv_scales.hpp"
#include "flashkernel/memory_resource.hpp"
#include "flashkernel/tensor_view.hpp"

namespace flashkernel {

using PageId = std::int32_t;

struct KvPagePoolOptions {
  std::int64_t num_pages = 0;
  std::int64_t heads_kv = 0;
  std::int64_t head_dim = 0;
  std::int64_t head_dim_v = 0;    ///< 0: head_dim
  std::int64_t page_size = 256;   ///< tokens: 16, 32, 64, 128 or 256
  std::int64_t num_layers = 1;    ///< one page id covers the same tokens in every layer
  DType dtype = DType::kFloat16;  ///< float32, float16, bfloat16, float8_e4m3fn, int8 or int4
  /// 8-bit pages: the pool stores a scale a token and head; false: the caller has scales. (Of int4 it stores them
  /// always.)
  bool token_scales = true;
  Device device{};
};

/// Storage and bookkeeping of pages. A page taken has one reference; it returns to the free list when the last one is
/// given up. Exhaustion is OutOfPages and a page that is not taken is InvalidArgument; both leave everything as it was.
/// Thread-safe.
/// The pool orders nothing on streams: whoever gives a page back makes sure that queued work which reads it is followed
/// by the work of the next owner (one stream is enough for that), and that none is left when the pool is destroyed.
class FK_API KvPagePool {
 public:
  /// Storage comes from `resource` (null: the device's default_resource), which must outlive the pool. It is not
  /// initialised.
  explicit KvPagePool(const KvPagePoolOptions& options, MemoryResource* resource = nullptr);
  ~KvPagePool();
  KvPagePool(const KvPagePool&) = delete;
  KvPagePool& operator=(const KvPagePool&) = delete;

  /// As given, with `head_dim_v` filled in and `token_scales` false for pages that need none.
  const KvPagePoolOptions& options() const noexcept;
  /// Bytes of one page: keys and values of all layers, and their scales.
  std::size_t page_bytes() const noexcept;
  std::int64_t num_free() const;
  std::int64_t num_used() const;

  PageId take();
  /// All `count` pages or none.
  void take(std::int64_t count, PageId* pages);
  /// One more reference to a taken page; all of `count` or none.
  void retain(PageId page);
  void retain(std::int64_t count, const PageId* pages);
  /// One reference less; all of `count` or none. The page given back last is the next to be taken.
  void give_back(PageId page);
  void give_back(std::int64_t count, const PageId* pages);
  /// 0 for a free page.
  std::int32_t num_references(PageId page) const;

  /// [num_pages, page_size, heads_kv, head_dim] of one layer; layers lie one after another. Of int4 the last dim counts
  /// bytes, head_dim / 2.
  TensorView k_pages(std::int64_t layer = 0) const;
  /// [num_pages, page_size, heads_kv, head_dim_v]
  TensorView v_pages(std::int64_t layer = 0) const;
  /// [num_layers, num_pages, page_size, heads_kv, head_dim]: the same of all layers.
  TensorView k_layers() const;
  /// [num_layers, num_pages, page_size, heads_kv, head_dim_v].
  TensorView v_layers() const;
  /// float32 [num_pages, heads_kv, page_size] of one layer, beside pages of 8-bit elements; float16 [num_pages,
  /// heads_kv, page_size, ceil(head_dim / 32), 2] beside int4; else absent.
  KvScales scales(std::int64_t layer = 0) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace flashkernel
