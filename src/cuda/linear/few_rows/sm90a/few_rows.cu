// blocks.cuh and direct.cuh for __half and __nv_bfloat16.
#include "cuda/linear/few_rows/sm90a/blocks.cuh"
#include "cuda/linear/few_rows/sm90a/direct.cuh"

namespace flashkernel::cuda::sm90a {

template void few_rows<__half>(const FewRowsProblem&, const FewRowsBlocksPlan&, cudaStream_t);
template void few_rows<__nv_bfloat16>(const FewRowsProblem&, const FewRowsBlocksPlan&, cudaStream_t);
template void few_rows<__half>(const FewRowsProblem&, const FewRowsBlocksInOrderPlan&, cudaStream_t);
template void few_rows<__nv_bfloat16>(const FewRowsProblem&, const FewRowsBlocksInOrderPlan&, cudaStream_t);
template void few_rows<__half>(const FewRowsProblem&, const FewRowsDirectPlan&, cudaStream_t);
template void few_rows<__nv_bfloat16>(const FewRowsProblem&, const FewRowsDirectPlan&, cudaStream_t);

}  // namespace flashkernel::cuda::sm90a
