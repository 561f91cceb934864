// What the kernels of pack_mask get: a mask of bytes to bits. ops/pack_mask.cpp brings it to 4 dims.
#pragma once

#include "ops/params_common.hpp"

namespace flashkernel {

/// Bit j % 32 of out[x0, x1, x2, j / 32] = mask[x0, x1, x2, j] != 0; bits behind the last column are 0.
struct PackMaskParams {
  static constexpr const char* kOp = "pack_mask";

  Device device{};
  std::int64_t shape[3] = {1, 1, 1};  // of the rows
  std::int64_t columns = 0;           // of the mask
  const std::uint8_t* mask = nullptr;
  std::uint32_t* out = nullptr;
  std::int64_t stride_mask[3] = {}, stride_mask_column = 1;  // in bytes
  std::int64_t stride_out[3] = {};                           // in words; those of a row lie side by side

  FK_HOST_DEVICE std::int64_t rows() const { return shape[0] * shape[1] * shape[2]; }
  FK_HOST_DEVICE std::int64_t words() const { return (columns + 31) / 32; }
  FK_HOST_DEVICE std::int64_t offset(std::int64_t row, const std::int64_t (&strides)[3]) const {
    return row % shape[2] * strides[2] + row / shape[2] % shape[1] * strides[1] +
           row / shape[2] / shape[1] * strides[0];
  }
};

/// What a call has to do (params_common.hpp).
inline double work_of(const PackMaskParams& p) { return work::product(p.rows(), p.columns); }

}  // namespace flashkernel
