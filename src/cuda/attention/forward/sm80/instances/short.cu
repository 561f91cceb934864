// kernel.cuh in small tiles for fp16 and bf16, head_dim 32, 64 and 128.
#include "cuda/attention/forward/sm80/kernel.cuh"

namespace flashkernel::cuda::sm80 {

template void attention_fwd_short<DType::kFloat16, 32, 32>(const AttentionParams&, void*, Stream);
template void attention_fwd_short<DType::kBFloat16, 32, 32>(const AttentionParams&, void*, Stream);
template void attention_fwd_short<DType::kFloat16, 64, 64>(const AttentionParams&, void*, Stream);
template void attention_fwd_short<DType::kBFloat16, 64, 64>(const AttentionParams&, void*, Stream);
template void attention_fwd_short<DType::kFloat16, 128, 128>(const AttentionParams&, void*, Stream);
template void attention_fwd_short<DType::kBFloat16, 128, 128>(const AttentionParams&, void*, Stream);

}  // namespace flashkernel::cuda::sm80
