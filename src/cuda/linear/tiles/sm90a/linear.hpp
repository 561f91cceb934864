// linear and its gradient on wgmma and TMA (9.0): what the rows of cuda/kernels.cpp name.
#pragma once

#include "cuda/linear/tiles/sm90a/plan.hpp"
#include "flashkernel/stream.hpp"
#include "ops/kernel_entry.hpp"
#include "ops/linear_params.hpp"

namespace flashkernel::cuda::sm90a {

/// kWork: the way of the row.
template <GemmWork kWork>
Verdict linear_supports(const LinearParams&, DType);
Verdict linear_bwd_supports(const LinearBackwardParams&, DType);

template <GemmWork kWork, DType kDtype>
Verdict linear_supports(const LinearParams& p) {
  return linear_supports<kWork>(p, kDtype);
}
template <DType kDtype>
Verdict linear_bwd_supports(const LinearBackwardParams& p) {
  return linear_bwd_supports(p, kDtype);
}

/// In one wave of tiles: later than the best way by what the model says. With more tiles, all but ping-pong are outside
/// of their range.
template <GemmWork kWork>
float linear_cost_us(const LinearParams&, const DeviceFacts&);
/// The plan is a GemmPlan.
template <GemmWork kWork>
Plan plan_linear(const LinearParams&, const DeviceFacts&);
void linear(const LinearParams&, const Plan&, void* workspace, Stream);

/// Kernel: one of the plans in linear/few_rows/sm90a/plan.hpp, which is the plan.
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

/// The plan has a GemmPlan for each product.
Plan plan_linear_bwd(const LinearBackwardParams&, const DeviceFacts&);
void linear_bwd(const LinearBackwardParams&, const Plan&, void* workspace, Stream);

}  // namespace flashkernel::cuda::sm90a
