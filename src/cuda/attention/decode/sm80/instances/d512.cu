// kernel.cuh for fp16 and bf16, head_dim 512.
#include "cuda/attention/decode/sm80/kernel.cuh"

namespace flashkernel::cuda::sm80 {

template void attention_decode<DType::kFloat16, 512, 512>(const AttentionParams&, const Plan&, void*, Stream);
template void attention_decode<DType::kBFloat16, 512, 512>(const AttentionParams&, const Plan&, void*, Stream);

}  // namespace flashkernel::cuda::sm80
