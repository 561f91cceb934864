// linear_few_rows.cuh for __half.
#include "cuda/sm80/linear_few_rows.cuh"

namespace flashkernel::cuda::sm80 {

void linear_few_rows_f16(const LinearParams& p, void*, Stream stream) {
  if (p.rows == 0 || p.out_features == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  linear_few_rows_instance<__half>(p, native(stream));
}

}  // namespace flashkernel::cuda::sm80
