// How thread blocks share the chunks of keys of the invariant mode (cuda/attention/forward/sm90a/chunks.hpp): host
// code, tested without a GPU.
#include "cuda/attention/forward/sm90a/chunks.hpp"

#include <gtest/gtest.h>

#include "hopper_devices.hpp"

namespace flashkernel::cuda::sm90a {
namespace {

AttentionParams call(std::int64_t batch, std::int64_t keys, std::int64_t queries = 1, std::int64_t heads = 32,
                     std::int64_t heads_kv = 8) {
  AttentionParams p;
  p.batch = batch, p.seq_q = queries, p.seq_k = keys;
  p.heads_q = heads, p.heads_kv = heads_kv, p.head_dim = p.head_dim_v = 128;
  return p;
}

ForwardMode mode_of(const AttentionParams& p, bool invariant = true) {
  DeviceFacts facts;
  facts.num_sms = kH200.num_sms;
  facts.invariant = invariant;
  return forward_mode<128, 128>(p, facts);
}

TEST(ChunksPlan, OneSequenceIsSharedByManyBlocks) {
  EXPECT_EQ(mode_of(call(1, 8192)).splits, 22);  // a chunk each: 8 heads x 22 blocks of 264 places
  for (const std::int64_t keys : {4096, 32768, 131072})
    EXPECT_GE(8 * mode_of(call(1, keys)).splits, std::min<std::int64_t>(200, 8 * keys / kKeysOfChunk<128>));
}

TEST(ChunksPlan, NoBlockIsLeftWithoutAChunkByTheLongestSequence) {
  for (const std::int64_t batch : {1, 3, 16, 64, 200})
    for (const std::int64_t keys : {385, 1024, 8192, 131072}) {
      const AttentionParams p = call(batch, keys);
      EXPECT_LE(mode_of(p).splits, most_chunks<128>(p));
    }
}

TEST(ChunksPlan, ShortAndManyQueriesAndOtherCallsAreNotShared) {
  EXPECT_EQ(mode_of(call(1, 384)).splits, 0);
  EXPECT_EQ(mode_of(call(1, 8192, 65)).splits, 0);
  EXPECT_GT(mode_of(call(1, 8192, 64)).splits, 0);
  EXPECT_EQ(mode_of(call(1, 8192), false).splits, 0);
  AttentionParams capped = call(1, 8192);
  capped.softcap = 5.0f;
  EXPECT_EQ(mode_of(capped).splits, 0);
  DeviceFacts facts;
  facts.invariant = true, facts.num_sms = kH200.num_sms;
  EXPECT_EQ((forward_mode<256, 256>(call(1, 8192), facts).splits), 0);
}

TEST(ChunksPlan, PartsHaveABound) {
  const AttentionParams p = call(256, 131072);
  EXPECT_GT(bytes_of_parts<128>(p), kMostPartBytes);
  EXPECT_EQ(mode_of(p).splits, 0);
}

}  // namespace
}  // namespace flashkernel::cuda::sm90a
