// Shared by every params struct: plain data, legal on host and device.
#pragma once

#include <cstdint>

#include "flashkernel/types.hpp"

#if defined(__CUDACC__)
#define FK_HOST_DEVICE __host__ __device__
#else
#define FK_HOST_DEVICE
#endif

namespace flashkernel {

/// A contiguous or strided run of int32 or int64 values; null when absent.
struct IndexArray {
  const void* data = nullptr;
  bool is_int64 = false;

  FK_HOST_DEVICE std::int64_t operator[](std::int64_t i) const {
    return is_int64 ? static_cast<const std::int64_t*>(data)[i] : static_cast<const std::int32_t*>(data)[i];
  }
  FK_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
};

/// A read-only vector or matrix in fp32 or the op's dtype; null when absent.
struct TypedPointer {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  FK_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
};

/// Scales of a cache's keys or values: one a kv head (the strides of pages and slots are 0), or one a token and head.
/// Of 4-bit elements: `groups` of them, side by side, a token and head. A scale and zero of int4 are one word of 4
/// bytes here, as a float is; a scale of NVFP4 is a byte, and its strides count bytes.
struct KvScale {
  float* data = nullptr;
  std::int64_t stride_page = 0, stride_head = 0, stride_slot = 0;
  int groups = 1;
  float tensor = 1.0f;  // NVFP4: scale of the tensor

  FK_HOST_DEVICE float* at(std::int64_t page, std::int64_t head, std::int64_t slot) const {
    return data + page * stride_page + head * stride_head + slot * stride_slot;
  }
};

/// How 8-bit or 4-bit elements of a cache become numbers. False where the cache holds numbers itself.
struct KvQuantization {
  bool present = false;
  bool per_token = false;  // else one scale a kv head
  bool packed = false;     // 4-bit elements, two a byte (kv_packed_params.hpp); strides of pages count bytes
  KvScale k, v;
  FK_HOST_DEVICE explicit operator bool() const { return present; }
};

/// Largest number that an 8-bit element holds; a scale of its own maps a row's largest magnitude to it.
FK_HOST_DEVICE static constexpr float largest_element(DType dtype) {
  return dtype == DType::kFloat8E4M3 ? 448.0f : 127.0f;
}

/// The scale of a row whose largest magnitude is `largest` (NaN where int8 has to keep one). Never 0, nor infinite, so
/// that 1 / scale is a number; 2^-100 is below what any row of fp16 needs and far from where fp32 loses bits.
FK_HOST_DEVICE static inline float row_scale(float largest, float largest_element) {
  constexpr float kLeast = 7.888609052210118e-31f, kMost = 3.4028234663852886e38f;
  const float scale = (largest > kMost ? kMost : largest) / largest_element;
  return scale < kLeast ? kLeast : scale;
}

// How much a call has to do is what both backends' cost models divide by their rates: each params struct has a function
// `double work_of(const Params&)`. It counts terms of sums for products and attention, and elements for what is bound
// by memory. All rows of an op measure a call alike, so that their costs differ by their rates alone.
namespace work {
inline double product(std::int64_t a, std::int64_t b) { return static_cast<double>(a) * static_cast<double>(b); }
inline double volume(const std::int64_t* shape, int ndim) {
  double elements = 1;
  for (int d = 0; d < ndim; ++d) elements *= static_cast<double>(shape[d]);
  return elements;
}
}  // namespace work

}  // namespace flashkernel
