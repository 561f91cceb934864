// C = A B^T with a fused epilogue on wgmma and TMA: what linear and its gradient ask for on 9.0. A is [m, k] and B is
// [n, k], each stored along k ("k-major") or along its other dim. The kernel is in gemm.cuh, one instance file a dtype.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/tile/linear_epilogue.cuh"

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
  int parts = 1;             // of k, for the cooperative variants
  float* partial = nullptr;  // [parts, m, n] where parts > 1
};

/// The kernel's variants: columns of a tile of 128 rows. Cooperative: two warpgroups share a tile; ping-pong: each has
/// a tile of its own and one's epilogue runs under the other's products.
enum class GemmVariant {
  kPingPong192,
  kPingPong128,
  kCooperative128,
  kCooperative96,  // k-major operands only
};

/// The variant, and into how many parts k is cut so that few tiles with a long k fill the GPU: more than 1 only where
/// the variant is cooperative.
struct GemmPlan {
  GemmVariant variant = GemmVariant::kCooperative128;
  int parts = 1;
};

GemmPlan plan_gemm(const GemmProblem& problem, int num_sms);

/// T is __half or __nv_bfloat16. Both operands k-major, or the second one or both along their other dim. Every operand
/// and result must fit a tensor map (host/tensor_map.hpp).
template <class T>
void gemm(const char* name, const GemmProblem& problem, GemmVariant variant, int num_sms, cudaStream_t stream);

}  // namespace flashkernel::cuda::sm90a
