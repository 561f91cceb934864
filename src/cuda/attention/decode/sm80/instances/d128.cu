// kernel.cuh for fp16 and bf16, head_dim 128.
#include "cuda/attention/decode/sm80/kernel.cuh"

namespace flashkernel::cuda::sm80 {

template void attention_decode<DType::kFloat16, 128, 128>(const AttentionParams&, const Plan&, void*, Stream);
template void attention_decode<DType::kBFloat16, 128, 128>(const AttentionParams&, const Plan&, void*, Stream);

}  // namespace flashkernel::cuda::sm80
