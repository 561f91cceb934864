// The producer of the Hopper forward kernel: two threads that know which tiles this thread block computes, tell the
// consumers, and keep their slots of Q, K and V filled by TMA. They run ahead as far as the slots allow, across tiles.
#pragma once

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/sm90a/attention_fwd_shape.cuh"

namespace flashkernel::cuda::sm90a {

/// The tile of the block's `round`-th turn, in the order of the plan: groups of heads one after the other, within a
/// group the heavy tiles (the last ones, when causal) first. Blocks take turns forwards and backwards, so that none
/// gets the heavier tile every time. False when there is none left.
template <class Shape>
__device__ inline bool locate_tile(const AttentionParams& p, const ForwardPlan& plan, unsigned round,
                                   TileRecord* tile) {
  const unsigned turn = round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const unsigned index = round * gridDim.x + turn;
  if (index >= static_cast<unsigned>(plan.items)) return false;
  const unsigned at_once = plan.heads_at_once;
  const unsigned group = index / (at_once * plan.q_tiles), in_group = index % (at_once * plan.q_tiles);
  const unsigned group_heads = min(at_once, plan.heads - group * at_once);
  const unsigned head = group * at_once + in_group % group_heads;
  tile->b = static_cast<int>(head / static_cast<unsigned>(plan.heads_q));
  tile->h = static_cast<int>(head % static_cast<unsigned>(plan.heads_q));
  tile->g = tile->h / plan.group;
  tile->range = KeyRange(p, tile->b);
  tile->first_query = (plan.q_tiles - 1 - static_cast<int>(in_group / group_heads)) * Shape::kBlockM;
  const int last_query = min(tile->range.q_len, tile->first_query + Shape::kBlockM) - 1;
  const int first_key = tile->range.first(tile->first_query), last_key = tile->range.last(last_query);
  tile->end_block = (last_key + Shape::kBlockN - 1) / Shape::kBlockN;
  tile->num_blocks = last_key > first_key ? tile->end_block - first_key / Shape::kBlockN : 0;
  return true;
}

/// Keys [first, first + kBlockN) of one sequence and kv head into a slot. `row` is the first one's row of the tensor
/// (unless paged).
template <class Shape>
__device__ inline void load_keys(const AttentionParams& p, const ForwardPlan& plan, const CUtensorMap* map, int b,
                                 int g, int first, int row, int k_len, std::uint32_t slot, std::uint32_t barrier,
                                 std::uint64_t policy) {
  ptx::mbarrier_arrive_expect(barrier, Shape::kKvBytes);
  if (!p.is_paged()) {
#pragma unroll
    for (int c = 0; c < Shape::kColumnBlocks; ++c)
      ptx::tma_load(slot + c * Shape::kKvBlockBytes, map, barrier, policy, c * 64, row, g, b);
    return;
  }
#pragma unroll 1
  for (int at = 0; at < Shape::kBlockN; at += plan.kv_box_rows) {
    const unsigned key = static_cast<unsigned>(first + at), page_size = static_cast<unsigned>(p.page_size);
    const unsigned column = key / page_size;
    // Past the sequence and for a bad id: a page outside of the tensor, which reads as zeros. What the table holds past
    // the sequence's end is never followed.
    int page = static_cast<int>(p.num_pages);
    if (first + at < k_len && column < p.max_pages) page = p.block_table[b * p.stride_block_table + column];
    if (page < 0) page = static_cast<int>(p.num_pages);
#pragma unroll 1
    for (int c = 0; c < Shape::kColumnBlocks; ++c)
      ptx::tma_load(slot + c * Shape::kKvBlockBytes + at * 128, map, barrier, policy, c * 64,
                    static_cast<int>(key - column * page_size), g, page);
  }
}

/// Tells the consumers of a tile and brings each its 64 rows of Q.
template <class Shape>
__device__ inline void publish(const AttentionParams& p, const SharedLayout<Shape>& shared, const CUtensorMap* map_q,
                               const TileRecord& tile, const Ring<Shape::kQSlots>& at) {
  const std::uint64_t pass = ptx::l2_evict_first();
  const int row = tile.first_query + (p.is_varlen_q() && tile.num_blocks > 0 ? static_cast<int>(p.q_begin(tile.b)) : 0);
#pragma unroll 1
  for (int w = 0; w < Shape::kConsumers; ++w) {
    ptx::mbarrier_wait(shared.q_empty(at.slot(), w), at.parity() ^ 1);
    TileRecord* const record = shared.record(at.count, w);
    *record = tile;
    record->first_query = tile.first_query + 64 * w;
    const std::uint32_t barrier = shared.q_full(at.slot(), w);
    if (tile.num_blocks <= 0) {
      ptx::mbarrier_arrive(barrier);
      continue;
    }
    ptx::mbarrier_arrive_expect(barrier, Shape::kQBytes);
#pragma unroll
    for (int c = 0; c < Shape::kColumnBlocks; ++c)
      ptx::tma_load(shared.q(at.slot(), w) + c * Shape::kQBlockBytes, map_q, barrier, pass, c * 64, row + 64 * w,
                    tile.h, p.is_varlen_q() ? 0 : tile.b);
  }
}

/// Two threads of different warps run this, one for the records, Q and K, one for V.
template <class Shape, bool kOfV>
__device__ inline void produce(const AttentionParams& p, const ForwardPlan& plan, const SharedLayout<Shape>& shared,
                               const CUtensorMap* map_q, const CUtensorMap* map_kv) {
  const std::uint64_t keep = ptx::l2_evict_last();
  Ring<Shape::kQSlots> at_q;
  Ring<Shape::kStages> at;
  for (unsigned round = 0;; ++round) {
    TileRecord tile;
    const bool more = locate_tile<Shape>(p, plan, round, &tile);
    if (more && tile.first_query >= tile.range.q_len) continue;  // a shorter sequence has no such tile
    if (!more) tile.num_blocks = -1;
    const int begin = p.is_varlen_k() && more ? static_cast<int>(p.k_begin(tile.b)) : 0;
    const int b = p.is_varlen_k() ? 0 : tile.b;
#pragma unroll 1
    for (int i = 0; i < tile.num_blocks; ++i) {
      const std::uint32_t barrier = kOfV ? shared.v_full(at.slot()) : shared.k_full(at.slot());
      ptx::mbarrier_wait(kOfV ? shared.v_empty(at.slot()) : shared.k_empty(at.slot()), at.parity() ^ 1);
      const int first = (tile.end_block - 1 - i) * Shape::kBlockN;
      load_keys<Shape>(p, plan, map_kv, b, tile.g, first, begin + first, tile.range.k_len,
                       kOfV ? shared.v(at.slot()) : shared.k(at.slot()), barrier, keep);
      ++at.count;
      if (!kOfV && i == 0) publish<Shape>(p, shared, map_q, tile, at_q);
    }
    if (!kOfV) {
      if (tile.num_blocks <= 0) publish<Shape>(p, shared, map_q, tile, at_q);
      ++at_q.count;
    }
    if (!more) return;
  }
}

}  // namespace flashkernel::cuda::sm90a
