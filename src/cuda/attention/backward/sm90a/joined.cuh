// A key warpgroup of the Hopper backward kernel at d128 without softcap (JoinedBackwardShape): 64 keys, their dK and
// dV, and half of the columns of dQ. No third warpgroup makes dQ. keys.cuh has what both kinds of key warpgroups share.
// Called by kernel.cuh. After FlashAttention-3 (Shah et al., 2024).
//
//   S^T = K Q^T, dP^T = V dO^T  ->  P^T = exp2(..), dS^T = P^T * (dP^T - D)        dV += P^T dO   dK += dS^T Q
//   and of the step before      dQ^T = K^T dS^T, over the 128 keys of both warpgroups
//
// Order: the exponentials run while the other warpgroup multiplies, and dP^T is issued behind them. dS^T is computed
// during the product for dV, and dQ is added during the product for dK. dS passes through shared memory, one line for
// each query, and is used one step later, when the half of the other warpgroup has long been there. The last dQ of an
// item is made in the first step of the next item.
//
// What limits it: a multiprocessor takes 1280 cycles to send an addition of 32 KB. Instructions that read shared memory
// after the addition, or that write one of its registers, wait for it. Therefore a warp reads all that its next step
// needs before its additions, and multiplies dP^T, which comes into the registers of dQ^T, as late as possible.
//
// Invariant: P^T is rounded only as the operand of dV, so that dS^T is rounded once, in fp16 and in bf16. A block adds
// the dQ of its steps in the order of its items and their steps. K is given back after the last of an item's additions.
#pragma once

#include "cuda/ptx/atomic.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/attention/backward/sm90a/keys.cuh"

namespace flashkernel::cuda::sm90a {

/// kMasked: the call hides some pairs.
template <class Shape, class T, bool kMasked>
struct JoinedConsumer : KeyConsumer<Shape, T, false> {
  using Keys = KeyConsumer<Shape, T, false>;
  using Keys::at, Keys::keys, Keys::grad_k, Keys::grad_v, Keys::scores, Keys::operand;
  using Keys::p, Keys::plan, Keys::shared, Keys::warpgroup;
  using Keys::release, Keys::lane, Keys::warp;
  static constexpr int kBlockM = Shape::kBlockM, kSteps = Keys::kSteps;
  static constexpr int kScoreHalfBytes = kBlockM * 128;  // dS of a warpgroup's keys

  Ring<BackwardLayout<Shape>::kTurns> turns;
  std::uint32_t my_queries;                    // where this lane's numbers begin in a row of them, bytes
  BackwardTurn turn;                           // of the dQ that is due
  float* sum;                                  // where it goes
  float lse[kBlockM / 4], delta[kBlockM / 4];  // of this lane's queries: -LSE in base 2 and -D
  float other[kBlockM / 2];                    // dP^T; dQ^T
  std::uint32_t grad_s[kSteps][4];             // dS^T, rounded; `operand` is P^T

  // Every step takes one place of Q, of dO and of dS, every item with steps one of K and of V.
  __device__ Ring<Shape::kScoreSlots> scored() const { return {at.count}; }
  __device__ Ring<1> values() const { return {keys.count}; }

  // Whether a step's dQ has not been added yet.
  __device__ bool is_due() const { return at.count != turns.count; }

  // These three only issue.
  template <int kDim>
  __device__ void multiply_scores(float (&x)[kBlockM / 2], std::uint32_t keys_at, std::uint32_t queries_at) {
    ptx::hold(x);
    ptx::wgmma_fence();
    Keys::template issue_scores<kDim>(x, keys_at, queries_at);
    ptx::wgmma_commit();
  }
  template <int kSums>
  __device__ void multiply_gradient(float (&grad)[kSums], std::uint32_t (&from)[kSteps][4], std::uint32_t queries_at,
                                    bool accumulate) {
    Keys::hold_operand(from);
    ptx::hold(grad);
    ptx::wgmma_fence();
    Keys::issue_gradient(grad, from, queries_at, accumulate);
    ptx::wgmma_commit();
  }
  __device__ void multiply_grad_q(std::uint32_t keys_at, std::uint32_t grad_s_at) {
    const std::uint64_t a = ptx::matrix_descriptor(keys_at + warpgroup * Shape::kKvBlockBytes, 1024, 1024);
    const std::uint64_t b = ptx::matrix_descriptor(grad_s_at, 16, 1024);
    ptx::hold(other);
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < Shape::kBlockN / 16; ++n)
      ptx::wgmma_ss<T, true, false>(other, a + n * 2048 / 16, b + (n / 4 * kScoreHalfBytes + n % 4 * 32) / 16, n > 0);
    ptx::wgmma_commit();
  }

  /// This lane's numbers of a step's queries: 8 n + 2 (lane % 4) and the next one.
  __device__ void load_row(float (&to)[kBlockM / 4], int of_delta, std::uint32_t stage) {
    const float* const from =
        static_cast<const float*>(__cvta_shared_to_generic(shared.rows(stage) + my_queries)) + of_delta * kBlockM;
#pragma unroll
    for (int n = 0; n < kBlockM / 8; ++n) {
      const float2 x = *reinterpret_cast<const float2*>(from + 8 * n);
      to[2 * n] = x.x, to[2 * n + 1] = x.y;
    }
  }

  /// S^T -> P^T.
  __device__ void exponentials() {
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i)
      scores[i] = ptx::exp2_approx(fmaf(scores[i], plan.scale_log2, lse[i / 4 * 2 + i % 2]));
  }

  /// P^T of the pairs that a tile of queries does not see is zero.
  __device__ void hide(const BackwardItem& item, int tile) {
    const typename Keys::Mask mask(item.range, item.n_tile * Shape::kBlockN + warpgroup * 64 + warp() * 16,
                                   tile * kBlockM);
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i)
      if (mask.hides(i)) scores[i] = 0.0f;
  }

  /// dP^T -> dS^T, rounded.
  __device__ void differentiate() {
#pragma unroll
    for (int n = 0; n < kSteps; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int i = 8 * n + 2 * r, query = 4 * n + r / 2 * 2;
        grad_s[n][r] =
            pack<T>(scores[i] * (other[i] + delta[query]), scores[i + 1] * (other[i + 1] + delta[query + 1]));
      }
  }

  /// dS to shared memory, for both warpgroups: a line a query, 64 keys.
  __device__ void hand_over() {
    const std::uint32_t slot = scored().slot();
    ptx::mbarrier_wait(shared.grad_s_empty(slot), scored().parity() ^ 1);
    const int row = lane() % 8 + lane() / 16 * 8, chunk = 2 * warp() + lane() / 8 % 2;
    const std::uint32_t to =
        shared.grad_s(slot) + (threadIdx.x / 128 - 1) * kScoreHalfBytes + row * 128 + (chunk ^ (lane() % 8)) * 16;
#pragma unroll
    for (int n = 0; n < kSteps; ++n)
      ptx::stmatrix_x4_trans(to + n * 2048, grad_s[n][0], grad_s[n][1], grad_s[n][2], grad_s[n][3]);
    ptx::fence_proxy_async_shared();
    __syncwarp();
    release(shared.grad_s_full(slot));
  }

  /// Waits for the turn of the dQ that is under way, and works out where it goes.
  __device__ void take_turn() {
    ptx::mbarrier_wait(shared.turn_full(turns.slot()), turns.parity());
    turn = *shared.turn(turns.slot());
    sum = plan.sums + static_cast<std::int64_t>(turn.tile) * (kBlockM * Shape::kQkDim) +
          Shape::joined_sum_index(static_cast<int>(threadIdx.x) / 32 - 4, 0, lane());
    ptx::hold(sum);  // here, not behind the additions
  }

  /// dQ^T in `other` to its tile's sum.
  __device__ void add() {
    std::uint32_t done = shared.pass_full(turns.slot());
    ptx::hold(done);  // as above
    float* const to = sum;
    constexpr int kStride = Shape::joined_sum_index(0, 1, 0);
    if (turn.how == BackwardTurn::kAdd) {
#pragma unroll
      for (int c = 0; c < kBlockM / 8; ++c)
        ptx::reduce_add_4(to + c * kStride, other[4 * c], other[4 * c + 1], other[4 * c + 2], other[4 * c + 3]);
    } else if (turn.how == BackwardTurn::kStore) {
#pragma unroll
      for (int c = 0; c < kBlockM / 8; ++c)
        *reinterpret_cast<float4*>(to + c * kStride) =
            float4{other[4 * c], other[4 * c + 1], other[4 * c + 2], other[4 * c + 3]};
    }
    ptx::mbarrier_arrive(done);
    ++turns.count;
  }

  /// One step, and the dQ of the step before it, if one is due. In the first step of an item that is the last step of
  /// the item before, whose K is in `keys_before`. kHidden: the tile has hidden pairs, or may have some. `last`: the
  /// step is the last of its item. No product is under way at the start or at the end, since ptxas serialises products
  /// that cross the back edge of a loop.
  template <bool kFirst, bool kHidden>
  __device__ void step(const BackwardItem& item, int tile, std::uint32_t keys_before, bool last) {
    const std::uint32_t stage = at.slot();
    if constexpr (kFirst) {
      ptx::mbarrier_wait(shared.q_full(stage), at.parity());
      load_row(lse, 0, stage);
      ptx::mbarrier_wait(shared.k_full(keys.slot()), keys.parity());
    }
    multiply_scores<Shape::kQkDim>(scores, shared.k(keys.slot()), shared.q(stage));
    ptx::mbarrier_wait(shared.grad_out_full(stage), at.parity());
    if constexpr (kFirst) ptx::mbarrier_wait(shared.v_full(), values().parity());
    const bool hidden = kHidden && (!kFirst || Keys::is_masked(item, tile));
    ptx::wgmma_wait<0>();
    ptx::hold(scores);
    exponentials();
    // The registers of the additions are read when these leave, some 600 cycles later. An instruction that writes one
    // of them before that waits.
    ptx::hold(sum);
    multiply_scores<Shape::kVDim>(other, shared.v(), shared.grad_out(stage));
    if (hidden) hide(item, tile);
    load_row(delta, 1, stage);
    Keys::round();
    multiply_gradient(grad_v, operand, shared.grad_out(stage), !kFirst);
    ptx::wgmma_wait<1>();
    ptx::hold(other);
    differentiate();
    hand_over();
    const auto late = scored().before();
    if (!kFirst || is_due()) ptx::mbarrier_wait(shared.grad_s_full(late.slot()), late.parity());
    // With no dQ due it multiplies what nobody writes now: a branch around it would have all products serialised.
    multiply_grad_q(shared.k(kFirst && is_due() ? keys_before : keys.slot()),
                    !kFirst || is_due() ? shared.grad_s(late.slot()) : shared.q(stage));
    multiply_gradient(grad_k, grad_s, shared.q(stage), !kFirst);
    if (!kFirst || is_due()) take_turn();
    // Here, and not behind the additions, for which a read of shared memory would wait: what the next step needs first.
    const Ring<Shape::kStages> next{at.count + 1};
    const std::uint32_t next_stage = last ? stage : next.slot();
    if (!last) ptx::mbarrier_wait(shared.q_full(next_stage), next.parity());
    load_row(lse, 0, next_stage);
    ptx::wgmma_wait<1>();
    ptx::hold(other);
    ptx::hold(grad_v);
    Keys::hold_operand(operand);
    release(shared.grad_out_empty(stage));
    if (!kFirst || is_due()) {
      release(shared.grad_s_empty(late.slot()));
      if constexpr (kFirst) release(shared.k_empty(keys_before));
      add();
    }
    ptx::wgmma_wait<0>();
    ptx::hold(grad_k);
    Keys::hold_operand(grad_s);
    __syncwarp();  // the warp has read the step's rows
    release(shared.q_empty(stage));
    ++at.count;
  }

  /// dQ of the last step before a pause.
  __device__ void finish() {
    const auto late = scored().before();
    const std::uint32_t slot = keys.before().slot();
    ptx::mbarrier_wait(shared.grad_s_full(late.slot()), late.parity());
    multiply_grad_q(shared.k(slot), shared.grad_s(late.slot()));
    take_turn();
    ptx::wgmma_wait<0>();
    ptx::hold(other);
    release(shared.grad_s_empty(late.slot()));
    release(shared.k_empty(slot));
    add();
  }

  /// Calls f(sums, place in a range's part) for each four neighbours of a lane's sums of dK and dV.
  template <class F>
  __device__ void for_parts(int range, std::uint32_t thread, const F& f) {
    const int key_thread = static_cast<int>(thread) - (Shape::kThreads - 32 * Shape::kKeyWarps);
    float4* const part = reinterpret_cast<float4*>(plan.parts) +
                         static_cast<std::int64_t>(range) * (Shape::kBlockN * (Shape::kQkDim + Shape::kVDim) / 4) +
                         key_thread;
#pragma unroll
    for (int i = 0; i < Shape::kQkDim / 8; ++i) {
      f(&grad_k[4 * i], part + (2 * i) * 32 * Shape::kKeyWarps);
      f(&grad_v[4 * i], part + (2 * i + 1) * 32 * Shape::kKeyWarps);
    }
  }

  /// The sums of an item that is shared go to the block with its other tiles of queries.
  __device__ void give(const BackwardItem& item, std::uint32_t thread) {
    for_parts(item.cut_range, thread, [](const float* x, float4* to) { *to = float4{x[0], x[1], x[2], x[3]}; });
    ptx::fetch_add_release(plan.given + item.cut_range, 1);
  }

  /// Adds what that block has given.
  __device__ void take(const BackwardItem& item, std::uint32_t thread) {
    while (ptx::load_acquire(plan.given + item.cut_range - 1) < 32 * Shape::kKeyWarps) {
    }
    for_parts(item.cut_range - 1, thread, [](float* x, const float4* from) {
      const float4 other = *from;
      x[0] += other.x, x[1] += other.y, x[2] += other.z, x[3] += other.w;
    });
  }

  /// Stores dK and dV through the place of the next dS. A barrier follows, because other warps of this warpgroup write
  /// dS to this warp's part of that place.
  __device__ void store(const BackwardItem& item) {
    Ring<Shape::kScoreSlots> next = scored();
    ptx::hold(next.count);
    const std::uint32_t thread = Keys::thread_again();
    if constexpr (!kMasked) {
      if (item.share == BackwardItem::kGives) return give(item, thread);
      if (item.share == BackwardItem::kTakes) take(item, thread);
    }
    Keys::store(item, next, thread);
    ptx::barrier_sync(thread / 128, 128);
  }

  /// Whether the next of an item's last `left` steps has hidden pairs, and how many steps are left (`end`) when that
  /// changes.
  struct AlikeSteps {
    bool hidden = false;
    int end = 0;
    __device__ AlikeSteps(const BackwardItem& item, int group, int left) {
      if constexpr (!kMasked) return;
      // Tiles come backwards: whole ones with `from` to `until` left.
      const int from = (min(item.last_whole, item.first_tile + item.tiles) - item.first_tile) * group;
      const int until = max(0, item.first_whole - item.first_tile) * group;
      hidden = left > from || left <= until;
      end = !hidden ? until : left > from && from > until ? from : 0;
    }
  };

  __device__ void run() {
    at = {};
    keys = {};
    turns = {};
    my_queries = lane() % 4 * 8;
    ptx::hold(my_queries);  // or each step works it out again
    sum = plan.sums;
    for (Ring<BackwardLayout<Shape>::kItems> items;; ++items.count) {
      ptx::mbarrier_wait(shared.item_full(items.slot()), items.parity());
      const BackwardItem& item = *shared.item(items.slot());
      const int steps = item.steps;
      // Not later: an item's record is free when its last dQ has been added, and the next record may need its place.
      if (steps <= 0 && is_due()) finish();
      if (steps < 0) return;
      if (steps == 0) {
        Keys::store_zeros(item);
      } else {
        step<true, kMasked>(item, item.first_tile + item.tiles - 1, keys.before().slot(), steps == 1);
        for (int left = steps - 1; left > 0;) {
          const BackwardItem& now = *shared.item(items.slot());  // its address, kept over the loops, would spill
          const AlikeSteps alike(now, plan.group, left);
          if (alike.hidden) {
#pragma unroll 1
            for (; left > alike.end; --left) {
              const BackwardItem& again = *shared.item(items.slot());
              step<false, true>(again, again.first_tile + (left - 1) / plan.group, 0, left == 1);
            }
          } else {
#pragma unroll 1
            for (; left > alike.end; --left) step<false, false>(now, 0, 0, left == 1);
          }
        }
        release(shared.v_empty());
        ++keys.count;
        Ring<BackwardLayout<Shape>::kItems> again = items;
        ptx::hold(again.count);  // its address, kept over the loop, would spill
        store(*shared.item(again.slot()));
      }
      ptx::mbarrier_arrive(shared.item_empty(items.slot()));
    }
  }
};

/// dQ = scale * sum of such a call, from the order of dQ^T's fragments to rows. A block of 256 threads a tile of
/// queries, a warp 16 columns.
template <class Shape, class T>
__global__ void __launch_bounds__(256)
    joined_grad_q_kernel(const __grid_constant__ AttentionBackwardParams p, const __grid_constant__ BackwardPlan plan) {
  constexpr int kBlockM = Shape::kBlockM, kDim = Shape::kQkDim, kLine = kDim + 8;
  static_assert(kDim == 8 * 16, "eight warps");
  __shared__ __align__(16) T rows[kBlockM * kLine];
  ptx::allow_next_kernel();
  ptx::wait_for_previous_kernel();
  const AttentionParams& f = p.forward;
  const TileOfBlock at(f, plan);
  const KeyWindow range(f, at.b);
  const int first_query = at.tile * kBlockM, count = min(kBlockM, range.q_len - first_query);
  if (count <= 0) return;
  // Nobody has made the sum of a tile that sees no keys; prepare_kernel has written zeros.
  if (range.first(first_query) >= range.last(first_query + count - 1)) return;
  const float* const sums = plan.sums + static_cast<std::int64_t>(at.index) * (kBlockM * kDim);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  FiniteCheck<> finite;
#pragma unroll
  for (int c = 0; c < kBlockM / 8; ++c) {
    const float4 x = *reinterpret_cast<const float4*>(sums + Shape::joined_sum_index(warp, c, lane));
    const int row = 8 * c + 2 * (lane % 4);
    T* const to = rows + row * kLine + 16 * warp + lane / 4;
    to[0] = from_float<T>(x.x * f.scale), to[kLine] = from_float<T>(x.y * f.scale);
    to[8] = from_float<T>(x.z * f.scale), to[kLine + 8] = from_float<T>(x.w * f.scale);
    if (row < count) finite.see(x.x, 0), finite.see(x.z, 1);
    if (row + 1 < count) finite.see(x.y, 2), finite.see(x.w, 3);
  }
  finite.report(plan.not_finite);
  __syncthreads();
  T* const row0 = grad_q_row<T>(p, at.b, at.h, first_query);
  const int column = static_cast<int>(threadIdx.x) % 16 * 8, columns = static_cast<int>(f.head_dim) - column;
  for (int row = threadIdx.x / 16; row < count; row += 16) {
    const T* const from = rows + row * kLine + column;
    T* const to = row0 + row * p.stride_grad_q_token + column;
    if (columns >= 8) {
      ptx::store_16(to, *reinterpret_cast<const uint4*>(from), true);
    } else {
      for (int e = 0; e < columns; ++e) to[e] = from[e];
    }
  }
}

}  // namespace flashkernel::cuda::sm90a
