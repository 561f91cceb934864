// What the kernels of linear_fp8 and quantize_fp8_blocks get. Filled by ops/linear_fp8.cpp, which folds leading dims
// into rows.
#pragma once

#include "ops/params_common.hpp"

namespace flashkernel {

namespace fp8 {
inline constexpr std::int64_t kBlock = 128;  // elements, along in_features and, of a weight's blocks, out_features
FK_HOST_DEVICE constexpr std::int64_t blocks_of(std::int64_t elements) { return (elements + kBlock - 1) / kBlock; }
}  // namespace fp8

struct LinearFp8Params {
  static constexpr const char* kOp = "linear_fp8";

  DType dtype = DType::kBFloat16;  // of out
  Device device{};
  std::int64_t rows = 0, in_features = 0, out_features = 0;
  const std::uint8_t* x = nullptr;       // [rows, in_features] float8_e4m3fn, last dim contiguous
  const std::uint8_t* weight = nullptr;  // [out_features, in_features] of the same
  // Strides are 0 along what one scale is for. Of the weight, a scale is for out_per_scale rows: 128 or 1.
  const float* x_scale = nullptr;
  const float* weight_scale = nullptr;
  std::int64_t stride_x_scale_row = 0, stride_x_scale_block = 0;
  std::int64_t stride_weight_scale_out = 0, stride_weight_scale_block = 0;
  std::int64_t out_per_scale = 1;
  TypedPointer bias;    // [out_features], contiguous; fp32 or dtype
  void* out = nullptr;  // [rows, out_features]
  std::int64_t stride_x_row = 0, stride_weight_row = 0, stride_out_row = 0;
  Activation activation = Activation::kNone;

  /// Where the scales of an output's row of weights begin.
  FK_HOST_DEVICE const float* weight_scale_of(std::int64_t output) const {
    return weight_scale + (out_per_scale == 1 ? output : output / fp8::kBlock) * stride_weight_scale_out;
  }
};

/// What a call has to do (params_common.hpp).
inline double work_of(const LinearFp8Params& p) {
  return work::product(p.rows, p.in_features) * static_cast<double>(p.out_features);
}

struct QuantizeFp8Params {
  static constexpr const char* kOp = "quantize_fp8_blocks";

  DType dtype = DType::kFloat32;  // of x
  Device device{};
  std::int64_t rows = 0, features = 0;
  const void* x = nullptr;      // [rows, features], last dim contiguous
  std::uint8_t* out = nullptr;  // the same in float8_e4m3fn
  float* scales = nullptr;      // [rows, blocks of features]
  std::int64_t stride_x_row = 0, stride_out_row = 0, stride_scales_row = 0, stride_scales_block = 0;
};

inline double work_of(const QuantizeFp8Params& p) { return work::product(p.rows, p.features); }

}  // namespace flashkernel
