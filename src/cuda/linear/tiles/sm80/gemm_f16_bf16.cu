// gemm.cuh for __half and __nv_bfloat16.
#include "cuda/linear/tiles/sm80/gemm.cuh"

namespace flashkernel::cuda::sm80 {

template void gemm<__half>(const char*, GemmProblem, const GemmPlan&, void*, cudaStream_t);
template void gemm<__nv_bfloat16>(const char*, GemmProblem, const GemmPlan&, void*, cudaStream_t);

}  // namespace flashkernel::cuda::sm80
