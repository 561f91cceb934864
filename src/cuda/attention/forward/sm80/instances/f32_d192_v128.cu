// kernel_f32.cuh for fp32, head_dim 192 with values of 128.
#include "cuda/attention/forward/sm80/kernel_f32.cuh"

namespace flashkernel::cuda::sm80 {

template void attention_fwd_f32<192, 128>(const AttentionParams&, void*, Stream);

}  // namespace flashkernel::cuda::sm80
