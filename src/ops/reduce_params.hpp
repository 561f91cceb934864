// What the reduction and softmax kernels get. ops/reduce.cpp sorts dims into kept and reduced ones and merges
// neighbours.
#pragma once

#include "ops/params_common.hpp"

namespace flashkernel {

enum class ReduceOp : std::uint8_t { kSum, kMean, kMax, kArgmax };

/// out[kept...] = op over reduced... of x[kept..., reduced...]
struct ReduceParams {
  static constexpr const char* kOp = "reduce";

  ReduceOp op = ReduceOp::kSum;
  DType dtype = DType::kFloat32;      // of x
  DType out_dtype = DType::kFloat32;  // dtype or fp32; int64 for kArgmax
  Device device{};
  int num_kept = 0, num_reduced = 0;  // dims after merging; each may be 0
  std::int64_t kept_shape[kMaxDims] = {}, reduced_shape[kMaxDims] = {};
  std::int64_t kept_count = 1, reduced_count = 1;  // products of the shapes
  const void* x = nullptr;
  void* out = nullptr;
  std::int64_t stride_x_kept[kMaxDims] = {}, stride_x_reduced[kMaxDims] = {}, stride_out[kMaxDims] = {};
};

/// Softmax along one dim of length `columns`; the other dims are `rows` (merged, up to kMaxDims - 1).
struct SoftmaxParams {
  static constexpr const char* kOp = "softmax";

  bool log = false;
  DType dtype = DType::kFloat32;
  Device device{};
  int ndim = 0;  // of the rows
  std::int64_t shape[kMaxDims] = {};
  std::int64_t rows = 1, columns = 0;
  const void* x = nullptr;
  void* out = nullptr;
  std::int64_t stride_x[kMaxDims] = {}, stride_out[kMaxDims] = {};
  std::int64_t stride_x_column = 1, stride_out_column = 1;
};

struct SoftmaxBackwardParams {
  static constexpr const char* kOp = "softmax_bwd";

  bool log = false;
  DType dtype = DType::kFloat32;
  Device device{};
  int ndim = 0;
  std::int64_t shape[kMaxDims] = {};
  std::int64_t rows = 1, columns = 0;
  const void* grad_out = nullptr;
  const void* out = nullptr;
  void* grad_x = nullptr;
  std::int64_t stride_grad_out[kMaxDims] = {}, stride_out[kMaxDims] = {}, stride_grad_x[kMaxDims] = {};
  std::int64_t stride_grad_out_column = 1, stride_out_column = 1, stride_grad_x_column = 1;
};

/// What a call has to do (params_common.hpp).
inline double work_of(const ReduceParams& p) { return work::product(p.kept_count, p.reduced_count); }
inline double work_of(const SoftmaxParams& p) { return work::product(p.rows, p.columns); }
inline double work_of(const SoftmaxBackwardParams& p) { return work::product(p.rows, p.columns); }

}  // namespace flashkernel
