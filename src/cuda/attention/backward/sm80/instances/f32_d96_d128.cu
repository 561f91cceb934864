// kernel_f32.cuh for fp32, head_dim 96 and 128.
#include "cuda/attention/backward/sm80/kernel_f32.cuh"

namespace flashkernel::cuda::sm80 {

template void attention_bwd_f32<96, 96>(const AttentionBackwardParams&, void*, Stream);
template void attention_bwd_f32<128, 128>(const AttentionBackwardParams&, void*, Stream);

}  // namespace flashkernel::cuda::sm80
