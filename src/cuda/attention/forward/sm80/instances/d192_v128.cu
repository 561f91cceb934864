// kernel.cuh for fp16 and bf16, head_dim 192 with values of 128.
#include "cuda/attention/forward/sm80/kernel.cuh"

namespace flashkernel::cuda::sm80 {

template void attention_fwd<DType::kFloat16, 192, 128>(const AttentionParams&, void*, Stream);
template void attention_fwd<DType::kBFloat16, 192, 128>(const AttentionParams&, void*, Stream);

}  // namespace flashkernel::cuda::sm80
