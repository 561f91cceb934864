// A consumer of the Hopper forward kernel: one warpgroup, with 64 queries of each tile. It walks blocks of keys from
// the last one to the first. While the scores of a block go through the softmax, the tensor cores work on the values of
// the previous block, and on products of the other warpgroups. Warpgroups issue their products in turn, so that the
// softmax of one runs during the products of another.
#pragma once

#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/attention/forward/sm90a/epilogue.cuh"
#include "cuda/attention/forward/sm90a/float8.cuh"
#include "cuda/attention/forward/sm90a/parts.cuh"
#include "cuda/attention/forward/sm90a/redo.cuh"
#include "cuda/attention/forward/sm90a/scored.cuh"
#include "cuda/attention/forward/sm90a/sparse.cuh"

namespace flashkernel::cuda::sm90a {

/// Numbers of the named barriers; 0 is __syncthreads.
enum NamedBarrier : int { kTurn = 1, kWarpgroup = 5 };  // one of each per consumer

/// kModified: scores get a softcap, a scale that is not positive, or what a scored call adds, before their
/// exponentials.
template <class Shape, class T, bool kModified>
struct Consumer : TotalOf<Shape>, ScalesOf<Shape> {
  // With two places for Q, the first scores of a tile are under way while the output of the previous tile is finished.
  static constexpr bool kOverlap = !kModified && Shape::kQSlots > 1;
  static constexpr int kBlockN = Shape::kBlockN;
  static constexpr int kScores = kBlockN / 2;                        // a thread's elements of 64 x kBlockN
  static constexpr int kValueSteps = kBlockN / Shape::kStepColumns;  // of 16 keys; 32 of 8 bits
  static constexpr bool kEightBits = Shape::kEightBits;
  static constexpr int kOut = Shape::kVDim / 2 + (Shape::kSums ? 4 : 0);
  static constexpr bool kInChunks = Shape::kChunkBlocks > 0, kFolds = Shape::kFolds;

  const AttentionParams& p;
  const typename Shape::Plan& plan;
  const SharedLayout<Shape>& shared;
  const CUtensorMap* map_out;
  const int warpgroup;

  Ring<Shape::kQSlots> tiles;   // the current tile's
  Ring<Shape::kStages> blocks;  // K and V of the next block; V of values that are due is at blocks.before()
  Ring<1> outputs;              // the places of the next output, where the warp of V sends outputs
  Ring<Shape::kScored ? Shape::kBiasStages : 1> biases;  // the bias of the next block, where the call has it in tiles
  float score[kScores];
  float out[kOut];                        // with kSums, also the sum of each of the thread's rows, twice
  std::uint32_t weights[kValueSteps][4];  // exponentials of the previous block, as operands for its values
  std::uint32_t queries[Shape::kHeld > 0 ? Shape::kHeld : 1][4];  // the first steps of Q, as operands of the scores
  RunningRows rows;
  ShownBlock shown;  // with a block mask: the block of the scores

  __device__ static bool is_leader() { return threadIdx.x % 128 == 0; }

  // Each warp arrives once when it has read a slot.
  __device__ static void release(std::uint32_t barrier) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
  }

  __device__ void take_turn() const {
    if constexpr (Shape::kTurns) ptx::barrier_sync(kTurn + warpgroup, 256);
  }
  __device__ void pass_turn() const {
    if constexpr (Shape::kTurns)
      ptx::barrier_arrive(kTurn + (warpgroup + 1 == Shape::kConsumers ? 0 : warpgroup + 1), 256);
  }

  __device__ void wait_for_keys() {
    ptx::mbarrier_wait(shared.k_full(blocks.slot()), blocks.parity());
    if constexpr (Shape::kSparse) shown = *shared.shown(blocks.slot());
  }
  __device__ void wait_for_values() const {
    ptx::mbarrier_wait(shared.v_full(blocks.before().slot()), blocks.before().parity());
  }

  __device__ void load_queries() {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int d = 0; d < Shape::kHeld; ++d)
      ptx::ldmatrix_x4(queries[d], shared.q(tiles.slot(), warpgroup) + row_chunk(row, 2 * d + lane / 16));
  }

  /// S = Q K^T for the keys of the slot; only issues.
  __device__ void issue_scores() {
    const std::uint64_t q = ptx::matrix_descriptor(shared.q(tiles.slot(), warpgroup), 16, 1024);
    const std::uint64_t k = ptx::matrix_descriptor(shared.k(blocks.slot()), 16, 1024);
    const auto keys_of = [&](int d) { return k + (d / 4 * Shape::kKvBlockBytes + d % 4 * 32) / 16; };
#pragma unroll
    for (int d = 0; d < Shape::kHeld; ++d) ptx::wgmma_rs<T>(score, queries[d], keys_of(d), d > 0);
#pragma unroll
    for (int d = Shape::kHeld; d < Shape::kQkDim / Shape::kStepColumns; ++d) {
      const std::uint64_t queries_of_d = q + (d / 4 * Shape::kQBlockBytes + d % 4 * 32) / 16;
      if constexpr (kEightBits)
        ptx::wgmma_fp8_ss<ptx::E4m3>(score, queries_of_d, keys_of(d), d > 0);
      else
        ptx::wgmma_ss<T>(score, queries_of_d, keys_of(d), d > 0);
    }
  }

  /// O += P V for the keys of the slot; only issues.
  __device__ void issue_values(bool accumulate) {
    if constexpr (kEightBits)
      return issue_transposed_values<Shape>(out, weights, shared.v(blocks.before().slot()), accumulate);
    const std::uint64_t v = ptx::matrix_descriptor(shared.v(blocks.before().slot()), Shape::kKvBlockBytes, 1024);
#pragma unroll
    for (int n = 0; n < kValueSteps; ++n)
      if constexpr (!kEightBits) ptx::wgmma_rs<T, true>(out, weights[n], v + n * 2048 / 16, n > 0 || accumulate);
  }

  __device__ void hold_values() {
    ptx::hold(out);
#pragma unroll
    for (int n = 0; n < kValueSteps; ++n) ptx::hold(weights[n]);
  }

  /// Called when the values of the previous block are in the output: moves on to the next block.
  __device__ void take_values() {
    ptx::wgmma_wait<0>();
    hold_values();
    release(shared.v_empty(blocks.before().slot()));
    ++blocks.count;
  }

  __device__ void pack_weights() {
#pragma unroll
    for (int n = 0; n < kValueSteps; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) weights[n][e] = pack<T>(score[8 * n + 2 * e], score[8 * n + 2 * e + 1]);
  }

  /// Finishes the scores of a scored call, in the order of docs/numerics.md. Each of the first steps also scales them,
  /// if none before it has.
  __device__ void add_to_scores(const TileRecord& tile, int block) {
    const int first_query = tile.first_query + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const int first_key = block * kBlockN + 2 * static_cast<int>(threadIdx.x % 4);
    float factor = p.scale;
    if (p.softcap > 0.0f) {
      modify_scores(score, p.scale, p.softcap);
      factor = 1.0f;
    }
    if (plan.bias == BiasFrom::kTiles) {
      ptx::mbarrier_wait(shared.bias_full(biases.slot(), warpgroup), biases.parity());
      add_bias_tile<Shape, T>(score, factor, shared.bias(biases.slot(), warpgroup));
      __syncwarp();
      release(shared.bias_empty(biases.slot(), warpgroup));
      ++biases.count;
      factor = 1.0f;
    } else if (plan.bias == BiasFrom::kRow) {
      const T* const row =
          static_cast<const T*>(p.bias.data) + tile.b * p.bias.stride_batch + tile.h * p.bias.stride_head;
      add_bias_row(score, factor, row, first_key, tile.range.k_len);
      factor = 1.0f;
    }
    if (p.alibi_slopes) {
      const float slope = p.alibi_slopes[tile.b * p.stride_alibi_batch + tile.h];
      const int distance = first_query + tile.range.k_len - tile.range.q_len - first_key;
      if (p.alibi == Alibi::kDistance)
        add_alibi<Alibi::kDistance>(score, factor, slope, distance);
      else if (p.alibi == Alibi::kSigned)
        add_alibi<Alibi::kSigned>(score, factor, slope, distance);
      else
        add_alibi<Alibi::kSqrt>(score, factor, slope, distance);
    } else if (factor != 1.0f) {
      modify_scores(score, factor, 0.0f);
    }
    if (p.mask.data)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        hide_keys<kBlockN>(score, half, p, tile, min(first_query + 8 * half, tile.range.q_len - 1), block * kBlockN);
  }

  /// What the exponentials multiply scores with.
  __device__ float scale_log2() const {
    if constexpr (kEightBits)
      return this->score_scale;
    else
      return plan.scale_log2;
  }

  /// Finishes scores that are more than products, and applies the mask where asked.
  __device__ void modify_and_mask(const TileRecord& tile, int block, bool masked) {
    if constexpr (kEightBits) this->scale_first(score);
    if constexpr (Shape::kScored)
      add_to_scores(tile, block);
    else if constexpr (kModified)
      modify_scores(score, p.scale, p.softcap);
    const int first_query = tile.first_query + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    if constexpr (Shape::kSparse)
      hide_blocks<kBlockN>(score, p, tile, shown.of(warpgroup), first_query, block * kBlockN);
    if (masked) mask_scores(score, tile.range, first_query, block * kBlockN + 2 * static_cast<int>(threadIdx.x % 4));
  }

  __device__ void rescale_output(const float (&factor)[2]) {
#pragma unroll
    for (int c = 0; c < kOut / 4; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[4 * c + e] *= factor[e / 2];
  }

  /// Computes the weights of a tile's first block from its scores, with the maxima of that block.
  __device__ void first_weights() {
    float factor[2];
    if constexpr (kModified) {
      exponentials(score, rows, plan.scale_log2, factor);
      pack_weights();
    } else {
      renew_maxima(score, rows, {true, true}, scale_log2(), factor);
      fill<!Shape::kSums>(true, rows.sum);
    }
  }

  /// Fills the weights of a block (fill_weights); true where one is too large.
  template <bool kSum>
  __device__ bool fill(bool is_final, float (&sum)[2]) {
    if constexpr (kEightBits)
      return fill_eight_bit_weights<kSum>(score, weights, rows, scale_log2(), is_final, sum);
    else
      return fill_weights<T, kSum>(score, weights, rows, scale_log2(), is_final, sum);
  }
  __device__ bool row_has_large(int half) const {
    if constexpr (kEightBits)
      return eight_bit_row_is_over(weights, half);
    else
      return row_is_over<T>(weights, half);
  }

  /// Computes the weights of a later block from its scores, with the shift of the blocks before. A warp in which an
  /// exponential is too large repeats it, with new maxima for the rows that have such a one. The values of the previous
  /// block are in the output. `is_final`: the rows have their maxima.
  __device__ void guess_weights(bool is_final = false) {
    float sum[2];
#pragma unroll 1
    for (;; is_final = true) {
      const bool is_over = fill<!Shape::kSums>(is_final, sum);
      // Without this the compiler would keep all exponentials, and add them only once it is known that the sum is
      // needed.
      if constexpr (!Shape::kSums) ptx::hold(sum);
      if (is_final || !__any_sync(kFullMask, is_over)) break;
      const bool moves[2] = {row_has_large(0), row_has_large(1)};
      float factor[2];
      renew_maxima(score, rows, moves, scale_log2(), factor);
      rows.sum[0] *= factor[0];
      rows.sum[1] *= factor[1];
      rescale_output(factor);
    }
    rows.sum[0] += sum[0];
    rows.sum[1] += sum[1];
  }

  /// Whether a block is the first one of a chunk that is walked.
  __device__ static bool opens_chunk(int block) {
    if constexpr (kInChunks) return block % Shape::kChunkBlocks == Shape::kChunkBlocks - 1;
    return false;
  }

  /// Computes the scores of block `block`, while the previous block gets its values, added to `out` if `accumulate`.
  /// The exponentials come after the wait for the values. Where a branch kept them before it, d64 and d128 were 4 to 8
  /// % slower. (For modified scores the source has them before the wait, and ptxas moves them behind it.)
  /// `opens`: the block is the first one of a chunk of keys. With a block mask, the slot says which block it is.
  __device__ void step(const TileRecord& tile, int block, bool masked, bool accumulate, int is_last,
                       bool opens = false) {
    wait_for_keys();
    if constexpr (Shape::kSparse) {
      block = shown.block;
      masked = block >= tile.end_full || block < tile.first_full;
    }
    take_turn();
    ptx::hold(score);
    ptx::wgmma_fence();
    issue_scores();
    ptx::wgmma_commit();
    wait_for_values();
    hold_values();
    ptx::wgmma_fence();
    issue_values(accumulate);
    ptx::wgmma_commit();
    pass_turn();
    ptx::wgmma_wait<1>();
    ptx::hold(score);
    release(shared.k_empty(blocks.slot()));
    if (is_last) retire_q();
    modify_and_mask(tile, block, masked);
    if constexpr (kModified) {
      float factor[2];
      const bool rescale = exponentials(score, rows, plan.scale_log2, factor);
      take_values();
      pack_weights();
      if (rescale) rescale_output(factor);
    } else {
      take_values();
      if constexpr (kInChunks)
        if (opens) end_chunk(tile, block / Shape::kChunkBlocks + 1);
      guess_weights(opens);
    }
  }

  /// Puts the chunk whose values are in the output where it belongs, and gives the rows the maxima of the next chunk.
  __device__ void end_chunk(const TileRecord& tile, int chunk) {
    if constexpr (kFolds) this->template add<false>(out, rows, plan.scale_log2, shared.total(warpgroup));
    if constexpr (Shape::kParts) store_part<Shape>(p, plan, tile, chunk, out, rows);
    rows.clear();
    float factor[2];
    renew_maxima(score, rows, {true, true}, plan.scale_log2, factor);
  }

  /// Multiplies the values of the last block of a tile.
  __device__ void last_values(bool accumulate) {
    wait_for_values();
    hold_values();
    ptx::wgmma_fence();
    issue_values(accumulate);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    hold_values();
    release(shared.v_empty(blocks.before().slot()));
  }

  /// What is still to be done for a tile when the first scores of the next tile are under way.
  struct Pending {
    int accumulate = 0;  // the last values of the tile are not its first
    int partly_masked = 0;
  } pending;

  __device__ void finish_pending() {
    const TileRecord& tile = *shared.record(tiles.count - 1, warpgroup);
    float factor[2];
    if constexpr (Shape::kParts) {
      const int chunk = (tile.end_block - tile.num_blocks) / Shape::kChunkBlocks;
      return store_part<Shape>(p, plan, tile, chunk, out, rows);
    }
    if constexpr (kFolds) {
      this->template add<true>(out, rows, plan.scale_log2, shared.total(warpgroup));
      this->clear(shared.total(warpgroup));
    }
    if constexpr (kEightBits)
      finish_eight_bit_factors(p, tile, rows, *this, factor);
    else
      finish_factors<Shape, kFolds>(p, tile, out, rows, kModified, factor);
    if (kFolds ? has_any_nan(out) : pending.partly_masked && has_nan(out)) *shared.met_nan(warpgroup) = 1;
    const OutputRecord at{tile.b, tile.h, tile.first_query, min(64, tile.range.q_len - tile.first_query)};
    if constexpr (Shape::kOutInValues > 0) return hand_over(at, factor);
    if (Shape::kQSlots == 1) {
      if (is_leader()) ptx::bulk_wait_read<0>();
      ptx::barrier_sync(kWarpgroup + warpgroup, 128);
    }
    const std::uint32_t place = Shape::kQSlots > 1 ? shared.q(tiles.before().slot(), warpgroup) : shared.out(warpgroup);
    stage_rows<T, 0, Shape::kVBlocks>(out, factor, place);
    send_rows<Shape>(p, plan, at, map_out, place, kWarpgroup + warpgroup);
  }

  /// Hands the output to the warp of V, which sends it. Where the rows end with a sequence, it hands over only the
  /// places.
  __device__ void hand_over(const OutputRecord& at, const float (&factor)[2]) {
    const auto last = blocks.before();
    ptx::mbarrier_wait(shared.out_empty(warpgroup), outputs.parity() ^ 1);
    stage_rows<T, 0, Shape::kOutSlots>(out, factor, shared.out(warpgroup));
    ptx::mbarrier_wait(shared.v_empty(last.slot()), last.parity());  // all warpgroups have read the values
    stage_rows<T, Shape::kOutSlots, Shape::kOutInValues>(out, factor,
                                                         shared.out(warpgroup, Shape::kOutSlots, last.slot()));
    if (!is_whole(p, at)) {
      ptx::barrier_sync(kWarpgroup + warpgroup, 128);
      for (int c = 0; c < Shape::kVBlocks; ++c) store_some_rows(p, at, c, 1, shared.out(warpgroup, c, last.slot()));
    }
    if (is_leader()) *shared.output(warpgroup) = at;
    ptx::fence_proxy_async_shared();
    __syncwarp();
    release(shared.out_full(warpgroup));
    ++outputs.count;
  }
  /// Lets the producer fill the place of Q. With two places, the output of the previous tile must have left it.
  __device__ void retire_pending() {
    if (Shape::kQSlots == 1) return;
    if (is_leader()) ptx::bulk_wait_read<0>();
    ptx::mbarrier_arrive(shared.q_empty(tiles.before().slot(), warpgroup));
  }

  /// Computes the scores of a tile's first block. With kValues the last values of the previous tile come first, and the
  /// output of that tile is finished while the scores are under way.
  template <bool kValues>
  __device__ void open_tile(int is_last) {
    if (kValues) wait_for_values();
    wait_for_keys();
    take_turn();
    if (kValues) {
      hold_values();
      ptx::wgmma_fence();
      issue_values(pending.accumulate);
      ptx::wgmma_commit();
    }
    ptx::hold(score);
    ptx::wgmma_fence();
    issue_scores();
    ptx::wgmma_commit();
    pass_turn();
    if (kValues) {
      ptx::wgmma_wait<1>();
      hold_values();
      release(shared.v_empty(blocks.before().slot()));
      finish_pending();
    }
    ptx::wgmma_wait<0>();
    ptx::hold(score);
    release(shared.k_empty(blocks.slot()));
    if (is_last) retire_q();
    ++blocks.count;
  }

  /// Skips a block that none of this warpgroup's rows sees.
  __device__ void skip_block() {
    wait_for_keys();
    release(shared.k_empty(blocks.slot()));
    ptx::mbarrier_wait(shared.v_full(blocks.slot()), blocks.parity());
    release(shared.v_empty(blocks.slot()));
    ++blocks.count;
    take_turn();
    pass_turn();
  }

  /// With one place of Q: called once the scores of the last block are there, so that the next Q comes during their
  /// softmax.
  __device__ void retire_q() {
    if (Shape::kQSlots == 1) ptx::mbarrier_arrive(shared.q_empty(0, warpgroup));
  }

  /// Does all that is pending, without overlap.
  __device__ void close_tile() {
    last_values(pending.accumulate);
    finish_pending();
    retire_pending();
  }

  /// Zeroes the values past the end of a sequence. They belong to another sequence or to none, and the product would
  /// multiply them by 0.
  __device__ void clear_values(int first) {
    wait_for_values();
    const std::uint32_t slot = shared.v(blocks.before().slot());
#pragma unroll 1
    for (int at = first * 8 + static_cast<int>(threadIdx.x % 128); at < kBlockN * 8; at += 128)
      for (int c = 0; c < Shape::kVBlocks; ++c)
        *static_cast<uint4*>(__cvta_shared_to_generic(slot + c * Shape::kKvBlockBytes + at * 16)) = uint4{0, 0, 0, 0};
    ptx::fence_proxy_async_shared();
    ptx::barrier_sync(kWarpgroup + warpgroup, 128);
  }

  __device__ void run() {
    tiles = {};
    blocks = {};
    outputs = {};
    biases = {};
    pending = {};
    if constexpr (kFolds) this->clear(shared.total(warpgroup));
    if (Shape::kTurns && warpgroup == Shape::kConsumers - 1) pass_turn();  // the first turn is warpgroup 0's
    for (;; ++tiles.count) {
      // Whether the previous tile is pending is read from shared memory, not kept. ptxas takes such a value for
      // uniform, and then keeps the addresses and descriptors of this loop out of the registers.
      int is_pending = 0;
      if (tiles.count > 0) is_pending = shared.record(tiles.count - 1, warpgroup)->num_blocks > 0;
      if (!kOverlap && is_pending) close_tile();  // while Q is on its way
      ptx::mbarrier_wait(shared.q_full(tiles.slot(), warpgroup), tiles.parity());
      const TileRecord& tile = *shared.record(tiles.count, warpgroup);
      load_queries();
      const int num_blocks = tile.num_blocks, end = tile.end_block - num_blocks;
      ScalesOf<Shape> scales{};
      if constexpr (kEightBits)
        if (num_blocks > 0) scales = scales_of_tile<Shape>(plan, tile);  // the record of no tile has no head
      int block = tile.end_block - 1;
      const int last_key = tile.last_key;
      const bool skips = !Shape::kSparse && block > end && block * kBlockN >= last_key;

      // The scores of the first block follow the last values of the previous tile, whose output is finished meanwhile.
      const int overlap = kOverlap && is_pending && num_blocks > 0 && !skips;
      if (overlap) {
        open_tile<true>(block == end);
      } else if (kOverlap && is_pending) {
        close_tile();
      }
      if (num_blocks < 0) break;
      if (num_blocks == 0) {
        if constexpr (!Shape::kParts) store_empty_rows<Shape, T>(p, tile);
        ptx::barrier_sync(kWarpgroup + warpgroup, 128);
        ptx::mbarrier_arrive(shared.q_empty(tiles.slot(), warpgroup));
        continue;
      }
      if (!overlap) {
        if constexpr (!Shape::kSparse)
          for (; block > end && block * kBlockN >= last_key; --block) skip_block();
        open_tile<false>(block == end);
      }
      if constexpr (Shape::kSparse) block = shown.block;

      const int first_full = tile.first_full, end_full = tile.end_full;
      const auto masked = [&] { return block >= end_full || block < first_full; };
      const bool partly_masked =
          masked() || end < first_full || Shape::kSparse || (Shape::kScored && p.hides_by_score());
      rows.clear();
      static_cast<ScalesOf<Shape>&>(*this) = scales;
      modify_and_mask(tile, block, masked());
      first_weights();
      if (overlap) retire_pending();
      const bool has_more = Shape::kSparse ? !shown.is_last() : block > end;
      pending = {has_more && !opens_chunk(end) ? 1 : 0, partly_masked ? 1 : 0};
      if (!kEightBits && (p.is_varlen_k() || p.is_paged())) {
        const int past = tile.range.k_len - block * kBlockN;
        if (past < kBlockN) clear_values(past);
      }
      --block;
      int accumulate = 0;
      if constexpr (kInChunks) {
        for (; block >= end; --block) {
          const bool opens = opens_chunk(block);
          step(tile, block, masked(), accumulate, block == end, opens);
          accumulate = !opens;
        }
      } else if constexpr (Shape::kSparse) {
        for (; !shown.is_last(); accumulate = 1) step(tile, 0, false, accumulate, 0);
      } else {
        for (; block >= end; --block, accumulate = 1) step(tile, block, masked(), accumulate, block == end);
      }
    }
    if constexpr (Shape::kOutInValues > 0) ptx::mbarrier_wait(shared.out_empty(warpgroup), outputs.parity() ^ 1);
    ptx::bulk_wait<0>();
    ptx::barrier_sync(kWarpgroup + warpgroup, 128);
    if constexpr (!Shape::kParts)
      if (*shared.met_nan(warpgroup)) redo_tiles<Shape, T>(p, plan, shared, warpgroup);
  }
};

}  // namespace flashkernel::cuda::sm90a
