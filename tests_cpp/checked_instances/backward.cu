// One instance of attention backward, compiled as for users where the library has PTX alone (tests_cpp/CMakeLists.txt).
#include "cuda/attention/backward/sm90a/kernel.cuh"

namespace flashkernel::cuda::sm90a {

template void attention_bwd<DType::kBFloat16, 128, 128>(const AttentionBackwardParams&, void*, Stream);

}  // namespace flashkernel::cuda::sm90a
