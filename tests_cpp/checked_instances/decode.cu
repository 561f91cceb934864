// One instance of decode by clusters and by groups, compiled as for users where the library has PTX alone
// (tests_cpp/CMakeLists.txt).
#include "cuda/attention/decode/sm90a/kernel.cuh"

namespace flashkernel::cuda::sm90a {

template void decode_group<DType::kBFloat16, 128, 128>(const AttentionParams&, const Plan&, void*, Stream);
template void decode_clusters<DType::kBFloat16, 128, 128>(const AttentionParams&, const Plan&, void*, Stream);

}  // namespace flashkernel::cuda::sm90a
