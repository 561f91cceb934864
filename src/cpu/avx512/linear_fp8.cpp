// linear_fp8 with AVX-512: elements become fp32 as they are loaded. Row `linear_fp8/cpu/avx512`.
#include "cpu/fast_ops.hpp"
#include "cpu/simd/linear_fp8_impl.hpp"

namespace flashkernel::cpu::avx512 {

void linear_fp8(const LinearFp8Params& p, void* workspace, Stream) {
  visit_type(p.dtype, [&](auto type) { linear_fp8_typed<decltype(type)>(p, workspace); });
}

}  // namespace flashkernel::cpu::avx512
