// kernel.cuh for fp16 and bf16, head_dim 128, 192 and 256.
#include "cuda/attention/forward/sm90a/kernel.cuh"

namespace flashkernel::cuda::sm90a {

template void attention_fwd<DType::kFloat16, 128, 128>(const AttentionParams&, bool, void*, Stream);
template void attention_fwd<DType::kBFloat16, 128, 128>(const AttentionParams&, bool, void*, Stream);
template void attention_fwd<DType::kFloat16, 192, 192>(const AttentionParams&, bool, void*, Stream);
template void attention_fwd<DType::kBFloat16, 192, 192>(const AttentionParams&, bool, void*, Stream);
template void attention_fwd<DType::kFloat16, 256, 256>(const AttentionParams&, bool, void*, Stream);
template void attention_fwd<DType::kBFloat16, 256, 256>(const AttentionParams&, bool, void*, Stream);

}  // namespace flashkernel::cuda::sm90a
