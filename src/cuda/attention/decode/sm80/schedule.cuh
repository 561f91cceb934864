// Which block works on what in split-KV decode. The granules (16 keys) of all pairs of head group and sequence stand in
// a row, which is cut into one share of equal length for each block. In the row, all sequences of a head group come
// before the next head group. Blocks of different heads then read the same tokens at the same time, and the heads of a
// token lie side by side in memory. Every block works out its share from the lengths on the device, so the host needs
// no length. Used by kernel.cuh. All lanes of a warp call these functions together. Stream-K: Osama et al. (2023);
// Flash-Decoding: Dao et al. (2023).
//
// Invariant: if lengths are overwritten during a call, so that two readings differ, shares are wrong. But every walk
// ends, and every sequence and block that it names exists.
#pragma once

#include "cuda/attention/decode/sm80/variant.hpp"
#include "cuda/attention/key_range.cuh"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda::sm80 {

/// Granules [first, end) of a sequence that hold a key which some query sees.
struct Granules {
  int first, end;

  Granules() = default;
  __device__ explicit Granules(const KeyRange& range) : first(0), end(0) {
    if (range.q_len <= 0) return;
    const int first_key = range.first(0), last_key = range.last(range.q_len - 1);
    if (last_key <= first_key) return;
    first = first_key / kGranule;
    end = (last_key + kGranule - 1) / kGranule;
  }
  __device__ unsigned count() const { return static_cast<unsigned>(end - first); }
};

/// Granules of sequence b; 0 past the last one.
__device__ inline unsigned granules_of(const AttentionParams& p, int b) {
  return b < p.batch ? Granules(KeyRange(p, b)).count() : 0;
}

/// A pair of sequence and head group: `start` is its first granule's place in the row of all granules.
struct Pair {
  int b, head_group;
  unsigned start, count;
};

/// The numbers fit 32 bits: attention_decode_supports sees to that.
class Schedule {
 public:
  __device__ Schedule(const AttentionParams& p, const DecodePlan& plan)
      : head_groups_(static_cast<unsigned>(plan.head_groups)),
        lane_(static_cast<int>(threadIdx.x % kWarp)),
        first_count_(granules_of(p, lane_)) {
    unsigned sum = first_count_;
#pragma unroll 1
    for (int b = kWarp + lane_; b < p.batch; b += kWarp) sum += granules_of(p, b);
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
    of_head_group_ = sum;
    const unsigned total = sum * head_groups_, lanes = static_cast<unsigned>(plan.key_lanes);
    // A share is one granule a warp at least. The first `longer_` shares are one granule longer than the others.
    blocks_ = min(static_cast<unsigned>(plan.blocks), (total + lanes - 1) / lanes);
    share_ = blocks_ > 0 ? total / blocks_ : 0;
    longer_ = total - share_ * blocks_;
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

  /// The pair of a number.
  __device__ Pair pair(const AttentionParams& p, unsigned number) const {
    const int b = static_cast<int>(number / head_groups_);
    const unsigned head_group = number % head_groups_;
    unsigned before = lane_ < b ? first_count_ : 0;
#pragma unroll 1
    for (int at = kWarp + lane_; at < b; at += kWarp) before += granules_of(p, at);
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) before += __shfl_xor_sync(kFullMask, before, step);
    return {b, static_cast<int>(head_group), head_group * of_head_group_ + before, granules_of(p, b)};
  }

  /// The pair that holds a place; of no granules where there is none.
  __device__ Pair pair_at(const AttentionParams& p, unsigned place) const {
    const unsigned head_group = place / max(of_head_group_, 1u), within = place - head_group * of_head_group_;
    unsigned before = 0;
    for (int base = 0; base < p.batch && head_group < head_groups_; base += kWarp) {
      const unsigned count = base == 0 ? first_count_ : granules_of(p, base + lane_);
      const unsigned through = sum_through_lane(count, lane_);  // of the sequences up to this lane's
      const unsigned past = __ballot_sync(kFullMask, before + through > within);
      if (past != 0) {
        const int at = __ffs(static_cast<int>(past)) - 1;
        const unsigned found = __shfl_sync(kFullMask, count, at);
        const unsigned first = before + __shfl_sync(kFullMask, through, at) - found;
        return {base + at, static_cast<int>(head_group), place - within + first, found};
      }
      before += __shfl_sync(kFullMask, through, kWarp - 1);
    }
    return {};
  }

 private:
  unsigned head_groups_;
  int lane_;
  unsigned first_count_;    // of sequence `lane`
  unsigned of_head_group_;  // granules of all sequences
  unsigned blocks_, share_, longer_;
};

/// Granules [first, end) of one pair.
struct Segment {
  KeyRange range;
  int b, head_group, first, end;
  Granules pair;
  unsigned start;  // place of the pair's first granule

  __device__ bool begins() const { return first == pair.first; }
  __device__ bool ends() const { return end == pair.end; }
};

/// Walks a block's share, segment by segment.
class SegmentWalk {
 public:
  SegmentWalk() = default;  // in shared memory: assigned by one thread
  __device__ SegmentWalk(const AttentionParams& p, const Schedule& schedule, int block) {
    const unsigned begin = schedule.begin(static_cast<unsigned>(block));
    left_ = static_cast<int>(schedule.begin(static_cast<unsigned>(block) + 1) - begin);
    const Pair pair = schedule.pair_at(p, begin);
    if (pair.count == 0) left_ = 0;
    next_.b = pair.b;
    next_.head_group = pair.head_group;
    next_.range = KeyRange(p, pair.b);
    next_.pair = Granules(next_.range);
    next_.start = pair.start;
    next_.first = next_.pair.first + static_cast<int>(begin - pair.start);
  }

  __device__ bool next(const AttentionParams& p, int head_groups, Segment& segment) {
    if (left_ == 0) return false;
    next_.end = max(next_.first, min(next_.pair.end, next_.first + left_));
    segment = next_;
    left_ -= next_.end - next_.first;
    if (left_ > 0) {
      next_.start += next_.pair.count();
      do {
        if (++next_.b >= p.batch) {
          next_.b = 0;
          if (++next_.head_group >= head_groups) {
            left_ = 0;
            return true;
          }
        }
        next_.range = KeyRange(p, next_.b);
        next_.pair = Granules(next_.range);
      } while (next_.pair.count() == 0);
      next_.first = next_.pair.first;
    }
    return true;
  }

 private:
  Segment next_;
  int left_;
};

}  // namespace flashkernel::cuda::sm80
