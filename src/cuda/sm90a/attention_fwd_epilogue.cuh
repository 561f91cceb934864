// The end of a row block in the Hopper forward kernel: divide by the row sums, write LSE, note rows that met NaN behind
// a mask, and send the output to global memory: through the place of the warpgroup's Q, or places of its own.
#pragma once

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/sm90a/attention_fwd_softmax.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace flashkernel::cuda::sm90a {

/// Byte offset of a 16-byte chunk of one of a warpgroup's 64 rows: blocks of 64 columns, lines of 128 bytes, swizzled.
__device__ inline std::uint32_t row_chunk(int row, int chunk) {
  return chunk / 8 * (64 * 128) + row * 128 + ((chunk ^ row) & 7) * 16;
}

/// kCount blocks of 64 columns, from block kFirst on, in shared memory -> out, rows past the sequence left alone.
template <class T, int kFirst, int kCount>
__device__ inline void store_some_rows(const AttentionParams& p, const TileRecord& tile, std::uint32_t from) {
  const int thread = threadIdx.x % 128, rows = min(64, tile.range.q_len - tile.first_query);
  T* const to = static_cast<T*>(p.out) + p.out_offset(tile.b, tile.h, tile.first_query) + kFirst * 64;
#pragma unroll 1
  for (int at = thread; at < rows * (kCount * 8); at += 128) {
    const int row = at / (kCount * 8), chunk = at % (kCount * 8);
    const uint4 packed = *static_cast<const uint4*>(__cvta_shared_to_generic(from + row_chunk(row, chunk)));
    T* const row_to = to + row * p.stride_out_token + chunk * 8;
    const T* const values = reinterpret_cast<const T*>(&packed);
    const int count = static_cast<int>(p.head_dim_v) - (kFirst * 64 + chunk * 8);
    if (count >= 8) {
      ptx::store_16(row_to, packed, true);
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (e < count) row_to[e] = values[e];
    }
  }
}

/// The same blocks of the warpgroup's output, times a factor and rounded, into shared memory.
template <class T, int kFirst, int kCount, int kOut>
__device__ inline void stage_rows(const float (&out)[kOut], const float (&factor)[2], std::uint32_t place) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
  for (int c = 0; c < kCount * 4; ++c) {
    const int at = 8 * (kFirst * 4 + c);  // of the thread's elements, 8 in 16 columns
    if (at >= kOut) break;                // d96 ends in half a block
    std::uint32_t pairs[4];
#pragma unroll
    for (int e = 0; e < 4; ++e)
      pairs[e] = pack<T>(out[at + 2 * e] * factor[e % 2], out[at + 2 * e + 1] * factor[e % 2]);
    ptx::stmatrix_x4(place + row_chunk(row, 2 * c + lane / 16), pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

/// From there to global memory; thread 0 of the warpgroup must wait for its group of stores before the place is filled
/// again.
template <class T, int kFirst, int kCount>
__device__ inline void send_rows(const AttentionParams& p, const ForwardPlan& plan, const TileRecord& tile,
                                 const CUtensorMap* map_out, std::uint32_t place, int barrier) {
  // The copy engine cuts rows at the tensor's end; where sequences lie side by side, that is not the sequence's.
  const bool whole = !p.is_varlen_q() || tile.first_query + 64 <= tile.range.q_len;
  ptx::fence_proxy_async_shared();
  ptx::barrier_sync(barrier, 128);
  if (!whole) {
    store_some_rows<T, kFirst, kCount>(p, tile, place);
    ptx::barrier_sync(barrier, 128);
  } else if (threadIdx.x % 128 == 0) {
    const int begin = tile.first_query + (p.is_varlen_q() ? static_cast<int>(p.q_begin(tile.b)) : 0);
#pragma unroll
    for (int c = 0; c < kCount; ++c)
      ptx::tma_store(map_out, place + c * (64 * 128), plan.out_policy, (kFirst + c) * 64, begin, tile.h,
                     p.is_varlen_q() ? 0 : tile.b);
    ptx::bulk_commit();
  }
}

/// The whole output by way of fewer places, Shape::kOutSlots, a block of 64 columns in each, which serve in turn from
/// block kBlock on: while one is filled, the copy engine reads the one before.
template <class Shape, class T, int kBlock = 0, int kOut>
__device__ inline void send_in_turn(const AttentionParams& p, const ForwardPlan& plan, const TileRecord& tile,
                                    const CUtensorMap* map_out, const float (&out)[kOut], const float (&factor)[2],
                                    std::uint32_t places, int barrier) {
  if constexpr (kBlock < Shape::kColumnBlocks) {
    if (kBlock == 0 || kBlock >= Shape::kOutSlots) {
      if (threadIdx.x % 128 == 0) ptx::bulk_wait_read<(kBlock == 0 ? 0 : Shape::kOutSlots - 1)>();
      ptx::barrier_sync(barrier, 128);
    }
    const std::uint32_t place = places + kBlock % Shape::kOutSlots * Shape::kQBlockBytes;
    stage_rows<T, kBlock, 1>(out, factor, place);
    send_rows<T, kBlock, 1>(p, plan, tile, map_out, place, barrier);
    send_in_turn<Shape, T, kBlock + 1>(p, plan, tile, map_out, out, factor, places, barrier);
  }
}

/// Whether a value that the products took is not finite: 0 times it is NaN, so it shows in its column of every row,
/// those that don't see it as well. One row of each thread is looked at, and by each warp every fourth 8 columns.
template <int kCount>
__device__ inline bool has_nan(const float (&out)[kCount]) {
  const int warp = threadIdx.x % 128 / 32;
  float zero[2] = {};  // NaN once any result is not finite
#pragma unroll
  for (int w = 0; w < 4; ++w)
    if (warp == w)
#pragma unroll
      for (int c = w; c < kCount / 4; c += 4)
#pragma unroll
        for (int e = 0; e < 2; ++e) zero[e] = fmaf(out[4 * c + e], 0.0f, zero[e]);
  const float all = zero[0] + zero[1];
  return all != all;
}

/// LSE of this thread's two rows, of which `total` are the sums, and a sink's share in the factors.
__device__ inline void finish_sums(const AttentionParams& p, const TileRecord& tile, const RunningRows& rows,
                                   bool scores_are_final, const float (&total)[2], float (&factor)[2]) {
  const int first = tile.first_query + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    SoftmaxState state;
    state.maximum =
        scores_are_final || rows.maximum[half] == -INFINITY ? rows.maximum[half] : rows.maximum[half] * p.scale;
    state.sum = total[half];
    float lse;
    if (p.sinks)
      factor[half] = state.finish(p.sinks, tile.h, &lse);
    else
      lse = state.sum == 0.0f ? -INFINITY : SoftmaxState::shift(state.maximum) + logf(state.sum);
    const int i = first + 8 * half;
    if (p.lse && threadIdx.x % 4 == 0 && i < tile.range.q_len) p.lse[p.lse_offset(tile.b, tile.h, i)] = lse;
  }
}

/// Divides by the row sums, writes LSE and starts the output's way to global memory. A warp issues one instruction
/// after the other here, and nobody else may have work: what is asked for by few (LSE, sinks) stays behind one branch,
/// and what waits for its own result (sums, exchanges) comes in many independent ones.
template <class Shape, class T, int kOut>
__device__ inline void finish_rows(const AttentionParams& p, const ForwardPlan& plan, const TileRecord& tile,
                                   const CUtensorMap* map_out, float (&out)[kOut], RunningRows& rows,
                                   bool scores_are_final, bool partly_masked, int* met_nan, std::uint32_t place,
                                   int barrier) {
  float total[2], factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if constexpr (Shape::kSums) {
      total[half] = out[Shape::kDim / 2 + 2 * half];
    } else {
      total[half] = rows.sum[half];
      total[half] += __shfl_xor_sync(kFullMask, total[half], 1);
      total[half] += __shfl_xor_sync(kFullMask, total[half], 2);
    }
    factor[half] = total[half] == 0.0f ? 0.0f : ptx::reciprocal_approx(total[half]);
  }
  if (p.lse || p.sinks) finish_sums(p, tile, rows, scores_are_final, total, factor);
  if (partly_masked && has_nan(out)) *met_nan = 1;
  // Where nothing is seen the factor is 0, and 0 * NaN noted above.
  constexpr bool kOwnPlaces = Shape::kOutSlots >= Shape::kColumnBlocks;
  if constexpr (kOwnPlaces) {
    if (threadIdx.x % 128 == 0) ptx::bulk_wait_read<0>();
    ptx::barrier_sync(barrier, 128);
  }
  if constexpr (kOwnPlaces || Shape::kQSlots > 1) {
    stage_rows<T, 0, Shape::kColumnBlocks>(out, factor, place);
    send_rows<T, 0, Shape::kColumnBlocks>(p, plan, tile, map_out, place, barrier);
  } else {
    send_in_turn<Shape, T>(p, plan, tile, map_out, out, factor, place, barrier);
  }
}

/// The output of 64 rows that see no key.
template <class Shape, class T>
__device__ inline void store_empty_rows(const AttentionParams& p, const TileRecord& tile) {
  const int thread = threadIdx.x % 128, rows = min(64, tile.range.q_len - tile.first_query);
  for (int row = thread / 32; row < rows; row += 4) {
    const int i = tile.first_query + row;
    T* const to = static_cast<T*>(p.out) + p.out_offset(tile.b, tile.h, i);
    for (int column = thread % 32; column < p.head_dim_v; column += 32) to[column] = T(0.0f);
    SoftmaxState state;
    float lse;
    state.finish(p.sinks, tile.h, &lse);
    if (p.lse && thread % 32 == 0) p.lse[p.lse_offset(tile.b, tile.h, i)] = lse;
  }
}

}  // namespace flashkernel::cuda::sm90a
