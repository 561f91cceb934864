// Attention forward with AVX-512: fp32 as it is, fp16 and bf16 widened to fp32 while K and V are packed or streamed.
// A row of cpu/kernels.cpp; the algorithm is in simd/attention_tiled.hpp (many rows) and simd/attention_decode.hpp
// (few).
#include "cpu/avx512/attention_fwd.hpp"

#include "cpu/simd/vec_avx512.hpp"
// The vector type comes first.
#include "cpu/simd/attention_entry.hpp"
#include "cpu/simd/attention_tiled.hpp"

namespace flashkernel::cpu::avx512 {

namespace {

void launch(const AttentionParams& p, void* workspace, FewRows few_rows) {
  if (p.quantization.present) return attention_fwd_quantized(p, workspace, few_rows);
  launch_attention<TiledPath>(p, workspace, few_rows);
}

}  // namespace

std::size_t attention_fwd_workspace(const AttentionParams& p) {
  return attention_workspace<TiledPath>(p, FewRows::kStream);
}
void attention_fwd(const AttentionParams& p, void* workspace, Stream) { launch(p, workspace, FewRows::kStream); }

std::size_t attention_fwd_packed_workspace(const AttentionParams& p) {
  return attention_workspace<TiledPath>(p, FewRows::kPack);
}
void attention_fwd_packed(const AttentionParams& p, void* workspace, Stream) { launch(p, workspace, FewRows::kPack); }

}  // namespace flashkernel::cpu::avx512
