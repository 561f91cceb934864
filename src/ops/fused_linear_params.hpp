// What a kernel of fused_linear gets: a norm in front of a linear, and what follows it. Filled by ops/fused_linear.cpp,
// which folds x's leading dims into rows.
#pragma once

#include <cstddef>

#include "core/device_facts.hpp"
#include "flashkernel/stream.hpp"
#include "ops/params_common.hpp"
#include "ops/plan.hpp"

namespace flashkernel {

struct FusedLinearParams {
  static constexpr const char* kOp = "fused_linear";

  DType dtype = DType::kFloat32;  // of x, weight, residual, out
  Device device{};
  std::int64_t rows = 0, in_features = 0, out_features = 0;
  const void* x = nullptr;  // [rows, in_features], rows stride_x_row apart, last dim contiguous
  const void* weight =
      nullptr;               // [out_features, in_features], or with gated twice as many rows, those of the gate first
  TypedPointer bias;         // one for each row of weight, contiguous; fp32 or dtype; may be null
  TypedPointer norm_weight;  // [in_features], contiguous, any floating dtype; null where there is no norm
  TypedPointer norm_bias;    // [in_features], contiguous, any floating dtype; may be null
  const void* residual = nullptr;  // [rows, out_features]; may be null, and may be out
  void* out = nullptr;             // [rows, out_features]
  std::int64_t stride_x_row = 0, stride_weight_out = 0, stride_weight_in = 0, stride_residual_row = 0,
               stride_out_row = 0;
  float eps = 1e-6f;
  bool centred = false;   // LayerNorm, else RMSNorm
  bool gated = false;     // out = activation(gate) * up
  bool constant = false;  // nothing that is still under way writes weight, bias, norm_weight or norm_bias
  Activation activation = Activation::kNone;

  FK_HOST_DEVICE std::int64_t weight_rows() const { return gated ? 2 * out_features : out_features; }
};

/// What a call has to do (params_common.hpp).
inline double work_of(const FusedLinearParams& p) {
  return work::product(p.rows, p.in_features) * static_cast<double>(p.weight_rows());
}

/// The rows of both backends that compose the call of other ops (ops/fused_linear_composed.cpp).
Plan plan_composed_fused_linear(const FusedLinearParams&, const DeviceFacts&);
void composed_fused_linear(const FusedLinearParams&, const Plan&, void* workspace, Stream);

}  // namespace flashkernel
