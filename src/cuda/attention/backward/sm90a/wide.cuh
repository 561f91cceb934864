// A key warpgroup of the Hopper backward kernel at head dims over 128, where dK and dV of 64 keys fill the registers of
// two warpgroups. Both work on the same 64 keys. Of a tile of 64 queries each computes the scores of 32, and of dK and
// dV each owns some blocks of 64 columns. So P^T and dS^T pass through shared memory, from which both read all of them.
//
//   S^T = K Q^T     P^T = exp2(..)                 dV += P^T dO
//   dP^T = V dO^T   dS^T = P^T * (dP^T - D)        dK += dS^T Q
//
// Order: the product for dV runs while dS^T of its step is computed, and the products for dK and for dP^T of the next
// step run while the exponentials of the next step are computed. Two barriers a step: P^T is there, dS^T is there.
#pragma once

#include "cuda/attention/backward/sm90a/keys.cuh"

namespace flashkernel::cuda::sm90a {

/// kModified: scores get a softcap, ALiBi or a packed mask. kGroup: which of the two warpgroups.
template <class Shape, class T, bool kModified, int kGroup>
struct WideKeyConsumer {
  using Keys = KeyConsumer<Shape, T, kModified>;
  using Mask = typename Keys::Mask;
  static constexpr int kBlockM = Shape::kBlockM, kQueries = kBlockM / 2;  // of a tile, and of this warpgroup
  static_assert(kBlockM == 64 && Shape::kBlockN == 64, "a line of shared memory has 64 queries, a product 64 keys");
  // Blocks of 64 columns that this warpgroup owns: of an odd number the first one has one more of dK, the second of dV.
  static constexpr int kFirstQk = kGroup == 0 ? 0 : (Shape::kQkBlocks + 1) / 2;
  static constexpr int kFirstV = kGroup == 0 ? 0 : Shape::kVBlocks / 2;
  static constexpr int kOwnQk = (kGroup == 0 ? (Shape::kQkBlocks + 1) / 2 : Shape::kQkBlocks) - kFirstQk;
  static constexpr int kOwnV = (kGroup == 0 ? Shape::kVBlocks / 2 : Shape::kVBlocks) - kFirstV;
  static constexpr int kSums = kQueries / 2;  // of a thread's scores
  static constexpr float kLog2E = Keys::kLog2E;
  static constexpr std::uint32_t kPair = 1;  // barrier of both warpgroups

  const AttentionBackwardParams& p;
  const BackwardPlan& plan;
  const BackwardLayout<Shape>& shared;

  Ring<Shape::kStages> at;            // the step's Q and dO
  Ring<Shape::kScoreSlots> scored;    // the step's dS
  Ring<Shape::kWeightSlots> weighed;  // and P
  Ring<Shape::kKeySlots> keys;        // the item's K
  Ring<1> values;                     // and V
  float grad_k[kOwnQk * 32], grad_v[kOwnV * 32];
  float scores[kSums];                                    // S^T, P^T
  float other[kSums];                                     // dP^T, dS^T
  std::uint32_t slope_of_cap[kModified ? kSums / 2 : 1];  // 1 - tanh^2, in fp16

  __device__ static void release(std::uint32_t barrier) { Keys::release(barrier); }
  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ static int warp() { return threadIdx.x % 128 / 32; }
  __device__ static void meet() { ptx::barrier_sync(kPair, 256); }

  /// x = (K or V) x (this warpgroup's rows of the step's Q or dO)^T, rows of kDim each.
  template <int kDim>
  __device__ void issue_scores(float (&x)[kSums], std::uint32_t keys_at, std::uint32_t queries_at) {
    const std::uint64_t a = ptx::matrix_descriptor(keys_at, 16, 1024);
    const std::uint64_t b = ptx::matrix_descriptor(queries_at + kGroup * kQueries * 128, 16, 1024);
    ptx::hold(x);
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d)
      ptx::wgmma_ss<T>(x, a + (d / 4 * Shape::kKvBlockBytes + d % 4 * 32) / 16,
                       b + (d / 4 * Shape::kQBlockBytes + d % 4 * 32) / 16, d > 0);
    ptx::wgmma_commit();
  }

  /// grad += (P^T or dS^T) x (the own columns, from block kFirst on, of the step's dO or Q).
  template <int kFirst, int kCount>
  __device__ void issue_gradient(float (&grad)[kCount], std::uint32_t from, std::uint32_t queries_at, bool accumulate) {
    const std::uint64_t a = ptx::matrix_descriptor(from, 16, 1024);
    const std::uint64_t b =
        ptx::matrix_descriptor(queries_at + kFirst * Shape::kQBlockBytes, Shape::kQBlockBytes, 1024);
    ptx::hold(grad);
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kBlockM / 16; ++n)
      ptx::wgmma_ss<T, false, true>(grad, a + n * 32 / 16, b + n * 2048 / 16, n > 0 || accumulate);
    ptx::wgmma_commit();
  }

  /// Rounds this warpgroup's 64 keys x 32 queries into lines of 64 queries.
  __device__ void put(const float (&x)[kSums], std::uint32_t to) const {
    const int row = warp() * 16 + lane() % 16;
#pragma unroll
    for (int n = 0; n < kQueries / 16; ++n) {
      std::uint32_t w[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) w[r] = pack<T>(x[8 * n + 2 * r], x[8 * n + 2 * r + 1]);
      const int chunk = 2 * (kGroup * (kQueries / 16) + n) + lane() / 16;
      ptx::stmatrix_x4(to + row * 128 + (chunk ^ (row & 7)) * 16, w[0], w[1], w[2], w[3]);
    }
    ptx::fence_proxy_async_shared();
  }

  /// Where the lane's queries begin in a step's -LSE or -D.
  __device__ const float* queries_row(std::uint32_t stage, int of_delta) const {
    return static_cast<const float*>(__cvta_shared_to_generic(shared.rows(stage))) + of_delta * kBlockM +
           kGroup * kQueries + 2 * (lane() % 4);
  }

  /// S^T of a tile of queries -> P^T, in `scores` and rounded in shared memory. `heads` of the group, with the own one,
  /// are left of the tile.
  __device__ void weigh(const BackwardItem& item, int tile, int heads, std::uint32_t stage) {
    const bool masked = Keys::is_masked(item, tile);
    const int first_key = item.n_tile * Shape::kBlockN + warp() * 16, first_query = tile * kBlockM + kGroup * kQueries;
    const AttentionParams& f = p.forward;
    const float* const lse = queries_row(stage, 0);
    const int h = (item.g + 1) * plan.group - heads;
    const float inner = kModified && f.softcap > 0.0f ? f.scale / f.softcap : 0.0f, outer = f.softcap * kLog2E;
    const bool capped = kModified && f.softcap > 0.0f, has_alibi = kModified && f.alibi_slopes;
    typename Keys::AlibiOfThread alibi;
    if (has_alibi) alibi = {f, item, h, first_key, first_query};
#pragma unroll
    for (int c = 0; c < kSums / 4; ++c) {
      const float2 row = *reinterpret_cast<const float2*>(lse + 8 * c);
      float factor[4] = {1.0f, 1.0f, 1.0f, 1.0f};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = scores[4 * c + e];
        float shift = e % 2 ? row.y : row.x;
        if constexpr (kModified) {
          if (has_alibi) shift = alibi.add(4 * c + e, shift);
          if (capped) {
            const float t = tanh_exp2(x * inner);
            factor[e] = 1.0f - t * t;
            x = ptx::exp2_approx(fmaf(t, outer, shift));
          } else {
            x = ptx::exp2_approx(fmaf(x, plan.scale_log2, shift));
          }
        } else {
          x = ptx::exp2_approx(fmaf(x, plan.scale_log2, shift));
        }
      }
      if constexpr (kModified) {
        slope_of_cap[2 * c] = pack<__half>(factor[0], factor[1]);
        slope_of_cap[2 * c + 1] = pack<__half>(factor[2], factor[3]);
      }
    }
    if (masked) {
      const Mask mask(item.range, first_key, first_query);
#pragma unroll
      for (int i = 0; i < kSums; ++i)
        if (mask.hides(i)) scores[i] = 0.0f;
    }
    if constexpr (kModified) {
      if (f.mask.data) {
#pragma unroll
        for (int n = 0; n < kQueries / 16; ++n)
          hide_by_words(f, item, h, first_key, first_query + 16 * n, reinterpret_cast<float(&)[8]>(scores[8 * n]));
      }
    }
    put(scores, shared.weights(weighed.slot()));
  }

  /// The scores of an item's first tile of queries.
  __device__ void open(const BackwardItem& item, int tile, int heads) {
    const std::uint32_t stage = at.slot();
    ptx::mbarrier_wait(shared.q_full(stage), at.parity());
    ptx::mbarrier_wait(shared.k_full(keys.slot()), keys.parity());
    issue_scores<Shape::kQkDim>(scores, shared.k(keys.slot()), shared.q(stage));
    ptx::mbarrier_wait(shared.v_full(), values.parity());
    ptx::mbarrier_wait(shared.grad_out_full(stage), at.parity());
    issue_scores<Shape::kVDim>(other, shared.v(), shared.grad_out(stage));
    ptx::wgmma_wait<1>();
    ptx::hold(scores);
    weigh(item, tile, heads, stage);
    ptx::wgmma_wait<0>();
    ptx::hold(other);
  }

  /// From P^T and dP^T of one tile of queries to those of the next one. kLast: no tile follows. No product is under way
  /// at the start or at the end, since ptxas serialises products that cross the back edge of a loop.
  template <bool kLast>
  __device__ void step(const BackwardItem& item, int next_tile, int heads, int accumulate) {
    const std::uint32_t stage = at.slot();
    if constexpr (kLast) {
      release(shared.k_empty(keys.slot()));
      release(shared.v_empty());
    }
    meet();
    issue_gradient<kFirstV>(grad_v, shared.weights(weighed.slot()), shared.grad_out(stage), accumulate);
    ++weighed.count;
    const float* const delta = queries_row(stage, 1);
#pragma unroll
    for (int c = 0; c < kSums / 4; ++c) {
      const float2 row = *reinterpret_cast<const float2*>(delta + 8 * c);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float weight = scores[4 * c + e];
        if constexpr (kModified) {
          const float2 factors = unpack_pair<__half>(slope_of_cap[2 * c + e / 2]);
          weight *= e % 2 ? factors.y : factors.x;
        }
        other[4 * c + e] = weight * (other[4 * c + e] + (e % 2 ? row.y : row.x));
      }
    }
    const std::uint32_t grad_s = scored.slot();
    ptx::mbarrier_wait(shared.grad_s_empty(grad_s), scored.parity() ^ 1);
    put(other, shared.grad_s(grad_s));
    __syncwarp();
    release(shared.grad_s_full(grad_s));
    ++scored.count;
    meet();
    ++at.count;
    if constexpr (!kLast) {
      ptx::mbarrier_wait(shared.q_full(at.slot()), at.parity());
      issue_scores<Shape::kQkDim>(scores, shared.k(keys.slot()), shared.q(at.slot()));
      ptx::mbarrier_wait(shared.grad_out_full(at.slot()), at.parity());
      issue_scores<Shape::kVDim>(other, shared.v(), shared.grad_out(at.slot()));
    }
    issue_gradient<kFirstQk>(grad_k, shared.grad_s(grad_s), shared.q(stage), accumulate);
    if constexpr (!kLast) {
      ptx::wgmma_wait<2>();
      ptx::hold(grad_v);
      ptx::hold(scores);
      release(shared.grad_out_empty(stage));
      weigh(item, next_tile, heads, at.slot());
    }
    ptx::wgmma_wait<0>();
    if constexpr (kLast) {
      ptx::hold(grad_v);
      release(shared.grad_out_empty(stage));
    } else {
      ptx::hold(other);
    }
    ptx::hold(grad_k);
    release(shared.q_empty(stage));
  }

  /// Stores this warpgroup's columns of dK and dV through the place of the weights, of which each warp has 2 KB.
  __device__ void store(const BackwardItem& item) const {
    const AttentionParams& f = p.forward;
    const std::uint32_t thread = Keys::thread_again();
    const int key_warp = static_cast<int>(thread) % 128 / 32, first_key = item.n_tile * Shape::kBlockN + 16 * key_warp;
    const std::uint32_t place = shared.weights(0) + (kGroup * 4 + key_warp) * 16 * 128;
    const std::int64_t begin = f.is_varlen_k() ? f.k_begin(item.b) : 0;
    FiniteCheck<> finite;
    const auto put_columns = [&](const auto& x, float factor, void* to, std::int64_t batch, std::int64_t head,
                                 std::int64_t token, int first_block, std::int64_t dim) {
      if (!to) return;
      constexpr int kDim = 2 * static_cast<int>(sizeof(x) / sizeof(x[0]));
      T* const row0 = static_cast<T*>(to) +
                      row_offset(f.is_varlen_k(), begin, item.b, item.g, first_key, batch, head, token) +
                      64 * first_block;
      store_by_lines<kDim>(x, factor, place, row0, token, item.range.k_len - first_key,
                           static_cast<int>(dim) - 64 * first_block, thread % 32, finite);
    };
    meet();  // the other warpgroup has read the weights
    put_columns(grad_v, 1.0f, p.grad_v, p.stride_grad_v_batch, p.stride_grad_v_head, p.stride_grad_v_token, kFirstV,
                f.head_dim_v);
    put_columns(grad_k, f.scale, p.grad_k, p.stride_grad_k_batch, p.stride_grad_k_head, p.stride_grad_k_token, kFirstQk,
                f.head_dim);
    finite.report(plan.not_finite);
    meet();  // before either writes weights again
  }

  /// Stores zeros: no query sees these keys.
  __device__ void store_zeros(const BackwardItem& item) const {
    const AttentionParams& f = p.forward;
    const int first_key = item.n_tile * Shape::kBlockN + kGroup * 32;
    const std::int64_t begin = f.is_varlen_k() ? f.k_begin(item.b) : 0;
    const auto zeros = [&](void* to, std::int64_t batch, std::int64_t head, std::int64_t token, std::int64_t dim) {
      if (to)
        store_zero_rows(
            static_cast<T*>(to) + row_offset(f.is_varlen_k(), begin, item.b, item.g, first_key, batch, head, token),
            token, min(32, item.range.k_len - first_key), static_cast<int>(dim), threadIdx.x % 128, 128);
    };
    zeros(p.grad_v, p.stride_grad_v_batch, p.stride_grad_v_head, p.stride_grad_v_token, f.head_dim_v);
    zeros(p.grad_k, p.stride_grad_k_batch, p.stride_grad_k_head, p.stride_grad_k_token, f.head_dim);
  }

  __device__ void run() {
    at = {};
    scored = {};
    weighed = {};
    keys = {};
    values = {};
    for (Ring<BackwardLayout<Shape>::kItems> items;; ++items.count) {
      ptx::mbarrier_wait(shared.item_full(items.slot()), items.parity());
      const BackwardItem& item = *shared.item(items.slot());
      const int steps = item.steps;
      if (steps < 0) return;
      if (steps == 0) {
        store_zeros(item);
        ptx::mbarrier_arrive(shared.item_empty(items.slot()));
        continue;
      }
      int tile = item.first_tile + item.tiles - 1, heads = plan.group;  // heads: left of the tile
      open(item, tile, heads);
#pragma unroll 1
      for (int s = 0; s < steps - 1; ++s) {
        if (--heads == 0) heads = plan.group, --tile;
        step<false>(item, tile, heads, s);
      }
      step<true>(item, 0, 0, steps - 1);
      ++keys.count, ++values.count;
      store(item);
      ptx::mbarrier_arrive(shared.item_empty(items.slot()));
    }
  }
};

}  // namespace flashkernel::cuda::sm90a
