// Linear's tiles where most registers are held, the widest ping-pong and cooperative ones, compiled as for users where
// the library has PTX alone (tests_cpp/CMakeLists.txt).
#include "cuda/linear/tiles/sm90a/gemm.cuh"

namespace flashkernel::cuda::sm90a {

template void launch_ping_pong<__nv_bfloat16, 192>(const char*, const GemmProblem&, int, cudaStream_t);
template void launch_cooperative<__nv_bfloat16, 128>(const char*, const GemmProblem&, int, cudaStream_t);

}  // namespace flashkernel::cuda::sm90a
