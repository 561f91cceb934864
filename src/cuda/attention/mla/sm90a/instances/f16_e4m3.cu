// kernel.cuh for fp16 over latent rows of 8 bits.
#include "cuda/attention/mla/sm90a/kernel.cuh"

namespace flashkernel::cuda::sm90a {

template void mla_decode<DType::kFloat16, true>(const MlaDecodeParams&, const Plan&, void*, Stream);

}  // namespace flashkernel::cuda::sm90a
