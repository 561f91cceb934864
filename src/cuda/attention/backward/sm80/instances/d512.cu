// wide.cuh for fp16 and bf16, head_dim 512.
#include "cuda/attention/backward/sm80/wide.cuh"

namespace flashkernel::cuda::sm80 {

template void attention_bwd_wide<DType::kFloat16, 512>(const AttentionBackwardParams&, void*, Stream);
template void attention_bwd_wide<DType::kBFloat16, 512>(const AttentionBackwardParams&, void*, Stream);

}  // namespace flashkernel::cuda::sm80
