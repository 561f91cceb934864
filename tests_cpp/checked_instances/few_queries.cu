// One instance of attention of few queries, compiled as for users where the library has PTX alone
// (tests_cpp/CMakeLists.txt).
#include "cuda/attention/few_queries/sm90a/kernel.cuh"

namespace flashkernel::cuda::sm90a {

template void attention_few_queries<DType::kBFloat16, 128, 128>(const AttentionParams&, const Plan&, void*, Stream);

}  // namespace flashkernel::cuda::sm90a
