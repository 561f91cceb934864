// few_rows.cuh for __half and __nv_bfloat16.
#include "cuda/linear/few_rows/sm80/few_rows.cuh"

namespace flashkernel::cuda::sm80 {

void linear_few_rows_f16(const LinearParams& p, void*, Stream stream) {
  if (p.rows == 0 || p.out_features == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  linear_few_rows_instance<__half>(p, native(stream));
}

void linear_few_rows_bf16(const LinearParams& p, void*, Stream stream) {
  if (p.rows == 0 || p.out_features == 0) return;
  const CudaDeviceGuard guard(p.device.index);
  linear_few_rows_instance<__nv_bfloat16>(p, native(stream));
}

}  // namespace flashkernel::cuda::sm80
