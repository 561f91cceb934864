// kernel_f32.cuh for fp32, head_dim 192 and 256.
#include "cuda/attention/forward/sm80/kernel_f32.cuh"

namespace flashkernel::cuda::sm80 {

template void attention_fwd_f32<192, 192>(const AttentionParams&, void*, Stream);
template void attention_fwd_f32<256, 256>(const AttentionParams&, void*, Stream);

}  // namespace flashkernel::cuda::sm80
