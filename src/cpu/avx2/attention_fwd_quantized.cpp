// Attention forward over pages of 8-bit elements: attention_fwd.cpp's algorithms with elements widened to fp32 as they
// are loaded; scales join keys and values where those are packed, or scores and weights where they stream. Called by
// attention_fwd.cpp; a file of its own for the time that it takes to compile.
#include "cpu/avx2/attention_fwd.hpp"

#include "cpu/simd/vec_avx2.hpp"
// The vector type comes first.
#include "cpu/simd/attention_entry.hpp"
#include "cpu/simd/attention_tiled.hpp"

namespace flashkernel::cpu::avx2 {

void attention_fwd_quantized(const AttentionParams& p, void* workspace, FewRows few_rows) {
  launch_attention_quantized<TiledPath>(p, workspace, few_rows);
}

}  // namespace flashkernel::cpu::avx2
