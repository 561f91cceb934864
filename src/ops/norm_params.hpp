// What the norm kernels get: LayerNorm and RMSNorm in one struct. Filled by ops/norm.cpp, which folds leading dims into
// rows.
#pragma once

#include "ops/params_common.hpp"

namespace flashkernel {

enum class NormKind : std::uint8_t { kLayerNorm, kRmsNorm };

struct NormParams {
  static constexpr const char* kOp = "norm";

  NormKind kind = NormKind::kLayerNorm;
  DType dtype = DType::kFloat32;
  DType out_dtype = DType::kFloat8E4M3;  // of an output of 8 bits; else out is of `dtype`
  Device device{};
  std::int64_t rows = 0, features = 0;
  float eps = 1e-5f;
  float weight_offset = 0;         // added to each weight; 0 where there are none
  const void* x = nullptr;         // [rows, features], rows stride_x_row apart, last dim contiguous (so with all below)
  const void* residual = nullptr;  // may be null
  TypedPointer weight, bias;       // [features], contiguous, of any floating dtype; may be null
  void* out = nullptr;
  void* residual_out = nullptr;  // null when residual is
  const float* scale = nullptr;  // of an output of 8 bits: one number; null where each row has one in `scales`
  float* scales = nullptr;       // [rows], contiguous; null otherwise
  float* mean = nullptr;         // [rows], contiguous; may be null
  float* rstd = nullptr;         // [rows], contiguous; may be null
  std::int64_t stride_x_row = 0, stride_residual_row = 0, stride_out_row = 0, stride_residual_out_row = 0;

  /// Whether the output is of 8 bits.
  FK_HOST_DEVICE bool is_quantized() const { return scale || scales; }
};

struct NormBackwardParams {
  static constexpr const char* kOp = "norm_bwd";

  NormKind kind = NormKind::kLayerNorm;
  DType dtype = DType::kFloat32;
  Device device{};
  std::int64_t rows = 0, features = 0;
  const void* grad_out = nullptr;
  const void* h = nullptr;
  const void* grad_residual_out = nullptr;  // may be null
  TypedPointer weight;                      // of any floating dtype; may be null
  float weight_offset = 0;                  // added to each weight; 0 where there are none
  const float* mean = nullptr;              // null for RMSNorm
  const float* rstd = nullptr;
  void* grad_x = nullptr;       // may be null
  void* grad_weight = nullptr;  // [features], contiguous; may be null
  void* grad_bias = nullptr;    // [features], contiguous; may be null
  DType grad_weight_dtype = DType::kFloat32, grad_bias_dtype = DType::kFloat32;
  std::int64_t stride_grad_out_row = 0, stride_h_row = 0, stride_grad_residual_out_row = 0, stride_grad_x_row = 0;
};

/// What a call has to do (params_common.hpp).
inline double work_of(const NormParams& p) { return work::product(p.rows, p.features); }
inline double work_of(const NormBackwardParams& p) { return work::product(p.rows, p.features); }

}  // namespace flashkernel
