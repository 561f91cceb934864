// C = A B^T with a fused epilogue on wgmma and TMA: what linear and its gradient ask for on 9.0. A is [m, k] and B is
// [n, k], each stored along k ("k-major") or along its other dim. The kernels are in gemm.cuh and
// linear/cluster_k/sm90a/kernel.cuh, one instance file a dtype.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/linear/tiles/sm90a/plan.hpp"
#include "cuda/linear/epilogue.cuh"

namespace flashkernel::cuda::sm90a {

struct GemmOperand {
  const void* data = nullptr;
  std::int64_t stride = 0;  // elements from one row of the stored matrix to the next
  bool k_major = true;      // a row of the stored matrix runs along k
};

struct GemmProblem {
  GemmOperand a, b;
  std::int64_t m = 0, n = 0, k = 0;
  LinearEpilogue epilogue;   // no activation where A is not k-major: that is the gradient of weights
  int parts = 1;             // of k, for the cooperative and the cluster variants
  float* partial = nullptr;  // [parts, m, n] where the former have more than one
};

/// Whether the bias can come by bulk copies, in the results' dtype.
inline bool bulk_bias(const LinearEpilogue& e, DType dtype) {
  return !e.bias || (e.bias.dtype == dtype && reinterpret_cast<std::uintptr_t>(e.bias.data) % 16 == 0);
}

/// Clusters of `parts` blocks of the cluster variants that the current device, which is number `device`, runs at once.
int gemm_clusters_at_once(int parts, int device);

/// T is __half or __nv_bfloat16. Both operands k-major, or the second one or both along their other dim. Every operand
/// and result must fit a tensor map (host/tensor_map.hpp).
template <class T>
void gemm_in_clusters(const char* name, const GemmProblem& problem, GemmVariant variant, cudaStream_t stream);
template <class T>
void gemm(const char* name, const GemmProblem& problem, GemmVariant variant, int num_sms, cudaStream_t stream);

}  // namespace flashkernel::cuda::sm90a
