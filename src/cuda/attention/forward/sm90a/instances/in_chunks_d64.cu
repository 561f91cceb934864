// kernel.cuh for fp16 and bf16, head_dim 64, in the invariant mode.
#include "cuda/attention/forward/sm90a/kernel.cuh"

namespace flashkernel::cuda::sm90a {

template void attention_fwd_in_chunks<DType::kFloat16, 64, 64>(const AttentionParams&, int, void*, Stream);
template void attention_fwd_in_chunks<DType::kBFloat16, 64, 64>(const AttentionParams&, int, void*, Stream);

}  // namespace flashkernel::cuda::sm90a
