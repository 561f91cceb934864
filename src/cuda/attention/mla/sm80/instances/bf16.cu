// kernel.cuh for bf16.
#include "cuda/attention/mla/sm80/kernel.cuh"

namespace flashkernel::cuda::sm80 {

template void mla_decode<DType::kBFloat16, false>(const MlaDecodeParams&, const Plan&, void*, Stream);

}  // namespace flashkernel::cuda::sm80
