// kernel.cuh for __half.
#include "cuda/linear/quantized/few_rows/sm80/kernel.cuh"

namespace flashkernel::cuda::sm80 {

template void quantized_few_rows<DType::kFloat16>(const QuantizedLinearParams&, const Plan&, void*, Stream);

}  // namespace flashkernel::cuda::sm80
