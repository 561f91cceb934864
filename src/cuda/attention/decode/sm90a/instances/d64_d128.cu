// kernel.cuh for fp16 and bf16, head_dim 64 and 128.
#include "cuda/attention/decode/sm90a/kernel.cuh"

namespace flashkernel::cuda::sm90a {

template int decode_groups_at_once<DType::kFloat16, 64, 64>(int, int);
template void decode_group<DType::kFloat16, 64, 64>(const AttentionParams&, const Plan&, void*, Stream);
template void decode_clusters<DType::kFloat16, 64, 64>(const AttentionParams&, const Plan&, void*, Stream);
template int decode_groups_at_once<DType::kBFloat16, 64, 64>(int, int);
template void decode_group<DType::kBFloat16, 64, 64>(const AttentionParams&, const Plan&, void*, Stream);
template void decode_clusters<DType::kBFloat16, 64, 64>(const AttentionParams&, const Plan&, void*, Stream);
template int decode_groups_at_once<DType::kFloat16, 128, 128>(int, int);
template void decode_group<DType::kFloat16, 128, 128>(const AttentionParams&, const Plan&, void*, Stream);
template void decode_clusters<DType::kFloat16, 128, 128>(const AttentionParams&, const Plan&, void*, Stream);
template int decode_groups_at_once<DType::kBFloat16, 128, 128>(int, int);
template void decode_group<DType::kBFloat16, 128, 128>(const AttentionParams&, const Plan&, void*, Stream);
template void decode_clusters<DType::kBFloat16, 128, 128>(const AttentionParams&, const Plan&, void*, Stream);

}  // namespace flashkernel::cuda::sm90a
