// gemm.cuh for __half.
#include "cuda/sm80/gemm.cuh"

namespace flashkernel::cuda::sm80 {

template void gemm<__half>(const char*, GemmProblem, const GemmPlan&, void*, cudaStream_t);

}  // namespace flashkernel::cuda::sm80
