// kernel.cuh for fp16, head_dim 32, 64, 96 and 128.
#include "cuda/attention/backward/sm75/kernel.cuh"

namespace flashkernel::cuda::sm75 {

template void attention_bwd<DType::kFloat16, 32, 32>(const AttentionBackwardParams&, void*, Stream);
template void attention_bwd<DType::kFloat16, 64, 64>(const AttentionBackwardParams&, void*, Stream);
template void attention_bwd<DType::kFloat16, 96, 96>(const AttentionBackwardParams&, void*, Stream);
template void attention_bwd<DType::kFloat16, 128, 128>(const AttentionBackwardParams&, void*, Stream);

}  // namespace flashkernel::cuda::sm75
