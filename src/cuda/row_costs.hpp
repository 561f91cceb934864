// Which rows of norms and softmax a block holds, and for which the kernels of 9.0 are faster, as costs. Host code;
// tests_cpp/row_costs_test.cpp.
#pragma once

#include "cuda/costs.hpp"
#include "flashkernel/types.hpp"
#include "ops/norm_params.hpp"
#include "ops/reduce_params.hpp"

namespace flashkernel::cuda {

/// Bytes of a row from which on a cluster that shares it was ahead of the generic kernels on an H200. It was behind at
/// 48 KB in 16 bits, and at 96 KB in fp32 (norms: at 64 KB); what lies between was not measured
/// (lab/notebooks/cuda_memory_bound.md).
inline constexpr std::int64_t kLongRowOf16Bits = 64 * 1024, kLongRowOf32Bits = 128 * 1024;
/// Bytes of a row of norm_bwd from which on no thread of the kernel with a ring is without work.
inline constexpr std::int64_t kShortestRowOfRing = 1024;

/// Bytes of a row, in vectors of 16, that the generic kernels of norms and softmax hold in the registers of a block.
/// With more, 16-bit elements spill: five times slower than walking the row.
inline constexpr std::int64_t kMostHeldOf16Bits = 64 * 1024, kMostHeldOf32Bits = 128 * 1024;

/// The same for gradients of norms, whose sums of columns lie in registers too.
inline constexpr std::int64_t kMostHeldByNormBwd = 16 * 1024;

inline std::int64_t row_bytes(DType dtype, std::int64_t columns) {
  return columns * static_cast<std::int64_t>(dtype_bytes(dtype));
}
inline bool is_long_row(DType dtype, std::int64_t columns) {
  return row_bytes(dtype, columns) >= (dtype == DType::kFloat32 ? kLongRowOf32Bits : kLongRowOf16Bits);
}

inline bool is_held_row(DType dtype, std::int64_t columns) {
  return row_bytes(dtype, columns) <= (dtype == DType::kFloat32 ? kMostHeldOf32Bits : kMostHeldOf16Bits);
}

inline bool is_for_clusters(const NormParams& p) { return is_long_row(p.dtype, p.features); }
inline bool is_for_clusters(const SoftmaxParams& p) { return is_long_row(p.dtype, p.columns); }
inline bool is_for_clusters(const SoftmaxBackwardParams& p) { return is_long_row(p.dtype, p.columns); }
inline bool is_for_clusters(const NormBackwardParams& p) {
  return row_bytes(p.dtype, p.features) >= kShortestRowOfRing;
}

template <class Params>
float clusters_cost_us(const Params& p, const DeviceFacts&) {
  const double us = launch_and(work_of(p), rates::kRowsInClusters);
  return static_cast<float>(is_for_clusters(p) ? us : kOutsideItsRange * us);
}

}  // namespace flashkernel::cuda
