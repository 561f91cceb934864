// Which block works on what in MLA decoding on 9.0. The tiles (64 keys) of all pairs of head group and sequence stand
// in a row, all sequences of a group before the next group, and the row is cut into one share of equal length for each
// block. Blocks of different groups then read the same latent rows at the same time. Every block works out its share
// from the lengths on the device. All lanes of a warp call these functions together. Stream-K: Osama et al. (2023).
//
// Invariant: if lengths are overwritten during a call, so that two readings differ, shares are wrong. But every walk
// ends, and every sequence and block that it names exists.
#pragma once

#include "cuda/attention/mla/sm90a/variant.hpp"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda::sm90a {

/// Tiles of sequence b; 0 past the last one.
__device__ inline unsigned mla_tiles_of(const AttentionParams& p, int b) {
  return b < p.batch ? static_cast<unsigned>((p.k_length(b) + kMlaKeys - 1) / kMlaKeys) : 0;
}

/// A pair of sequence and head group: `start` is its first tile's place in the row of all tiles.
struct MlaPair {
  int b, head_group;
  unsigned start, count;
};

/// The numbers fit 32 bits: mla_decode_supports sees to that.
class MlaSchedule {
 public:
  __device__ MlaSchedule(const AttentionParams& p, const MlaPlan& plan)
      : groups_(static_cast<unsigned>(plan.head_groups)), lane_(static_cast<int>(threadIdx.x % kWarp)) {
    unsigned sum = 0;
#pragma unroll 1
    for (int b = lane_; b < p.batch; b += kWarp) sum += mla_tiles_of(p, b);
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
    of_group_ = sum;
    const unsigned total = sum * groups_;
    blocks_ = min(static_cast<unsigned>(plan.blocks), total);
    share_ = blocks_ > 0 ? total / blocks_ : 0;
    longer_ = total - share_ * blocks_;  // the first shares are a tile longer than the others
  }

  /// Blocks that have a share.
  __device__ int blocks() const { return static_cast<int>(blocks_); }
  /// Block c's share is [begin(c), begin(c + 1)).
  __device__ unsigned begin(unsigned c) const { return c * share_ + min(c, longer_); }
  /// The block whose share holds a place.
  __device__ int block_of(unsigned place) const {
    const unsigned in_longer = longer_ * (share_ + 1);
    const unsigned block = place < in_longer ? place / (share_ + 1) : longer_ + (place - in_longer) / max(share_, 1u);
    return static_cast<int>(min(block, max(blocks_, 1u) - 1));
  }

  /// The pair that holds a place; of no tiles where there is none.
  __device__ MlaPair pair_at(const AttentionParams& p, unsigned place) const {
    const unsigned group = place / max(of_group_, 1u), within = place - group * of_group_;
    unsigned before = 0;
    for (int base = 0; base < p.batch && group < groups_; base += kWarp) {
      const unsigned count = mla_tiles_of(p, base + lane_);
      const unsigned through = sum_through_lane(count, lane_);  // of the sequences up to this lane's
      const unsigned past = __ballot_sync(kFullMask, before + through > within);
      if (past != 0) {
        const int at = __ffs(static_cast<int>(past)) - 1;
        const unsigned found = __shfl_sync(kFullMask, count, at);
        const unsigned first = before + __shfl_sync(kFullMask, through, at) - found;
        return {base + at, static_cast<int>(group), place - within + first, found};
      }
      before += __shfl_sync(kFullMask, through, kWarp - 1);
    }
    return {};
  }

 private:
  unsigned groups_;
  int lane_;
  unsigned of_group_;  // tiles of all sequences
  unsigned blocks_, share_, longer_;
};

/// Tiles [first, end) of a sequence's `tiles`, for one head group; first == end: there is no more work.
struct MlaSegment {
  int b, head_group, first, end, tiles, keys;

  __device__ bool is_there() const { return first < end; }
  __device__ bool begins() const { return first == 0; }
  __device__ bool ends() const { return end == tiles; }
};

/// Walks a block's share, segment by segment. One thread goes on from what all lanes of a warp have begun.
class MlaWalk {
 public:
  MlaWalk() = default;  // in shared memory: assigned by one thread
  __device__ MlaWalk(const AttentionParams& p, const MlaSchedule& schedule, int block) {
    const unsigned begin = schedule.begin(static_cast<unsigned>(block));
    left_ = static_cast<int>(schedule.begin(static_cast<unsigned>(block) + 1) - begin);
    const MlaPair pair = schedule.pair_at(p, begin);
    if (pair.count == 0) left_ = 0;
    b_ = pair.b, head_group_ = pair.head_group;
    first_ = static_cast<int>(begin - pair.start);
  }

  __device__ MlaSegment next(const AttentionParams& p, int groups) {
    while (left_ > 0) {
      if (b_ >= p.batch) {
        b_ = 0;
        if (++head_group_ >= groups) break;
      }
      const int keys = static_cast<int>(p.k_length(b_)), tiles = (keys + kMlaKeys - 1) / kMlaKeys;
      const MlaSegment segment{b_++, head_group_, first_, min(tiles, first_ + left_), tiles, keys};
      first_ = 0;
      if (!segment.is_there()) continue;
      left_ -= segment.end - segment.first;
      return segment;
    }
    left_ = 0;
    return {};
  }

 private:
  int b_, head_group_, first_, left_;
};

}  // namespace flashkernel::cuda::sm90a
