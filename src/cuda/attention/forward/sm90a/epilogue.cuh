// The end of a tile in the Hopper forward kernel. It divides by the row sums, writes the LSE, notes rows that met NaN
// behind a mask, and sends the output to global memory. The output passes through the place of the warpgroup's Q, or
// through places of its own and the slot of the tile's last values.
#pragma once

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/attention/forward/sm90a/softmax.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace flashkernel::cuda::sm90a {

/// Byte offset of a 16-byte chunk of one of a warpgroup's 64 rows. Rows lie as blocks of 64 columns, in lines of 128
/// bytes, swizzled.
__device__ inline std::uint32_t row_chunk(int row, int chunk) {
  return chunk / 8 * (64 * 128) + row * 128 + ((chunk ^ row) & 7) * 16;
}

/// Copies 64 `count` columns, from column 64 `block` on, from shared memory to the output, but no row past the end of
/// the sequence. All threads of the warpgroup call it.
__device__ inline void store_some_rows(const AttentionParams& p, const OutputRecord& at, int block, int count,
                                       std::uint32_t from) {
  using Bits = std::uint16_t;
  Bits* const to = static_cast<Bits*>(p.out) + p.out_offset(at.b, at.h, at.first_query) + block * 64;
#pragma unroll 1
  for (int i = threadIdx.x % 128; i < at.rows * (count * 8); i += 128) {
    const int row = i / (count * 8), chunk = i % (count * 8);
    const uint4 packed = *static_cast<const uint4*>(__cvta_shared_to_generic(from + row_chunk(row, chunk)));
    Bits* const row_to = to + row * p.stride_out_token + chunk * 8;
    const Bits* const values = reinterpret_cast<const Bits*>(&packed);
    const int columns = static_cast<int>(p.head_dim_v) - (block * 64 + chunk * 8);
    if (columns >= 8) {
      ptx::store_16(row_to, packed, true);
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (e < columns) row_to[e] = values[e];
    }
  }
}

/// Whether the copy engine may store the rows. It drops rows past the end of the tensor, but where sequences lie side
/// by side, a sequence may end before that.
__device__ inline bool is_whole(const AttentionParams& p, const OutputRecord& at) {
  return !p.is_varlen_q() || at.rows == 64;
}

/// Sends a block of 64 columns to global memory. One thread calls it.
__device__ inline void copy_rows(const AttentionParams& p, const ForwardPlan& plan, const OutputRecord& at,
                                 const CUtensorMap* map_out, int block, std::uint32_t from) {
  const int begin = p.is_varlen_q() ? static_cast<int>(p.q_begin(at.b)) : 0;
  ptx::tma_store(map_out, from, plan.out_policy, block * 64, begin + at.first_query, at.h, p.is_varlen_q() ? 0 : at.b);
}

/// Writes kCount blocks of 64 columns of the warpgroup's output, from block kFirst on, to shared memory, times a factor
/// and rounded.
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

/// Sends all columns from there to global memory. Thread 0 of the warpgroup must wait for its group of stores before
/// the place is filled again.
template <class Shape>
__device__ inline void send_rows(const AttentionParams& p, const ForwardPlan& plan, const OutputRecord& at,
                                 const CUtensorMap* map_out, std::uint32_t place, int barrier) {
  ptx::fence_proxy_async_shared();
  ptx::barrier_sync(barrier, 128);
  if (!is_whole(p, at)) {
    store_some_rows(p, at, 0, Shape::kVBlocks, place);
    ptx::barrier_sync(barrier, 128);
  } else if (threadIdx.x % 128 == 0) {
#pragma unroll
    for (int c = 0; c < Shape::kVBlocks; ++c) copy_rows(p, plan, at, map_out, c, place + c * Shape::kQBlockBytes);
    ptx::bulk_commit();
  }
}

/// Where outputs leave through slots of V as well (Shape::kOutInValues), the warp that loads V sends them, before it
/// loads other values into the slot. The first values of the next tile have another slot, and its second values are
/// needed later than anything else.
template <class Shape>
struct OutputSender {
  const AttentionParams& p;
  const ForwardPlan& plan;
  const SharedLayout<Shape>& shared;
  const CUtensorMap* map_out;
  unsigned ended : Shape::kStages;  // bit i: the load that was i loads before the last one brought a tile's last values
  unsigned phase : 1;               // of the barriers of outputs; shares a register with `ended`

  __device__ bool is_due() const { return ended >> (Shape::kStages - 1) & 1; }
  __device__ void before_load(const Ring<Shape::kStages>& at) {
    if (is_due()) send<false>(at.slot());
  }
  __device__ void after_load(bool tile_ends) { ended = ended << 1 | static_cast<unsigned>(tile_ends); }
  /// Sends all outputs that are left, where no load follows. Consumers go on to the next tile once the places of their
  /// last output are free. After the last tile they read outputs again, so this waits until all are written.
  __device__ void flush(Ring<Shape::kStages> at) {
    for (; ended; ++at.count) {
      if (is_due()) send<true>(at.slot());
      after_load(false);
    }
  }

  /// Sends the outputs of whole tiles; consumers have stored other rows themselves. kWritten: waits until all that was
  /// sent has arrived.
  template <bool kWritten>
  __device__ void send(int slot) {
#pragma unroll 1
    for (int w = 0; w < Shape::kConsumers; ++w) {
      ptx::mbarrier_wait(shared.out_full(w), phase);
      if (threadIdx.x % kWarp == 0 && is_whole(p, *shared.output(w)))
#pragma unroll 1
        for (int c = 0; c < Shape::kVBlocks; ++c)
          copy_rows(p, plan, *shared.output(w), map_out, c, shared.out(w, c, slot));
    }
    if (threadIdx.x % kWarp == 0) {
      ptx::bulk_commit();
      kWritten ? ptx::bulk_wait<0>() : ptx::bulk_wait_read<0>();
      for (int w = 0; w < Shape::kConsumers; ++w) ptx::mbarrier_arrive(shared.out_empty(w));
    }
    __syncwarp();
    phase ^= 1;
  }
};

/// Whether the products met a value that is not finite. 0 times such a value is NaN, so it shows in its column of every
/// row, even of rows that do not see it. Each thread looks at one row, and each warp at every fourth group of 8
/// columns.
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

/// The same of all of a thread's results: where chunks of keys are folded, a row that does not see the value's chunk
/// does not show it.
template <int kCount>
__device__ inline bool has_any_nan(const float (&out)[kCount]) {
  float zero[4] = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) zero[i % 4] = fmaf(out[i], 0.0f, zero[i % 4]);
  const float all = (zero[0] + zero[1]) + (zero[2] + zero[3]);
  return all != all;
}

/// The LSE of a row whose sum is `total`; puts the share of a sink into the factor.
__device__ inline float lse_of_row(const AttentionParams& p, const TileRecord& tile, float maximum,
                                   bool scores_are_final, float total, float* factor) {
  SoftmaxState state;
  state.maximum = scores_are_final || maximum == -INFINITY ? maximum : maximum * p.scale;
  state.sum = total;
  if (!p.sinks) return state.sum == 0.0f ? -INFINITY : SoftmaxState::shift(state.maximum) + logf(state.sum);
  float lse;
  *factor = state.finish(p.sinks, tile.h, &lse);
  return lse;
}

/// Stores the LSE of the thread's two rows, whose sums are `total`, and puts the share of a sink into the factors.
__device__ inline void apply_sinks_and_store_lse(const AttentionParams& p, const TileRecord& tile,
                                                 const RunningRows& rows, bool scores_are_final,
                                                 const float (&total)[2], float (&factor)[2]) {
  const int first = tile.first_query + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float lse = lse_of_row(p, tile, rows.maximum[half], scores_are_final, total[half], &factor[half]);
    const int i = first + 8 * half;
    if (p.lse && threadIdx.x % 4 == 0 && i < tile.range.q_len) p.lse[p.lse_offset(tile.b, tile.h, i)] = lse;
  }
}

/// The factors of a thread's two rows; 0 for a row that has seen no key. A warp works alone here, and often no other
/// warp has work. Therefore the LSE and sinks, which few calls ask for, stay behind one branch, and sums and exchanges,
/// which wait for their own results, are split into several independent ones. kWhole: sums are those of whole rows.
template <class Shape, bool kWhole = false, int kOut>
__device__ inline void finish_factors(const AttentionParams& p, const TileRecord& tile, const float (&out)[kOut],
                                      const RunningRows& rows, bool scores_are_final, float (&factor)[2]) {
  float total[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if constexpr (Shape::kSums) {
      total[half] = out[Shape::kVDim / 2 + 2 * half];
    } else if constexpr (kWhole) {
      total[half] = rows.sum[half];
    } else {
      total[half] = rows.sum[half];
      total[half] += __shfl_xor_sync(kFullMask, total[half], 1);
      total[half] += __shfl_xor_sync(kFullMask, total[half], 2);
    }
    factor[half] = total[half] == 0.0f ? 0.0f : ptx::reciprocal_approx(total[half]);
  }
  if (p.lse || p.sinks) apply_sinks_and_store_lse(p, tile, rows, scores_are_final, total, factor);
}

/// Stores the output of 64 rows that see no key.
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
