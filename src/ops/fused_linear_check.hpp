// What fused_linear and qkv_append check alike: x, weight, bias and the norm.
#pragma once

#include <string>

#include "ops/check.hpp"
#include "ops/fused_linear_params.hpp"

namespace flashkernel {

inline void take_weight(const Checker& check, const TensorView& x, const TensorView& weight,
                        FusedLinearParams& params) {
  check.dtype("weight", weight, x.dtype);
  check.ndim("weight", weight, 2, 2);
  check.extent("weight", weight, 1, x.shape[x.ndim - 1], "x's last dim");
  if (params.gated && weight.shape[0] % 2 != 0)
    check.fail("weight.shape[0]=" + std::to_string(weight.shape[0]) +
               " with gated; an even number is needed: rows of the gate, then as many of up");
  params.in_features = weight.shape[1];
  params.out_features = params.gated ? weight.shape[0] / 2 : weight.shape[0];
  params.weight = weight.data;
  params.stride_weight_out = weight.strides[0];
  params.stride_weight_in = weight.strides[1];
  if (weight.numel() == 0) {
    params.stride_weight_out = weight.shape[1];
    params.stride_weight_in = 1;
  }
  if (weight.shape[1] == 1 && params.stride_weight_out != 1) params.stride_weight_in = 1;
  if (weight.shape[0] == 1 && params.stride_weight_in != 1) params.stride_weight_out = 1;
  if (params.stride_weight_out != 1 && params.stride_weight_in != 1)
    check.fail("weight has strides [" + std::to_string(weight.strides[0]) + ", " + std::to_string(weight.strides[1]) +
               "]; one of its dims must be contiguous (stride 1): make a contiguous copy");
}

inline void take_norm(const Checker& check, const TensorView& weight, const TensorView& bias, bool centred, float eps,
                      FusedLinearParams& params) {
  params.centred = centred;
  params.eps = eps;
  if (bias.defined() && (!weight.defined() || !centred))
    check.fail("norm_bias is given without a LayerNorm; norm_weight and centred are needed beside it");
  if (centred && !weight.defined()) check.fail("centred without norm_weight; the norm's weight is needed");
  params.norm_weight = check.optional_floating_vector("norm_weight", weight, params.in_features);
  params.norm_bias = check.optional_floating_vector("norm_bias", bias, params.in_features);
}

/// x of up to `most_dims` dims, weight and bias.
inline void take_product(const Checker& check, const TensorView& x, const TensorView& weight, const TensorView& bias,
                         int most_dims, FusedLinearParams& params) {
  check.floating("x", x);
  check.ndim("x", x, most_dims == kMaxDims ? 1 : most_dims, most_dims);
  check.last_dim_contiguous("x", x);
  params.dtype = x.dtype;
  params.device = x.device;
  take_weight(check, x, weight, params);
  params.bias = check.optional_vector("bias", bias, params.weight_rows(), x.dtype);
}

}  // namespace flashkernel
