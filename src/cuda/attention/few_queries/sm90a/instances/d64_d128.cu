// kernel.cuh for fp16 and bf16, head_dim 64 and 128.
#include "cuda/attention/few_queries/sm90a/kernel.cuh"

namespace flashkernel::cuda::sm90a {

template void attention_few_queries<DType::kFloat16, 64, 64>(const AttentionParams&, const Plan&, void*, Stream);
template void attention_few_queries<DType::kBFloat16, 64, 64>(const AttentionParams&, const Plan&, void*, Stream);
template void attention_few_queries<DType::kFloat16, 128, 128>(const AttentionParams&, const Plan&, void*, Stream);
template void attention_few_queries<DType::kBFloat16, 128, 128>(const AttentionParams&, const Plan&, void*, Stream);

}  // namespace flashkernel::cuda::sm90a
