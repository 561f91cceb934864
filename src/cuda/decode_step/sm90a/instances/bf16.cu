// launch.cuh for __nv_bfloat16.
#include "cuda/decode_step/sm90a/launch.cuh"

namespace flashkernel::cuda::decode_step {

template <>
void launch<DType::kBFloat16, true>(const DecodeStepParams& p, const Plan& plan, void* workspace, Stream stream) {
  launch_for<__nv_bfloat16, true>(p, plan, workspace, stream);
}
template <>
void launch<DType::kBFloat16, false>(const DecodeStepParams& p, const Plan& plan, void* workspace, Stream stream) {
  launch_for<__nv_bfloat16, false>(p, plan, workspace, stream);
}

}  // namespace flashkernel::cuda::decode_step
