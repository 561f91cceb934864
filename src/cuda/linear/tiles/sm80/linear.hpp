// linear and its gradient on mma.sync (8.0 and later): what the rows of cuda/kernels.cpp name. `linear` takes any
// number of rows; `linear_few_rows_...` streams the weights once for up to 16 rows (decode).
#pragma once

#include <cstddef>

#include "flashkernel/stream.hpp"
#include "ops/kernel_entry.hpp"
#include "ops/linear_params.hpp"

namespace flashkernel::cuda::sm80 {

inline constexpr std::int64_t kFewRows = 16;
inline constexpr std::int64_t kMostElements = std::int64_t{1} << 30;  // of a dim: indices are 32-bit, tiles added

template <DType kDtype>
Verdict linear_supports(const LinearParams& p) {
  if (p.dtype != kDtype) return "it is built for another dtype";
  if (p.rows > kMostElements || p.in_features > kMostElements || p.out_features > kMostElements)
    return "a dim is over 2^30";
  return Verdict::ok();
}

/// Rows of x and of the stored weight at multiples of 16 bytes, k in vectors of 8.
template <DType kDtype>
Verdict linear_few_rows_supports(const LinearParams& p) {
  if (p.dtype != kDtype) return "it is built for another dtype";
  if (p.rows > kFewRows) return "it takes at most 16 rows";
  const auto aligned = [](const void* data, std::int64_t stride) {
    return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride % 8 == 0;
  };
  const bool along_in = p.stride_weight_in == 1;
  if (p.in_features % 8 != 0) return "in_features must be a multiple of 8";
  if (!along_in && p.out_features % 4 != 0)
    return "out_features must be a multiple of 4 for a weight that is contiguous along it";
  if ((p.rows > 1 && !aligned(p.x, p.stride_x_row)) || !aligned(p.x, 0) ||
      !aligned(p.weight, along_in ? p.stride_weight_out : p.stride_weight_in))
    return "rows of x and weight must start at multiples of 16 bytes";
  return linear_supports<kDtype>(p);
}

/// The products of the gradient: g (already the pre-activation's gradient) as grad_out, no activation, no bias.
template <DType kDtype>
Verdict linear_bwd_supports(const LinearBackwardParams& p) {
  if (p.dtype != kDtype) return "it is built for another dtype";
  if (p.rows > kMostElements || p.in_features > kMostElements || p.out_features > kMostElements)
    return "a dim is over 2^30";
  return Verdict::ok();
}

// In the invariant mode k is never cut: how it is cut follows from the number of rows.
std::size_t linear_workspace(const LinearParams&, bool invariant);
void linear(const LinearParams&, bool invariant, void* workspace, Stream);
void linear_few_rows_f16(const LinearParams&, void* workspace, Stream);
void linear_few_rows_bf16(const LinearParams&, void* workspace, Stream);
std::size_t linear_bwd_workspace(const LinearBackwardParams&, bool invariant);
void linear_bwd(const LinearBackwardParams&, bool invariant, void* workspace, Stream);

}  // namespace flashkernel::cuda::sm80
