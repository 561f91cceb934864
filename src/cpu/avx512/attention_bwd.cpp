// Attention backward with AVX-512: fp32 arithmetic for every dtype. Row `attention_bwd/cpu/avx512`.
#include "cpu/avx512/attention_bwd.hpp"

#include "cpu/simd/vec_avx512.hpp"
// After a vector type.
#include "cpu/simd/attention_bwd.hpp"

namespace flashkernel::cpu::avx512 {

void attention_bwd(const AttentionBackwardParams& params, void* workspace, Stream) {
  launch_backward(params, workspace);
}

std::size_t attention_bwd_workspace(const AttentionBackwardParams& params) { return backward_workspace(params); }

}  // namespace flashkernel::cpu::avx512
