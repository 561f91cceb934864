// Instances of the sm80 kernels with a head dim of values that is not that of queries and keys.
#include "cuda/attention/backward/sm80/kernel.cuh"
#include "cuda/attention/decode/sm80/kernel_quantized.cuh"
#include "cuda/attention/forward/sm80/kernel.cuh"
#include "cuda/attention/forward/sm80/kernel_f32.cuh"

namespace flashkernel::cuda::sm80 {

template void attention_fwd<DType::kBFloat16, 192, 128>(const AttentionParams&, void*, Stream);
template void attention_bwd<DType::kFloat16, 192, 128>(const AttentionBackwardParams&, void*, Stream);
template void attention_fwd_f32<64, 96>(const AttentionParams&, void*, Stream);
template void attention_decode<DType::kFloat16, 192, 128>(const AttentionParams&, const Plan&, void*, Stream);

}  // namespace flashkernel::cuda::sm80
