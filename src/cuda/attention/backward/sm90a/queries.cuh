// The dQ warpgroup of the Hopper backward kernel. It computes dQ = dS K of every step from shared memory, and adds it
// from registers to the tile's sum in global memory. The key warpgroups wait for it only where all places of dS are
// full.
//
// Several tiles of keys add to a tile of queries. The first of them stores. The others add in the order of their keys
// (plan.ordered), or in any order once the first one has stored. Afterwards grad_q_kernel scales, rounds and writes the
// rows of grad_q, or the last tile of keys to add does (plan.last_writes), from the sum and its own part.
#pragma once

#include "cuda/ptx/atomic.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/attention/backward/sm90a/epilogue.cuh"

namespace flashkernel::cuda::sm90a {

/// 64 queries x at most 64 columns at a time: 32 registers, so that the key warpgroups have what they need.
template <class Shape, class T>
struct QueryConsumer {
  static constexpr int kQkDim = Shape::kQkDim, kSlices = Shape::kBlockM / 64;  // of 64 queries

  const AttentionBackwardParams& p;
  const BackwardPlan& plan;
  const BackwardLayout<Shape>& shared;

  Ring<Shape::kScoreSlots> scored;
  Ring<BackwardLayout<Shape>::kTurns> turns;
  Ring<BackwardLayout<Shape>::kPasses> passes;
  Ring<Shape::kKeySlots> keys;

  __device__ static void release(std::uint32_t barrier) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
  }

  /// Computes dQ of 64 queries and a block of 64 columns, and waits for it. (At d96 the last 32 columns of the second
  /// block are zeros.)
  __device__ void multiply(const BackwardItem& item, float (&sum)[32], int slice, int block) {
    const std::uint64_t a = ptx::matrix_descriptor(shared.grad_s(scored.slot()), 1024, 1024);
    // The slot is read each time: descriptors kept over the loop would take 32 registers.
    const std::uint64_t b = ptx::matrix_descriptor(shared.k(item.key_slot), 1024, 1024);
    ptx::hold(sum);
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < Shape::kBlockN / 16; ++n)
      ptx::wgmma_ss<T, true, true>(sum, a + (slice * Shape::kScoreBlockBytes + n * 2048) / 16,
                                   b + (block * Shape::kKvBlockBytes + n * 2048) / 16, n > 0);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(sum);
  }

  /// One step, whose dS is there.
  __device__ void step(const BackwardItem& item, const PlaceOf<Shape>& place, int last_of_item) {
    const int index = plan.tile_index(p.forward.heads_q, item.b, place.head(item, plan.group), place.q_tile());
    const int turn = place.template before<Shape>(item);                       // tiles of keys that come before
    const auto is_last = [&] { return place.template is_last<Shape>(item); };  // kept, it would spill
    float sum[32];
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice)
#pragma unroll
      for (int block = 0; block < Shape::kQkBlocks; ++block) {
        constexpr int kTiles = kQkDim / 8;  // of columns, of which this block has
        const int tiles = kTiles - 8 * block < 8 ? kTiles - 8 * block : 8;
        multiply(item, sum, slice, block);
        if (slice == kSlices - 1 && block == Shape::kQkBlocks - 1) {
          release(shared.grad_s_empty(scored.slot()));
          if (last_of_item) release(shared.k_empty(item.key_slot));
        }
        if (slice + block == 0 && turn > 0 && !plan.adds_freely<Shape>()) {
          ptx::mbarrier_wait(shared.turn_full(turns.slot()), turns.parity());
          __syncwarp();  // all lanes have seen it
          release(shared.turn_empty(turns.slot()));
          ++turns.count;
        }
        float* const to = plan.sums + static_cast<std::int64_t>(index) * (Shape::kBlockM * kQkDim) +
                          Shape::sum_index(slice, 8 * block, threadIdx.x % 128);
        constexpr int kStride = Shape::sum_index(0, 1, 0);
        if (!Shape::kSparse && plan.last_writes && is_last()) {
          if (turn > 0) {
#pragma unroll
            for (int c = 0; c < tiles; ++c) {
              const float4 other = __ldcg(reinterpret_cast<const float4*>(to + c * kStride));
              sum[4 * c] += other.x, sum[4 * c + 1] += other.y, sum[4 * c + 2] += other.z, sum[4 * c + 3] += other.w;
            }
          }
          const int first_query = place.q_tile() * Shape::kBlockM + 64 * slice;
          FiniteCheck<1> finite;
          store_fragment<64, false>(sum, p.forward.scale,
                                    grad_q_row<T>(p, item.b, place.head(item, plan.group), first_query) + 64 * block,
                                    p.stride_grad_q_token, item.range.q_len - first_query,
                                    static_cast<int>(p.forward.head_dim) - 64 * block, finite);
          finite.report(plan.not_finite);
        } else if (turn == 0 && !plan.adds_freely<Shape>()) {
#pragma unroll
          for (int c = 0; c < tiles; ++c)
            *reinterpret_cast<float4*>(to + c * kStride) =
                float4{sum[4 * c], sum[4 * c + 1], sum[4 * c + 2], sum[4 * c + 3]};
        } else {
#pragma unroll
          for (int c = 0; c < tiles; ++c)
            ptx::reduce_add_4(to + c * kStride, sum[4 * c], sum[4 * c + 1], sum[4 * c + 2], sum[4 * c + 3]);
        }
      }
    if (!plan.adds_freely<Shape>() && plan.passes(turn, is_last())) {
      ptx::mbarrier_wait(shared.pass_empty(passes.slot()), passes.parity() ^ 1);
      __syncwarp();
      release(shared.pass_full(passes.slot()));
      ++passes.count;
    }
  }

  __device__ void run() {
    scored = {};
    turns = {};
    passes = {};
    keys = {};
    for (Ring<BackwardLayout<Shape>::kItems> items;; ++items.count) {
      ptx::mbarrier_wait(shared.item_full(items.slot()), items.parity());
      const BackwardItem& item = *shared.item(items.slot());
      const int steps = item.steps;
      if (steps < 0) return;
      if (steps > 0) {
        ptx::mbarrier_wait(shared.k_full(item.key_slot), keys.parity());
        auto place = first_place<Shape>(plan, item);
#pragma unroll 1
        for (int left = steps; left > 0; --left, advance<Shape>(place, plan, item)) {
          ptx::mbarrier_wait(shared.grad_s_full(scored.slot()), scored.parity());
          if (p.grad_q) {
            step(item, place, left == 1);
          } else {
            release(shared.grad_s_empty(scored.slot()));
            if (left == 1) release(shared.k_empty(item.key_slot));
          }
          ++scored.count;
        }
        ++keys.count;
      }
      ptx::mbarrier_arrive(shared.item_empty(items.slot()));
    }
  }
};

/// dQ = scale * sum, from the order of the fragments to rows. A block has a warpgroup for each 64 queries of a tile.
template <class T, int kQkDim, int kVDim>
__global__ void __launch_bounds__(BackwardShape<kQkDim, kVDim>::kBlockM * 2)
    grad_q_kernel(const __grid_constant__ AttentionBackwardParams p, const __grid_constant__ BackwardPlan plan) {
  using Shape = BackwardShape<kQkDim, kVDim>;
  ptx::allow_next_kernel();
  ptx::wait_for_previous_kernel();
  const AttentionParams& f = p.forward;
  const TileOfBlock at(f, plan);
  const KeyWindow range(f, at.b);
  const int q_len = range.q_len, first_query = at.tile * Shape::kBlockM;
  if (first_query >= q_len) return;
  // A tile that sees no keys has no sum; prepare_kernel has written zeros.
  if (plan.adders && plan.adders[plan.query_list(at.b, at.h, at.tile)] == 0) return;
  if (range.first(first_query) >= range.last(min(q_len, first_query + Shape::kBlockM) - 1)) return;
  const float* const sums = plan.sums + static_cast<std::int64_t>(at.index) * (Shape::kBlockM * kQkDim);
  const int slice = static_cast<int>(threadIdx.x) / 128, row = first_query + 64 * slice;
  float sum[kQkDim / 2];
#pragma unroll
  for (int c = 0; c < kQkDim / 8; ++c) {
    const float4 x = *reinterpret_cast<const float4*>(sums + Shape::sum_index(slice, c, threadIdx.x % 128));
    sum[4 * c] = x.x, sum[4 * c + 1] = x.y, sum[4 * c + 2] = x.z, sum[4 * c + 3] = x.w;
  }
  FiniteCheck<> finite;
  T* const to = grad_q_row<T>(p, at.b, at.h, row);
  if (q_len - row >= 64 && f.head_dim == kQkDim)
    store_fragment<kQkDim, true>(sum, f.scale, to, p.stride_grad_q_token, 64, kQkDim, finite);
  else
    store_fragment<kQkDim, false>(sum, f.scale, to, p.stride_grad_q_token, q_len - row, static_cast<int>(f.head_dim),
                                  finite);
  finite.report(plan.not_finite);
}

}  // namespace flashkernel::cuda::sm90a
