// linear and its gradient by the product of gemm.hpp; how a product is cut is decided here.
#include "cuda/linear/tiles/sm80/linear.hpp"

#include "cuda/host/launch.hpp"
#include "cuda/linear/tiles/sm80/gemm.hpp"

namespace flashkernel::cuda::sm80 {

GemmPlan plan_gemm(std::int64_t m, std::int64_t n, std::int64_t k, int num_sms) {
  constexpr std::int64_t kTileK = 64;       // a part of k is a multiple of every shape's tile
  constexpr std::int64_t kLeastPart = 256;  // a shorter part costs more in sums stored than it gains
  GemmPlan plan;
  plan.large = ceil_div(m, 128) * ceil_div(n, 128) >= num_sms;
  const std::int64_t tiles = plan.large ? num_sms : ceil_div(m, 64) * ceil_div(n, 64);
  // Two blocks a multiprocessor hide each other's latencies.
  const std::int64_t wanted = tiles > 0 && 2 * tiles <= num_sms ? 2 * num_sms / tiles : 1;
  const std::int64_t parts = std::max<std::int64_t>(1, std::min(wanted, k / kLeastPart));
  const std::int64_t part = std::max(kTileK, ceil_div(ceil_div(k, parts), kTileK) * kTileK);
  plan.splits = static_cast<int>(std::max<std::int64_t>(1, ceil_div(k, part)));
  plan.k_per_split = static_cast<int>(part);
  if (plan.splits > 1)
    plan.workspace_bytes = sizeof(float) * static_cast<std::size_t>(plan.splits * m * padded_columns(n));
  return plan;
}

namespace {

/// All of k in one part: tiles of either size add its slices in the same order.
GemmPlan whole_k(GemmPlan plan, std::int64_t k) {
  plan.splits = 1;
  plan.k_per_split = static_cast<int>(std::max<std::int64_t>(1, k));
  plan.workspace_bytes = 0;
  return plan;
}

GemmPlan plan_of(const LinearParams& p, bool invariant) {
  const GemmPlan plan =
      plan_gemm(p.rows, p.out_features, p.in_features, cuda_device_properties(p.device.index).num_sms);
  return invariant ? whole_k(plan, p.in_features) : plan;
}

}  // namespace

std::size_t linear_workspace(const LinearParams& p, bool invariant) { return plan_of(p, invariant).workspace_bytes; }

void linear(const LinearParams& p, bool invariant, void* workspace, Stream stream) {
  if (p.rows == 0 || p.out_features == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    GemmProblem problem;
    problem.m = static_cast<int>(p.rows);
    problem.n = static_cast<int>(p.out_features);
    problem.k = static_cast<int>(p.in_features);
    problem.a = gemm_operand<T>(p.x, p.stride_x_row, true);
    const bool along_in = p.stride_weight_in == 1;
    problem.b = gemm_operand<T>(p.weight, along_in ? p.stride_weight_out : p.stride_weight_in, along_in);
    problem.epilogue = linear_epilogue<T>(p);
    gemm<T>("linear", problem, plan_of(p, invariant), workspace, native(stream));
  });
}

// The products of the gradient: grad_x = g W and grad_weight = g^T x, where g comes as grad_out (the generic first step
// has applied the activation's derivative). The parts of a long sum over k are added in their order.
namespace {

struct Plans {
  bool x = false, weight = false;
  bool weight_along_in = true;  // rows of the result run along the dim of grad_weight that is contiguous
  std::int64_t weight_m = 0, weight_n = 0;
  GemmPlan plan_x, plan_weight;
};

Plans plans_of(const LinearBackwardParams& p, bool invariant) {
  const int num_sms = cuda_device_properties(p.device.index).num_sms;
  Plans plans;
  plans.x = p.grad_x && p.rows * p.in_features > 0;
  plans.weight = p.grad_weight && p.out_features * p.in_features > 0;
  if (plans.x) plans.plan_x = plan_gemm(p.rows, p.in_features, p.out_features, num_sms);
  if (invariant) plans.plan_x = whole_k(plans.plan_x, p.out_features);
  plans.weight_along_in = p.stride_grad_weight_in == 1;
  plans.weight_m = plans.weight_along_in ? p.out_features : p.in_features;
  plans.weight_n = plans.weight_along_in ? p.in_features : p.out_features;
  if (plans.weight) plans.plan_weight = plan_gemm(plans.weight_m, plans.weight_n, p.rows, num_sms);
  return plans;
}

GemmProblem problem_of(std::int64_t m, std::int64_t n, std::int64_t k) {
  GemmProblem problem;
  problem.m = static_cast<int>(m);
  problem.n = static_cast<int>(n);
  problem.k = static_cast<int>(k);
  return problem;
}

}  // namespace

std::size_t linear_bwd_workspace(const LinearBackwardParams& p, bool invariant) {
  const Plans plans = plans_of(p, invariant);  // the products run one after the other
  return std::max(plans.plan_x.workspace_bytes, plans.plan_weight.workspace_bytes);
}

void linear_bwd(const LinearBackwardParams& p, bool invariant, void* workspace, Stream stream) {
  const CudaDeviceGuard guard(p.device.index);
  const Plans plans = plans_of(p, invariant);
  visit_floating(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (plans.x) {
      GemmProblem problem = problem_of(p.rows, p.in_features, p.out_features);
      problem.a = gemm_operand<T>(p.grad_out, p.stride_grad_out_row, true);
      // W [out, in] is B [in, out]: k-major where its out dim is contiguous.
      const bool along_out = p.stride_weight_in != 1;
      problem.b = gemm_operand<T>(p.weight, along_out ? p.stride_weight_in : p.stride_weight_out, along_out);
      problem.epilogue = plain_epilogue<T>(p.grad_x, p.stride_grad_x_row);
      gemm<T>("linear_bwd: grad_x", problem, plans.plan_x, workspace, native(stream));
    }
    if (plans.weight) {
      GemmProblem problem = problem_of(plans.weight_m, plans.weight_n, p.rows);
      problem.a = gemm_operand<T>(p.grad_out, p.stride_grad_out_row, false);
      problem.b = gemm_operand<T>(p.x, p.stride_x_row, false);
      if (!plans.weight_along_in) std::swap(problem.a, problem.b);
      problem.epilogue =
          plain_epilogue<T>(p.grad_weight, plans.weight_along_in ? p.stride_grad_weight_out : p.stride_grad_weight_in);
      gemm<T>("linear_bwd: grad_weight", problem, plans.plan_weight, workspace, native(stream));
    }
  });
}

}  // namespace flashkernel::cuda::sm80
