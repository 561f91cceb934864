// kernel.cuh for fp16 and bf16, head_dim 64 and 96.
#include "cuda/attention/forward/sm90a/kernel.cuh"

namespace flashkernel::cuda::sm90a {

template void attention_fwd<DType::kFloat16, 64, 64>(const AttentionParams&, bool, void*, Stream);
template void attention_fwd<DType::kBFloat16, 64, 64>(const AttentionParams&, bool, void*, Stream);
template void attention_fwd<DType::kFloat16, 96, 96>(const AttentionParams&, bool, void*, Stream);
template void attention_fwd<DType::kBFloat16, 96, 96>(const AttentionParams&, bool, void*, Stream);

}  // namespace flashkernel::cuda::sm90a
