// Who works on what in split-KV decode: all granules (16 keys) of all pairs of sequence and head group, one after the
// other, are cut into equal shares, one a block. Every block works its share out from the lengths on the device, so
// that nothing depends on them on the host. Used by attention_decode.cuh; the functions here are warp-wide. Stream-K:
// Osama et al. (2023); Flash-Decoding: Dao et al. (2023).
#pragma once

#include "cuda/sm80/attention_decode.hpp"
#include "cuda/tile/key_range.cuh"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda::sm80 {

/// Granules [first, end) of a sequence that hold a key which some query sees.
struct Granules {
  int first, end;
  __device__ int count() const { return end - first; }
};

__device__ inline Granules granules_of(const AttentionParams& p, int b) {
  const KeyRange range(p, b);
  if (range.q_len <= 0) return {0, 0};
  const int first = range.first(0), last = range.last(range.q_len - 1);
  if (last <= first) return {0, 0};
  return {first / kGranule, (last + kGranule - 1) / kGranule};
}

/// A pair of sequence and head group: `start` is its first granule's place in the row of all granules.
struct Pair {
  int b, head_group;
  std::int64_t start;
  int count;
};

class Schedule {
 public:
  __device__ Schedule(const AttentionParams& p, const DecodePlan& plan) : head_groups_(plan.head_groups) {
    std::int64_t sum = 0;
    for (int b = static_cast<int>(threadIdx.x % kWarp); b < p.batch; b += kWarp) sum += granules_of(p, b).count();
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
    total_ = sum * head_groups_;
    // A share is one granule a warp at least.
    blocks_ = min(static_cast<std::int64_t>(plan.blocks), (total_ + plan.key_lanes - 1) / plan.key_lanes);
  }

  /// Blocks that have a share.
  __device__ int blocks() const { return static_cast<int>(blocks_); }
  /// Block c's share is [begin(c), begin(c + 1)).
  __device__ std::int64_t begin(int c) const { return c * total_ / blocks_; }
  /// The block whose share holds a place: the last c with c * total <= place * blocks + blocks - 1.
  __device__ int block_of(std::int64_t place) const { return static_cast<int>(((place + 1) * blocks_ - 1) / total_); }

  /// The pair of a number: head groups of a sequence are neighbours.
  __device__ Pair pair(const AttentionParams& p, int number) const {
    const int b = number / static_cast<int>(head_groups_), head_group = number % static_cast<int>(head_groups_);
    std::int64_t before = 0;
    for (int at = static_cast<int>(threadIdx.x % kWarp); at < b; at += kWarp) before += granules_of(p, at).count();
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) before += __shfl_xor_sync(kFullMask, before, step);
    const int count = granules_of(p, b).count();
    return {b, head_group, before * head_groups_ + static_cast<std::int64_t>(head_group) * count, count};
  }

  /// The pair that holds a place.
  __device__ Pair pair_at(const AttentionParams& p, std::int64_t place) const {
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    std::int64_t before = 0;
    for (int base = 0;; base += kWarp) {
      const int count = base + lane < p.batch ? granules_of(p, base + lane).count() : 0;
      int through = count;  // of the sequences up to this lane's; 32 x 2^25 granules at most
#pragma unroll
      for (int step = 1; step < kWarp; step *= 2) {
        const int other = __shfl_up_sync(kFullMask, through, step);
        if (lane >= step) through += other;
      }
      const unsigned past = __ballot_sync(kFullMask, (before + through) * head_groups_ > place);
      if (past != 0) {
        const int at = __ffs(static_cast<int>(past)) - 1;
        const int found = __shfl_sync(kFullMask, count, at);
        const std::int64_t first = (before + __shfl_sync(kFullMask, through, at) - found) * head_groups_;
        const int head_group = static_cast<int>((place - first) / found);
        return {base + at, head_group, first + static_cast<std::int64_t>(head_group) * found, found};
      }
      before += __shfl_sync(kFullMask, through, kWarp - 1);
    }
  }

 private:
  std::int64_t head_groups_, total_, blocks_;
};

/// Granules [first, end) of one pair; whether they are its first and its last.
struct Segment {
  int b = 0, head_group = 0, first = 0, end = 0;
  bool begins = false, ends = false;
};

/// Walks a block's share, segment by segment.
class SegmentWalk {
 public:
  __device__ SegmentWalk(const AttentionParams& p, const Schedule& schedule, int block) {
    const std::int64_t begin = schedule.begin(block);
    left_ = static_cast<int>(schedule.begin(block + 1) - begin);
    const Pair pair = schedule.pair_at(p, begin);
    b_ = pair.b;
    head_group_ = pair.head_group;
    range_ = granules_of(p, b_);
    at_ = range_.first + static_cast<int>(begin - pair.start);
  }

  __device__ bool next(const AttentionParams& p, int head_groups, Segment& segment) {
    if (left_ == 0) return false;
    segment.b = b_;
    segment.head_group = head_group_;
    segment.first = at_;
    segment.end = min(range_.end, at_ + left_);
    segment.begins = at_ == range_.first;
    segment.ends = segment.end == range_.end;
    left_ -= segment.end - at_;
    at_ = segment.end;
    if (left_ > 0) {
      if (++head_group_ == head_groups) {
        head_group_ = 0;
        do range_ = granules_of(p, ++b_);
        while (range_.count() == 0);
      }
      at_ = range_.first;
    }
    return true;
  }

 private:
  int b_, head_group_, at_, left_;
  Granules range_;
};

}  // namespace flashkernel::cuda::sm80
