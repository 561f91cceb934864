// A consumer of the kernel for few queries: one warpgroup with 64 rows, which walks the keys of its part from the last
// block to the first. The tensor cores work on the values of one block and the scores of the next one, which then go
// through the softmax.
#pragma once

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/attention/few_queries/sm90a/gather.cuh"
#include "cuda/attention/forward/sm90a/epilogue.cuh"
#include "cuda/pipeline/ring.cuh"

namespace flashkernel::cuda::sm90a {

template <class Shape, class T>
struct FewQueriesConsumer {
  static constexpr int kBlockN = Shape::kBlockN, kValueSteps = kBlockN / 16;
  static constexpr int kWarpgroupBarrier = 1;  // one for each warpgroup; 0 is __syncthreads

  const AttentionParams& p;
  const RowTile& tile;
  const Shape& shared;
  const float scale_log2;
  const int warpgroup;

  Ring<Shape::kStages> blocks;  // of the next scores; the values that are due are those before
  float score[kBlockN / 2], out[Shape::kVDim / 2];
  std::uint32_t weights[kValueSteps][4];
  RunningRows rows;
  int first_key[2], last_key[2];  // what the thread's two rows see

  __device__ int thread_row(int half) const {
    return 64 * warpgroup + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4 +
           8 * half;
  }
  __device__ static void release(std::uint32_t barrier) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
  }
  /// Keys that threads have copied become known to wgmma here; those of the copy engine are.
  __device__ void wait_for(std::uint32_t full, std::uint32_t parity) const {
    ptx::mbarrier_wait(full, parity);
    if (gathers_keys(p)) ptx::fence_proxy_async_shared();
  }
  __device__ void wait_for_values() const { wait_for(shared.v_full(blocks.before().slot()), blocks.before().parity()); }

  /// Gathers the warpgroup's rows of Q: neighbours are heads of one query. Rows past the last one, and columns past
  /// head_dim, are zeros.
  __device__ void load_queries() const {
    constexpr int kChunks = Shape::kQkDim / 8;
#pragma unroll 4
    for (int at = static_cast<int>(threadIdx.x) % 128; at < 64 * kChunks; at += 128) {
      const int row = at / kChunks, chunk = at % kChunks;
      const bool there = 64 * warpgroup + row < tile.rows && chunk * 8 < p.head_dim;
      const T* from = static_cast<const T*>(p.q);
      if (there) from += tile.place(64 * warpgroup + row).q_offset(p, tile.b) + chunk * 8;
      ptx::cp_async_16(shared.q(warpgroup) + row_chunk(row, chunk), from, there ? 16 : 0);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    ptx::fence_proxy_async_shared();
    ptx::barrier_sync(kWarpgroupBarrier + warpgroup, 128);
  }

  /// S = Q K^T for the keys of the slot; only issues.
  __device__ void issue_scores() {
    wait_for(shared.k_full(blocks.slot()), blocks.parity());
    const std::uint64_t q = ptx::matrix_descriptor(shared.q(warpgroup), 16, 1024);
    const std::uint64_t k = ptx::matrix_descriptor(shared.k(blocks.slot()), 16, 1024);
    ptx::hold(score);
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < Shape::kQkDim / 16; ++d)
      ptx::wgmma_ss<T>(score, q + (d / 4 * Shape::kQBlockBytes + d % 4 * 32) / 16,
                       k + (d / 4 * Shape::kKvBlockBytes + d % 4 * 32) / 16, d > 0);
    ptx::wgmma_commit();
  }
  /// O += P V for the keys of the block before; only issues.
  __device__ void issue_values(bool accumulate) {
    wait_for_values();
    const std::uint64_t v = ptx::matrix_descriptor(shared.v(blocks.before().slot()), Shape::kKvBlockBytes, 1024);
    hold_values();
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kValueSteps; ++n)
      ptx::wgmma_rs<T, true>(out, weights[n], v + n * 2048 / 16, n > 0 || accumulate);
    ptx::wgmma_commit();
  }
  __device__ void hold_values() {
    ptx::hold(out);
#pragma unroll
    for (int n = 0; n < kValueSteps; ++n) ptx::hold(weights[n]);
  }

  __device__ void mask(int block) {
    const int column = block * kBlockN + 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int begin = first_key[half] - column, end = last_key[half] - column;
#pragma unroll
      for (int c = 0; c < kBlockN / 8; ++c)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * c + e >= end || 8 * c + e < begin) score[4 * c + 2 * half + e] = -INFINITY;
    }
    if (p.mask.data) hide_by_bits(block);
  }
  /// The same for the keys that the packed mask hides, which has bits for the last ones (attention_params.hpp).
  __device__ void hide_by_bits(int block) {
    constexpr int kWord = kBlockN < 64 ? kBlockN : 64;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowPlace at = tile.place(thread_row(half));
#pragma unroll
      for (int part = 0; part < kBlockN / kWord; ++part) {
        const std::uint64_t shown = mask_keys<kWord>(p, tile.b, at.head, at.query, block * kBlockN + part * kWord,
                                                     tile.range.k_len - tile.range.q_len) >>
                                    2 * (threadIdx.x % 4);
#pragma unroll
        for (int c = 0; c < kWord / 8; ++c)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if ((shown >> (8 * c + e) & 1) == 0) score[4 * (part * kWord / 8 + c) + 2 * half + e] = -INFINITY;
      }
    }
  }

  /// The weights of a later block, with the shift of the blocks before. A warp in which an exponential is too large
  /// repeats it, with new maxima for the rows that have such a one. The values of the block before are in the output.
  __device__ void guess_weights() {
    float sum[2];
#pragma unroll 1
    for (bool is_final = false;; is_final = true) {
      const bool is_over = fill_weights<T, true>(score, weights, rows, scale_log2, is_final, sum);
      ptx::hold(sum);
      if (is_final || !__any_sync(kFullMask, is_over)) break;
      const bool moves[2] = {row_is_over<T>(weights, 0), row_is_over<T>(weights, 1)};
      float factor[2];
      renew_maxima(score, rows, moves, scale_log2, factor);
      rows.sum[0] *= factor[0];
      rows.sum[1] *= factor[1];
#pragma unroll
      for (int c = 0; c < Shape::kVDim / 8; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[4 * c + e] *= factor[e / 2];
    }
    rows.sum[0] += sum[0];
    rows.sum[1] += sum[1];
  }

  /// Zeroes the values past the end of a sequence: they belong to another one or to none, and may be NaN.
  __device__ void clear_values(int first) {
    wait_for_values();
    const std::uint32_t slot = shared.v(blocks.before().slot());
#pragma unroll 1
    for (int at = first * 8 + static_cast<int>(threadIdx.x % 128); at < kBlockN * 8; at += 128)
      for (int c = 0; c < Shape::kVBlocks; ++c)
        *static_cast<uint4*>(__cvta_shared_to_generic(slot + c * Shape::kKvBlockBytes + at * 16)) = uint4{0, 0, 0, 0};
    ptx::fence_proxy_async_shared();
    ptx::barrier_sync(kWarpgroupBarrier + warpgroup, 128);
  }

  /// Walks `count` blocks down from the one before `end`. Then `out` has the numerators, and `rows` the maxima and the
  /// sums, which the four threads of a row share.
  __device__ void run(int end, int count) {
    load_queries();
    blocks = {};
    rows.clear();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = tile.place(thread_row(half)).query;
      first_key[half] = tile.range.first(i);
      last_key[half] = tile.range.last(i);
    }
    const int first_full = (tile.range.first(tile.place(64 * warpgroup + 63).query) + kBlockN - 1) / kBlockN;
    const int all_see = p.mask.data ? tile.range.k_len - tile.range.q_len : tile.range.k_len;
    const int end_full = min(all_see, tile.range.last(tile.place(64 * warpgroup).query)) / kBlockN;
    int block = end - 1;
    issue_scores();
    ptx::wgmma_wait<0>();
    ptx::hold(score);
    release(shared.k_empty(blocks.slot()));
    ++blocks.count;
    if (block >= end_full || block < first_full) mask(block);
    {
      float factor[2];
      renew_maxima(score, rows, {true, true}, scale_log2, factor);
      fill_weights<T, true>(score, weights, rows, scale_log2, true, rows.sum);
    }
    if (p.has_lengths() && tile.range.k_len - block * kBlockN < kBlockN)
      clear_values(tile.range.k_len - block * kBlockN);
    const int begin = end - count;
    int accumulate = 0;
    for (--block; block >= begin; --block, accumulate = 1) {
      issue_scores();
      issue_values(accumulate);
      ptx::wgmma_wait<1>();
      ptx::hold(score);
      release(shared.k_empty(blocks.slot()));
      if (block >= end_full || block < first_full) mask(block);
      ptx::wgmma_wait<0>();
      hold_values();
      release(shared.v_empty(blocks.before().slot()));
      ++blocks.count;
      guess_weights();
    }
    issue_values(accumulate);
    ptx::wgmma_wait<0>();
    hold_values();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.sum[half] += __shfl_xor_sync(kFullMask, rows.sum[half], 1);
      rows.sum[half] += __shfl_xor_sync(kFullMask, rows.sum[half], 2);
    }
  }

  /// Finishes the rows, whose keys were all here. Returns whether the thread has stored a value that is not finite.
  __device__ bool store_rows() {
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = thread_row(half);
      const RowPlace at = tile.place(row);
      const bool there = row < tile.rows;
      factor[half] =
          there ? finish_few_queries_row(p, tile.b, at, maximum_log2(half), rows.sum[half], threadIdx.x % 4 == 0)
                : 0.0f;
    }
    stage_rows<T, 0, Shape::kVBlocks>(out, factor, shared.q(warpgroup));
    ptx::barrier_sync(kWarpgroupBarrier + warpgroup, 128);
    constexpr int kChunks = Shape::kVDim / 8;
    bool all_finite = true;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) % 128; i < 64 * kChunks; i += 128) {
      const int row = i / kChunks, chunk = i % kChunks;
      if (64 * warpgroup + row >= tile.rows) break;
      if (chunk * 8 >= p.head_dim_v) continue;
      const uint4 packed =
          *static_cast<const uint4*>(__cvta_shared_to_generic(shared.q(warpgroup) + row_chunk(row, chunk)));
      T* const to = static_cast<T*>(p.out) + tile.place(64 * warpgroup + row).out_offset(p, tile.b) + chunk * 8;
      ptx::store_16(to, packed, true);
      for (const std::uint32_t word : {packed.x, packed.y, packed.z, packed.w})
        all_finite = all_finite && is_finite_bits<T>(word) && is_finite_bits<T>(word >> 16);
    }
    return !all_finite;
  }

  __device__ float maximum_log2(int half) const {
    return rows.maximum[half] == -INFINITY ? -INFINITY : rows.maximum[half] * scale_log2;
  }

  /// Leaves the numerators, maxima and sums of the rows in shared memory, where keys were. All warpgroups are through
  /// with those.
  __device__ void leave_part() const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = thread_row(half);
      float* const to =
          static_cast<float*>(__cvta_shared_to_generic(shared.part_row(row))) + 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
      for (int c = 0; c < Shape::kVDim / 8; ++c)
        *reinterpret_cast<float2*>(to + 8 * c) = float2{out[4 * c + 2 * half], out[4 * c + 2 * half + 1]};
      if (threadIdx.x % 4 == 0)
        *static_cast<float2*>(__cvta_shared_to_generic(shared.part_state(row))) =
            float2{maximum_log2(half), rows.sum[half]};
    }
  }
};

}  // namespace flashkernel::cuda::sm90a
