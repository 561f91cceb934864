// in_order.cuh for __half and __nv_bfloat16.
#include "cuda/linear/few_rows/sm90a/in_order.cuh"

namespace flashkernel::cuda::sm90a {

template void few_rows<__half>(const FewRowsProblem&, const FewRowsInOrderPlan&, cudaStream_t);
template void few_rows<__nv_bfloat16>(const FewRowsProblem&, const FewRowsInOrderPlan&, cudaStream_t);

}  // namespace flashkernel::cuda::sm90a
