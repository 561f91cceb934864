// linear and its gradient on wgmma and TMA (9.0): what the rows of cuda/kernels.cpp name.
#pragma once

#include "flashkernel/stream.hpp"
#include "ops/kernel_entry.hpp"
#include "ops/linear_params.hpp"

namespace flashkernel::cuda::sm90a {

Verdict linear_supports(const LinearParams&, DType);
Verdict linear_few_rows_supports(const LinearParams&, DType);
Verdict linear_bwd_supports(const LinearBackwardParams&, DType);

template <DType kDtype>
Verdict linear_supports(const LinearParams& p) {
  return linear_supports(p, kDtype);
}
template <DType kDtype>
Verdict linear_few_rows_supports(const LinearParams& p) {
  return linear_few_rows_supports(p, kDtype);
}
template <DType kDtype>
Verdict linear_bwd_supports(const LinearBackwardParams& p) {
  return linear_bwd_supports(p, kDtype);
}

std::size_t linear_workspace(const LinearParams&);
void linear(const LinearParams&, void* workspace, Stream);
void linear_few_rows(const LinearParams&, void* workspace, Stream);
std::size_t linear_bwd_workspace(const LinearBackwardParams&);
/// The products of the gradient: g (already the pre-activation's gradient) as grad_out, no activation, no bias.
void linear_bwd(const LinearBackwardParams&, void* workspace, Stream);

}  // namespace flashkernel::cuda::sm90a
