// Cross-entropy and its gradient with AVX2; the loops are in simd/loss_impl.hpp.
#include "cpu/fast_ops.hpp"
#include "cpu/simd/loss_impl.hpp"

namespace flashkernel::cpu::avx2 {

void cross_entropy(const CrossEntropyParams& p, void* workspace, Stream) {
  visit_type(p.dtype, [&](auto type) { cross_entropy_typed<decltype(type)>(p, workspace); });
}

void cross_entropy_backward(const CrossEntropyBackwardParams& p, void*, Stream) {
  visit_type(p.dtype, [&](auto type) { cross_entropy_backward_typed<decltype(type)>(p); });
}

}  // namespace flashkernel::cpu::avx2
