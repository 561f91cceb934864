// Keys of the kernel for few queries in pages that are no whole lines of the swizzle (8 tokens): the copy engine cannot
// bring pieces of them, so warps copy every row by themselves, 16 bytes a lane. Pools of inference engines have such
// pages, most of them of one token.
// The producer does not wait for its copies, and cannot fence them for wgmma. Consumers do (FewQueriesConsumer).
// Invariant: rows past the end of the sequence, and those of a page that does not exist, become zeros.
#pragma once

#include "cuda/attention/few_queries/sm90a/rows.cuh"
#include "cuda/pipeline/ring.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"

namespace flashkernel::cuda::sm90a {

/// Whether keys come row by row.
FK_HOST_DEVICE inline bool gathers_keys(const AttentionParams& p) { return p.is_paged() && p.page_size % 8 != 0; }

/// A warp that copies 32 keys of every block: lane l looks up the page of the l-th one, a block before it is copied.
template <class Shape, class T>
struct KeyGatherer {
  static constexpr int kBlockN = Shape::kBlockN;
  static_assert(kBlockN == kWarp * Shape::kGatherWarps, "a lane has one key of a block");
  const AttentionParams& p;
  const Shape& shared;
  const int b, g, k_len;
  const int first;  // of the warp's 32 keys of a block
  const std::uint64_t policy;

  __device__ static int lane() { return static_cast<int>(threadIdx.x % kWarp); }

  /// The page of the lane's key of a block; -1: none.
  __device__ std::int32_t look_up(int block) const {
    const int key = block * kBlockN + first + lane();
    if (block < 0 || key >= k_len) return -1;
    return p.block_table[b * p.stride_block_table + static_cast<unsigned>(key) / static_cast<unsigned>(p.page_size)];
  }

  /// Starts the copies of the warp's keys, or values, once their slot is free. `page` has the lane's key, as its
  /// `token`'th one.
  template <bool kOfV>
  __device__ void start(std::int32_t page, unsigned token, const Ring<Shape::kStages>& ring) {
    constexpr int kChunks = (kOfV ? Shape::kVDim : Shape::kQkDim) / 8, kRows = kWarp / kChunks;  // of one copy
    const std::int64_t stride_page = kOfV ? p.stride_v_batch : p.stride_k_batch;
    const std::int64_t stride_token = kOfV ? p.stride_v_token : p.stride_k_token;
    const int sub = lane() / kChunks, chunk = lane() % kChunks;
    const T* const from =
        static_cast<const T*>(kOfV ? p.v : p.k) + g * (kOfV ? p.stride_v_head : p.stride_k_head) + chunk * 8;
    const bool has_column = chunk * 8 < (kOfV ? p.head_dim_v : p.head_dim);
    const auto twist = static_cast<std::uint32_t>((chunk % 8 ^ sub) * 16);
    const std::uint32_t to =
        (kOfV ? shared.v(ring.slot()) : shared.k(ring.slot())) + chunk / 8 * Shape::kKvBlockBytes + (first + sub) * 128;
    std::int64_t own = -1;  // where the lane's key begins
    if (page >= 0 && page < p.num_pages) own = page * stride_page + token * stride_token;
    ptx::mbarrier_wait(kOfV ? shared.v_empty(ring.slot()) : shared.k_empty(ring.slot()), ring.parity() ^ 1);
#pragma unroll Shape::kHandsOver ? 2 : 16  // producers that hand over registers have few
    for (int row = 0; row < kWarp; row += kRows) {
      const std::int64_t at = __shfl_sync(kFullMask, own, row + sub);
      const bool there = has_column && at >= 0;
      ptx::cp_async_16_by(policy, to + row * 128 + (twist ^ row % 8 * 16), from + (there ? at : 0), there ? 16 : 0);
    }
    ptx::cp_async_arrive(kOfV ? shared.v_full(ring.slot()) : shared.k_full(ring.slot()));
  }

  /// The `count` blocks of keys before the block `end`, the last one first.
  __device__ void run(int end, int count) {
    Ring<Shape::kStages> at;
    std::int32_t page = look_up(end - 1);
#pragma unroll 1
    for (int block = end - 1; block >= end - count; --block, ++at.count) {
      const std::int32_t next = look_up(block - 1);
      const unsigned token =
          static_cast<unsigned>(block * kBlockN + first + lane()) % static_cast<unsigned>(p.page_size);
      start<false>(page, token, at);
      start<true>(page, token, at);
      page = next;
    }
  }
};

}  // namespace flashkernel::cuda::sm90a
