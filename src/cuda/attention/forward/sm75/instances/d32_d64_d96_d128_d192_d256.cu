// kernel.cuh for fp16, head_dim 32, 64, 96, 128, 192 and 256.
#include "cuda/attention/forward/sm75/kernel.cuh"

namespace flashkernel::cuda::sm75 {

template void attention_fwd<DType::kFloat16, 32, 32>(const AttentionParams&, void*, Stream);
template void attention_fwd<DType::kFloat16, 64, 64>(const AttentionParams&, void*, Stream);
template void attention_fwd<DType::kFloat16, 96, 96>(const AttentionParams&, void*, Stream);
template void attention_fwd<DType::kFloat16, 128, 128>(const AttentionParams&, void*, Stream);
template void attention_fwd<DType::kFloat16, 192, 192>(const AttentionParams&, void*, Stream);
template void attention_fwd<DType::kFloat16, 256, 256>(const AttentionParams&, void*, Stream);

}  // namespace flashkernel::cuda::sm75
