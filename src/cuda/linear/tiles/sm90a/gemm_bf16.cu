// gemm.cuh for __nv_bfloat16.
#include "cuda/linear/tiles/sm90a/gemm.cuh"

namespace flashkernel::cuda::sm90a {

template void gemm<__nv_bfloat16>(const char*, const GemmProblem&, GemmVariant, int, cudaStream_t);

}  // namespace flashkernel::cuda::sm90a
