// linear and its gradients on AMX tiles, every dtype (fp16 and fp32 by exact splits into bf16, see gemm_amx.hpp).
// Rows `linear/cpu/amx`, `linear_bwd/cpu/amx`. Few rows (decode) are bound by memory and take the AVX-512 walk.
#include "cpu/fast_ops.hpp"
#include "cpu/amx/gemm_amx.hpp"
#include "cpu/simd/linear_impl.hpp"

namespace flashkernel::cpu::amx {

void linear(const LinearParams& p, void* workspace, Stream) {
  visit_type(p.dtype, [&](auto type) { linear_typed<AmxMicro<decltype(type)>, decltype(type)>(p, workspace); });
}

void linear_backward(const LinearBackwardParams& p, void* workspace, Stream) {
  visit_type(p.dtype, [&](auto type) { linear_backward_typed<AmxMicro<decltype(type)>, decltype(type)>(p, workspace); });
}

}  // namespace flashkernel::cpu::amx
