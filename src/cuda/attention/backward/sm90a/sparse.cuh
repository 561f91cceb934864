// Backward calls with a block mask. Two small kernels before the pass find the pairs of tiles that the mask shows
// something of: the first one in which order tiles of keys add to the dQ of each tile of queries, the second one the
// steps of each tile of keys. The pass walks these lists instead of all tiles of queries.
#pragma once

#include "cuda/attention/backward/sm90a/shape.cuh"
#include "cuda/tile/reduce.cuh"

namespace flashkernel::cuda::sm90a {

template <int kDim>
struct SparseBackwardShape : BackwardShape<kDim, kDim> {
  static constexpr bool kSparse = true;
};

/// What the block mask says of a tile of queries and one of keys (SparseStep); 0: all is hidden.
template <class Shape>
__device__ inline unsigned step_states(const AttentionParams& f, int b, int h, int tile, int n_tile) {
  static_assert(Shape::kBlockN == 128 && Shape::kBlockM <= 128, "eight bits");
  const AttentionBlocks& blocks = f.mask.blocks;
  unsigned states = 0;
#pragma unroll
  for (int n = 0; n < Shape::kBlockM / 64; ++n) {
    const std::int64_t i = static_cast<std::int64_t>(tile) * Shape::kBlockM + 64 * n;
    if (i >= f.seq_q) continue;
    const std::uint8_t* const entries = blocks.row(b, h, i);
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const std::int64_t j = static_cast<std::int64_t>(n_tile) * Shape::kBlockN + 64 * w;
      if (j >= f.seq_k) continue;
      const unsigned entry = entries[(j >> blocks.shift_k) * blocks.stride_k];
      const unsigned state = entry == kBlockShown && f.mask.data ? kBlockShown : kBlockWhole;
      states |= (entry == kBlockHidden ? 0u : state) << (4 * w + 2 * n);
    }
  }
  return states;
}

inline constexpr int kListWarps = 4;  // of a block of the two kernels; each has a list of its own

/// A warp for each tile of queries of all heads: the order of those tiles of keys that add to its dQ, the last one
/// first. (Where all queries see the first keys beside some near them, the tile of the first keys has by far the most
/// steps. It comes last, and no other waits for it.)
template <class Shape>
__global__ void __launch_bounds__(kListWarps* kWarp)
    order_kernel(const __grid_constant__ AttentionBackwardParams p, const __grid_constant__ BackwardPlan plan,
                 int lists) {
  const AttentionParams& f = p.forward;
  const int index = static_cast<int>(blockIdx.x) * kListWarps + static_cast<int>(threadIdx.x) / kWarp;
  if (index >= lists) return;
  const int lane = threadIdx.x % kWarp, tile = index % plan.q_tiles, head = index / plan.q_tiles;
  const int h = head % plan.list_heads_q, b = head / plan.list_heads_q;
  const KeyWindow range(f, b);
  const int m = tile * Shape::kBlockM;
  const int first_key = range.first(m), last_key = range.last(min(range.q_len, m + Shape::kBlockM) - 1);
  std::uint16_t* const orders = plan.orders + static_cast<std::int64_t>(index) * plan.k_tiles;
  int count = 0;
  for (int n0 = 0; n0 < plan.k_tiles; n0 += kWarp) {
    const int n = plan.k_tiles - 1 - n0 - lane;
    const bool inside = n >= 0 && n * Shape::kBlockN < last_key && (n + 1) * Shape::kBlockN > first_key;
    const bool shown = inside && step_states<Shape>(f, b, h, tile, n) != 0;
    const unsigned found = __ballot_sync(kFullMask, shown);
    if (n >= 0)
      orders[n] =
          shown ? static_cast<std::uint16_t>(count + __popc(found & ((1u << lane) - 1))) : BackwardPlan::kNoOrder;
    count += __popc(found);
  }
  if (lane == 0) plan.adders[index] = count;
}

/// A warp for each tile of keys of all kv heads: its steps, in the order of BackwardPlace.
template <class Shape>
__global__ void __launch_bounds__(kListWarps* kWarp)
    steps_kernel(const __grid_constant__ AttentionBackwardParams p, const __grid_constant__ BackwardPlan plan,
                 int lists) {
  const AttentionParams& f = p.forward;
  const int index = static_cast<int>(blockIdx.x) * kListWarps + static_cast<int>(threadIdx.x) / kWarp;
  if (index >= lists) return;
  const int lane = threadIdx.x % kWarp, n_tile = index % plan.k_tiles, head = index / plan.k_tiles;
  const int g = head % plan.list_heads_kv, b = head / plan.list_heads_kv;
  const int most = plan.q_tiles * plan.group;
  SparseStep* const steps = plan.steps + static_cast<std::int64_t>(index) * most;
  int count = 0;
  for (int s0 = 0; s0 < most; s0 += kWarp) {
    const int s = s0 + lane, tile = plan.q_tiles - 1 - s / plan.group, of_group = s % plan.group;
    const int h = g * plan.group + of_group;
    const int queries = tile < 0 ? 0 : plan.query_list(b, h, tile);
    const int order = tile < 0 ? int{BackwardPlan::kNoOrder}
                               : plan.orders[static_cast<std::int64_t>(queries) * plan.k_tiles + n_tile];
    const bool shown = order != BackwardPlan::kNoOrder;
    const unsigned found = __ballot_sync(kFullMask, shown);
    if (shown)
      steps[count + __popc(found & ((1u << lane) - 1))] = SparseStep(
          tile, step_states<Shape>(f, b, h, tile, n_tile), order, order + 1 == plan.adders[queries], of_group);
    count += __popc(found);
  }
  if (lane == 0) plan.num_steps[index] = count;
}

}  // namespace flashkernel::cuda::sm90a
