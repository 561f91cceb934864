// Instances of the sm75 kernels with a head dim of values that is not that of queries and keys.
#include "cuda/attention/backward/sm75/kernel.cuh"
#include "cuda/attention/forward/sm75/kernel.cuh"

namespace flashkernel::cuda::sm75 {

template void attention_fwd<DType::kFloat16, 192, 128>(const AttentionParams&, void*, Stream);
template void attention_bwd<DType::kFloat16, 96, 64>(const AttentionBackwardParams&, void*, Stream);

}  // namespace flashkernel::cuda::sm75
