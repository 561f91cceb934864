// kernel.cuh for fp16 and bf16, head_dim 64 and 128.
#include "cuda/attention/decode/sm90a/kernel.cuh"

namespace flashkernel::cuda::sm90a {

template void attention_decode<DType::kFloat16, 64>(const AttentionParams&, void*, Stream);
template void attention_decode<DType::kBFloat16, 64>(const AttentionParams&, void*, Stream);
template void attention_decode<DType::kFloat16, 128>(const AttentionParams&, void*, Stream);
template void attention_decode<DType::kBFloat16, 128>(const AttentionParams&, void*, Stream);

}  // namespace flashkernel::cuda::sm90a
