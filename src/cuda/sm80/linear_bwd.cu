// The products of linear's gradient: grad_x = g W and grad_weight = g^T x, where g comes as grad_out (the generic first
// step has applied the activation's derivative). The parts of a long sum over k are added in their order.
#include "cuda/host/launch.hpp"
#include "cuda/sm80/gemm.hpp"
#include "cuda/sm80/linear.hpp"

namespace flashkernel::cuda::sm80 {
namespace {

struct Plans {
  bool x = false, weight = false;
  bool weight_along_in = true;  // rows of the result run along the dim of grad_weight that is contiguous
  std::int64_t weight_m = 0, weight_n = 0;
  GemmPlan plan_x, plan_weight;
};

Plans plans_of(const LinearBackwardParams& p) {
  const int num_sms = cuda_device_properties(p.device.index).num_sms;
  Plans plans;
  plans.x = p.grad_x && p.rows * p.in_features > 0;
  plans.weight = p.grad_weight && p.out_features * p.in_features > 0;
  if (plans.x) plans.plan_x = plan_gemm(p.rows, p.in_features, p.out_features, num_sms);
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

std::size_t linear_bwd_workspace(const LinearBackwardParams& p) {
  const Plans plans = plans_of(p);  // the products run one after the other
  return std::max(plans.plan_x.workspace_bytes, plans.plan_weight.workspace_bytes);
}

void linear_bwd(const LinearBackwardParams& p, void* workspace, Stream stream) {
  const CudaDeviceGuard guard(p.device.index);
  const Plans plans = plans_of(p);
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
