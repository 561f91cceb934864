// Where transposed values lie for attention of 8 bits on 9.0 (cuda/attention/forward/sm90a/float8_plan.hpp): host code,
// tested without a GPU.
#include "cuda/attention/forward/sm90a/float8_plan.hpp"

#include <gtest/gtest.h>

namespace flashkernel::cuda::sm90a {
namespace {

AttentionParams call() {
  AttentionParams p;
  p.batch = 2, p.heads_q = 8, p.heads_kv = 2, p.seq_q = p.seq_k = 300, p.head_dim = p.head_dim_v = 128;
  return p;
}

// Sequences side by side: each has room for whole blocks of its keys before the next one, and all fit.
TEST(Float8Plan, SequencesDoNotTouch) {
  constexpr int kBlock = 96;
  for (const int length : {0, 1, 95, 96, 97, 192, 500}) {
    int begin = 0, b = 0;
    for (const int other : {length, 3, length, 96, 0, length}) {
      const int room = first_transposed_key<kBlock>(begin + other, b + 1) - first_transposed_key<kBlock>(begin, b);
      EXPECT_GE(room, (other + kBlock - 1) / kBlock * kBlock) << begin << " " << other;
      begin += other, ++b;
    }
    AttentionParams p = call();
    p.cu_seqlens_k = {&p, false};
    p.total_k = begin, p.batch = b;
    EXPECT_GE(TransposedValues::of<kBlock>(p).keys, first_transposed_key<kBlock>(begin, b));
    EXPECT_EQ(TransposedValues::of<kBlock>(p).batch, 1);
  }
}

TEST(Float8Plan, DenseKeysAreWholeBlocks) {
  const AttentionParams p = call();
  EXPECT_EQ(TransposedValues::of<128>(p).keys, 384);
  EXPECT_EQ(TransposedValues::of<128>(p).bytes(p), std::size_t{2 * 2 * 128 * 384});
}

}  // namespace
}  // namespace flashkernel::cuda::sm90a
