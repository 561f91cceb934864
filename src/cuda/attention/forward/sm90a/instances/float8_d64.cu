// kernel.cuh for e4m3 operands, head_dim 64, with an output of fp16 and of bf16.
#include "cuda/attention/forward/sm90a/kernel.cuh"

namespace flashkernel::cuda::sm90a {

template std::size_t attention_fp8_workspace<64>(const Float8AttentionParams&);
template void attention_fp8<DType::kFloat16, 64>(const Float8AttentionParams&, void*, Stream);
template void attention_fp8<DType::kBFloat16, 64>(const Float8AttentionParams&, void*, Stream);

}  // namespace flashkernel::cuda::sm90a
