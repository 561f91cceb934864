// Attention forward with AVX2, FMA and F16C: fp32 as it is, fp16 and bf16 widened to fp32 while K and V are packed or
// streamed. A row of cpu/kernels.cpp; the algorithm is in simd/attention_tiled.hpp (many rows) and
// simd/attention_decode.hpp (few).
#include "cpu/avx2/attention_fwd.hpp"

#include "cpu/simd/vec_avx2.hpp"
// The vector type comes first.
#include "cpu/simd/attention_entry.hpp"
#include "cpu/simd/attention_tiled.hpp"

namespace flashkernel::cpu::avx2 {
namespace {

struct Path {
  static constexpr int kStrip = kStripRows, kLeast = kLeastStrips;
  static int most(const AttentionParams&) { return kMostStrips; }
  static std::int64_t scratch_bytes(const AttentionParams& p) {
    std::int64_t bytes;
    tiled_scratch(p, kMostStrips, nullptr, &bytes);
    return bytes;
  }
  template <class T>
  static void run(const Sequence<T>& seq, std::int64_t row0, std::int64_t row1, char* memory) {
    std::int64_t bytes;
    tiled_task(seq, row0, row1, tiled_scratch(*seq.p, kMostStrips, memory, &bytes));
  }
};

}  // namespace

std::size_t attention_fwd_workspace(const AttentionParams& p) { return attention_workspace<Path>(p); }
void attention_fwd(const AttentionParams& p, void* workspace, Stream) { launch_attention<Path>(p, workspace); }

}  // namespace flashkernel::cpu::avx2
