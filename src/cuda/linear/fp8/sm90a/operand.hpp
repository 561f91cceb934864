// For both kernels of linear_fp8 on 9.0: which operands they accept, and the tensor maps of these operands, whose lines
// have 128 elements.
#pragma once

#include "cuda/linear/fp8/sm90a/plan.hpp"
#include "cuda/pipeline/tensor_map.hpp"
#include "ops/kernel_entry.hpp"
#include "ops/linear_fp8_params.hpp"

namespace flashkernel::cuda::sm90a {

/// Boxes of `box_rows` x 128 of an operand [rows, k].
inline TensorMapSpec fp8_rows(const std::uint8_t* data, std::int64_t rows, std::int64_t k, std::int64_t stride,
                              int box_rows) {
  TensorMapSpec spec;
  spec.data = data;
  spec.dtype = DType::kFloat8E4M3;
  spec.rank = 2;
  spec.dims[0] = {k, 1, fp8_plan::kTileK};
  spec.dims[1] = {rows, stride, static_cast<std::uint32_t>(box_rows)};
  return spec;
}

/// The same in the order for B's rows that gives each thread of wgmma neighbours: row 32 g + 8 c + j of a box of
/// `groups` x 32 rows is row first + 32 g + 4 j + c of the operand (linear/tiles/sm90a/operand_map.hpp).
inline TensorMapSpec fp8_interleaved_rows(const std::uint8_t* data, std::int64_t rows, std::int64_t k,
                                          std::int64_t stride, int groups) {
  TensorMapSpec spec;
  spec.data = data;
  spec.dtype = DType::kFloat8E4M3;
  spec.rank = 5;
  spec.dims[0] = {k, 1, fp8_plan::kTileK};
  spec.dims[1] = {8, 4 * stride, 8};
  spec.dims[2] = {4, stride, 4};
  spec.dims[3] = {groups, 32 * stride, static_cast<std::uint32_t>(groups)};
  spec.dims[4] = {(rows - groups * 32) / 8 + 1, 8 * stride, 1};
  return spec;
}

inline Verdict fp8_operands_fit(const LinearFp8Params& p) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;  // coordinates are 32-bit
  if (p.rows > kMost || p.in_features > kMost || p.out_features > kMost) return "a dim is over 2^30";
  if (p.rows == 0 || p.out_features == 0 || p.in_features == 0) return "a matrix is empty";
  if (!fits_tensor_map(fp8_rows(p.x, p.rows, p.in_features, p.stride_x_row, 1)) ||
      !fits_tensor_map(fp8_rows(p.weight, p.out_features, p.in_features, p.stride_weight_row, 1)))
    return "rows of x or of the weight are not at multiples of 16 bytes";
  return Verdict::ok();
}

inline fp8_plan::Extent extent_of(const LinearFp8Params& p) { return {p.rows, p.in_features, p.out_features}; }

}  // namespace flashkernel::cuda::sm90a
