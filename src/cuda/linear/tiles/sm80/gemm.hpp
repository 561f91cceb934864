// C = A B^T with a fused epilogue on mma.sync: what linear and its gradient ask for. A is [m, k] and B is [n, k], each
// stored along k ("k-major") or along its other dim. The kernels are in gemm.cuh, their instances in gemm_*.cu.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/linear/epilogue.cuh"

namespace flashkernel::cuda::sm80 {

struct GemmOperand {
  const void* data = nullptr;
  std::int64_t stride = 0;  // elements from one row of the stored matrix to the next
  bool k_major = true;      // a row of the stored matrix runs along k
  bool vectors = false;     // its rows start at multiples of 16 bytes
};

/// How a product is cut: tiles of 128 x 128 or 64 x 64, and k into `splits` parts whose sums meet in the workspace.
struct GemmPlan {
  bool large = true;
  int splits = 1;
  int k_per_split = 0;
  std::size_t workspace_bytes = 0;
};

struct GemmProblem {
  GemmOperand a, b;
  int m = 0, n = 0, k = 0;
  LinearEpilogue epilogue;   // no activation where A is not k-major: that is the gradient of weights
  float* partial = nullptr;  // [splits, m, padded_columns(n)] when splits > 1
  int k_per_split = 0;
};

constexpr std::int64_t padded_columns(std::int64_t n) { return (n + 3) / 4 * 4; }  // rows of 16 bytes

GemmPlan plan_gemm(std::int64_t m, std::int64_t n, std::int64_t k, int num_sms);

/// T is float (three TF32 products a term), __half or __nv_bfloat16. Either both operands are k-major, or the second
/// one or both lie along their other dim.
template <class T>
void gemm(const char* name, GemmProblem problem, const GemmPlan& plan, void* workspace, cudaStream_t stream);

template <class T>
GemmOperand gemm_operand(const void* data, std::int64_t stride, bool k_major) {
  return {data, stride, k_major, rows_in_vectors<T>(data, stride)};
}

}  // namespace flashkernel::cuda::sm80
