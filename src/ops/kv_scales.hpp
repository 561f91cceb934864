// The check of the scales of a cache of 8 or 4 bits, shared by the front doors that take pages (kv_ops.cpp,
// attention_check.cpp).
#pragma once

#include "flashkernel/kv_scales.hpp"
#include "ops/check.hpp"

namespace flashkernel {

/// The dtype of k_pages and v_pages: one dtype, floating or of 8 or 4 bits; and their scales, present with the latter
/// and only there. Pages are [num_pages, page_size, heads_kv, *] (checked before). `written`: pages, and scales of
/// tokens, are.
KvQuantization check_kv_scales(const Checker& check, const KvScales& scales, const TensorView& k_pages,
                               const TensorView& v_pages, bool written);

/// Whether pages of this dtype have scales.
inline bool has_scales(DType dtype) { return is_quantized(dtype) || is_packed(dtype); }

/// Numbers in a row of pages: elements, which may lie two in a byte.
inline std::int64_t columns_of(const TensorView& pages) {
  return pages.shape[pages.ndim - 1] * (is_packed(pages.dtype) ? 2 : 1);
}

}  // namespace flashkernel
