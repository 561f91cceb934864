// few_rows.cuh for __nv_bfloat16.
#include "cuda/sm90a/few_rows.cuh"

namespace flashkernel::cuda::sm90a {

template void few_rows<__nv_bfloat16>(const FewRowsProblem&, const FewRowsPlan&, cudaStream_t);

}  // namespace flashkernel::cuda::sm90a
