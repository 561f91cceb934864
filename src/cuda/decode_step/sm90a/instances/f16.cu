// launch.cuh for __half.
#include "cuda/decode_step/sm90a/launch.cuh"

namespace flashkernel::cuda::decode_step {

template <>
void launch<DType::kFloat16, true>(const DecodeStepParams& p, const Plan& plan, void* workspace, Stream stream) {
  launch_for<__half, true>(p, plan, workspace, stream);
}
template <>
void launch<DType::kFloat16, false>(const DecodeStepParams& p, const Plan& plan, void* workspace, Stream stream) {
  launch_for<__half, false>(p, plan, workspace, stream);
}

}  // namespace flashkernel::cuda::decode_step
