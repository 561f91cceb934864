// gemm.cuh for __half.
#include "cuda/linear/tiles/sm90a/gemm.cuh"

namespace flashkernel::cuda::sm90a {

template void gemm<__half>(const char*, const GemmProblem&, GemmVariant, int, cudaStream_t);

}  // namespace flashkernel::cuda::sm90a
