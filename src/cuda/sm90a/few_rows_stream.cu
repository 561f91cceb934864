// few_rows_stream.cuh for __half and __nv_bfloat16.
#include "cuda/sm90a/few_rows_stream.cuh"

namespace flashkernel::cuda::sm90a {

template void few_rows<__half>(const FewRowsProblem&, const FewRowsStreamPlan&, cudaStream_t);
template void few_rows<__nv_bfloat16>(const FewRowsProblem&, const FewRowsStreamPlan&, cudaStream_t);

}  // namespace flashkernel::cuda::sm90a
