// linear by the product of gemm.hpp; how a product is cut is decided here.
#include "cuda/sm80/linear.hpp"

#include "cuda/host/launch.hpp"
#include "cuda/sm80/gemm.hpp"

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

GemmPlan plan_of(const LinearParams& p) {
  return plan_gemm(p.rows, p.out_features, p.in_features, cuda_device_properties(p.device.index).num_sms);
}

}  // namespace

std::size_t linear_workspace(const LinearParams& p) { return plan_of(p).workspace_bytes; }

void linear(const LinearParams& p, void* workspace, Stream stream) {
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
    gemm<T>("linear", problem, plan_of(p), workspace, native(stream));
  });
}

}  // namespace flashkernel::cuda::sm80
