// linear and its gradient on the tensor cores of 7.5, in fp16: what the rows of cuda/kernels.cpp name.
#pragma once

#include "flashkernel/stream.hpp"
#include "ops/kernel_entry.hpp"
#include "ops/linear_params.hpp"

namespace flashkernel::cuda::sm75 {

/// Params is LinearParams or LinearBackwardParams.
template <class Params>
Verdict linear_supports(const Params& p) {
  if (p.dtype != DType::kFloat16) return "it takes float16 only, as the tensor cores of compute capability 7.5 do";
  constexpr std::int64_t kMost = std::int64_t{1} << 30;  // indices are 32-bit, tiles added
  if (p.rows > kMost || p.in_features > kMost || p.out_features > kMost) return "a dim is over 2^30";
  return Verdict::ok();
}

void linear(const LinearParams&, void* workspace, Stream);
/// The products of the gradient: g (already the pre-activation's gradient) comes as grad_out.
std::size_t linear_bwd_workspace(const LinearBackwardParams&, bool invariant);
void linear_bwd(const LinearBackwardParams&, bool invariant, void* workspace, Stream);

}  // namespace flashkernel::cuda::sm75
