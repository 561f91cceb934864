// kernel.cuh for fp16 over latent rows of 8 bits.
#include "cuda/attention/mla/sm80/kernel.cuh"

namespace flashkernel::cuda::sm80 {

template void mla_decode<DType::kFloat16, true>(const MlaDecodeParams&, const Plan&, void*, Stream);

}  // namespace flashkernel::cuda::sm80
