// How the blocks of a cluster add their partial sums of one tile (for kernel.cuh). Each block finishes a share of the
// tile's columns. The other blocks send it their sums of these columns by st.async, and a barrier for each warpgroup
// counts the bytes that arrive. The block adds them to its own sums in the order of the blocks' ranks, so that every
// run gives the same bits. A thread sends its sums to the thread of the same index in the other block. For each chunk
// of 8 columns that is 16 bytes, and the 16 bytes of neighbouring lanes are neighbours.
#pragma once

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/linear/tiles/sm90a/shape.cuh"
#include "cuda/linear/epilogue.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace flashkernel::cuda::sm90a {

/// Which of a tile's chunks the block of each part finishes.
template <class Shape>
struct Shares {
  __device__ static constexpr int begin(int part) { return part * Shape::kChunks / Shape::kCluster; }
  __device__ static constexpr int count(int part) { return begin(part + 1) - begin(part); }
};

/// Sends the other blocks their shares, each block beginning with the next one, so that no two send to one at a time.
template <class Shape>
__device__ inline void send_shares(const Sums<Shape>& sum, std::uint32_t mail, std::uint32_t full, int rank) {
  using Share = Shares<Shape>;
  constexpr int kParts = Shape::kCluster;
#pragma unroll 1
  for (int step = 1; step < kParts; ++step) {
    const int to = rank + step < kParts ? rank + step : rank + step - kParts;
    const int place = rank < to ? rank : rank - 1;
    const std::uint32_t there = ptx::map_shared(mail, static_cast<std::uint32_t>(to));
    const std::uint32_t barrier = ptx::map_shared(full, static_cast<std::uint32_t>(to));
#pragma unroll
    for (int r = 0; r < kParts; ++r) {
      if (r != to) continue;
#pragma unroll
      for (int i = 0; i < Share::count(r); ++i) {
        const float* const x = sum[0] + 4 * (Share::begin(r) + i);
        ptx::store_async_4(there + (place * Share::count(r) + i) * Shape::kChunkBytes,
                           make_float4(x[0], x[1], x[2], x[3]), barrier);
      }
    }
  }
}

/// This block's share of its own sums, and the others' added to it.
template <class Shape>
__device__ inline void receive_share(const Sums<Shape>& sum, const char* mail, std::uint32_t full, int rank,
                                     float (&x)[Shape::kMostChunks][4]) {
  using Share = Shares<Shape>;
  constexpr int kParts = Shape::kCluster;
#pragma unroll
  for (int r = 0; r < kParts; ++r) {
    if (r != rank) continue;
#pragma unroll
    for (int i = 0; i < Share::count(r); ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[i][e] = sum[0][4 * (Share::begin(r) + i) + e];
  }
  ptx::mbarrier_wait(full, 0);
  const int count = Share::count(rank);
#pragma unroll
  for (int i = 0; i < Shape::kMostChunks; ++i) {
    if (i >= count) continue;
#pragma unroll
    for (int other = 0; other < kParts - 1; ++other) {
      const float4 part = *reinterpret_cast<const float4*>(mail + (other * count + i) * Shape::kChunkBytes);
      x[i][0] += part.x, x[i][1] += part.y, x[i][2] += part.z, x[i][3] += part.w;
    }
  }
}

/// Two chunks of a row's eight results: of the words that four lanes have of 2 rows and 2 chunks, the 16 bytes of row
/// lane % 2, chunk lane / 2 % 2.
__device__ inline uint4 exchange_in_quad(const std::uint32_t (&word)[2][2]) {  // [chunk][row]
  const bool row = threadIdx.x % 2 != 0, chunk = threadIdx.x / 2 % 2 != 0;
  std::uint32_t pair[2][2];  // [chunk]: four neighbours of this lane's row
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const std::uint32_t kept = row ? word[c][1] : word[c][0];
    const std::uint32_t got = __shfl_xor_sync(kFullMask, row ? word[c][0] : word[c][1], 1);
    pair[c][0] = row ? got : kept;
    pair[c][1] = row ? kept : got;
  }
  std::uint32_t kept[2], got[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    kept[i] = chunk ? pair[1][i] : pair[0][i];
    got[i] = __shfl_xor_sync(kFullMask, chunk ? pair[0][i] : pair[1][i], 2);
  }
  return chunk ? make_uint4(got[0], got[1], kept[0], kept[1]) : make_uint4(kept[0], kept[1], got[0], got[1]);
}

/// The share's way out. rows: from the warp's first one on; columns: from the share's first chunk on.
template <class T, Activation kActivation, int kMost>
__device__ inline void store_share(const GemmArguments& p, float (&x)[kMost][4], int count, TileSpan rows,
                                   TileSpan columns) {
  const int lane = threadIdx.x % 32;
  const int chunk = lane / 2 % 2;
  rows = rows.from(lane / 4 + lane % 2 * 8);
  columns = columns.from(8 * chunk);
  const auto send = [&](void* data, std::int64_t stride) {
    T* const to = static_cast<T*>(data) + rows.first * stride + columns.first;
#pragma unroll
    for (int i = 0; i < kMost; i += 2) {
      std::uint32_t word[2][2];
#pragma unroll
      for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float* const pair = x[min(i + c, kMost - 1)] + 2 * h;  // an odd share's last chunk twice
          word[c][h] = pack<T>(pair[0], pair[1]);
        }
      ptx::store_16(to + 8 * i, exchange_in_quad(word),
                    rows.stores(0) && i + chunk < count && columns.stores(8 * i));  // n is a multiple of 8
    }
  };
  const LinearEpilogue& e = p.epilogue;
  if (e.preactivation) send(e.preactivation, e.stride_preactivation);
#pragma unroll
  for (int i = 0; i < kMost; ++i)
#pragma unroll
    for (int v = 0; v < 4; ++v) x[i][v] = activate_fast<kActivation>(x[i][v]);
  send(e.out, e.stride_out);
}

}  // namespace flashkernel::cuda::sm90a
