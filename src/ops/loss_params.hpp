// What the cross-entropy kernels get. Filled by ops/loss.cpp.
#pragma once

#include "ops/large_lse.hpp"
#include "ops/params_common.hpp"

namespace flashkernel {

struct CrossEntropyParams {
  static constexpr const char* kOp = "cross_entropy";

  DType dtype = DType::kFloat32;  // of logits
  Device device{};
  std::int64_t rows = 0, classes = 0;
  std::int64_t ignore_index = -100;
  float label_smoothing = 0.0f;
  Reduction reduction = Reduction::kMean;
  const void* logits = nullptr;  // [rows, classes], rows stride_logits_row apart, last dim contiguous
  IndexArray targets;            // [rows]
  float* loss = nullptr;         // [rows] for kNone, else one value
  float* lse = nullptr;          // [rows]; may be null
  std::int64_t stride_logits_row = 0;
};

struct CrossEntropyBackwardParams {
  static constexpr const char* kOp = "cross_entropy_bwd";

  DType dtype = DType::kFloat32;
  Device device{};
  std::int64_t rows = 0, classes = 0;
  std::int64_t ignore_index = -100;
  float label_smoothing = 0.0f;
  Reduction reduction = Reduction::kMean;
  const float* grad_loss = nullptr;  // of row r at r * stride_grad_loss: [rows] for kNone, else one value
  const void* logits = nullptr;
  IndexArray targets;
  const float* lse = nullptr;  // [rows]
  void* grad_logits = nullptr;
  std::int64_t stride_logits_row = 0, stride_grad_logits_row = 0;
  std::int64_t stride_grad_loss = 0;  // any, 0 for one value of all rows
};

/// What a call has to do (params_common.hpp).
inline double work_of(const CrossEntropyParams& p) { return work::product(p.rows, p.classes); }
inline double work_of(const CrossEntropyBackwardParams& p) { return work::product(p.rows, p.classes); }

}  // namespace flashkernel
