// kernel.cuh for fp16 and bf16, head_dim 128, with a bias, ALiBi or a packed mask.
#include "cuda/attention/forward/sm90a/kernel.cuh"

namespace flashkernel::cuda::sm90a {

template void attention_fwd_scored<DType::kFloat16, 128, 128>(const AttentionParams&, void*, Stream);
template void attention_fwd_scored<DType::kBFloat16, 128, 128>(const AttentionParams&, void*, Stream);

}  // namespace flashkernel::cuda::sm90a
