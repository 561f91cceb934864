// A linear of up to 4 rows with a norm before it and a tail after it, for 8.0 and later. It is one kernel in a chain of
// dependent kernels (a decode step), and it is built to overlap with its neighbours in that chain:
//
// Blocks are small, so that several fit on a multiprocessor. The first instruction of a block lets the next kernel
// start. So while the last blocks of one kernel run, blocks of the next kernel take the places of those that have
// ended. Where the weights are constant, these blocks load them into registers before they wait for the kernel in
// front. After the wait only x is left to read: the block brings it to shared memory and normalises it there.
//
// The weights are the left operand of mma.sync, in the layout that they have in memory: a lane loads 16 bytes, which
// are the halves of two fragments (few_rows/sm90a/stream.cuh explains the order). The rows of x are the right operand.
// The warps of a block split k, and their sums are added in shared memory in the order of the warps. Called by
// few_rows.cu and append.cu, which have the tails. Source: HazyResearch, "No Bubbles" (2025), makes the case for loads
// before the wait.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/linear/fused/sm80/few_rows.hpp"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda::sm80 {

/// What every call has. A tail (few_rows.cu, append.cu) says what becomes of the sums.
struct FusedFewRowsArguments {
  const void *x, *weight;
  TypedPointer bias, norm_weight, norm_bias;
  std::int64_t stride_x, stride_weight;
  float eps;
  int rows, k;
  int tiles, tiles_a_block;
  bool centred, constant;
};

/// x in shared memory. Of 32 elements of a row the first and the third pair of each 8 come first, then the second and
/// the fourth pair of each 8: so the half of the right operand that a lane needs is 8 contiguous bytes.
template <class T>
struct FusedX {
  char* rows;
  int pitch;

  __device__ uint2* low(int row, int eight) const {
    return reinterpret_cast<uint2*>(rows + row * pitch + eight / 4 * 64 + eight % 4 * 8);
  }
  __device__ uint2* high(int row, int eight) const { return low(row, eight) + 4; }
  __device__ void put(int row, int eight, const uint4& v) const {
    *low(row, eight) = make_uint2(v.x, v.z);
    *high(row, eight) = make_uint2(v.y, v.w);
  }
  __device__ void get(int row, int eight, float (&x)[8]) const {
    const uint2 a = *low(row, eight), b = *high(row, eight);
    const uint4 v = make_uint4(a.x, b.x, a.y, b.y);
    unpack(x, reinterpret_cast<const Packed<T, 8>&>(v));
  }
};

/// 8 elements of a norm's vector as fp32, which this thread alone reads again.
__device__ inline void stage_norm(float* to, const TypedPointer& from, int k, int thread, int threads) {
  for (int eight = thread; eight < k / 8; eight += threads) {
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = load_typed(from.data, from.dtype, 8 * eight + i);
    store_wide(to + 8 * eight, values);
  }
}

/// A sum of each warp, from shared memory.
template <int kWarps, int kRows>
__device__ inline float sum_of_row(const float (&of_warps)[kWarps][kRows], int row) {
  float sum = of_warps[0][row];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) sum += of_warps[warp][row];
  return sum;
}

/// Brings x to shared memory, and normalises it there if the call has a norm. `norm`: its weight and, behind it, its
/// bias.
template <class T, int kWarps, int kRows>
__device__ inline void bring_x(const FusedFewRowsArguments& p, const FusedX<T>& x, const float* norm,
                               float (&scratch)[2][kWarps][kRows]) {
  constexpr int kThreads = 32 * kWarps;
  const int thread = static_cast<int>(threadIdx.x), eights = p.k / 8;
  const T* const from = static_cast<const T*>(p.x);
  float sums[kRows] = {};
  for (int eight = thread; eight < eights; eight += kThreads) {
    uint4 v[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      if (row < p.rows) v[row] = *reinterpret_cast<const uint4*>(from + row * p.stride_x + 8 * eight);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (row >= p.rows) break;
      x.put(row, eight, v[row]);
      float values[8];
      unpack(values, reinterpret_cast<const Packed<T, 8>&>(v[row]));
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[row] += p.centred ? values[i] : values[i] * values[i];
    }
  }
  if (!p.norm_weight) return;
  // Means and the like are read again for each row: the weights need the registers.
  const int warp = thread / 32, lane = thread % 32;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const float sum = warp_reduce(sums[row], Sum());
    if (lane == 0) scratch[0][warp][row] = sum;
  }
  __syncthreads();
  const float over_k = 1.0f / static_cast<float>(p.k);
  if (p.centred) {
#pragma unroll 1
    for (int row = 0; row < p.rows; ++row) {
      const float mean = sum_of_row(scratch[0], row) * over_k;
      float sum = 0.0f;
      for (int eight = thread; eight < eights; eight += kThreads) {
        float values[8];
        x.get(row, eight, values);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += (values[i] - mean) * (values[i] - mean);
      }
      sum = warp_reduce(sum, Sum());
      if (lane == 0) scratch[1][warp][row] = sum;
    }
    __syncthreads();
  }
#pragma unroll 1
  for (int row = 0; row < p.rows; ++row) {
    const float mean = p.centred ? sum_of_row(scratch[0], row) * over_k : 0.0f;
    const float rstd = rsqrtf(sum_of_row(scratch[p.centred ? 1 : 0], row) * over_k + p.eps);
    for (int eight = thread; eight < eights; eight += kThreads) {
      float weight[8], bias[8] = {}, values[8];
      load_wide(weight, norm + 8 * eight);
      if (p.norm_bias) load_wide(bias, norm + p.k + 8 * eight);
      x.get(row, eight, values);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = (values[i] - mean) * rstd * weight[i] + bias[i];
      const Packed<T, 8> packed = pack_vector<T>(values);
      x.put(row, eight, reinterpret_cast<const uint4&>(packed));
    }
  }
}

/// Each of kWarps warps keeps kChunks chunks of 32 k in registers. Tail: which rows of the weight are a tile, and what
/// becomes of the sums. A thread finishes one sum of each tile, or a pair of sums four rows apart.
template <class T, int kWarps, int kChunks, class Tail>
__global__ void __launch_bounds__(32 * kWarps, 16 / kWarps)
    fused_few_rows_kernel(const __grid_constant__ FusedFewRowsArguments p, const __grid_constant__ Tail tail) {
  ptx::allow_next_kernel();  // its blocks take the places of those that end here, and wait
  constexpr int kRows = kFusedMostRows, kThreads = 32 * kWarps, kStep = kWarps * kFusedChunk, kPiece = kChunks * kStep;
  constexpr int kTile = 8;    // rows of the weight
  constexpr int kChains = 2;  // products that don't wait for each other
  extern __shared__ __align__(16) char shared[];
  __shared__ float partial[2][kWarps][kRows][kTile], scratch[2][kWarps][kRows];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32, group = lane / 4;
  const int first_tile = static_cast<int>(blockIdx.x) * p.tiles_a_block;
  const int tiles = min(p.tiles_a_block, p.tiles - first_tile);
  const FusedX<T> x{shared, 2 * p.k + 32};
  float* const norm = reinterpret_cast<float*>(shared + p.rows * x.pitch);

  const auto begin_of = [&](int tile) {
    return static_cast<const T*>(p.weight) + tail.weight_row(tile, group) * p.stride_weight + kFusedChunk * warp +
           lane % 4 * 8;
  };
  const T* from = begin_of(first_tile);
  const int length = p.k - kFusedChunk * warp;  // from the warp's first chunk on
  std::uint32_t w[kChunks][4];
  const auto load = [&](int i, const T* at, int left) {
    const uint4 v = i * kStep < left ? ptx::load_16_once(at + i * kStep) : make_uint4(0, 0, 0, 0);
    w[i][0] = v.x, w[i][1] = v.y, w[i][2] = v.z, w[i][3] = v.w;
  };
  const auto load_constants = [&] {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) load(i, from, length);
    if (p.norm_weight) stage_norm(norm, p.norm_weight, p.k, thread, kThreads);
    if (p.norm_bias) stage_norm(norm + p.k, p.norm_bias, p.k, thread, kThreads);
  };
  if (p.constant) load_constants();
  ptx::wait_for_previous_kernel();
  if (!p.constant) load_constants();

  // A thread finishes one sum, or pair, of a row in each tile.
  const int across = tail.is_paired() ? kTile / 2 : kTile, row = thread / across, column = thread % across;
  const bool finishes = row < p.rows;
  typename Tail::Rest rest;
  if (finishes) rest.fetch(p, tail, first_tile, row, column);
  bring_x<T, kWarps, kRows>(p, x, norm, scratch);
  __syncthreads();

  const char* const right = shared + group % 4 * x.pitch + warp * 64 + group / 4 * 32 + lane % 4 * 8;
#pragma unroll 1
  for (int t = 0; t < tiles; ++t) {
    float sum[kChains][4] = {};
#pragma unroll 1
    for (int at = 0; at < p.k; at += kPiece) {
      const bool last = at + kPiece >= p.k;
      const T* const next = last ? begin_of(first_tile + t + 1) : from + kPiece;
      const int left = length - at, next_left = !last ? left - kPiece : t + 1 < tiles ? length : 0;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        if (i * kStep < left) {
          uint2 v = make_uint2(0, 0);
          if (group % 4 < p.rows) v = *reinterpret_cast<const uint2*>(right + 2 * (at + i * kStep));
          ptx::mma_m16n8k16<T>(sum[i % kChains], w[i], v.x, v.y);
        }
        load(i, next, next_left);
      }
      from = next;
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float upper = sum[0][e] + sum[1][e];
      const float lower = __shfl_xor_sync(kFullMask, sum[0][2 + e] + sum[1][2 + e], 2);
      if (lane % 4 < 2) partial[t % 2][warp][lane % 4 * 2 + e][group] = upper + lower;
    }
    __syncthreads();
    if (!finishes) continue;
    float first = 0.0f, second = 0.0f;
#pragma unroll
    for (int other = 0; other < kWarps; ++other) {
      first += partial[t % 2][other][row][column];
      if (tail.is_paired()) second += partial[t % 2][other][row][column + kTile / 2];
    }
    rest.finish(p, tail, first_tile + t, row, column, first, second);
    if (t + 1 < tiles) rest.fetch(p, tail, first_tile + t + 1, row, column);
  }
}

/// Launches the plan's kernel for what the arguments and the tail say.
template <class T, class Tail>
void launch_fused_few_rows(const char* name, const FusedLinearParams& p, const FusedFewRowsPlan& plan, int tiles,
                           const Tail& tail, cudaStream_t stream) {
  FusedFewRowsArguments a;
  a.x = p.x, a.weight = p.weight;
  a.bias = p.bias, a.norm_weight = p.norm_weight, a.norm_bias = p.norm_bias;
  a.stride_x = p.stride_x_row, a.stride_weight = p.stride_weight_out;
  a.eps = p.eps;
  a.rows = static_cast<int>(p.rows), a.k = static_cast<int>(p.in_features);
  a.tiles = tiles, a.tiles_a_block = plan.tiles;
  a.centred = p.centred, a.constant = p.constant;
  const auto run = [&](auto warps, auto chunks) {
    constexpr int kWarps = decltype(warps)::value, kChunks = decltype(chunks)::value;
    LaunchShape shape{static_cast<unsigned>(ceil_div(tiles, plan.tiles)), 32 * kWarps,
                      static_cast<std::size_t>(fused_shared_bytes(p)), stream};
    shape.early = true;
    launch(name, fused_few_rows_kernel<T, kWarps, kChunks, Tail>, shape, a, tail);
  };
  const std::integral_constant<int, 4> four;
  const std::integral_constant<int, 8> eight;
  const std::integral_constant<int, 16> sixteen;
  if (plan.warps == 8) return run(eight, sixteen);
  plan.chunks == 8 ? run(four, eight) : run(four, sixteen);
}

}  // namespace flashkernel::cuda::sm80
