// How the results of a cluster's warpgroups become the output. First the two warpgroups of a block merge: each takes
// half of the columns. Then each block finishes a share of the heads from what the other blocks send it (st.async,
// which a barrier in its shared memory counts). A thread keeps the same head and columns all the way: results move from
// registers to registers of the same thread number, and no address depends on a head or a column. Used by group.cuh.
//
// All that happens after the last tile is latency, and 8 warps hide none of it. Therefore instructions count here, not
// bytes.
//
// Invariant: parts are merged in the order of their places. Therefore results are the same bit for bit.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/attention/decode/sm90a/group_sums.cuh"
#include "cuda/attention/decode/sm90a/merge.cuh"
#include "cuda/attention/score.cuh"
#include "cuda/tile/shared_tile.cuh"
#include "ops/attention_params.hpp"

namespace flashkernel::cuda::sm90a {

/// A thread's part of the result of query head 8 w + l / 4, where w is the warp in its warpgroup and l the lane. It has
/// columns 64 * warpgroup + 8 c + 2 (l % 4) + {0, 1} in values[2 c + {0, 1}].
template <class Shape>
struct GroupPart {
  static constexpr int kValues = Shape::kVDim / (4 * Shape::kConsumers), kQuads = kValues / 4;
  float maximum, sum, values[kValues];  // maximum: base 2; sum and values: relative to it

  /// Makes the part relative to another maximum, which is not less.
  __device__ void rescale(float new_maximum) {
    const float factor = ptx::exp2_approx(maximum - SoftmaxState::shift(new_maximum));
    maximum = new_maximum, sum *= factor;
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] *= factor;
  }
  /// Adds another part, whose maximum is not greater. `quad(i)` is its values[4 i] to values[4 i + 3].
  template <class Quad>
  __device__ void add(float2 state, Quad quad) {
    const float factor = ptx::exp2_approx(state.x - SoftmaxState::shift(maximum));
    sum = __fadd_rn(sum, __fmul_rn(state.y, factor));  // alike in both warpgroups, whose own one comes first
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const float4 part = quad(i);
      values[4 * i] = fmaf(part.x, factor, values[4 * i]);
      values[4 * i + 1] = fmaf(part.y, factor, values[4 * i + 1]);
      values[4 * i + 2] = fmaf(part.z, factor, values[4 * i + 2]);
      values[4 * i + 3] = fmaf(part.w, factor, values[4 * i + 3]);
    }
  }
  __device__ float4 quad(int i) const {
    return {values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]};
  }
};

/// Merges the warpgroups of a block, which all call it. Returns the block's part for the thread's head and columns.
template <class T, class Shape>
__device__ GroupPart<Shape> merge_warpgroups(const GroupSums<T, Shape>& sums, int consumer, unsigned char* shared) {
  static_assert(Shape::kConsumers == 2);
  using Part = GroupPart<Shape>;
  const int thread = static_cast<int>(threadIdx.x) % 128;
  Part kept, given;
#pragma unroll
  for (int i = 0; i < Part::kValues; ++i) {
    const float left = sums.out[i / 2 * 4 + i % 2], right = sums.out[(Part::kValues + i) / 2 * 4 + i % 2];
    kept.values[i] = consumer ? right : left, given.values[i] = consumer ? left : right;
  }
  kept.maximum = sums.maximum, kept.sum = sums.sum;
  float4* const values = reinterpret_cast<float4*>(shared + Shape::kExchange) + thread;
  float2* const states = reinterpret_cast<float2*>(shared + Shape::kExchangeStates) + thread;
#pragma unroll
  for (int i = 0; i < Part::kQuads; ++i) values[(2 * i + consumer) * 128] = given.quad(i);
  states[consumer * 128] = float2{kept.maximum, kept.sum};
  // An mbarrier: compute-sanitizer's racecheck did not follow a named barrier of these warps alone.
  const std::uint32_t exchanged = ptx::shared_address(shared) + Shape::kExchanged;
  ptx::mbarrier_arrive(exchanged);
  ptx::mbarrier_wait(exchanged, 0);
  const float2 other = states[(1 - consumer) * 128];
  kept.rescale(fmaxf(kept.maximum, other.x));
  kept.add(other, [&](int i) { return values[(2 * i + 1 - consumer) * 128]; });
  return kept;
}

/// What the blocks of a cluster send each other. The inbox of a block has parts from every other block, of the heads
/// that the block finishes, and their states.
template <class Shape>
struct GroupInbox {
  int blocks, share;  // heads
  int states, bytes;  // in shared memory, behind Shape::kInbox

  __host__ __device__ GroupInbox(int rows, int blocks)
      : blocks(blocks),
        share((rows + blocks - 1) / blocks),
        states(Shape::kInbox + (blocks - 1) * share * Shape::kVDim * 4),
        bytes(states + (blocks - 1) * share * 8) {}

  /// Bytes that come in all.
  __device__ int expected(int rows, int rank) const {
    return (blocks - 1) * max(0, min(share, rows - rank * share)) * (Shape::kVDim * 4 + 8);
  }
  /// The place of this thread's `quad` of head `row` of the owner's share, from sender number `place` (the owner does
  /// not count).
  __device__ int at(int place, int row, int quad) const {
    const int consumer = static_cast<int>(threadIdx.x) / 128, lane = static_cast<int>(threadIdx.x) % 4;
    return Shape::kInbox +
           (((place * GroupPart<Shape>::kQuads + quad) * Shape::kConsumers + consumer) * share * 4 + row * 4 + lane) *
               16;
  }
  __device__ int state_at(int place, int row) const { return states + (place * share + row) * 8; }
};

/// Merges the parts of all blocks of a cluster and stores the result. All warpgroups of all blocks call it, once all
/// blocks have started. `shared` is the memory of this block, and `full` the barrier of its inbox.
template <class T, class Shape>
__device__ void merge_blocks(const AttentionParams& p, GroupPart<Shape> part, const GroupInbox<Shape>& inbox, int rows,
                             int rank, int sequence, int head, unsigned char* shared, std::uint32_t full) {
  using Part = GroupPart<Shape>;
  const int lane = static_cast<int>(threadIdx.x) % 4, consumer = static_cast<int>(threadIdx.x) / 128;
  int row = static_cast<int>(threadIdx.x) % 128 / 4;
  if (row >= rows) return;
  const std::int64_t h = static_cast<std::int64_t>(head) * rows + row;
  T* const out = static_cast<T*>(p.out) + sequence * p.stride_out_batch + h * p.stride_out_head +
                 consumer * (Shape::kVDim / Shape::kConsumers) + lane * 2;
  if (inbox.blocks > 1) {
    // The half keeps the quotient away from whole numbers, where rounding would matter.
    const auto owner =
        static_cast<int>((static_cast<float>(row) + 0.5f) * __fdividef(1.0f, static_cast<float>(inbox.share)));
    row -= owner * inbox.share;
    if (owner != rank) {
      const int place = rank - (rank > owner ? 1 : 0);
      const std::uint32_t there = ptx::map_shared(ptx::shared_address(shared), static_cast<std::uint32_t>(owner));
      const std::uint32_t full_there = ptx::map_shared(full, static_cast<std::uint32_t>(owner));
      if (lane == 0 && consumer == 0)
        ptx::store_async_2(there + static_cast<std::uint32_t>(inbox.state_at(place, row)),
                           float2{part.maximum, part.sum}, full_there);
#pragma unroll
      for (int i = 0; i < Part::kQuads; ++i)
        ptx::store_async_4(there + static_cast<std::uint32_t>(inbox.at(place, row, i)), part.quad(i), full_there);
      return;
    }
    ptx::mbarrier_wait(full, 0);
    const auto state = [&](int place) { return *reinterpret_cast<const float2*>(shared + inbox.state_at(place, row)); };
    float maximum = part.maximum;
#pragma unroll 1
    for (int place = 0; place < inbox.blocks - 1; ++place) maximum = fmaxf(maximum, state(place).x);
    part.rescale(maximum);
#pragma unroll 1
    for (int place = 0; place < inbox.blocks - 1; ++place)
      part.add(state(place), [&](int i) { return *reinterpret_cast<const float4*>(shared + inbox.at(place, row, i)); });
  }
  const float factor = finish_row(p, sequence, h, part.maximum, part.sum, lane == 0 && consumer == 0);
#pragma unroll
  for (int c = 0; c < Part::kValues / 2; ++c)
    *reinterpret_cast<std::uint32_t*>(out + 8 * c) =
        factor == 0.0f ? 0u : pack<T>(part.values[2 * c] * factor, part.values[2 * c + 1] * factor);
}

}  // namespace flashkernel::cuda::sm90a
