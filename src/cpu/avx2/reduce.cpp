// sum, mean, max and argmax with AVX2; the loops are in simd/reduce_impl.hpp.
#include "cpu/fast_ops.hpp"
#include "cpu/simd/reduce_impl.hpp"

namespace flashkernel::cpu::avx2 {

void reduce(const ReduceParams& p, void* workspace, Stream) {
  visit_type(p.dtype, [&](auto type) { reduce_typed<decltype(type)>(p, workspace); });
}

}  // namespace flashkernel::cpu::avx2
