// kernel_f32.cuh for fp32, head_dim 32, 64, 96 and 128.
#include "cuda/attention/forward/sm80/kernel_f32.cuh"

namespace flashkernel::cuda::sm80 {

template void attention_fwd_f32<32, 32>(const AttentionParams&, void*, Stream);
template void attention_fwd_f32<64, 64>(const AttentionParams&, void*, Stream);
template void attention_fwd_f32<96, 96>(const AttentionParams&, void*, Stream);
template void attention_fwd_f32<128, 128>(const AttentionParams&, void*, Stream);

}  // namespace flashkernel::cuda::sm80
