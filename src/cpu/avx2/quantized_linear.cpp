// quantized_linear with AVX2 and FMA: fp32 sums for every dtype. Rows `quantized_linear/cpu/avx2` and `avx2_packed`.
#include "cpu/fast_ops.hpp"
#include "cpu/simd/quantized_linear_impl.hpp"

namespace flashkernel::cpu::avx2 {

void quantized_linear(const QuantizedLinearParams& p, void* workspace, Stream) {
  visit_type(p.dtype, [&](auto type) { quantized_linear_typed<decltype(type)>(p, workspace); });
}

void quantized_linear_packed(const QuantizedLinearParams& p, void* workspace, Stream) {
  visit_type(p.dtype, [&](auto type) { quantized_linear_typed<decltype(type), 0>(p, workspace); });
}

}  // namespace flashkernel::cpu::avx2
