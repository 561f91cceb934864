// The keyword arguments `kv_scales` and `kv_dtype` of the ops that take pages. Used by bind_kv_ops.cpp and
// bind_attention.cpp.
#pragma once

#include "array_type.hpp"
#include "bindings.hpp"
#include "flashkernel/kv_scales.hpp"

namespace flashkernel::python {

/// kv_scales is None, a pair (k_scales, v_scales), or for NVFP4 these and two numbers, the scales of the whole tensors.
/// `written`: by kv_append and kv_copy_pages, where there is one a token.
inline KvScales parse_kv_scales(Call& call, nb::handle kv_scales, bool written) {
  KvScales scales;
  if (kv_scales.is_none()) return scales;
  nb::object k, v;
  if (nb::isinstance<nb::tuple>(kv_scales) && nb::len(kv_scales) == 4) {
    const auto four = nb::borrow<nb::tuple>(kv_scales);
    k = four[0], v = four[1];
    if (!nb::try_cast(four[2], scales.k_tensor) || !nb::try_cast(four[3], scales.v_tensor))
      call.fail("kv_scales[2] and kv_scales[3], the scales of the whole tensors, are no numbers");
  } else {
    std::tie(k, v) =
        parse_pair(call, "kv_scales", kv_scales, "a pair (k_scales, v_scales), or a tuple of these and two numbers,");
  }
  const auto import = [&](const char* name, const nb::object& array) {
    TensorView view = call.input(name, array);
    return written && view.ndim >= 3 ? call.inout(name, array) : view;  // read-only memory is refused
  };
  scales.k = import("k_scales", k);
  scales.v = import("v_scales", v);
  return scales;
}

inline constexpr const char* kKvDtypes = "'float8_e4m3fn', 'int8', 'int4' or 'float4_e2m1fn_x2'";

/// Pages of bytes as what `kv_dtype` says they are: for frameworks without such a type.
inline void apply_kv_dtype(const Call& call, nb::handle kv_dtype, TensorView& k_pages, TensorView& v_pages) {
  DType dtype = DType::kUInt8;
  if (!kv_dtype.is_none()) {
    dtype = parse_dtype(call.op(), kv_dtype);
    if (!is_quantized(dtype) && !is_packed(dtype))
      call.fail("kv_dtype=" + short_repr(kv_dtype) + "; it says how uint8 pages are read and can be " + kKvDtypes);
  }
  for (TensorView* pages : {&k_pages, &v_pages}) {
    if (pages->dtype == DType::kUInt8 && kv_dtype.is_none())
      call.fail(std::string(pages == &k_pages ? "k_pages" : "v_pages") +
                " has dtype uint8; pass kv_dtype=" + kKvDtypes + " to say what its bytes are");
    if (!kv_dtype.is_none() && pages->dtype != DType::kUInt8 && pages->dtype != dtype)
      call.fail(std::string(pages == &k_pages ? "k_pages" : "v_pages") + " is " + dtype_name(pages->dtype) +
                " but kv_dtype is " + dtype_name(dtype) + "; it is for uint8 pages");
    if (!kv_dtype.is_none()) pages->dtype = dtype;
  }
}

/// Numbers in a row of pages.
inline std::int64_t kv_columns(const TensorView& pages) { return extent(pages, -1) * (is_packed(pages.dtype) ? 2 : 1); }

}  // namespace flashkernel::python
