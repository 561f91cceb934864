// kernel.cuh for fp16, head_dim 192 with values of 128.
#include "cuda/attention/forward/sm75/kernel.cuh"

namespace flashkernel::cuda::sm75 {

template void attention_fwd<DType::kFloat16, 192, 128>(const AttentionParams&, void*, Stream);

}  // namespace flashkernel::cuda::sm75
