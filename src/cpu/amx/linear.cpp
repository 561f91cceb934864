// linear and its gradients on AMX tiles: bf16 and fp16 as they are or by exact splits, fp32 by exact splits (see
// gemm_amx.hpp). Rows `linear/cpu/amx` and `linear/cpu/amx_fp16` (fp16 on processors with AMX-FP16), and the same of
// linear_bwd.
#include "cpu/amx/gemm_amx.hpp"
#include "cpu/fast_ops.hpp"
#include "cpu/simd/linear_impl.hpp"

namespace flashkernel::cpu::amx {

void linear(const LinearParams& p, void* workspace, Stream) {
  if (p.dtype == DType::kFloat32) return linear_typed<AmxMicro<AmxSplitFp32>, float, 0>(p, workspace);
  if (p.dtype == DType::kFloat16) return linear_typed<AmxMicro<AmxSplitFp16>, Half, 0>(p, workspace);
  linear_typed<AmxMicro<AmxBf16>, BFloat, 0>(p, workspace);
}

void linear_fp16(const LinearParams& p, void* workspace, Stream) {
  linear_typed<AmxMicro<AmxFp16>, Half, 0>(p, workspace);
}

void linear_backward(const LinearBackwardParams& p, void* workspace, Stream) {
  if (p.dtype == DType::kFloat32) return linear_backward_typed<AmxMicro<AmxSplitFp32>, float>(p, workspace);
  if (p.dtype == DType::kFloat16) return linear_backward_typed<AmxMicro<AmxSplitFp16>, Half>(p, workspace);
  linear_backward_typed<AmxMicro<AmxBf16>, BFloat>(p, workspace);
}

void linear_backward_fp16(const LinearBackwardParams& p, void* workspace, Stream) {
  linear_backward_typed<AmxMicro<AmxFp16>, Half>(p, workspace);
}

}  // namespace flashkernel::cpu::amx
