// kernel.cuh for __nv_bfloat16.
#include "cuda/linear/cluster_k/sm90a/kernel.cuh"

namespace flashkernel::cuda::sm90a {

template void gemm_in_clusters<__nv_bfloat16>(const char*, const GemmProblem&, GemmVariant, cudaStream_t);

}  // namespace flashkernel::cuda::sm90a
