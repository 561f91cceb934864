// One instance of attention forward, of its form with scores modified and of that for e4m3, compiled as for users where
// the library has PTX alone (tests_cpp/CMakeLists.txt).
#include "cuda/attention/forward/sm90a/kernel.cuh"

namespace flashkernel::cuda::sm90a {

template void attention_fwd<DType::kBFloat16, 128, 128>(const AttentionParams&, bool, void*, Stream);
template void attention_fwd_scored<DType::kBFloat16, 128, 128>(const AttentionParams&, void*, Stream);
template void attention_fp8<DType::kBFloat16, 128>(const Float8AttentionParams&, void*, Stream);

}  // namespace flashkernel::cuda::sm90a
