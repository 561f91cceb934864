// The producer of the Hopper forward kernel: three warps. One fills the slots of K, one those of V by TMA, a thread of
// the third finds the tiles that this thread block computes, tells the two and the consumers of them and brings Q. Each
// runs ahead as far as its slots allow, across tiles.
#pragma once

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/sm90a/attention_fwd_shape.cuh"

namespace flashkernel::cuda::sm90a {

/// Where this lane's part of a block of keys lies: its first row, and the image of the tensor, a sequence or a page.
struct KeyPlace {
  int row, image;
};

/// Of keys [first, first + kBlockN) of one sequence and kv head; `row` is the first one's row of the tensor (unless
/// paged). From pages a copy brings plan.kv_box_rows keys of one, and each lane asks for a copy.
template <class Shape>
__device__ inline KeyPlace place_of_keys(const AttentionParams& p, const ForwardPlan& plan, int b, int first, int row,
                                         int k_len) {
  if (!p.is_paged()) return {row, p.is_varlen_k() ? 0 : b};
  const int at = static_cast<int>(threadIdx.x % kWarp) * plan.kv_box_rows;
  const unsigned key = static_cast<unsigned>(first + at), page_size = static_cast<unsigned>(p.page_size);
  const unsigned column = key / page_size;
  // Past the sequence and for a bad id: a page outside of the tensor, which reads as zeros. What the table holds past
  // the sequence's end is never followed.
  int image = -1;
  if (at < Shape::kBlockN && first + at < k_len && column < static_cast<unsigned>(plan.max_pages))
    image = p.block_table[b * p.stride_block_table + column];
  return {static_cast<int>(key - column * page_size), image};
}

/// The block into the ring's slot, once that is free.
template <class Shape, bool kOfV>
__device__ inline void load_keys(const AttentionParams& p, const ForwardPlan& plan, const SharedLayout<Shape>& shared,
                                 const CUtensorMap* map, const KeyPlace& place, int g,
                                 const Ring<Shape::kStages>& ring) {
  const int lane = static_cast<int>(threadIdx.x % kWarp),
            at = lane * (p.is_paged() ? plan.kv_box_rows : Shape::kBlockN);
  const std::uint32_t barrier = kOfV ? shared.v_full(ring.slot()) : shared.k_full(ring.slot());
  const std::uint32_t slot = kOfV ? shared.v(ring.slot()) : shared.k(ring.slot());
  ptx::mbarrier_wait(kOfV ? shared.v_empty(ring.slot()) : shared.k_empty(ring.slot()), ring.parity() ^ 1);
  if (lane == 0) ptx::mbarrier_arrive_expect(barrier, Shape::kKvBytes);
  __syncwarp();
  if (at < Shape::kBlockN) {
    const int image = place.image < 0 ? static_cast<int>(p.num_pages) : place.image;
#pragma unroll
    for (int c = 0; c < Shape::kColumnBlocks; ++c)
      ptx::tma_load(slot + c * Shape::kKvBlockBytes + at * 128, map, barrier, ptx::l2_evict_last(), c * 64, place.row,
                    g, image);
  }
}

/// Tells the consumers of a tile and brings each its 64 rows of Q.
template <class Shape>
__device__ inline void publish(const AttentionParams& p, const SharedLayout<Shape>& shared, const CUtensorMap* map_q,
                               const TileRecord& tile, const Ring<Shape::kQSlots>& at) {
#pragma unroll 1
  for (int w = 0; w < Shape::kConsumers; ++w) {
    ptx::mbarrier_wait(shared.q_empty(at.slot(), w), at.parity() ^ 1);
    TileRecord* const record = shared.record(at.count, w);
    const int first = first_row<Shape>(tile, w);
    *record = tile;
    record->first_query = first;
    // Of no rows, all blocks but one are skipped.
    record->last_key = first < tile.range.q_len ? tile.range.last(min(tile.range.q_len - 1, first + 63)) : 0;
    record->first_full = (tile.range.first(first + 63) + Shape::kBlockN - 1) / Shape::kBlockN;
    record->end_full = tile.range.last(first) / Shape::kBlockN;
    const std::uint32_t barrier = shared.q_full(at.slot(), w);
    if (tile.num_blocks <= 0) {
      ptx::mbarrier_arrive(barrier);
      continue;
    }
    ptx::mbarrier_arrive_expect(barrier, Shape::kQBytes);
    const int row = first + (p.is_varlen_q() ? static_cast<int>(p.q_begin(tile.b)) : 0);
#pragma unroll
    for (int c = 0; c < Shape::kColumnBlocks; ++c)
      ptx::tma_load(shared.q(at.slot(), w) + c * Shape::kQBlockBytes, map_q, barrier, ptx::l2_evict_first(), c * 64,
                    row, tile.h, p.is_varlen_q() ? 0 : tile.b);
  }
}

/// One warp for K, one for V: of the tiles that the thread below finds. What is known of a tile is read from shared
/// memory when it is asked for: the producer has few registers. A block's pages are looked up before the block in front
/// of it waits for its slot, so that nobody waits for the table.
template <class Shape, bool kOfV>
__device__ inline void produce_keys(const AttentionParams& p, const ForwardPlan& plan,
                                    const SharedLayout<Shape>& shared, const CUtensorMap* map) {
  Ring<Shape::kStages> at;
  for (Ring<SharedLayout<Shape>::kRecords> tiles;; ++tiles.count) {
    ptx::mbarrier_wait(shared.found_full(tiles.slot()), tiles.parity());
    const TileRecord& tile = *shared.found(tiles.count);
    if (tile.num_blocks < 0) return;
    const int begin = p.is_varlen_k() ? static_cast<int>(p.k_begin(tile.b)) : 0;
    const auto place_of = [&](int i) {  // i blocks from the last one
      const int first = (tile.end_block - i) * Shape::kBlockN;
      return place_of_keys<Shape>(p, plan, tile.b, first, begin + first, tile.range.k_len);
    };
    KeyPlace next = place_of(1);
#pragma unroll 1
    for (int i = 1; i <= tile.num_blocks; ++i, ++at.count) {
      const KeyPlace place = next;
      if (i < tile.num_blocks) next = place_of(i + 1);
      load_keys<Shape, kOfV>(p, plan, shared, map, place, tile.g, at);
    }
    ptx::mbarrier_arrive(shared.found_empty(tiles.slot()));
  }
}

/// One thread finds the tiles, for the warps of keys too, and brings Q. It alone reads lengths while there is work:
/// were they to change meanwhile, two readers might wait for each other for ever.
template <class Shape>
__device__ inline void produce_queries(const AttentionParams& p, const ForwardPlan& plan,
                                       const SharedLayout<Shape>& shared, const CUtensorMap* map) {
  Ring<SharedLayout<Shape>::kRecords> found;
  Ring<Shape::kQSlots> told;
  bool more = true;
  for (unsigned round = 0; more; ++round) {
    TileRecord* const tile = shared.found(found.count);
    ptx::mbarrier_wait(shared.found_empty(found.slot()), found.parity() ^ 1);
    more = locate_tile<Shape>(p, plan, round, tile);
    if (more && tile->first_query + Shape::kBlockM <= 0) continue;  // a shorter sequence has no such tile
    if (!more) tile->num_blocks = -1;
    ptx::mbarrier_arrive(shared.found_full(found.slot()));
    ++found.count;
    // A place of Q may be long in coming: keys know one tile more by then. The first places are free.
    const unsigned due = more && found.count > Shape::kQSlots ? found.count - 1 : found.count;
    for (; told.count < due; ++told.count) publish<Shape>(p, shared, map, *shared.found(told.count), told);
  }
}

}  // namespace flashkernel::cuda::sm90a
