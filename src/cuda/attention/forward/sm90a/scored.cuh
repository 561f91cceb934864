// Calls of the Hopper forward kernel whose scores get more than a scale: an additive bias, ALiBi and a packed mask. A
// fourth warp of the producer loads the bias by TMA, tile by tile, and the consumers read it in the layout of their
// scores. ALiBi and the mask need no shared memory: distances are numbers of the thread, and a row of a mask is three
// words a block.
#pragma once

#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/attention/forward/sm90a/scored.hpp"
#include "cuda/attention/forward/sm90a/shape.cuh"
#include "cuda/attention/forward/sm90a/softmax.cuh"

namespace flashkernel::cuda::sm90a {

/// What the host works out once per launch for a scored call.
struct ScoredPlan : ForwardPlan {
  CUtensorMap map_bias;  // where the bias comes from tiles
  BiasFrom bias;
  int bias_heads, bias_batches;  // 0 where one serves all
  std::uint64_t bias_policy;     // of the L2 cache
};

/// A shape whose consumers also have kBiasStages slots each for bias: 64 rows of kBlockN keys, as boxes of 32 keys in
/// lines of 64 bytes, swizzled.
template <class Tile>
struct ScoredShape : ForwardShape<Tile> {
  using Plan = ScoredPlan;
  static constexpr bool kScored = true;
  static constexpr int kBiasStages = 2, kBiasBoxes = Tile::kBlockN / kBiasBoxKeys;
  static constexpr int kBiasBoxBytes = 64 * kBiasBoxKeys * 2, kBiasBytes = kBiasBoxes * kBiasBoxBytes;
  static_assert(Tile::kBlockN % kBiasBoxKeys == 0, "a block is whole boxes, and whole words of a mask");
};

/// Sets scores to -inf where the packed mask hides the key from query i, one of the thread's two rows. The words come
/// from the L1 cache, except for one block in three: 32 bytes of a mask are 256 keys.
template <int kBlockN, int kCount>
__device__ inline void hide_keys(float (&score)[kCount], int half, const AttentionParams& p, const TileRecord& tile,
                                 int i, int first_key) {
  const std::uint32_t* const from = p.mask.row(tile.b, tile.h, i) + first_key / 32;
#pragma unroll
  for (int w = 0; w < kBlockN / 32; ++w) {
    const std::uint32_t shown = first_key + 32 * w < p.seq_k ? from[w] >> (2 * (threadIdx.x % 4)) : 0;
#pragma unroll
    for (int c = 4 * w; c < 4 * w + 4; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if ((shown >> (c % 4 * 8 + e) & 1) == 0) score[4 * c + 2 * half + e] = -INFINITY;
  }
}

/// score = score x factor + bias, for a bias that lies in shared memory.
template <class Shape, class T, int kCount>
__device__ inline void add_bias_tile(float (&score)[kCount], float factor, std::uint32_t from) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
  for (int n = 0; n < kCount / 8; ++n) {
    const int chunk = n % 2 * 2 + lane / 16;  // of 16 bytes, of four in a line
    std::uint32_t pairs[4];
    ptx::ldmatrix_x4(pairs, from + n / 2 * Shape::kBiasBoxBytes + row * 64 + ((chunk ^ row / 2) & 3) * 16);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& low = score[8 * n + 2 * e];
      float& high = score[8 * n + 2 * e + 1];
      low = fmaf(low, factor, bits_to_float<T>(pairs[e] & 0xffff));
      high = fmaf(high, factor, bits_to_float<T>(pairs[e] >> 16));
    }
  }
}

/// The same for a bias that is one row for all queries, in global memory. `first_key` is the key of the thread's
/// element 0.
template <class T, int kCount>
__device__ inline void add_bias_row(float (&score)[kCount], float factor, const T* row, int first_key, int num_keys) {
#pragma unroll
  for (int c = 0; c < kCount / 4; ++c)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int j = first_key + 8 * c + e;
      const float bias = j < num_keys ? to_float(row[j]) : 0.0f;
      score[4 * c + e] = fmaf(score[4 * c + e], factor, bias);
      score[4 * c + 2 + e] = fmaf(score[4 * c + 2 + e], factor, bias);
    }
}

/// score = score x factor + what ALiBi adds. `distance` is that of the thread's element 0.
template <Alibi kForm, int kCount>
__device__ inline void add_alibi(float (&score)[kCount], float factor, float slope, int distance) {
  const float from[2] = {static_cast<float>(distance), static_cast<float>(distance + 8)};
#pragma unroll
  for (int c = 0; c < kCount / 4; ++c)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float d = from[e / 2] - static_cast<float>(8 * c + e % 2);
      if (kForm == Alibi::kDistance) d = fabsf(d);
      if (kForm == Alibi::kSqrt) d = d > 0.0f ? ptx::sqrt_approx(d) : 0.0f;
      score[4 * c + e] = fmaf(score[4 * c + e], factor, -slope * d);
    }
}

/// One thread of the producer runs this: it loads the bias of each block for each consumer that multiplies it, in the
/// order in which they come to it.
template <class Shape>
__device__ inline void produce_bias(const ScoredPlan& plan, const SharedLayout<Shape>& shared) {
  Ring<Shape::kBiasStages> at[Shape::kConsumers];
  ptx::wait_for_previous_kernel();
  for (Ring<SharedLayout<Shape>::kRecords> tiles;; ++tiles.count) {
    ptx::mbarrier_wait(shared.found_full(tiles.slot()), tiles.parity());
    const TileRecord& tile = *shared.found(tiles.count);
    if (tile.num_blocks < 0) return;
    const int end = tile.end_block - tile.num_blocks;
    if (plan.bias == BiasFrom::kTiles)
#pragma unroll 1
      for (int block = tile.end_block - 1; block >= end; --block)
#pragma unroll
        for (int w = 0; w < Shape::kConsumers; ++w) {
          const int first = first_row<Shape>(tile, w);
          if (block > end && block * Shape::kBlockN >= last_key_of_rows(tile.range, first)) continue;  // it skips it
          const std::uint32_t barrier = shared.bias_full(at[w].slot(), w);
          ptx::mbarrier_wait(shared.bias_empty(at[w].slot(), w), at[w].parity() ^ 1);
          ptx::mbarrier_arrive_expect(barrier, Shape::kBiasBytes);
#pragma unroll 1
          for (int c = 0; c < Shape::kBiasBoxes; ++c)
            ptx::tma_load(shared.bias(at[w].slot(), w) + c * Shape::kBiasBoxBytes, &plan.map_bias, barrier,
                          plan.bias_policy, block * Shape::kBlockN + c * kBiasBoxKeys, first, tile.h * plan.bias_heads,
                          tile.b * plan.bias_batches);
          ++at[w].count;
        }
    ptx::mbarrier_arrive(shared.found_empty(tiles.slot()));
  }
}

}  // namespace flashkernel::cuda::sm90a
