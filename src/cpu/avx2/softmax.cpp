// softmax, log-softmax and their gradients with AVX2; the loops are in simd/softmax_impl.hpp.
#include "cpu/fast_ops.hpp"
#include "cpu/simd/softmax_impl.hpp"

namespace flashkernel::cpu::avx2 {

void softmax(const SoftmaxParams& p, void*, Stream) {
  visit_type(p.dtype, [&](auto type) { softmax_typed<decltype(type)>(p); });
}

void softmax_backward(const SoftmaxBackwardParams& p, void*, Stream) {
  visit_type(p.dtype, [&](auto type) { softmax_backward_typed<decltype(type)>(p); });
}

}  // namespace flashkernel::cpu::avx2
