// A consumer of the Hopper forward kernel: one warpgroup, 64 queries of each tile. Keys pass from the last block to the
// first; while the scores of a block go through the softmax, the tensor cores work on the values of the block before
// (this warpgroup's) and on the other warpgroups' products. Warpgroups take turns in issuing, so that one's softmax
// falls into another's products.
#pragma once

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90a/attention_fwd_epilogue.cuh"

namespace flashkernel::cuda::sm90a {

/// Numbers of the named barriers; 0 is __syncthreads.
enum NamedBarrier : int { kTurn = 1, kWarpgroup = 5 };  // one of each per consumer

template <class Shape, class T>
struct Consumer {
  static constexpr int kBlockN = Shape::kBlockN;
  static constexpr int kHalf = Shape::kHasHalf ? kBlockN / 2 : kBlockN;
  static constexpr int kScores = kBlockN / 2;       // a thread's elements of 64 x kBlockN
  static constexpr int kValueSteps = kBlockN / 16;  // of 16 keys

  const AttentionParams& p;
  const ForwardPlan& plan;
  const SharedLayout<Shape>& shared;
  const CUtensorMap* map_out;
  const int warpgroup;

  RingCursor<Shape::kQSlots> at_q;
  RingCursor<Shape::kStages> at_k, at_v;
  float score[kScores];
  float out[Shape::kDim / 2];
  std::uint32_t weights[kValueSteps][4];  // the exponentials of the block before, as operands of its values
  RunningRows rows;

  __device__ static bool is_leader() { return threadIdx.x % 128 == 0; }

  // One arrival a warp says that the whole warpgroup has read a slot.
  __device__ static void release(std::uint32_t barrier) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
  }

  __device__ void take_turn() const { ptx::barrier_sync(kTurn + warpgroup, 256); }
  __device__ void pass_turn() const {
    ptx::barrier_arrive(kTurn + (warpgroup + 1 == Shape::kConsumers ? 0 : warpgroup + 1), 256);
  }

  /// S = Q K^T for the first kWidth keys of the slot; only issues.
  template <int kWidth>
  __device__ void issue_scores(int q_slot, int k_slot) {
    auto& first = reinterpret_cast<float(&)[kWidth / 2]>(score);
    const std::uint64_t q = ptx::matrix_descriptor(shared.q(q_slot, warpgroup), 16, 1024);
    const std::uint64_t k = ptx::matrix_descriptor(shared.k(k_slot), 16, 1024);
#pragma unroll
    for (int d = 0; d < Shape::kDim / 16; ++d)
      ptx::wgmma_ss<T>(first, q + (d / 4 * Shape::kQBlockBytes + d % 4 * 32) / 16,
                       k + (d / 4 * Shape::kKvBlockBytes + d % 4 * 32) / 16, d > 0);
  }

  /// O += P V for the first kWidth keys of the slot; only issues.
  template <int kWidth>
  __device__ void issue_values(int v_slot, bool accumulate) {
    const std::uint64_t v = ptx::matrix_descriptor(shared.v(v_slot), Shape::kKvBlockBytes, 1024);
#pragma unroll
    for (int n = 0; n < kWidth / 16; ++n)
      ptx::wgmma_rs<T, true>(out, weights[n], v + n * 2048 / 16, n > 0 || accumulate);
  }

  __device__ void hold_values() {
    ptx::hold(out);
#pragma unroll
    for (int n = 0; n < kValueSteps; ++n) ptx::hold(weights[n]);
  }

  template <int kWidth>
  __device__ void pack_weights() {
#pragma unroll
    for (int n = 0; n < kWidth / 16; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) weights[n][e] = pack<T>(score[8 * n + 2 * e], score[8 * n + 2 * e + 1]);
  }

  /// Masks where asked and turns the scores of the first kWidth keys into exponentials.
  template <int kWidth>
  __device__ bool softmax(const TileRecord& tile, int block, bool masked, float (&factor)[2]) {
    auto& first = reinterpret_cast<float(&)[kWidth / 2]>(score);
    if (plan.modified) modify_scores(first, p.scale, p.softcap);
    if (masked)
      mask_scores(first, tile.range, tile.first_query + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4,
                  block * kBlockN + 2 * static_cast<int>(threadIdx.x % 4));
    return exponentials(first, rows, plan.scale_log2, factor);
  }

  /// Block `block`'s scores while the one before gets its values: of kWidth keys, added to `out` if `accumulate`.
  template <int kWidth>
  __device__ void step(const TileRecord& tile, int block, bool masked, bool accumulate) {
    ptx::mbarrier_wait(shared.k_full(at_k.slot), at_k.phase);
    take_turn();
    ptx::hold(score);
    hold_values();
    ptx::wgmma_fence();
    issue_scores<kBlockN>(at_q.slot, at_k.slot);
    ptx::wgmma_commit();
    ptx::mbarrier_wait(shared.v_full(at_v.slot), at_v.phase);
    issue_values<kWidth>(at_v.slot, accumulate);
    ptx::wgmma_commit();
    pass_turn();
    ptx::wgmma_wait<1>();
    ptx::hold(score);
    release(shared.k_empty(at_k.slot));
    at_k.advance();
    float factor[2];
    const bool rescale = softmax<kBlockN>(tile, block, masked, factor);
    ptx::wgmma_wait<0>();
    hold_values();
    release(shared.v_empty(at_v.slot));
    at_v.advance();
    pack_weights<kBlockN>();
    if (rescale) {
#pragma unroll
      for (int c = 0; c < Shape::kDim / 8; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[4 * c + e] *= factor[e / 2];
    }
  }

  /// The values of the last block of a tile.
  template <int kWidth>
  __device__ void last_values(bool accumulate) {
    ptx::mbarrier_wait(shared.v_full(at_v.slot), at_v.phase);
    hold_values();
    ptx::wgmma_fence();
    issue_values<kWidth>(at_v.slot, accumulate);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    hold_values();
    release(shared.v_empty(at_v.slot));
    at_v.advance();
  }

  /// A tile's first block: kWidth of its keys, the others are masked. Takes no values: there are none yet.
  template <int kWidth>
  __device__ void first_block(const TileRecord& tile, int block, bool masked) {
    ptx::mbarrier_wait(shared.k_full(at_k.slot), at_k.phase);
    ptx::hold(score);
    ptx::wgmma_fence();
    issue_scores<kWidth>(at_q.slot, at_k.slot);
    ptx::wgmma_commit();
    pass_turn();
    ptx::wgmma_wait<0>();
    ptx::hold(score);
    release(shared.k_empty(at_k.slot));
    at_k.advance();
    float factor[2];
    softmax<kWidth>(tile, block, masked, factor);
    pack_weights<kWidth>();
  }

  /// Skips a block that none of this warpgroup's rows sees.
  __device__ void skip_block() {
    ptx::mbarrier_wait(shared.k_full(at_k.slot), at_k.phase);
    release(shared.k_empty(at_k.slot));
    at_k.advance();
    ptx::mbarrier_wait(shared.v_full(at_v.slot), at_v.phase);
    release(shared.v_empty(at_v.slot));
    at_v.advance();
  }

  __device__ void run() {
    at_q = {};
    at_k = {};
    at_v = {};
    if (warpgroup == Shape::kConsumers - 1) pass_turn();  // the first turn is warpgroup 0's
    for (;; at_q.advance()) {
      ptx::mbarrier_wait(shared.q_full(at_q.slot, warpgroup), at_q.phase);
      const TileRecord& tile = *shared.record(at_q.slot, warpgroup);
      const int num_blocks = tile.num_blocks;
      if (num_blocks < 0) break;
      if (num_blocks == 0) {
        store_empty_rows<Shape, T>(p, tile);
        ptx::barrier_sync(kWarpgroup + warpgroup, 128);
        if (is_leader()) ptx::mbarrier_arrive(shared.q_empty(at_q.slot, warpgroup));
        continue;
      }
      run_tile(tile, num_blocks);
    }
    ptx::bulk_wait<0>();
  }

  __device__ void run_tile(const TileRecord& tile, int num_blocks) {
    const int last_row = min(tile.range.q_len - 1, tile.first_query + 63);
    const int last_key = tile.range.last(last_row);  // seen by the last row: no row sees more
    // Blocks outside of [first_full, end_full) are masked for some row.
    const int first_full = (tile.range.first(tile.first_query + 63) + kBlockN - 1) / kBlockN;
    const int end_full = tile.range.last(tile.first_query) / kBlockN;
    int block = tile.end_block - 1;
    const int end = tile.end_block - num_blocks;
    bool partly_masked = block >= end_full || end < first_full;
    rows.clear();
    for (; block > end && block * kBlockN >= last_key; --block) {
      skip_block();
      take_turn();
      pass_turn();
    }

    // The first block that the rows see: of a causal one, every other warpgroup sees the first half only.
    take_turn();
    bool half = false, accumulate = false;
    if constexpr (Shape::kHasHalf) half = block * kBlockN + kHalf >= last_key;
    if (half) {
      first_block<kHalf>(tile, block, true);
      if (--block >= end) {
        step<kHalf>(tile, block, block >= end_full || block < first_full, false);
        --block;
        half = false;
        accumulate = true;
      }
    } else {
      first_block<kBlockN>(tile, block, block >= end_full || block < first_full);
      --block;
    }
    for (; block >= end; --block) {
      step<kBlockN>(tile, block, block >= end_full || block < first_full, accumulate);
      accumulate = true;
    }
    if (half)
      last_values<kHalf>(accumulate);
    else
      last_values<kBlockN>(accumulate);
    finish_rows<Shape, T>(p, tile, map_out, out, rows, plan.modified, partly_masked, shared.q(at_q.slot, warpgroup),
                          kWarpgroup + warpgroup);
    if (is_leader()) {
      ptx::bulk_wait_read<0>();
      ptx::mbarrier_arrive(shared.q_empty(at_q.slot, warpgroup));
    }
  }
};

}  // namespace flashkernel::cuda::sm90a
