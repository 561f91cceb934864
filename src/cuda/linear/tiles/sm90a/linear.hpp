// linear and its gradient on wgmma and TMA (9.0): what the rows of cuda/kernels.cpp name.
#pragma once

#include "flashkernel/stream.hpp"
#include "ops/kernel_entry.hpp"
#include "ops/linear_params.hpp"

namespace flashkernel::cuda::sm90a {

Verdict linear_supports(const LinearParams&, DType);
Verdict linear_bwd_supports(const LinearBackwardParams&, DType);

template <DType kDtype>
Verdict linear_supports(const LinearParams& p) {
  return linear_supports(p, kDtype);
}
template <DType kDtype>
Verdict linear_bwd_supports(const LinearBackwardParams& p) {
  return linear_bwd_supports(p, kDtype);
}

/// The plan is a GemmPlan.
Plan plan_linear(const LinearParams&, const DeviceFacts&);
void linear(const LinearParams&, const Plan&, void* workspace, Stream);

/// Kernel: FewRowsDirectPlan, FewRowsStreamPlan or FewRowsBlocksPlan (linear/few_rows/sm90a/plan.hpp), which is the
/// plan.
template <class Kernel>
Verdict linear_few_rows_supports(const LinearParams&, DType);
template <class Kernel>
float linear_few_rows_cost_us(const LinearParams&, const DeviceFacts&);
template <class Kernel>
Plan plan_linear_few_rows(const LinearParams&, const DeviceFacts&);
template <class Kernel>
void linear_few_rows(const LinearParams&, const Plan&, void* workspace, Stream);

template <class Kernel, DType kDtype>
Verdict linear_few_rows_supports(const LinearParams& p) {
  return linear_few_rows_supports<Kernel>(p, kDtype);
}

std::size_t linear_bwd_workspace(const LinearBackwardParams&);
/// The products of the gradient: g (already the pre-activation's gradient) as grad_out, no activation, no bias.
void linear_bwd(const LinearBackwardParams&, void* workspace, Stream);

}  // namespace flashkernel::cuda::sm90a
