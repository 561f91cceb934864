// Instances of the Hopper kernels with a head dim of values that is not that of queries and keys.
#include "cuda/attention/backward/sm90a/kernel.cuh"
#include "cuda/attention/forward/sm90a/kernel.cuh"

namespace flashkernel::cuda::sm90a {

template void attention_fwd<DType::kFloat16, 192, 128>(const AttentionParams&, bool, void*, Stream);
template void attention_bwd<DType::kFloat16, 128, 64>(const AttentionBackwardParams&, void*, Stream);

}  // namespace flashkernel::cuda::sm90a
