// How keys and values reach a warp of kernel.cuh: the warp copies granules of 16 rows asynchronously into its own ring
// in shared memory. It computes the addresses of 32 granules at a time, one in each lane, and reads them by shuffles.
// Invariant: rows past a sequence's end, and rows of pages that do not exist, are not read and become zero.
#pragma once

#include "cuda/ptx/copy.cuh"
#include "cuda/attention/decode/sm90a/schedule.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace flashkernel::cuda::sm90a {

/// kByPolicy: the keys of the call may be more than the L2 cache holds, so that they leave it first (plan.leaves).
template <class T, int kQkDim, int kVDim, int kStages, class Schedule, bool kByPolicy>
class GranuleProducer {
 public:
  static constexpr bool kAlone = Schedule::kAlone;
  static_assert(kQkDim == kVDim, "a lane's places in a granule of K are its places in one of V");
  using Tile = SharedTile<kQkDim>;
  static constexpr std::uint32_t kTileBytes = kGranule * Tile::kPitch;
  static constexpr int kAcross = 8, kRowsAtOnce = kWarp / kAcross;  // lanes a row, 16 bytes each
  static constexpr int kPasses = kGranule / kRowsAtOnce, kGroups = Tile::kChunks / kAcross;
  static_assert(Tile::kChunks % kAcross == 0);

  /// For the places first, first + step, and so on. With one sequence, the pages are asked for before the length is
  /// known.
  __device__ GranuleProducer(const AttentionParams& p, const ClusterPlan& plan, int head, std::uint32_t ring,
                             unsigned first, unsigned step)
      : ring_(ring), place_(first), step_(step), head_(head) {
    if constexpr (kAlone) {
      next_.granule = static_cast<int>(first + lane() * step);
      next_.page = page(p, plan, 0, next_.granule);
    }
    if constexpr (kByPolicy) policy_ = ptx::l2_policy(plan.leaves);
    const int row = lane() / kAcross, chunk = lane() % kAcross;
    lane_k_ = row * p.stride_k_token + chunk * 8;
    lane_v_ = row * p.stride_v_token + chunk * 8;
    to_[0] = Tile::offset(row, chunk);
    to_[1] = Tile::offset(kRowsAtOnce + row, chunk) - kRowsAtOnce * Tile::kPitch;  // two passes on, the same twist
  }

  /// Changes the first place, before any copy has started.
  __device__ void move_to(unsigned first) { place_ = first; }

  __device__ void begin(const AttentionParams& p, const ClusterPlan& plan, const Schedule& schedule) {
    if (!kAlone) look_up(p, plan, schedule, place_ + lane() * step_);
    make_addresses(p, schedule);
    if (place_ + kWarp * step_ < schedule.end) look_up(p, plan, schedule, place_ + (kWarp + lane()) * step_);
  }

  /// The slot that is filled next. Between two starts it is free.
  __device__ int free_slot() const { return slot_; }

  /// Starts the copies of the next granule, if there is one, and ends a group of copies in any case.
  __device__ void start(const AttentionParams& p, const ClusterPlan& plan, const Schedule& schedule) {
    if (place_ < schedule.end) {
      if (used_ == kWarp) {
        used_ = 0;
        make_addresses(p, schedule);
        if (place_ + kWarp * step_ < schedule.end) look_up(p, plan, schedule, place_ + (kWarp + lane()) * step_);
      }
      const std::int64_t k = __shfl_sync(kFullMask, k_, used_), v = __shfl_sync(kFullMask, v_, used_);
      const int rows = __shfl_sync(kFullMask, rows_, used_);
      const std::uint32_t slot = ring_ + slot_ * 2 * kTileBytes;
      copy(slot, static_cast<const T*>(p.k) + k + lane_k_, kRowsAtOnce * p.stride_k_token, rows);
      copy(slot + kTileBytes, static_cast<const T*>(p.v) + v + lane_v_, kRowsAtOnce * p.stride_v_token, rows);
      ++used_;
      place_ += step_;
      slot_ = slot_ + 1 == kStages ? 0 : slot_ + 1;
    }
    ptx::cp_async_commit();
  }

 private:
  struct Place {
    int sequence = 0, granule = 0;
    std::int32_t page = 0;
  };

  __device__ static int lane() { return static_cast<int>(threadIdx.x % kWarp); }

  __device__ static std::int32_t page(const AttentionParams& p, const ClusterPlan& plan, int b, int granule) {
    if (!p.is_paged()) return b;
    const int column = granule >> plan.log2_granules_of_page;
    return column < p.max_pages ? p.block_table[b * p.stride_block_table + column] : -1;
  }

  /// The lane's place among the sequences, and its page.
  __device__ void look_up(const AttentionParams& p, const ClusterPlan& plan, const Schedule& schedule, unsigned place) {
    next_ = Place{};
    next_.granule = static_cast<int>(place);
    if constexpr (!kAlone) schedule.find(place, &next_.sequence, &next_.granule);
    const int granule = next_.granule + schedule.skipped_of(next_.sequence);
    next_.page = place < schedule.end ? page(p, plan, schedule.batch_of(plan, next_.sequence), granule) : -1;
  }

  /// Computes them from what was looked up.
  __device__ void make_addresses(const AttentionParams& p, const Schedule& schedule) {
    const int length = schedule.length_of(next_.sequence);
    rows_ = min(max(length - next_.granule * kGranule, 0), kGranule);
    std::int64_t slot = (std::int64_t{next_.granule} + schedule.skipped_of(next_.sequence)) * kGranule;
    if (p.is_paged()) {
      slot &= p.page_size - 1;
      if (next_.page < 0 || next_.page >= p.num_pages) rows_ = 0, next_.page = 0;  // a bad table reads nothing
    }
    k_ = next_.page * p.stride_k_batch + head_ * p.stride_k_head + slot * p.stride_k_token;
    v_ = next_.page * p.stride_v_batch + head_ * p.stride_v_head + slot * p.stride_v_token;
  }

  /// Rows [0, rows) of the tile; the others become zero. `from`: the lane's first 16 bytes.
  __device__ void copy(std::uint32_t tile, const T* from, std::int64_t pass_stride, int rows) const {
    if (rows == kGranule) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass, from += pass_stride)
#pragma unroll
        for (int group = 0; group < kGroups; ++group)
          copy_16(tile + to_[pass % 2] + pass * kRowsAtOnce * Tile::kPitch + group * kAcross * 16,
                  from + group * kAcross * 8, 16);
      return;
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass, from += pass_stride) {
      const std::uint32_t bytes = pass * kRowsAtOnce + lane() / kAcross < rows ? 16 : 0;
#pragma unroll
      for (int group = 0; group < kGroups; ++group)
        copy_16(tile + to_[pass % 2] + pass * kRowsAtOnce * Tile::kPitch + group * kAcross * 16,
                from + group * kAcross * 8, bytes);
    }
  }

  __device__ void copy_16(std::uint32_t to, const T* from, std::uint32_t bytes) const {
    if constexpr (kByPolicy)
      ptx::cp_async_16_by(policy_, to, from, bytes);
    else
      ptx::cp_async_16(to, from, bytes);
  }

  std::uint32_t ring_, to_[2];
  unsigned place_, step_;  // the next granule to fetch
  int head_, used_ = 0, slot_ = 0;
  std::int64_t lane_k_, lane_v_, k_ = 0, v_ = 0;  // in elements; k_, v_ of the lane's granule
  int rows_ = 0;
  std::uint64_t policy_ = 0;
  Place next_;
};

}  // namespace flashkernel::cuda::sm90a
