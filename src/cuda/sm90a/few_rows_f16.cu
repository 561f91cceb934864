// few_rows.cuh for __half.
#include "cuda/sm90a/few_rows.cuh"

namespace flashkernel::cuda::sm90a {

template void few_rows<__half>(const FewRowsProblem&, const FewRowsPlan&, cudaStream_t);

}  // namespace flashkernel::cuda::sm90a
