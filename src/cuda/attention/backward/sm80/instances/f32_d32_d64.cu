// kernel_f32.cuh for fp32, head_dim 32 and 64.
#include "cuda/attention/backward/sm80/kernel_f32.cuh"

namespace flashkernel::cuda::sm80 {

template void attention_bwd_f32<32, 32>(const AttentionBackwardParams&, void*, Stream);
template void attention_bwd_f32<64, 64>(const AttentionBackwardParams&, void*, Stream);

}  // namespace flashkernel::cuda::sm80
