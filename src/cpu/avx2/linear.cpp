// linear and its gradients with AVX2 and FMA: fp32 sums for every dtype. Rows `linear/cpu/avx2`, `linear_bwd/cpu/avx2`.
#include "cpu/fast_ops.hpp"
#include "cpu/simd/gemm_vec.hpp"
#include "cpu/simd/linear_impl.hpp"

namespace flashkernel::cpu::avx2 {

void linear(const LinearParams& p, void* workspace, Stream) {
  visit_type(p.dtype, [&](auto type) { linear_typed<VecMicro, decltype(type)>(p, workspace); });
}

void linear_packed(const LinearParams& p, void* workspace, Stream) {
  visit_type(p.dtype, [&](auto type) { linear_typed<VecMicro, decltype(type), 0>(p, workspace); });
}

void linear_backward(const LinearBackwardParams& p, void* workspace, Stream) {
  visit_type(p.dtype, [&](auto type) { linear_backward_typed<VecMicro, decltype(type)>(p, workspace); });
}

}  // namespace flashkernel::cpu::avx2
