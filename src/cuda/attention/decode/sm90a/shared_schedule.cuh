// Which block takes which granules of a kv head where blocks share its sequences without forming a cluster
// (ClusterPlan::shared). The granules of all sequences stand in a row, and each block has a run of the same length
// (Stream-K, Osama et al. 2023). A block shares at most two sequences with other blocks: the one that its run starts
// within, and the one that its run ends within. Used by kernel.cuh. All lanes of a warp call these functions together.
//
// Invariant: a block reads the lengths once and keeps them in shared memory. If a length is overwritten during the
// call, the call's results are wrong, but no block waits for another one.
#pragma once

#include "cuda/attention/decode/sm90a/merge.cuh"
#include "cuda/attention/decode/sm90a/schedule.cuh"

namespace flashkernel::cuda::sm90a {

class SharedSchedule {
 public:
  static constexpr bool kAlone = false;
  static constexpr int kPerLane = kMostShared / kWarp;
  unsigned begin, end;  // this block's places
  int num_sequences;
  int begun = -1, begins = -1;  // the shared sequences that the run starts and ends within; -1: none

  /// The sequences of a call: first places, and keys.
  struct Table {
    unsigned start[kMostShared + 1];  // behind the last one: how many places there are
    int length[kMostShared];
  };

  /// Keys of the sequences `lane`, `lane` + 32, ...; all are asked for at once.
  struct Lengths {
    int of[kPerLane];
  };
  __device__ static Lengths load_lengths(const AttentionParams& p, const ClusterPlan&) {
    Lengths lengths;
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      const int b = k * kWarp + lane();
      lengths.of[k] = b < p.batch ? keys_of(p, b) : 0;
    }
    return lengths;
  }

  /// All threads of a block meet here.
  __device__ SharedSchedule(const AttentionParams& p, int blocks, int block, const Lengths& lengths, Table& table)
      : num_sequences(static_cast<int>(p.batch)), table_(table) {
    unsigned total = 0;
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {  // every warp adds up, the first one writes
      if (k * kWarp >= num_sequences) break;
      const unsigned count = static_cast<unsigned>(lengths.of[k] + kGranule - 1) / kGranule;
      const unsigned through = sum_through_lane(count, lane());  // of the sequences up to this lane's
      if (threadIdx.x < kWarp) {
        table.start[k * kWarp + lane()] = total + through - count;
        table.length[k * kWarp + lane()] = lengths.of[k];
      }
      total += __shfl_sync(kFullMask, through, kWarp - 1);
    }
    if (threadIdx.x == 0) table.start[num_sequences] = total;
    __syncthreads();
    share_ = total / static_cast<unsigned>(blocks), longer_ = total - share_ * static_cast<unsigned>(blocks);
    begin = run_begin(block), end = run_begin(block + 1);
    first_ = last_ = num_sequences;
    if (begin == end) return;
    first_ = count_sequences([&](int i) { return table.start[i] <= begin; }) - 1;
    last_ = count_sequences([&](int i) { return table.start[i] < end; });
    if (table.start[first_] < begin) begun = first_;
    if (table.start[last_] > end && last_ - 1 != begun) begins = last_ - 1;
  }

  __device__ static int batch_of(const ClusterPlan&, int sequence) { return sequence; }
  __device__ static int skipped_of(int) { return 0; }
  __device__ int first_sequence() const { return first_; }

  struct Sequence {
    unsigned start, count;
    int length;
  };
  __device__ Sequence sequence(int i) const {
    return {table_.start[i], table_.start[i + 1] - table_.start[i], table_.length[i]};
  }
  /// The sequence of a place, and the granule there; each lane asks for its own.
  __device__ void find(unsigned place, int* sequence, int* granule) const {
    if (place >= end) return;
    int low = first_, high = last_;  // the last one that begins at or before the place
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (table_.start[middle] <= place)
        low = middle;
      else
        high = middle;
    }
    *sequence = low, *granule = static_cast<int>(place - table_.start[low]);
  }
  __device__ int length_of(int i) const { return table_.length[i]; }
  /// The block whose run holds a place.
  __device__ int block_of(unsigned place) const {
    const unsigned in_longer = longer_ * (share_ + 1);
    return static_cast<int>(place < in_longer ? place / (share_ + 1) : longer_ + (place - in_longer) / max(share_, 1u));
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x % kWarp); }
  __device__ unsigned run_begin(int block) const {
    return static_cast<unsigned>(block) * share_ + min(static_cast<unsigned>(block), longer_);
  }
  /// How many sequences satisfy `is`, where all that do come first.
  template <class Is>
  __device__ int count_sequences(Is is) const {
    int count = 0;
#pragma unroll 1
    for (int at = 0; at < num_sequences; at += kWarp) {
      const int i = at + lane();
      count += __popc(__ballot_sync(kFullMask, i < num_sequences && is(i)));
    }
    return count;
  }

  Table& table_;
  unsigned share_, longer_;
  int first_, last_;
};

/// The parts of shared sequences, in global memory. Each block of a head has two places: one for the sequence that its
/// run starts within, one for the sequence that its run ends within. First come all numerators, then all maxima (base
/// 2) and sums. The last block of a sequence to arrive merges the parts in the order of the blocks.
template <class T, class Shape>
class SharedParts {
 public:
  __device__ SharedParts(float* workspace, const AttentionParams& p, const ClusterPlan& plan, int head)
      : p_(p),
        plan_(plan),
        head_(head),
        values_(reinterpret_cast<float4*>(workspace)),
        states_(reinterpret_cast<float2*>(workspace + std::int64_t{2} * plan.groups * p.heads_q * Shape::kVDim)) {}

  __device__ void put(int block, bool begins, int row, int quad, float maximum, float sum, const float (&x)[4]) const {
    const int at = place(block, begins, row);
    values_[at * Shape::kQuads + quad] = float4{x[0], x[1], x[2], x[3]};
    if (quad == 0) states_[at] = float2{maximum, sum};
  }
  /// Merges a sequence that begins in block `first`. All warps of a block call it.
  __device__ void merge(int sequence, int first, int parts) const {
    const int quad = static_cast<int>(threadIdx.x) % Shape::kQuads;
    for (int row = static_cast<int>(threadIdx.x) / Shape::kQuads; row < plan_.rows;
         row += Shape::kThreads / Shape::kQuads) {
      const MergedQuad merged(
          parts, [&](int i) { return states_[place(first + i, i == 0, row)]; },
          [&](int i) { return values_[place(first + i, i == 0, row) * Shape::kQuads + quad]; });
      store_quad<T>(p_, sequence, static_cast<std::int64_t>(head_) * plan_.rows + row, quad * 4, merged.maximum,
                    merged.sum, merged.values);
    }
  }

 private:
  __device__ int place(int block, bool begins, int row) const {
    return ((head_ * plan_.groups + block) * 2 + (begins ? 1 : 0)) * plan_.rows + row;
  }

  const AttentionParams& p_;
  const ClusterPlan& plan_;
  int head_;
  float4* values_;
  float2* states_;
};

}  // namespace flashkernel::cuda::sm90a
