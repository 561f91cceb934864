// kernel.cuh for fp16 and bf16, head_dim 192 (with values of 128 too) and 256.
#include "cuda/attention/backward/sm90a/kernel.cuh"

namespace flashkernel::cuda::sm90a {

template void attention_bwd<DType::kFloat16, 192, 128>(const AttentionBackwardParams&, void*, Stream);
template void attention_bwd<DType::kBFloat16, 192, 128>(const AttentionBackwardParams&, void*, Stream);
template void attention_bwd<DType::kFloat16, 192, 192>(const AttentionBackwardParams&, void*, Stream);
template void attention_bwd<DType::kBFloat16, 192, 192>(const AttentionBackwardParams&, void*, Stream);
template void attention_bwd<DType::kFloat16, 256, 256>(const AttentionBackwardParams&, void*, Stream);
template void attention_bwd<DType::kBFloat16, 256, 256>(const AttentionBackwardParams&, void*, Stream);

}  // namespace flashkernel::cuda::sm90a
