// kernel.cuh for __nv_bfloat16.
#include "cuda/linear/quantized/few_rows/sm80/kernel.cuh"

namespace flashkernel::cuda::sm80 {

template void quantized_few_rows<DType::kBFloat16>(const QuantizedLinearParams&, const Plan&, void*, Stream);

}  // namespace flashkernel::cuda::sm80
