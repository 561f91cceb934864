// gemm_cluster.cuh for __nv_bfloat16.
#include "cuda/sm90a/gemm_cluster.cuh"

namespace flashkernel::cuda::sm90a {

template void gemm_in_clusters<__nv_bfloat16>(const char*, const GemmProblem&, GemmVariant, cudaStream_t);

}  // namespace flashkernel::cuda::sm90a
