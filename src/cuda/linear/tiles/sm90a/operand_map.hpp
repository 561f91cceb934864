// Tensor maps of a product's operands: boxes of 64 elements (lines of 128 bytes) along the contiguous dim.
#pragma once

#include "cuda/pipeline/tensor_map.hpp"
#include "cuda/linear/tiles/sm90a/gemm.hpp"
#include "cuda/tile/convert.cuh"

namespace flashkernel::cuda::sm90a {

/// The operand [mn, k]: boxes of box_mn x 64 where it is k-major, else of 64 x box_k.
template <class T>
CUtensorMap operand_map(const char* name, const GemmOperand& operand, std::int64_t mn, std::int64_t k, int box_mn,
                        int box_k) {
  TensorMapSpec spec;
  spec.data = operand.data;
  spec.dtype = dtype_of<T>;
  spec.rank = 2;
  const bool along_k = operand.k_major;  // lines of 64 elements along k, or along the other dim
  spec.dims[0] = {along_k ? k : mn, 1, 64};
  spec.dims[1] = {along_k ? mn : k, operand.stride, static_cast<std::uint32_t>(along_k ? box_mn : box_k)};
  return make_tensor_map(name, spec);
}

inline constexpr int kInterleavedRows = 32;

/// The k-major operand [mn, k] in an order for B's rows that gives each thread of wgmma neighbours: row 32 g + 8 c + j
/// of a box of `groups` x 32 rows is row first + 32 g + 4 j + c of the operand. The sums of a thread are of rows 8 c +
/// 2 (lane % 4) and the next one, c from 0 to 3: columns 8 (lane % 4) .. + 7 of 32. Coordinates k, 0, 0, 0, first / 8:
/// boxes begin at multiples of 8 and end within the operand, mn a multiple of 8; since they overlap, where they begin
/// is a dim of its own.
template <class T>
TensorMapSpec interleaved_rows(const GemmOperand& operand, std::int64_t mn, std::int64_t k, int groups) {
  TensorMapSpec spec;
  spec.data = operand.data;
  spec.dtype = dtype_of<T>;
  spec.rank = 5;
  spec.dims[0] = {k, 1, 64};
  spec.dims[1] = {8, 4 * operand.stride, 8};
  spec.dims[2] = {4, operand.stride, 4};
  spec.dims[3] = {groups, kInterleavedRows * operand.stride, static_cast<std::uint32_t>(groups)};
  spec.dims[4] = {(mn - groups * kInterleavedRows) / 8 + 1, 8 * operand.stride, 1};
  return spec;
}

}  // namespace flashkernel::cuda::sm90a
