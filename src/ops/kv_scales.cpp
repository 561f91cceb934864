// See kv_scales.hpp.
#include "ops/kv_scales.hpp"

namespace flashkernel {
namespace {

constexpr const char* kNeeded = "float32 [heads_kv] or [num_pages, heads_kv, page_size]";

const char* needed(DType pages) {
  switch (pages) {
    case DType::kInt4x2: return "float16 [num_pages, heads_kv, page_size, groups, 2]";
    case DType::kFloat4E2M1x2: return "float8_e4m3fn [num_pages, heads_kv, page_size, groups]";
    default: return kNeeded;
  }
}

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

/// Scales of 4-bit elements: a group of neighbours has one.
KvScale check_group_scale(const Checker& check, const char* name, const TensorView& scale, const TensorView& pages,
                          float tensor) {
  const bool is_int4 = pages.dtype == DType::kInt4x2;
  check.dtype(name, scale, is_int4 ? DType::kFloat16 : DType::kFloat8E4M3);
  const int dims = is_int4 ? 5 : 4;
  check.ndim(name, scale, dims, dims);
  const std::int64_t group = is_int4 ? kInt4Group : kNvfp4Group, groups = (columns_of(pages) + group - 1) / group;
  check.extent(name, scale, 0, pages.shape[0], "k_pages.shape[0]");
  check.extent(name, scale, 1, pages.shape[2], "k_pages.shape[2]");
  check.extent(name, scale, 2, pages.shape[1], "k_pages.shape[1]");
  check.extent(name, scale, 3, groups, is_int4 ? "a group for 32 elements" : "a group for 16 elements");
  if (is_int4) check.extent(name, scale, 4, 2, "scale and zero");
  check.last_dim_contiguous(name, scale);
  // A scale and its zero are one word.
  bool words =
      !is_int4 || (reinterpret_cast<std::uintptr_t>(scale.data) % 4 == 0 && (groups == 1 || scale.strides[3] == 2));
  for (int d = 0; is_int4 && d < 3; ++d) words = words && scale.strides[d] % 2 == 0;
  if (!words)
    check.fail(std::string(name) + " is " + to_string(scale) +
               "; scale and zero of a group must be one aligned word, and the groups of a row must lie side by side");
  const std::int64_t unit = is_int4 ? 2 : 1;
  return {static_cast<float*>(scale.data), scale.strides[0] / unit,  scale.strides[1] / unit,
          scale.strides[2] / unit,         static_cast<int>(groups), tensor};
}

}  // namespace

KvQuantization check_kv_scales(const Checker& check, const KvScales& scales, const TensorView& k_pages,
                               const TensorView& v_pages, bool written) {
  const bool packed = is_packed(k_pages.dtype), quantized = has_scales(k_pages.dtype),
             given = scales.k.defined() || scales.v.defined();
  if (v_pages.dtype != k_pages.dtype)
    check.fail(std::string("v_pages is ") + dtype_name(v_pages.dtype) + "; needs " + dtype_name(k_pages.dtype));
  if (!quantized) {
    if (given)
      check.fail(std::string("scales are given but k_pages is ") + dtype_name(k_pages.dtype) +
                 "; they are for pages of float8_e4m3fn, int8, int4 and float4_e2m1fn_x2");
    return {};
  }
  if (!scales.k.defined() || !scales.v.defined())
    check.fail(std::string(scales.k.defined() ? "v_scales" : "k_scales") + " is absent but k_pages is " +
               dtype_name(k_pages.dtype) + "; needs " + needed(k_pages.dtype));
  if (k_pages.dtype != DType::kFloat4E2M1x2 && (scales.k_tensor != 1 || scales.v_tensor != 1))
    check.fail(std::string("scales of whole tensors are given but k_pages is ") + dtype_name(k_pages.dtype) +
               "; they are for pages of float4_e2m1fn_x2");
  KvQuantization quantization;
  quantization.present = true;
  if (packed) {
    quantization.packed = true;
    quantization.k = check_group_scale(check, "k_scales", scales.k, k_pages, scales.k_tensor);
    quantization.v = check_group_scale(check, "v_scales", scales.v, v_pages, scales.v_tensor);
  } else {
    quantization.k = check_scale(check, "k_scales", scales.k, k_pages);
    quantization.v = check_scale(check, "v_scales", scales.v, v_pages);
  }
  if (scales.k.ndim != scales.v.ndim)
    check.fail("k_scales is " + to_string(scales.k) + " but v_scales is " + to_string(scales.v) +
               "; both need one scale a head, or both one a token and head");
  quantization.per_token = packed || scales.k.ndim == 3;
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
