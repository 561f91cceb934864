// The producer of the Hopper forward kernel: three warps. One fills the slots of K by TMA. One fills the slots of V,
// and sends outputs where these leave through the slots. A thread of the third warp finds the tiles that the thread
// block computes, tells the two other warps and the consumers, and loads Q. Each runs ahead, across tiles, as far as
// its slots allow.
#pragma once

#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/attention/forward/sm90a/epilogue.cuh"
#include "cuda/attention/forward/sm90a/float8.hpp"
#include "cuda/attention/forward/sm90a/parts.cuh"
#include "cuda/attention/forward/sm90a/sparse.cuh"

namespace flashkernel::cuda::sm90a {

/// Where the lane's part of a block of keys lies: its first row, and its image in the tensor, which is a sequence or a
/// page.
struct KeyPlace {
  int row, image;
};

/// The places of the blocks of a sequence, the last block first. Where keys lie in pages, one copy brings a piece of
/// plan.kv_box_rows keys, and each lane asks for one piece of a block. The warp looks up the pages of a batch of
/// blocks, one piece in each lane, one batch ahead of their use, and reads them by shuffles. That takes one division
/// and one load for each batch. (With a load for each block, paged keys had 0.96 of the rate of contiguous ones; with a
/// division as well, 0.92.)
template <class Shape>
struct KeyWalk {
  int key;                  // where the batch after the next one begins; without pages, the row of the next block
  int image;                // without pages
  KeyPlace piece{}, after;  // of this lane, in this batch and in the next one
  int taken = 0;            // blocks of this batch

  __device__ KeyWalk(const AttentionParams& p, const ForwardPlan& plan, const TileRecord& tile, int lane_keys) {
    key = (tile.end_block - 1) * Shape::kBlockN;
    image = p.is_varlen_k() ? 0 : tile.b;
    if (p.is_varlen_k()) key += static_cast<int>(p.k_begin(tile.b));
    if (!p.is_paged()) return;
    piece = look_up(p, plan, tile, lane_keys);
    after = look_up(p, plan, tile, lane_keys);
  }

  /// The image is below 0 past the end of the sequence and for a bad id. An entry of the table that lies past the end
  /// of the sequence is never used.
  __device__ KeyPlace next(const AttentionParams& p, const ForwardPlan& plan, const TileRecord& tile, int lane_keys) {
    if (!p.is_paged()) {
      key -= Shape::kBlockN;
      return {key + Shape::kBlockN, image};
    }
    if (taken == plan.batch_blocks) {
      piece = after;
      after = look_up(p, plan, tile, lane_keys);
      taken = 0;
    }
    const int from = taken++ * plan.block_pieces + static_cast<int>(threadIdx.x % kWarp);
    return {__shfl_sync(kFullMask, piece.row, from), __shfl_sync(kFullMask, piece.image, from)};
  }

  __device__ KeyPlace look_up(const AttentionParams& p, const ForwardPlan& plan, const TileRecord& tile,
                              int lane_keys) {
    const int at = key + lane_keys;
    key -= plan.batch_blocks * Shape::kBlockN;
    if (at < 0 || at >= tile.range.k_len) return {0, -1};
    const auto page_size = static_cast<unsigned>(p.page_size), column = static_cast<unsigned>(at) / page_size;
    const int row = at - static_cast<int>(column * page_size);
    if (column >= static_cast<unsigned>(plan.max_pages)) return {row, -1};
    return {row, p.block_table[tile.b * p.stride_block_table + column]};
  }

  /// Where the lane's piece of a batch begins, counted from the first block; far below 0 for lanes that have none.
  __device__ static int first_key_of_lane(const ForwardPlan& plan) {
    const int lane = static_cast<int>(threadIdx.x % kWarp), block = lane / plan.block_pieces;
    if (block >= plan.batch_blocks) return -kMostTokens * 2;
    return lane % plan.block_pieces * plan.kv_box_rows - block * Shape::kBlockN;
  }
};

/// Loads a block into its slot, once the slot is free. `shown`: what the warp of K says of it.
template <class Shape, bool kOfV>
__device__ inline void load_keys(const AttentionParams& p, const ForwardPlan& plan, const SharedLayout<Shape>& shared,
                                 const CUtensorMap* map, const KeyPlace& place, int g, const Ring<Shape::kStages>& ring,
                                 [[maybe_unused]] const ShownBlock& shown = {}) {
  const int lane = static_cast<int>(threadIdx.x % kWarp),
            at = lane * (p.is_paged() ? plan.kv_box_rows : Shape::kBlockN);
  const std::uint32_t barrier = kOfV ? shared.v_full(ring.slot()) : shared.k_full(ring.slot());
  const std::uint32_t slot = kOfV ? shared.v(ring.slot()) : shared.k(ring.slot());
  ptx::mbarrier_wait(kOfV ? shared.v_empty(ring.slot()) : shared.k_empty(ring.slot()), ring.parity() ^ 1);
  if constexpr (Shape::kSparse && !kOfV)
    if (lane == 0) *shared.shown(ring.slot()) = shown;
  if (lane == 0) ptx::mbarrier_arrive_expect(barrier, kOfV ? Shape::kVBytes : Shape::kKBytes);
  __syncwarp();
  if constexpr (Shape::kEightBits && kOfV) {
    if (lane == 0)
#pragma unroll
      for (int c = 0; c < Shape::kBlockN / Shape::kVLine; ++c)
        ptx::tma_load(slot + c * Shape::kVDim * Shape::kVLine, map, barrier, ptx::l2_evict_last(),
                      place.row + c * Shape::kVLine, 0, g, place.image);
    return;
  }
  if (at < Shape::kBlockN) {
    const int image = place.image < 0 ? static_cast<int>(p.num_pages) : place.image;
#pragma unroll
    for (int c = 0; c < (kOfV ? Shape::kVBlocks : Shape::kQkBlocks); ++c)
      ptx::tma_load(slot + c * Shape::kKvBlockBytes + at * 128, map, barrier, ptx::l2_evict_last(),
                    c * Shape::kLineColumns, place.row, g, image);
  }
}

/// Tells the consumers about a tile, and loads 64 rows of Q for each.
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
    record->last_key = last_key_of_rows(tile.range, first);  // of no rows, all blocks but one are skipped
    record->first_full = (tile.range.first(first + 63) + Shape::kBlockN - 1) / Shape::kBlockN;
    record->end_full = tile.range.last(first) / Shape::kBlockN;
    const std::uint32_t barrier = shared.q_full(at.slot(), w);
    if (tile.num_blocks <= 0) {
      ptx::mbarrier_arrive(barrier);
      continue;
    }
    ptx::mbarrier_arrive_expect(barrier, Shape::kQLoadBytes);
    const int row = first + (p.is_varlen_q() ? static_cast<int>(p.q_begin(tile.b)) : 0);
#pragma unroll
    for (int c = 0; c < Shape::kQkBlocks; ++c)
      ptx::tma_load(shared.q(at.slot(), w) + c * Shape::kQBlockBytes, map_q, barrier, ptx::l2_evict_first(),
                    c * Shape::kLineColumns, row, tile.h, p.is_varlen_q() ? 0 : tile.b);
  }
}

/// One warp runs this for K and one for V, for the tiles that produce_queries finds. It reads a tile's record from
/// shared memory each time, because the producer has few registers. The warp of V sends outputs by map_out, which is
/// null for the warp of K.
template <class Shape, bool kOfV>
__device__ inline void produce_keys(const AttentionParams& p, const ForwardPlan& plan,
                                    const SharedLayout<Shape>& shared, const CUtensorMap* map,
                                    const CUtensorMap* map_out) {
  constexpr bool kSends = kOfV && Shape::kOutInValues > 0;
  Ring<Shape::kStages> at;
  OutputSender<Shape> sender{p, plan, shared, map_out, 0, 0};
  ptx::wait_for_previous_kernel();
  const int lane_keys = p.is_paged() ? KeyWalk<Shape>::first_key_of_lane(plan) : 0;
  for (Ring<SharedLayout<Shape>::kRecords> tiles;; ++tiles.count) {
    ptx::mbarrier_wait(shared.found_full(tiles.slot()), tiles.parity());
    const TileRecord& tile = *shared.found(tiles.count);
    if (tile.num_blocks <= 0) {
      if (kSends) sender.flush(at);
      if (tile.num_blocks < 0) return;
    } else if constexpr (Shape::kSparse) {
      ShownWalk<Shape> walk{tile.end_block};
      for (ShownBlock now = walk.first(p, tile), next; now.block >= 0; now = next, ++at.count) {
        next = walk.next(p, tile);
        if (next.block < 0) now.states |= ShownBlock::kLast;
        load_keys<Shape, kOfV>(p, plan, shared, map, {now.block * Shape::kBlockN, tile.b}, tile.g, at, now);
      }
    } else {
      KeyWalk<Shape> walk(p, plan, tile, lane_keys);
      if constexpr (Shape::kEightBits && kOfV)
        if (p.is_varlen_k()) {
          const int begin = static_cast<int>(p.k_begin(tile.b));
          walk.key += first_transposed_key<Shape::kBlockN>(begin, tile.b) - begin;
        }
#pragma unroll 1
      for (int i = tile.num_blocks; i > 0; --i, ++at.count) {
        if (kSends) sender.before_load(at);
        load_keys<Shape, kOfV>(p, plan, shared, map, walk.next(p, plan, tile, lane_keys), tile.g, at);
        if (kSends) sender.after_load(i == 1);
      }
    }
    ptx::mbarrier_arrive(shared.found_empty(tiles.slot()));
  }
}

/// One thread finds the tiles, also for the warps of keys, and loads Q. No other thread reads lengths while there is
/// work: if lengths changed meanwhile, two readers might wait for each other forever. The first tile is found before
/// the previous kernel has ended, unless that takes lengths or a block mask from memory, which the previous kernel may
/// write.
template <class Shape>
__device__ inline void produce_queries(const AttentionParams& p, const typename Shape::Plan& plan,
                                       const SharedLayout<Shape>& shared, const CUtensorMap* map) {
  Ring<SharedLayout<Shape>::kRecords> found;
  Ring<Shape::kQSlots> told;
  if (p.has_lengths() || Shape::kSparse) ptx::wait_for_previous_kernel();
  bool more = true;
  for (unsigned round = 0; more; ++round) {
    TileRecord* const tile = shared.found(found.count);
    ptx::mbarrier_wait(shared.found_empty(found.slot()), found.parity() ^ 1);
    if constexpr (Shape::kParts)
      more = locate_part<Shape>(p, plan, round, tile);
    else if constexpr (Shape::kSparse)
      more = take_tile<Shape>(p, plan, shared, tile);
    else
      more = locate_tile<Shape>(p, plan, round, tile);
    if (more && tile->first_query + Shape::kBlockM <= 0) continue;  // a shorter sequence has no such tile
    if (Shape::kParts && more && tile->num_blocks == 0) continue;   // nor one of few keys a share for every block
    if (!more) tile->num_blocks = -1;
    ptx::mbarrier_arrive(shared.found_full(found.slot()));
    ++found.count;
    if (round == 0) ptx::wait_for_previous_kernel();
    // A place of Q may become free late, and by then the warps of keys know one tile more. The first places are free.
    const unsigned due = more && found.count > Shape::kQSlots ? found.count - 1 : found.count;
    for (; told.count < due; ++told.count) publish<Shape>(p, shared, map, *shared.found(told.count), told);
  }
}

}  // namespace flashkernel::cuda::sm90a
