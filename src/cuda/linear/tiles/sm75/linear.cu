// linear and the products of its gradient, grad_x = g W and grad_weight = g^T x, by the product of gemm.cuh.
#include "cuda/linear/tiles/sm75/linear.hpp"

#include <utility>

#include "cuda/linear/tiles/sm75/gemm.cuh"

namespace flashkernel::cuda::sm75 {
namespace {

using T = __half;

GemmOperand operand(const void* data, std::int64_t stride, bool k_major) {
  return {data, stride, k_major, rows_in_vectors<T>(data, stride)};
}

GemmProblem problem_of(std::int64_t m, std::int64_t n, std::int64_t k) {
  GemmProblem problem;
  problem.m = static_cast<int>(m);
  problem.n = static_cast<int>(n);
  problem.k = static_cast<int>(k);
  return problem;
}

}  // namespace

void linear(const LinearParams& p, void*, Stream stream) {
  if (p.rows == 0 || p.out_features == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  GemmProblem problem = problem_of(p.rows, p.out_features, p.in_features);
  problem.a = operand(p.x, p.stride_x_row, true);
  const bool along_in = p.stride_weight_in == 1;
  problem.b = operand(p.weight, along_in ? p.stride_weight_out : p.stride_weight_in, along_in);
  problem.epilogue = linear_epilogue<T>(p);
  gemm<T>("linear sm75", problem, cuda_device_properties(p.device.index).num_sms, native(stream));
}

std::size_t linear_bwd_workspace(const LinearBackwardParams&, bool) { return 0; }

void linear_bwd(const LinearBackwardParams& p, bool, void*, Stream stream) {
  const CudaDeviceGuard guard(p.device.index);
  const int num_sms = cuda_device_properties(p.device.index).num_sms;
  if (p.grad_x && p.rows * p.in_features > 0) {
    GemmProblem problem = problem_of(p.rows, p.in_features, p.out_features);
    problem.a = operand(p.grad_out, p.stride_grad_out_row, true);
    // W [out, in] is B [in, out]: k-major where its out dim is contiguous.
    const bool along_out = p.stride_weight_in != 1;
    problem.b = operand(p.weight, along_out ? p.stride_weight_in : p.stride_weight_out, along_out);
    problem.epilogue = plain_epilogue<T>(p.grad_x, p.stride_grad_x_row);
    gemm<T>("linear_bwd sm75: grad_x", problem, num_sms, native(stream));
  }
  if (p.grad_weight && p.out_features * p.in_features > 0) {
    // Rows of the result run along the dim of grad_weight that is contiguous.
    const bool along_in = p.stride_grad_weight_in == 1;
    GemmProblem problem = problem_of(p.out_features, p.in_features, p.rows);
    problem.a = operand(p.grad_out, p.stride_grad_out_row, false);
    problem.b = operand(p.x, p.stride_x_row, false);
    if (!along_in) {
      std::swap(problem.a, problem.b);
      std::swap(problem.m, problem.n);
    }
    problem.epilogue = plain_epilogue<T>(p.grad_weight, along_in ? p.stride_grad_weight_out : p.stride_grad_weight_in);
    gemm<T>("linear_bwd sm75: grad_weight", problem, num_sms, native(stream));
  }
}

}  // namespace flashkernel::cuda::sm75
