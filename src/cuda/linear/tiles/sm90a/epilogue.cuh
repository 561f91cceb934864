// What becomes of a tile's sums in gemm.cuh: bias, activation, one rounding, and the way out.
#pragma once

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/linear/tiles/sm90a/shape.cuh"
#include "cuda/linear/epilogue.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace flashkernel::cuda::sm90a {

/// Bias, activation, and the way out: 16 rows x kColumns of a warp at a time, through a place of its own in shared
/// memory, so that they leave as whole lines. (TMA stores would queue behind the producer's loads.)
template <class T, class Shape, Activation kActivation>
__device__ inline void store(const GemmArguments& p, Sums<Shape>& sum, char* shared, int group, TileIndex tile) {
  using Storage = SharedStorage<Shape>;
  using Staged = SharedTile<Shape::kColumns>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const float* bias = reinterpret_cast<const float*>(shared + Storage::kBias) + group * Shape::kTileN + lane % 4 * 2;
  char* const staged = shared + Storage::kStaged + (group * 4 + warp) * Shape::kStagedBytes;
  const std::uint32_t to_staged =
      ptx::shared_address(staged) + Staged::lane_offset(LaneA::row(lane), LaneA::half(lane));
  constexpr int kRowsAtOnce = 32 / Staged::kChunks;
  const int lane_row = lane / Staged::kChunks, chunk = lane % Staged::kChunks;
  const std::uint32_t at_staged = Staged::offset(lane_row, chunk);
  // Worked out for each send, so that they take no registers beside the sums.
  auto tile_m = static_cast<std::uint32_t>(tile.m), tile_n = static_cast<std::uint32_t>(tile.n);
  const auto send = [&](void* data, std::int64_t stride, const float* x, int i, int part) {
#pragma unroll
    for (int c = 0; c < Shape::kColumns / 16; ++c)
      ptx::stmatrix_x4(Staged::at_slice(to_staged, c), pack<T>(x[8 * c], x[8 * c + 1]),
                       pack<T>(x[8 * c + 2], x[8 * c + 3]), pack<T>(x[8 * c + 4], x[8 * c + 5]),
                       pack<T>(x[8 * c + 6], x[8 * c + 7]));
    __syncwarp();
    ptx::hold(tile_m);
    ptx::hold(tile_n);
    const TileSpan rows = TileSpan(static_cast<int>(tile_m), Shape::kTileM, p.m)
                              .from((Shape::kPingPong ? 0 : group * 64) + 16 * warp + lane_row);
    const TileSpan columns = TileSpan(static_cast<int>(tile_n), Shape::kTileN, p.n).from(chunk * 8);
    const bool own = columns.stores(part * Shape::kColumns);  // all 8: n is a multiple of 8
    T* to = static_cast<T*>(data) + (rows.first + 64 * i) * stride + columns.first + part * Shape::kColumns;
#pragma unroll
    for (int r = 0; r < 16 / kRowsAtOnce; ++r, to += kRowsAtOnce * stride) {
      // Rows of 128 bytes: 4 further, the twist differs in one bit.
      const int twist = Staged::kChunks == 8 && r % 2 == 1 ? 64 : 0;
      const uint4 values =
          *reinterpret_cast<const uint4*>(staged + (at_staged ^ twist) + r * kRowsAtOnce * Staged::kPitch);
      if (own && rows.stores(64 * i + r * kRowsAtOnce)) *reinterpret_cast<uint4*>(to) = values;
    }
    __syncwarp();
  };
  const LinearEpilogue& e = p.epilogue;
#pragma unroll
  for (int i = 0; i < Shape::kPartsM; ++i)
#pragma unroll
    for (int part = 0; part < Shape::kTileN / Shape::kColumns; ++part) {
      float* const x = sum[i] + part * (Shape::kColumns / 2);
#pragma unroll
      for (int c = 0; c < Shape::kColumns / 8; ++c) {
        const float2 b = *reinterpret_cast<const float2*>(bias + part * Shape::kColumns + 8 * c);
        x[4 * c] += b.x, x[4 * c + 1] += b.y, x[4 * c + 2] += b.x, x[4 * c + 3] += b.y;
      }
      if (e.preactivation) send(e.preactivation, e.stride_preactivation, x, i, part);
#pragma unroll
      for (int v = 0; v < Shape::kColumns / 2; ++v) x[v] = activate_fast<kActivation>(x[v]);
      send(e.out, e.stride_out, x, i, part);
    }
}

/// Where a thread's results go that stores 8 neighbours at once: columns 32 g + 8 (lane % 4) .. + 7 of its rows.
/// Nothing waits for shared memory; four lanes fill two sectors.
template <class T, class Shape>
struct NeighboursPlace {
  T* to;
  const T* bias;  // of the tile's columns, in shared memory
  std::uint32_t stride;
  TileSpan rows;           // from the thread's first one on
  std::uint32_t repeated;  // columns before the thread's 8 of a group are the tile before's
  __device__ NeighboursPlace(const GemmArguments& p, TileIndex tile, const T* tile_bias, void* data,
                             std::int64_t stride)
      : bias(tile_bias + threadIdx.x % 4 * 8),
        stride(static_cast<std::uint32_t>(stride)),
        rows(rows_of<Shape>(p, tile).from(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4)) {
    const TileSpan columns = columns_of<Shape>(p, tile);  // n is not short
    const int eight = threadIdx.x % 4 * 8;
    repeated = static_cast<std::uint32_t>(max(columns.bound - eight, 0));
    to = static_cast<T*>(data) + rows.first * stride + columns.first + eight;
  }
};

/// A thread's 8 neighbours of its first row of 64, or (i = 1) of the one 8 rows further. `sum`: of 32 columns, in chunk
/// c of 8 the first one is column c of a thread's 8, the second one 4 + c.
template <class T, Activation kActivation>
__device__ inline uint4 neighbours(const float* sum, int i, const float (&bias)[8]) {
  float x[8];
#pragma unroll
  for (int v = 0; v < 8; ++v) x[v] = activate_fast<kActivation>(sum[v % 4 * 4 + i * 2 + v / 4] + bias[v]);
  return {pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7])};
}

template <class T, class Shape, Activation kActivation>
__device__ inline void store_neighbours(const NeighboursPlace<T, Shape>& place, std::uint32_t g,
                                        const float* const (&sum)[Shape::kPartsM]) {
  float bias[8];
  load_floats(bias, place.bias + 32 * g);
#pragma unroll
  for (int i = 0; i < 2 * Shape::kPartsM; ++i) {
    const int down = i / 2 * 64 + i % 2 * 8;
    ptx::store_16(place.to + static_cast<std::uint64_t>(place.stride) * down + 32 * g,
                  neighbours<T, kActivation>(sum[i / 2], i % 2, bias),
                  place.rows.stores(down) && 32 * g >= place.repeated);
  }
}

/// The sums of the columns after the groups: in each chunk of 8 a thread has columns 2 (lane % 4) and the next one.
template <class T, class Shape, Activation kActivation>
__device__ inline void store_rest(const NeighboursPlace<T, Shape>& place, const float* const (&sum)[Shape::kPartsM]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int c = 0; c < Shape::kRest / 8; ++c) {
    const int column = 32 * Shape::kGroups + 8 * c;
    const bool own = column >= static_cast<int>(place.repeated) + 8 * lane;
    const T* const bias = place.bias + column - 6 * lane;
    const float bias_0 = to_float(bias[0]), bias_1 = to_float(bias[1]);
#pragma unroll
    for (int i = 0; i < 2 * Shape::kPartsM; ++i) {
      const int down = i / 2 * 64 + i % 2 * 8;
      const float* const x = sum[i / 2] + 4 * c + i % 2 * 2;
      const std::uint32_t two =
          pack<T>(activate_fast<kActivation>(x[0] + bias_0), activate_fast<kActivation>(x[1] + bias_1));
      T* const to = place.to + static_cast<std::uint64_t>(place.stride) * down + column - 6 * lane;
      if (own && place.rows.stores(down)) *reinterpret_cast<std::uint32_t*>(to) = two;
    }
  }
}

/// All groups of 32 columns, or the left half of them.
template <class T, class Shape, Activation kActivation>
__device__ inline void store_groups(NeighboursPlace<T, Shape> place, const Sums<Shape>& sum, bool left_half) {
#pragma unroll
  for (int g = 0; g < Shape::kGroups; ++g) {
    if (g == Shape::kLeftGroups && left_half) return;
    store_neighbours<T, Shape, kActivation>(place, g, {sum[0] + 16 * g, sum[1] + 16 * g});
    // One group after the other: all at once would not fit the registers.
    ptx::hold(place.stride);
    ptx::hold(place.repeated);
  }
  if constexpr (Shape::kRest > 0)
    store_rest<T, Shape, kActivation>(place, {sum[0] + 16 * Shape::kGroups, sum[1] + 16 * Shape::kGroups});
}

/// The sums of the right half of the columns, for the other warpgroup: into the ring's first slots, which nobody fills
/// again.
template <class Shape>
__device__ inline void give_right_half(const Sums<Shape>& sum, char* shared) {
  float4* to = reinterpret_cast<float4*>(shared) + threadIdx.x % 128;
#pragma unroll
  for (int v = 16 * Shape::kLeftGroups; v < Shape::kTileN / 2; v += 4)
#pragma unroll
    for (int i = 0; i < Shape::kPartsM; ++i, to += 128)
      *to = make_float4(sum[i][v], sum[i][v + 1], sum[i][v + 2], sum[i][v + 3]);
}

/// kCount of a thread's sums of each 64 rows, in the order in which they were given.
template <int kPartsM, int kCount>
__device__ inline const float4* take_sums(float (&sum)[kPartsM][kCount], const float4* from) {
#pragma unroll
  for (int v = 0; v < kCount; v += 4)
#pragma unroll
    for (int i = 0; i < kPartsM; ++i, from += 128) {
      const float4 four = *from;
      sum[i][v] = four.x, sum[i][v + 1] = four.y, sum[i][v + 2] = four.z, sum[i][v + 3] = four.w;
    }
  return from;
}

/// The other one's part of it.
template <class T, class Shape, Activation kActivation>
__device__ inline void store_right_half(const NeighboursPlace<T, Shape>& place, const char* shared) {
  const float4* from = reinterpret_cast<const float4*>(shared) + threadIdx.x % 128;
#pragma unroll 1
  for (int g = Shape::kLeftGroups; g < Shape::kGroups; ++g) {
    float sum[Shape::kPartsM][16];
    from = take_sums(sum, from);
    store_neighbours<T, Shape, kActivation>(place, g, {sum[0], sum[1]});
  }
  if constexpr (Shape::kRest > 0) {
    float sum[Shape::kPartsM][Shape::kRest / 2];
    take_sums(sum, from);
    store_rest<T, Shape, kActivation>(place, {sum[0], sum[1]});
  }
}

/// The sums of one part of k, as they are: four lanes' pairs are whole sectors of 32 bytes.
template <class Shape>
__device__ inline void store_part(const GemmArguments& p, const Sums<Shape>& sum, int part, int group, TileIndex tile) {
  const int lane = threadIdx.x % 32;
  const TileSpan rows = rows_of<Shape>(p, tile).from(group * 64 + 16 * (threadIdx.x / 32 % 4) + lane / 4);
  const TileSpan columns = columns_of<Shape>(p, tile);
  float* const to =
      p.partial + (static_cast<std::int64_t>(part) * p.m + rows.first) * p.n + columns.first + lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!rows.stores(8 * half)) continue;
#pragma unroll
    for (int c = 0; c < Shape::kTileN / 8; ++c)
      if (columns.stores(8 * c))  // n is a multiple of 8
        *reinterpret_cast<float2*>(to + 8 * half * p.n + 8 * c) =
            make_float2(sum[0][4 * c + 2 * half], sum[0][4 * c + 2 * half + 1]);
  }
}

}  // namespace flashkernel::cuda::sm90a
