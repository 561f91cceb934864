// What the elementwise kernels get. ops/elementwise.cpp merges dims that are laid out alike, so `ndim` is small.
#pragma once

#include "ops/params_common.hpp"

namespace flashkernel {

/// out = a + b
struct AddParams {
  static constexpr const char* kOp = "add";

  DType dtype = DType::kFloat32;
  Device device{};
  int ndim = 0;  // at least 1; the innermost dim is last
  std::int64_t shape[kMaxDims] = {};
  const void* a = nullptr;
  const void* b = nullptr;
  void* out = nullptr;
  std::int64_t stride_a[kMaxDims] = {}, stride_b[kMaxDims] = {}, stride_out[kMaxDims] = {};
};

/// out = silu(gate) * up; backward when grad_out is set.
struct SwigluParams {
  static constexpr const char* kOp = "swiglu";

  DType dtype = DType::kFloat32;
  Device device{};
  int ndim = 0;
  std::int64_t shape[kMaxDims] = {};
  const void* gate = nullptr;
  const void* up = nullptr;
  void* out = nullptr;
  std::int64_t stride_gate[kMaxDims] = {}, stride_up[kMaxDims] = {}, stride_out[kMaxDims] = {};
};

struct SwigluBackwardParams {
  static constexpr const char* kOp = "swiglu_bwd";

  DType dtype = DType::kFloat32;
  Device device{};
  int ndim = 0;
  std::int64_t shape[kMaxDims] = {};
  const void* grad_out = nullptr;
  const void* gate = nullptr;
  const void* up = nullptr;
  void* grad_gate = nullptr;  // may be null
  void* grad_up = nullptr;    // may be null
  std::int64_t stride_grad_out[kMaxDims] = {}, stride_gate[kMaxDims] = {}, stride_up[kMaxDims] = {};
  std::int64_t stride_grad_gate[kMaxDims] = {}, stride_grad_up[kMaxDims] = {};
};

/// What a call has to do (params_common.hpp).
inline double work_of(const AddParams& p) { return work::volume(p.shape, p.ndim); }
inline double work_of(const SwigluParams& p) { return work::volume(p.shape, p.ndim); }
inline double work_of(const SwigluBackwardParams& p) { return work::volume(p.shape, p.ndim); }

}  // namespace flashkernel
