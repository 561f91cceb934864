// What a linear kernel gets. Filled by ops/linear.cpp, which folds x's leading dims into rows.
#pragma once

#include "ops/params_common.hpp"

namespace flashkernel {

struct LinearParams {
  static constexpr const char* kOp = "linear";

  DType dtype = DType::kFloat32;  // of x, weight, out, preactivation
  Device device{};
  std::int64_t rows = 0, in_features = 0, out_features = 0;
  const void* x = nullptr;        // [rows, in_features], rows stride_x_row apart, last dim contiguous
  const void* weight = nullptr;   // [out_features, in_features]; one of the two strides is 1
  TypedPointer bias;              // [out_features], contiguous; fp32 or dtype
  void* out = nullptr;            // [rows, out_features]
  void* preactivation = nullptr;  // [rows, out_features]; may be null
  std::int64_t stride_x_row = 0, stride_weight_out = 0, stride_weight_in = 0, stride_out_row = 0,
               stride_preactivation_row = 0;
  Activation activation = Activation::kNone;
};

struct LinearBackwardParams {
  static constexpr const char* kOp = "linear_bwd";

  DType dtype = DType::kFloat32;
  Device device{};
  std::int64_t rows = 0, in_features = 0, out_features = 0;
  const void* grad_out = nullptr;       // [rows, out_features]
  const void* x = nullptr;              // [rows, in_features]
  const void* weight = nullptr;         // [out_features, in_features]
  const void* preactivation = nullptr;  // [rows, out_features]; null when there is no activation
  void* grad_x = nullptr;               // [rows, in_features]; may be null
  void* grad_weight = nullptr;          // [out_features, in_features] by its own strides; may be null
  void* grad_bias = nullptr;            // [out_features]; may be null
  DType grad_bias_dtype = DType::kFloat32;
  std::int64_t stride_grad_out_row = 0, stride_x_row = 0, stride_weight_out = 0, stride_weight_in = 0;
  std::int64_t stride_preactivation_row = 0, stride_grad_x_row = 0, stride_grad_weight_out = 0,
               stride_grad_weight_in = 0;
  Activation activation = Activation::kNone;
};

/// What a call has to do (params_common.hpp).
inline double work_of(const LinearParams& p) {
  return work::product(p.rows, p.in_features) * static_cast<double>(p.out_features);
}
inline double work_of(const LinearBackwardParams& p) {
  return 2 * work::product(p.rows, p.in_features) * static_cast<double>(p.out_features);
}

}  // namespace flashkernel
