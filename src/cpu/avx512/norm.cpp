// LayerNorm, RMSNorm and their gradients with AVX-512; the loops are in simd/norm_impl.hpp.
#include "cpu/fast_ops.hpp"
#include "cpu/simd/norm_impl.hpp"

namespace flashkernel::cpu::avx512 {

void norm(const NormParams& p, void*, Stream) {
  visit_type(p.dtype, [&](auto type) { norm_typed<decltype(type)>(p); });
}

void norm_backward(const NormBackwardParams& p, void* workspace, Stream) {
  visit_type(p.dtype, [&](auto type) { norm_backward_typed<decltype(type)>(p, workspace); });
}

}  // namespace flashkernel::cpu::avx512
