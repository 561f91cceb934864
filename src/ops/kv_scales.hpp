// The check of an 8-bit cache's scales, shared by the front doors that take pages (kv_ops.cpp, attention_check.cpp).
#pragma once

#include "flashkernel/kv_scales.hpp"
#include "ops/check.hpp"

namespace flashkernel {

/// The dtype of k_pages and v_pages: one dtype, floating or 8-bit; and their scales, present where it is 8-bit and only
/// there. Pages are [num_pages, page_size, heads_kv, *] (checked before). `written`: pages, and scales of tokens, are.
KvQuantization check_kv_scales(const Checker& check, const KvScales& scales, const TensorView& k_pages,
                               const TensorView& v_pages, bool written);

}  // namespace flashkernel
