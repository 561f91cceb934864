// In the invariant mode keys come in chunks, which begin at multiples of kKeysOfChunk from key 0 on. A row has a
// softmax of its own in each chunk that it sees. States of chunks are folded together from the last chunk to the first,
// by the same operations wherever that happens: between two chunks of a tile (chunks.cuh), or in a kernel that reads
// the states which thread blocks have left for each chunk (parts.cuh). So the chunks of one row may be shared among
// thread blocks in any way, and its bits stay.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/device_facts.hpp"
#include "cuda/host/ceil_div.hpp"
#include "ops/attention_params.hpp"

namespace flashkernel::cuda::sm90a {

/// Blocks of keys of a chunk, and keys of a block. Smaller chunks give a single sequence to more thread blocks, larger
/// ones are folded less often.
inline constexpr int kBlocksOfChunk = 4;
template <int kDim>
inline constexpr int kKeysOfBlock = kDim == 64 ? 128 : 96;
template <int kDim>
inline constexpr int kKeysOfChunk = kBlocksOfChunk* kKeysOfBlock<kDim>;

/// Whether the instance for these head dims cuts keys.
template <int kQkDim, int kVDim>
inline constexpr bool kInChunks = kQkDim == kVDim && (kQkDim == 64 || kQkDim == 128);

/// Of a call in the invariant mode. `splits`: thread blocks that share the chunks of a tile of queries; 0: none does,
/// and no part leaves a thread block.
struct ForwardMode {
  bool invariant;
  int splits;
};

inline constexpr int kRowsOfParts = 64;     // queries of a head, for which chunks are shared
inline constexpr int kResidentOfParts = 2;  // thread blocks of a multiprocessor then
inline constexpr int kBlocksOfAStart = 2;   // what a tile's start and end cost, in blocks of keys
inline constexpr std::int64_t kMostPartBytes = std::int64_t{256} << 20;

/// Chunks of the longest sequence.
template <int kDim>
std::int64_t most_chunks(const AttentionParams& p) {
  return ceil_div(p.is_paged() ? p.max_pages * p.page_size : p.seq_k, kKeysOfChunk<kDim>);
}
/// Bytes of all parts: for each row and chunk the output so far, its maximum and its sum.
template <int kDim>
std::int64_t bytes_of_parts(const AttentionParams& p) {
  return p.batch * p.heads_q * p.seq_q * most_chunks<kDim>(p) * (kDim + 2) * static_cast<std::int64_t>(sizeof(float));
}

/// Of calls with a softcap, or a scale that is not positive, keys are not cut.
inline bool has_plain_scores(const AttentionParams& p) { return p.softcap <= 0.0f && p.scale > 0.0f; }

/// How many thread blocks share the chunks of a tile: as many as make the busiest place of the device the least busy.
/// `p` is the call with heads as rows.
template <int kDim>
int count_splits(const AttentionParams& p, const DeviceFacts& facts) {
  const std::int64_t chunks = most_chunks<kDim>(p), tiles = p.batch * p.heads_q;
  // Lengths of sequences in one array of keys are known to be below seq_k by the caller's word alone.
  if (tiles == 0 || p.seq_q > kRowsOfParts || chunks < 2 || p.is_varlen_k() || bytes_of_parts<kDim>(p) > kMostPartBytes)
    return 0;
  const std::int64_t places = std::int64_t{kResidentOfParts} * std::max(1, facts.num_sms);
  std::int64_t best = 1, least = -1;
  for (std::int64_t splits = 1; splits <= std::min(chunks, ceil_div(4 * places, tiles)); ++splits) {
    const std::int64_t cost =
        ceil_div(tiles * splits, places) * (ceil_div(chunks, splits) * kBlocksOfChunk + kBlocksOfAStart);
    if (least < 0 || cost < least) least = cost, best = splits;
  }
  return static_cast<int>(best);
}

/// A call of one query a head, with the query heads of a kv head as rows of one tile: K and V are read once for all of
/// them. Rows do not touch each other's bits.
inline AttentionParams heads_as_rows(AttentionParams p) {
  const std::int64_t group = p.heads_q / p.heads_kv;
  // Sinks belong to heads. A window without a left side shows the only query all keys.
  if (p.seq_q != 1 || p.is_varlen_q() || group == 1 || p.sinks || p.window_left >= 0) return p;
  p.heads_q = p.heads_kv;
  p.seq_q = group;
  p.window_right = -1;
  p.stride_q_token = p.stride_q_head;
  p.stride_q_head *= group;
  p.stride_out_token = p.stride_out_head;
  p.stride_out_head *= group;
  p.stride_lse_token = p.stride_lse_head;
  p.stride_lse_head *= group;
  return p;
}

/// How a call of the instance runs.
template <int kQkDim, int kVDim>
ForwardMode forward_mode(const AttentionParams& p, const DeviceFacts& facts) {
  ForwardMode mode{facts.invariant, 0};
  if constexpr (kInChunks<kQkDim, kVDim>)
    if (mode.invariant && has_plain_scores(p)) mode.splits = count_splits<kVDim>(heads_as_rows(p), facts);
  return mode;
}

}  // namespace flashkernel::cuda::sm90a
