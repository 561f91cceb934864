// kernel_int4.cuh for fp16 and bf16, head_dim 256.
#include "cuda/attention/decode/sm80/kernel_int4.cuh"

namespace flashkernel::cuda::sm80 {

template void attention_decode_int4<DType::kFloat16, 256, 256>(const AttentionParams&, const Plan&, void*, Stream);
template void attention_decode_int4<DType::kBFloat16, 256, 256>(const AttentionParams&, const Plan&, void*, Stream);

}  // namespace flashkernel::cuda::sm80
