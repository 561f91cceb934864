// kernel.cuh for bf16.
#include "cuda/attention/mla/sm90a/kernel.cuh"

namespace flashkernel::cuda::sm90a {

template void mla_decode<DType::kBFloat16, false>(const MlaDecodeParams&, const Plan&, void*, Stream);

}  // namespace flashkernel::cuda::sm90a
