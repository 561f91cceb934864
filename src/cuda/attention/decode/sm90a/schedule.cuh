// Which warp takes which granules (16 keys) of a kv head. The granules of all sequences stand in a row, and a place is
// an index into that row.
//
// One sequence: places are dealt out warp by warp through the cluster. A warp then knows its places, and asks for their
// pages, before it knows the length. Several sequences: each cluster of the kv head gets a group of whole sequences,
// chosen by their lengths. In a cluster each block gets a run of places of the same length (Stream-K, Osama et al.
// 2023), and its warps take them in turn. Used by kernel.cuh. All lanes of a warp call these functions together.
#pragma once

#include "cuda/attention/decode/sm90a/variant.hpp"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda::sm90a {

/// Keys of a sequence. The host does not check lengths that lie on the GPU: a bad one must not lead past the table.
__device__ inline int keys_of(const AttentionParams& p, int b) {
  if (!p.is_paged()) return static_cast<int>(p.seq_k);
  return static_cast<int>(max(std::int64_t{0}, min(p.seq_lens[b], p.max_pages * p.page_size)));
}

/// kAlone_: there is one sequence. kPieces: a sequence may be cut into plan.pieces pieces. Each piece then counts as a
/// sequence here, and has a result of its own.
template <bool kAlone_, bool kPieces>
class ClusterSchedule {
 public:
  static constexpr bool kAlone = kAlone_;
  int length;           // of sequence `lane`: keys
  unsigned count;       // its granules; none if the sequence is another group's
  unsigned start;       // the place of its first one
  unsigned total;       // of this group
  unsigned begin, end;  // this block's places; all of them when there is one sequence
  int num_sequences;

  /// Sequence of the batch that a piece belongs to.
  __device__ static int batch_of(const ClusterPlan& plan, int sequence) {
    return kPieces ? sequence / plan.pieces : sequence;
  }
  /// Keys of sequence `lane`, all pieces.
  using Lengths = int;
  __device__ static Lengths load_lengths(const AttentionParams& p, const ClusterPlan& plan) {
    const int b = batch_of(plan, static_cast<int>(threadIdx.x % kWarp));
    return b < p.batch ? keys_of(p, b) : 0;
  }

  __device__ ClusterSchedule(const AttentionParams& p, const ClusterPlan& plan, int rank, int group, Lengths length)
      : length(length),
        num_sequences(static_cast<int>(p.batch) * (kPieces ? plan.pieces : 1)),
        lane_(static_cast<int>(threadIdx.x % kWarp)),
        log2_blocks_(plan.log2_blocks) {
    count = static_cast<unsigned>(length + kGranule - 1) / kGranule;
    if constexpr (kPieces) {
      const auto pieces = static_cast<unsigned>(plan.pieces), piece = static_cast<unsigned>(lane_) % pieces;
      const unsigned first = count * piece / pieces, last = count * (piece + 1) / pieces;
      skipped_ = static_cast<int>(first);
      this->length = max(0, min(length, static_cast<int>(last) * kGranule) - skipped_ * kGranule);
      count = last - first;
    }
    const unsigned through = kAlone ? count : sum_through_lane(count, lane_);  // of the sequences up to this lane's
    start = through - count;
    total = __shfl_sync(kFullMask, through, kAlone ? 0 : kWarp - 1);
    if (!kAlone && plan.groups > 1) take_group(plan.groups, group);
    begin = kAlone ? 0 : run_begin(rank);
    end = kAlone ? total : run_begin(rank + 1);
  }

  /// The first place of a block's run.
  __device__ unsigned run_begin(int block) const {
    const unsigned share = total >> log2_blocks_, longer = total - (share << log2_blocks_);
    return static_cast<unsigned>(block) * share + min(static_cast<unsigned>(block), longer);
  }
  /// The block whose run holds a place.
  __device__ int block_of(unsigned place) const {
    const bool before = lane_ < 1 << log2_blocks_ && run_begin(lane_) <= place;
    return __popc(__ballot_sync(kFullMask, before)) - 1;
  }
  /// Granules of a sequence in front of the piece; warp-wide.
  __device__ int skipped_of(int sequence) const { return kPieces ? __shfl_sync(kFullMask, skipped_, sequence) : 0; }
  /// The sequence of this block's first place.
  __device__ int first_sequence() const {
    return __popc(__ballot_sync(kFullMask, start + count <= begin));  // sequences past the batch end at `total`
  }

  /// A sequence as all lanes know it.
  struct Sequence {
    unsigned start, count;
    int length;
  };
  __device__ Sequence sequence(int b) const {
    return {__shfl_sync(kFullMask, start, b), __shfl_sync(kFullMask, count, b), __shfl_sync(kFullMask, length, b)};
  }
  /// The sequence of a place, and the granule there; each lane asks for its own.
  __device__ void find(unsigned place, int* sequence, int* granule) const {
    for (int i = first_sequence(); i < num_sequences; ++i) {  // the last one that begins at or before the place
      const unsigned begins = __shfl_sync(kFullMask, start, i);
      if (begins >= end) break;
      if (place >= begins) *sequence = i, *granule = static_cast<int>(place - begins);
    }
  }
  /// Keys of a sequence; the same.
  __device__ int length_of(int b) const { return __shfl_sync(kFullMask, length, b); }

 private:
  /// Keeps the sequences whose middle lies in this group's share of all granules. They are neighbours. Places are
  /// counted from the first of them, and the sequences behind the last one start at the new total.
  __device__ void take_group(int groups, int group) {
    const float per_granule = __fdividef(static_cast<float>(groups), static_cast<float>(max(total, 1u)));
    const float middle = static_cast<float>(start) + 0.5f * static_cast<float>(count);
    const bool mine = min(static_cast<int>(middle * per_granule), groups - 1) == group;
    const unsigned all = __ballot_sync(kFullMask, mine && count > 0);
    const unsigned first = __shfl_sync(kFullMask, start, all ? __ffs(static_cast<int>(all)) - 1 : 0);
    const unsigned last = __shfl_sync(kFullMask, start + count, all ? kWarp - 1 - __clz(static_cast<int>(all)) : 0);
    if (!mine) count = 0;
    total = all ? last - first : 0;
    start = min(max(start, first) - first, total);
  }

  int lane_, log2_blocks_, skipped_ = 0;
};

}  // namespace flashkernel::cuda::sm90a
