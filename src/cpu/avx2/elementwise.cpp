// add, swiglu and its gradient with AVX2; the loops are in simd/elementwise_impl.hpp.
#include "cpu/fast_ops.hpp"
#include "cpu/simd/elementwise_impl.hpp"

namespace flashkernel::cpu::avx2 {

void add(const AddParams& p, void*, Stream) {
  visit_type(p.dtype, [&](auto type) { add_typed<decltype(type)>(p); });
}

void swiglu(const SwigluParams& p, void*, Stream) {
  visit_type(p.dtype, [&](auto type) { swiglu_typed<decltype(type)>(p); });
}

void swiglu_backward(const SwigluBackwardParams& p, void*, Stream) {
  visit_type(p.dtype, [&](auto type) { swiglu_backward_typed<decltype(type)>(p); });
}

}  // namespace flashkernel::cpu::avx2
