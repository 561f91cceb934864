// wide.cuh for fp16 and bf16, head_dim 512.
#include "cuda/attention/forward/sm90a/wide.cuh"

namespace flashkernel::cuda::sm90a {

template void attention_fwd_wide<DType::kFloat16>(const AttentionParams&, void*, Stream);
template void attention_fwd_wide<DType::kBFloat16>(const AttentionParams&, void*, Stream);

}  // namespace flashkernel::cuda::sm90a
