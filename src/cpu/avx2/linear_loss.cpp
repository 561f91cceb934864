// linear_cross_entropy and its gradient with AVX2; the loops are in simd/linear_loss_impl.hpp.
#include "cpu/fast_ops.hpp"
#include "cpu/simd/linear_loss_impl.hpp"

namespace flashkernel::cpu::avx2 {

void linear_cross_entropy(const LinearCrossEntropyParams& p, void*, Stream) { linear_cross_entropy_step(p); }

void linear_cross_entropy_backward(const LinearCrossEntropyBackwardParams& p, void*, Stream) {
  linear_cross_entropy_backward_step(p);
}

}  // namespace flashkernel::cpu::avx2
