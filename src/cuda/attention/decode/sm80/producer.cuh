// How keys and values reach a warp of split-KV decode: the warp copies granules of 16 rows asynchronously into its own
// ring in shared memory, as far ahead as the ring allows, across segments. Used by kernel.cuh.
// Invariant: rows outside of what a sequence's queries see, and rows of pages that do not exist, become zero.
#pragma once

#include "cuda/ptx/copy.cuh"
#include "cuda/attention/decode/sm80/schedule.cuh"
#include "cuda/tile/packed.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace flashkernel::cuda::sm80 {

/// Of an element; an Int4x2 is two.
template <class E>
inline constexpr int kBitsOf = 8 * static_cast<int>(sizeof(E));
template <>
inline constexpr int kBitsOf<Int4x2> = 4;

/// A tile of keys or values: rows of kDim elements, laid out as 16-bit ones of as many bytes.
template <class E, int kDim>
using KeyTile = SharedTile<kDim * kBitsOf<E> / 16>;

/// How a warp copies a granule: kAcross lanes a row, 16 bytes each. Distances and dims count E's.
template <class E, int kDim>
struct GranuleCopy {
  using Tile = KeyTile<E, kDim>;
  static constexpr int kVector = 16 / static_cast<int>(sizeof(E));  // elements
  static constexpr int kAcross = Tile::kChunks % 8 == 0 ? 8 : Tile::kChunks % 4 == 0 ? 4 : 2;
  static constexpr int kRows = kWarp / kAcross;  // of a pass
  static constexpr int kPasses = kGranule / kRows, kGroups = Tile::kChunks / kAcross;

  /// Rows [first, first + count) of the tile from `from`, the tile's row 0; the others become zero.
  __device__ static void start(std::uint32_t tile, const E* from, std::int64_t stride, int dim, int first, int count) {
    const int lane = static_cast<int>(threadIdx.x % kWarp), row = lane / kAcross, chunk = lane % kAcross;
    // Two passes on, the twist is the same again.
    const std::uint32_t to[2] = {Tile::offset(row, chunk), Tile::offset(kRows + row, chunk) - kRows * Tile::kPitch};
    from += row * stride + chunk * kVector;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass, from += kRows * stride) {
      const bool there = static_cast<unsigned>(pass * kRows + row - first) < static_cast<unsigned>(count);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int bytes = min(max((dim - (group * kAcross + chunk) * kVector) * static_cast<int>(sizeof(E)), 0), 16);
        ptx::cp_async_16(tile + to[pass % 2] + pass * kRows * Tile::kPitch + group * kAcross * 16,
                         from + group * kAcross * kVector, there ? static_cast<std::uint32_t>(bytes) : 0u);
      }
    }
  }

  /// The same where each row has a place of its own: lane first_lane + r knows that of row r, as an offset from `from`,
  /// and bit r of `shown` says whether the row is there.
  __device__ static void start_rows(std::uint32_t tile, const E* from, std::int64_t lane_at, int first_lane, int dim,
                                    std::uint32_t shown) {
    const int lane = static_cast<int>(threadIdx.x % kWarp), chunk = lane % kAcross;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = pass * kRows + lane / kAcross;
      const E* const row_from = from + __shfl_sync(kFullMask, lane_at, first_lane + row) + chunk * kVector;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int bytes = min(max((dim - (group * kAcross + chunk) * kVector) * static_cast<int>(sizeof(E)), 0), 16);
        ptx::cp_async_16(tile + Tile::offset(row, chunk) + group * kAcross * 16, row_from + group * kAcross * kVector,
                         (shown >> row & 1) != 0 ? static_cast<std::uint32_t>(bytes) : 0u);
      }
    }
  }
};

/// Whether pages are smaller than a granule, which they divide. Each key then has a place of its own.
template <class E>
__device__ inline bool has_small_pages(const AttentionParams& p) {
  return sizeof(E) == 2 && p.is_paged() && p.page_size < kGranule;
}

/// The next granules of one warp: `count` of them (at most 32), plan.key_lanes apart from `granule` on; lane l knows
/// the page that holds the l-th one (-1: no such page). With small pages at most two granules; lane l knows the page of
/// the l-th key of both.
struct Batch {
  int granule = 0, count = 0;
  int b = 0, head = 0;  // of keys and values
  int first_key = 0, last_key = 0;
  std::int32_t page = -1;
};

/// Copies a warp's share into its ring, segment after segment, as far ahead as the ring allows. The addresses of 32
/// granules are computed at a time, one in each lane, and read by shuffles. Computed for each granule, a division by
/// the page size and 64-bit products would delay every copy.
template <class T, int kQkDim, int kVDim, int kStages>
class Producer {
 public:
  using Shape = DecodeShape<kQkDim, kVDim, 1, kBitsOf<T>>;  // slots are the same for any number of tiles

  __device__ Producer(const AttentionParams& p, const DecodePlan& plan, const SegmentWalk& walk, std::uint32_t ring)
      : walk_(walk), ring_(ring) {
    const int warp = static_cast<int>(threadIdx.x / kWarp);
    key_lane_ = warp % plan.key_lanes;
    head_ = warp / plan.key_lanes;
    segment_.end = 0;
    next_ = fetch(p, plan);
  }

  /// Starts the copies of the next granule, if there is one, and ends a group of copies in any case.
  __device__ void start(const AttentionParams& p, const DecodePlan& plan) {
    if (used_ == count_ && next_.count > 0) {
      make_addresses(p, plan);
      next_ = fetch(p, plan);
    }
    if (used_ < count_) {
      const std::int64_t k_at = __shfl_sync(kFullMask, k_at_, used_), v_at = __shfl_sync(kFullMask, v_at_, used_);
      const int rows = __shfl_sync(kFullMask, rows_, used_), first = rows & 0xff, count = rows >> 8;
      const std::uint32_t slot = ring_ + slot_ * Shape::kSlotBytes;
      if constexpr (kBitsOf<T> == 8) {
        if (p.quantization.per_token) start_scales(p, slot + Shape::kScalesAt, count > 0);
      }
      if constexpr (kBitsOf<T> == 4) start_scales_of_groups(p, slot + Shape::kScalesAt, first, count);
      constexpr int kElements = kBitsOf<T> == 4 ? 2 : 1;  // of a T
      if (has_small_pages<T>(p)) {
        const int first_lane = used_ * kGranule;
        const std::uint32_t shown = __ballot_sync(kFullMask, rows_ != 0) >> first_lane;
        GranuleCopy<T, kQkDim>::start_rows(slot, static_cast<const T*>(p.k), k_at_, first_lane,
                                           static_cast<int>(p.head_dim), shown);
        GranuleCopy<T, kVDim>::start_rows(slot + Shape::kKBytes, static_cast<const T*>(p.v), v_at_, first_lane,
                                          static_cast<int>(p.head_dim_v), shown);
      } else {
        GranuleCopy<T, kQkDim>::start(slot, static_cast<const T*>(p.k) + k_at, p.stride_k_token,
                                      static_cast<int>(p.head_dim) / kElements, first, count);
        GranuleCopy<T, kVDim>::start(slot + Shape::kKBytes, static_cast<const T*>(p.v) + v_at, p.stride_v_token,
                                     static_cast<int>(p.head_dim_v) / kElements, first, count);
      }
      ++used_;
      slot_ = slot_ + 1 == kStages ? 0 : slot_ + 1;
    }
    ptx::cp_async_commit();
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x % kWarp); }

  /// Copies the scales of all 16 keys of a granule: four lanes for K and four for V. Keys that no query sees are masked
  /// later.
  __device__ void start_scales(const AttentionParams& p, std::uint32_t to, bool there) const {
    const std::int64_t k_at = __shfl_sync(kFullMask, scale_k_, used_), v_at = __shfl_sync(kFullMask, scale_v_, used_);
    const float* const from = lane() < 4 ? p.quantization.k.data + k_at : p.quantization.v.data + v_at;
    if (lane() < 8) ptx::cp_async_16(to + lane() * 16, from + lane() % 4 * 4, there ? 16u : 0u);
  }

  /// Copies the scales of the keys of a granule that are there; a lane has a key of K or of V. Those of the others
  /// become zero, as their elements do, whatever lies behind a sequence's last key.
  __device__ void start_scales_of_groups(const AttentionParams& p, std::uint32_t to, int first, int count) const {
    static_assert(kWarp == 2 * kGranule);
    const std::int64_t k_at = __shfl_sync(kFullMask, scale_k_, used_), v_at = __shfl_sync(kFullMask, scale_v_, used_);
    const int key = lane() % kGranule;
    const bool there = static_cast<unsigned>(key - first) < static_cast<unsigned>(count);
    const auto copy = [&](std::uint32_t tile, const float* from, auto groups) {
      constexpr int kGroups = decltype(groups)::value, kWords = kGroups < 4 ? kGroups : 4;
      tile += key * kGroups * 4;
#pragma unroll
      for (int at = 0; at < kGroups; at += kWords) {
        if constexpr (kWords == 4)
          ptx::cp_async_16(tile + at * 4, from + at, there ? 16u : 0u);
        else
          ptx::cp_async_8(tile + at * 4, from + at, there ? 8u : 0u);
      }
    };
    if (lane() < kGranule)
      copy(to, p.quantization.k.data + k_at + (there ? key * p.quantization.k.stride_slot : 0),
           DecodeTiles<kQkDim / 32>{});
    else
      copy(to + Shape::kKScaleBytes, p.quantization.v.data + v_at + (there ? key * p.quantization.v.stride_slot : 0),
           DecodeTiles<kVDim / 32>{});
  }

  /// The first key of the lane's granule of a batch, or with small pages the lane's key.
  __device__ static int key_of_lane(const AttentionParams& p, int granule, const DecodePlan& plan) {
    if (has_small_pages<T>(p)) return (granule + lane() / kGranule * plan.key_lanes) * kGranule + lane() % kGranule;
    return (granule + lane() * plan.key_lanes) * kGranule;
  }

  /// The addresses of what was fetched.
  __device__ void make_addresses(const AttentionParams& p, const DecodePlan& plan) {
    const int key = key_of_lane(p, next_.granule, plan);
    const int first = max(next_.first_key - key, 0);
    int count = min(next_.last_key - key, kGranule) - first;
    k_at_ = next_.head * p.stride_k_head;
    v_at_ = next_.head * p.stride_v_head;
    if (p.is_paged()) {
      const int slot = key % static_cast<int>(p.page_size);
      const bool there = next_.page >= 0 && next_.page < p.num_pages;  // a bad table reads nothing
      const std::int64_t page = there ? next_.page : 0;
      if (!there) count = 0;
      k_at_ += page * p.stride_k_batch + slot * p.stride_k_token;
      v_at_ += page * p.stride_v_batch + slot * p.stride_v_token;
      if constexpr (kBitsOf<T> < 16) {
        if (p.quantization.per_token) {
          scale_k_ = p.quantization.k.at(page, next_.head, slot) - p.quantization.k.data;
          scale_v_ = p.quantization.v.at(page, next_.head, slot) - p.quantization.v.data;
        }
      }
    } else if (p.is_varlen_k()) {
      k_at_ += (p.k_begin(next_.b) + key) * p.stride_k_token;
      v_at_ += (p.k_begin(next_.b) + key) * p.stride_v_token;
    } else {
      k_at_ += next_.b * p.stride_k_batch + key * p.stride_k_token;
      v_at_ += next_.b * p.stride_v_batch + key * p.stride_v_token;
    }
    rows_ = count > 0 ? first | count << 8 : 0;
    if (has_small_pages<T>(p) && first > 0) rows_ = 0;  // a lane has one key, not those behind it
    count_ = next_.count;
    used_ = 0;
  }

  __device__ Batch fetch(const AttentionParams& p, const DecodePlan& plan) {
    while (at_ >= segment_.end) {
      if (!walk_.next(p, plan.head_groups, segment_)) return Batch{};
      at_ = segment_.first + key_lane_;
    }
    const KeyRange& range = segment_.range;
    Batch batch;
    batch.b = segment_.b;
    batch.head = segment_.head_group * plan.heads + head_;
    batch.granule = at_;
    const bool small = has_small_pages<T>(p);
    const int most = small ? kWarp / kGranule : kWarp;
    batch.count = min(most, (segment_.end - at_ + plan.key_lanes - 1) / plan.key_lanes);
    batch.first_key = range.first(0);
    batch.last_key = range.last(range.q_len - 1);
    const int key = key_of_lane(p, at_, plan);
    if (p.is_paged() && (small ? lane() / kGranule : lane()) < batch.count && key < range.k_len) {
      const int column = key / static_cast<int>(p.page_size);
      batch.page = p.block_table[segment_.b * p.stride_block_table + column];
    }
    at_ += most * plan.key_lanes;
    return batch;
  }

  SegmentWalk walk_;
  Segment segment_;
  Batch next_;
  // The lane's granule of the batch under way (or key, with small pages): where it begins (elements), rows of it (the
  // first, and how many times 256), its scales; `used_` of `count_` granules are under way.
  std::int64_t k_at_ = 0, v_at_ = 0, scale_k_ = 0, scale_v_ = 0;
  int rows_ = 0, used_ = 0, count_ = 0;
  std::uint32_t ring_;
  int key_lane_, head_, at_ = 0, slot_ = 0;
};

}  // namespace flashkernel::cuda::sm80
