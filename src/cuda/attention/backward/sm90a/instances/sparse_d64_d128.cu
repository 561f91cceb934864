// kernel.cuh for fp16 and bf16, head_dim 64 and 128, with a block mask.
#include "cuda/attention/backward/sm90a/kernel.cuh"

namespace flashkernel::cuda::sm90a {

template void attention_bwd_sparse<DType::kFloat16, 64, 64>(const AttentionBackwardParams&, void*, Stream);
template void attention_bwd_sparse<DType::kBFloat16, 64, 64>(const AttentionBackwardParams&, void*, Stream);
template void attention_bwd_sparse<DType::kFloat16, 128, 128>(const AttentionBackwardParams&, void*, Stream);
template void attention_bwd_sparse<DType::kBFloat16, 128, 128>(const AttentionBackwardParams&, void*, Stream);

}  // namespace flashkernel::cuda::sm90a
