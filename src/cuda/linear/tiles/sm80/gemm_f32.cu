// gemm.cuh for float.
#include "cuda/linear/tiles/sm80/gemm.cuh"

namespace flashkernel::cuda::sm80 {

template void gemm<float>(const char*, GemmProblem, const GemmPlan&, void*, cudaStream_t);

}  // namespace flashkernel::cuda::sm80
