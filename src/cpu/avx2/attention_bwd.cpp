// Attention backward with AVX2: fp32 arithmetic for every dtype. Row `attention_bwd/cpu/avx2`.
#include "cpu/avx2/attention_bwd.hpp"

#include "cpu/simd/vec_avx2.hpp"
// After a vector type.
#include "cpu/simd/attention_bwd.hpp"

namespace flashkernel::cpu::avx2 {

void attention_bwd(const AttentionBackwardParams& params, void* workspace, Stream) {
  launch_backward(params, workspace);
}

std::size_t attention_bwd_workspace(const AttentionBackwardParams& params) { return backward_workspace(params); }

}  // namespace flashkernel::cpu::avx2
