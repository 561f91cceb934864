// What the kernels of quantized_linear get, and where the parts of a block of weights lie. Filled by
// ops/quantized_linear.cpp, which folds x's leading dims into rows.
#pragma once

#include "ops/params_common.hpp"

namespace flashkernel {

struct QuantizedLinearParams {
  static constexpr const char* kOp = "quantized_linear";

  DType dtype = DType::kFloat32;  // of x and out
  Device device{};
  WeightFormat format = WeightFormat::kInt4;
  // Blocks of 16 rows of the weight lie side by side, 2 bytes and then 4 at a time (flashkernel/quantized_linear.hpp):
  // stride_weight_row bytes are between two groups of 16 rows.
  bool tiles = false;
  std::int64_t rows = 0, in_features = 0, out_features = 0;
  const void* x = nullptr;               // [rows, in_features], rows stride_x_row apart, last dim contiguous
  const std::uint8_t* weight = nullptr;  // rows (tiles: groups of 16 rows) stride_weight_row bytes apart
  std::int64_t group = 32;               // neighbours of a row with one scale; a multiple of 32, or in_features
  // [out_features, in_features / group] of one dtype, last dim contiguous; null where the blocks hold them.
  TypedPointer scales, zeros;
  TypedPointer bias;    // [out_features], contiguous; fp32 or dtype
  void* out = nullptr;  // [rows, out_features]
  std::int64_t stride_x_row = 0, stride_weight_row = 0, stride_scales_row = 0, stride_zeros_row = 0, stride_out_row = 0;
  Activation activation = Activation::kNone;
};

/// What a call has to do (params_common.hpp).
inline double work_of(const QuantizedLinearParams& p) {
  return work::product(p.rows, p.in_features) * static_cast<double>(p.out_features);
}

namespace quantized {

inline constexpr std::int64_t kBlock = 32;     // elements
inline constexpr std::int64_t kTileRows = 16;  // whose blocks lie side by side in a tile

FK_HOST_DEVICE constexpr bool is_int8(WeightFormat format) {
  return format == WeightFormat::kInt8 || format == WeightFormat::kQ8_0;
}
/// Whether a block holds its own scale.
FK_HOST_DEVICE constexpr bool is_gguf(WeightFormat format) {
  return format == WeightFormat::kQ4_0 || format == WeightFormat::kQ4_1 || format == WeightFormat::kQ8_0;
}
/// Bytes of a block before its elements.
FK_HOST_DEVICE constexpr int head_bytes(WeightFormat format) {
  return format == WeightFormat::kQ4_1 ? 4 : (is_gguf(format) ? 2 : 0);
}
FK_HOST_DEVICE constexpr int element_bytes(WeightFormat format) { return is_int8(format) ? 32 : 16; }
FK_HOST_DEVICE constexpr int block_bytes(WeightFormat format) { return head_bytes(format) + element_bytes(format); }

/// Bytes of a row: int8 alone may end within a block.
FK_HOST_DEVICE constexpr std::int64_t row_bytes(WeightFormat format, std::int64_t in_features) {
  return format == WeightFormat::kInt8 ? in_features : in_features / kBlock * block_bytes(format);
}

/// The zero of an element without `zeros`.
FK_HOST_DEVICE constexpr float plain_zero(WeightFormat format) {
  return format == WeightFormat::kInt4 || format == WeightFormat::kQ4_0 ? 8.0f : 0.0f;
}

}  // namespace quantized
}  // namespace flashkernel
