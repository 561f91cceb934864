// kernel.cuh for fp16 and bf16, head_dim 192 with values of 128.
#include "cuda/attention/backward/sm80/kernel.cuh"

namespace flashkernel::cuda::sm80 {

template void attention_bwd<DType::kFloat16, 192, 128>(const AttentionBackwardParams&, void*, Stream);
template void attention_bwd<DType::kBFloat16, 192, 128>(const AttentionBackwardParams&, void*, Stream);

}  // namespace flashkernel::cuda::sm80
