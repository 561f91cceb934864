// See kv_scales.hpp.
#include "ops/kv_scales.hpp"

namespace flashkernel {
namespace {

constexpr const char* kNeeded = "float32 [heads_kv] or [num_pages, heads_kv, page_size]";

KvScale check_scale(const Checker& check, const char* name, const TensorView& scale, const TensorView& pages) {
  check.dtype(name, scale, DType::kFloat32);
  if (scale.ndim != 1 && scale.ndim != 3)
    check.fail(std::string(name) + " is " + to_string(scale) + "; needs " + kNeeded);
  check.last_dim_contiguous(name, scale);
  if (scale.ndim == 1) {
    check.extent(name, scale, 0, pages.shape[2], "k_pages.shape[2]");
    return {static_cast<float*>(scale.data), 0, 1, 0};
  }
  check.extent(name, scale, 0, pages.shape[0], "k_pages.shape[0]");
  check.extent(name, scale, 1, pages.shape[2], "k_pages.shape[2]");
  check.extent(name, scale, 2, pages.shape[1], "k_pages.shape[1]");
  return {static_cast<float*>(scale.data), scale.strides[0], scale.strides[1], 1};
}

}  // namespace

KvQuantization check_kv_scales(const Checker& check, const KvScales& scales, const TensorView& k_pages,
                               const TensorView& v_pages, bool written) {
  const bool quantized = is_quantized(k_pages.dtype), given = scales.k.defined() || scales.v.defined();
  if (v_pages.dtype != k_pages.dtype)
    check.fail(std::string("v_pages is ") + dtype_name(v_pages.dtype) + "; needs " + dtype_name(k_pages.dtype));
  if (!quantized) {
    if (given)
      check.fail(std::string("scales are given but k_pages is ") + dtype_name(k_pages.dtype) +
                 "; they are for pages of float8_e4m3fn and int8");
    return {};
  }
  if (!scales.k.defined() || !scales.v.defined())
    check.fail(std::string(scales.k.defined() ? "v_scales" : "k_scales") + " is absent but k_pages is " +
               dtype_name(k_pages.dtype) + "; needs " + kNeeded);
  KvQuantization quantization;
  quantization.present = true;
  quantization.k = check_scale(check, "k_scales", scales.k, k_pages);
  quantization.v = check_scale(check, "v_scales", scales.v, v_pages);
  if (scales.k.ndim != scales.v.ndim)
    check.fail("k_scales is " + to_string(scales.k) + " but v_scales is " + to_string(scales.v) +
               "; both need one scale a head, or both one a token and head");
  quantization.per_token = scales.k.ndim == 3;
  if (!written) return quantization;
  for (const TensorView* pages : {&k_pages, &v_pages}) {
    const char* const name = pages == &k_pages ? "k_pages" : "v_pages";
    check.no_overlap(name, *pages, "k_scales", scales.k);
    check.no_overlap(name, *pages, "v_scales", scales.v);
  }
  if (quantization.per_token) {
    check.writable("k_scales", scales.k);
    check.writable("v_scales", scales.v);
    check.no_overlap("k_scales", scales.k, "v_scales", scales.v);
  }
  return quantization;
}

}  // namespace flashkernel
