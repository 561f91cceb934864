// kernel.cuh for fp16 and bf16, head_dim 32.
#include "cuda/attention/backward/sm80/kernel.cuh"

namespace flashkernel::cuda::sm80 {

template void attention_bwd<DType::kFloat16, 32, 32>(const AttentionBackwardParams&, void*, Stream);
template void attention_bwd<DType::kBFloat16, 32, 32>(const AttentionBackwardParams&, void*, Stream);

}  // namespace flashkernel::cuda::sm80
