// A key warpgroup of the Hopper backward kernel: 64 keys, their dK and dV in registers, and every tile of queries that
// sees them. It works on transposed scores, so that P^T and dS^T are register operands of dV and dK; dS^T also goes to
// shared memory, for the dQ warpgroup.
//
//   S^T = K Q^T     P^T = exp2(..)                 dV += P^T dO
//   dP^T = V dO^T   dS^T = P^T * (dP^T - D)        dK += dS^T Q
//
// Order: the product for dV runs while dS^T of its step is computed, and the product for dK runs while the exponentials
// of the next step are computed. S^T and dP^T take the same registers, one after the other, and P^T is kept rounded.
// That makes room for 128 registers of dK and dV.
#pragma once

#include <type_traits>

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/attention/backward/sm90a/epilogue.cuh"
#include "cuda/attention/score_fast.cuh"

namespace flashkernel::cuda::sm90a {

/// Two rounded neighbours, widened.
template <class T>
__device__ inline float2 unpack_pair(std::uint32_t word);
template <>
__device__ inline float2 unpack_pair<__half>(std::uint32_t word) {
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}
template <>
__device__ inline float2 unpack_pair<__nv_bfloat16>(std::uint32_t word) {
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}

/// P^T of the pairs that the packed mask hides is zero, for 16 queries.
__device__ inline void hide_by_words(const AttentionParams& f, const BackwardItem& item, int h, int first_key,
                                     int first_query, float (&x)[8]) {
  const int lane = threadIdx.x % 32;
  if (first_key >= item.range.k_len) return;  // those are hidden as it is, and have no word
#pragma unroll
  for (int of = 0; of < 4; ++of) {
    const int query = min(first_query + 2 * (lane % 4) + of / 2 * 8 + of % 2, item.range.q_len - 1);
    const std::uint32_t shown = f.mask.row(item.b, h, query)[first_key / 32] >> (first_key % 32 + lane / 4);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if ((shown >> 8 * half & 1u) == 0) x[of / 2 * 4 + 2 * half + of % 2] = 0.0f;
  }
}

/// kModified: scores get a softcap, a bias, ALiBi or a packed mask.
template <class Shape, class T, bool kModified>
struct KeyConsumer {
  static constexpr int kBlockM = Shape::kBlockM, kQkDim = Shape::kQkDim, kVDim = Shape::kVDim;
  static constexpr int kSteps = kBlockM / 16;  // of 16 queries
  static constexpr float kLog2E = 1.4426950408889634f;
  // The factor of dP^T waits in shared memory, in fp16, where it is not the rounded P^T that dV takes. That is so under
  // a softcap, and of the other modified scores, for which there is no second kernel. It is also so for bf16: rounding
  // P^T to bf16 and then dS^T again would be too coarse. (JoinedConsumer keeps the factor in registers.)
  static constexpr bool kStash = !Shape::kJoined && (kModified || !std::is_same_v<T, __half>);

  const AttentionBackwardParams& p;
  const BackwardPlan& plan;
  const BackwardLayout<Shape>& shared;
  const int warpgroup;

  Ring<Shape::kStages> at;          // the step's Q and dO
  Ring<Shape::kScoreSlots> scored;  // the step's dS
  Ring<Shape::kKeySlots> keys;      // the item's K
  Ring<1> values;                   // and V
  float grad_k[kQkDim / 2], grad_v[kVDim / 2];
  float scores[kBlockM / 2];         // S^T, P^T; dP^T, dS^T
  std::uint32_t operand[kSteps][4];  // P^T, rounded, of dV; dS^T of dK

  // One arrival a warp.
  __device__ static void release(std::uint32_t barrier) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
  }
  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ static int warp() { return threadIdx.x % 128 / 32; }

  /// x = (this warpgroup's rows of K or V) x (the step's Q or dO)^T, rows of kDim each; only issues.
  template <int kDim>
  __device__ void issue_scores(float (&x)[kBlockM / 2], std::uint32_t keys_at, std::uint32_t queries_at) const {
    const std::uint64_t a = ptx::matrix_descriptor(keys_at + warpgroup * 64 * 128, 16, 1024);
    const std::uint64_t b = ptx::matrix_descriptor(queries_at, 16, 1024);
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d)
      ptx::wgmma_ss<T>(x, a + (d / 4 * Shape::kKvBlockBytes + d % 4 * 32) / 16,
                       b + (d / 4 * Shape::kQBlockBytes + d % 4 * 32) / 16, d > 0);
  }

  /// grad += from x (the step's dO or Q); only issues.
  template <int kSums>
  __device__ void issue_gradient(float (&grad)[kSums], const std::uint32_t (&from)[kSteps][4], std::uint32_t queries_at,
                                 bool accumulate) const {
    const std::uint64_t b = ptx::matrix_descriptor(queries_at, Shape::kQBlockBytes, 1024);
#pragma unroll
    for (int n = 0; n < kSteps; ++n) ptx::wgmma_rs<T, true>(grad, from[n], b + n * 2048 / 16, n > 0 || accumulate);
  }

  __device__ static void hold_operand(std::uint32_t (&from)[kSteps][4]) {
#pragma unroll
    for (int n = 0; n < kSteps; ++n) ptx::hold(from[n]);
  }

  /// Rounds `scores` into `operand`. Must be called after a wait for a barrier, which must come after the product that
  /// took the last operand. Otherwise ptxas would round before that product is done, and there are no registers for two
  /// operands; it moves nothing across a loop that waits.
  __device__ void round() {
#pragma unroll
    for (int n = 0; n < kSteps; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) operand[n][r] = pack<T>(scores[8 * n + 2 * r], scores[8 * n + 2 * r + 1]);
  }

  /// Where the lane's queries begin in the step's -LSE or -D: it has queries 8 n + 2 (lane % 4) and the next one.
  __device__ const float* queries_row(int of_delta) const {
    return static_cast<const float*>(__cvta_shared_to_generic(shared.rows(at.slot()))) + of_delta * kBlockM +
           2 * (lane() % 4);
  }

  /// A place of this thread inside the rows of its warp, where the step's dS^T will be: 16 bytes for 16 queries.
  __device__ uint4* stash(int n) const {
    return static_cast<uint4*>(__cvta_shared_to_generic(shared.grad_s(scored.slot()) + n / 4 * Shape::kScoreBlockBytes +
                                                        (warpgroup * 64 + warp() * 16) * 128 +
                                                        (n % 4 * 32 + lane()) * 16));
  }

  /// Which pairs of a tile a thread must mask. Query i sees key j when i + left <= j < i + right.
  struct Mask {
    int offset[2];      // of its two keys
    unsigned width[2];  // 0: past the end

    __device__ Mask(const KeyWindow& range, int first_key, int first_query) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int j = first_key + lane() / 4 + 8 * half;
        offset[half] = j - range.left - (first_query + 2 * (lane() % 4));
        width[half] = j < range.k_len ? static_cast<unsigned>(range.right) - static_cast<unsigned>(range.left) : 0;
      }
    }
    /// Element `element` of the fragment.
    __device__ bool hides(int element) const {
      const int half = element / 2 % 2, query = element / 4 * 8 + element % 2;
      return static_cast<unsigned>(offset[half] - query) >= width[half];
    }
  };

  /// S^T -> P^T in `scores`.
  __device__ void exponentials() {
    const float* const lse = queries_row(0);
#pragma unroll
    for (int n = 0; n < kBlockM / 8; ++n) {
      const float2 shift = *reinterpret_cast<const float2*>(lse + 8 * n);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = scores[4 * n + e];
        x = ptx::exp2_approx(fmaf(x, plan.scale_log2, e % 2 ? shift.y : shift.x));
      }
    }
  }

  /// What ALiBi adds to the thread's scores, in base 2: slope times the distance, which for its element 0 is `first`.
  struct AlibiOfThread {
    float slope, first;
    bool is_signed;

    AlibiOfThread() = default;
    __device__ AlibiOfThread(const AttentionParams& f, const BackwardItem& item, int h, int first_key,
                             int first_query) {
      slope = -kLog2E * f.alibi_slopes[item.b * f.stride_alibi_batch + h];
      first = static_cast<float>(first_query + 2 * (lane() % 4) + item.range.k_len - item.range.q_len -
                                 (first_key + lane() / 4));
      is_signed = f.alibi == Alibi::kSigned;
    }
    __device__ float add(int element, float to) const {
      const int query = element / 4 * 8 + element % 2, key = element / 2 % 2 * 8;
      const float d = first + static_cast<float>(query - key);
      return fmaf(slope, is_signed ? d : fabsf(d), to);
    }
  };

  /// The same with ALiBi.
  __device__ void alibi_exponentials(const AlibiOfThread& alibi) {
    const float* const lse = queries_row(0);
#pragma unroll
    for (int n = 0; n < kBlockM / 8; ++n) {
      const float2 shift = *reinterpret_cast<const float2*>(lse + 8 * n);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = scores[4 * n + e];
        x = ptx::exp2_approx(fmaf(x, plan.scale_log2, alibi.add(4 * n + e, e % 2 ? shift.y : shift.x)));
      }
    }
  }

  /// The same with an additive bias, of which the thread reads what belongs to its two keys.
  __device__ void bias_exponentials(const BackwardItem& item, int h, int first_key, int first_query) {
    const AttentionParams& f = p.forward;
    const int key = first_key + lane() / 4, last_key = item.range.k_len - 1, last_query = item.range.q_len - 1;
    const T* const bias = static_cast<const T*>(f.bias.data) + item.b * f.bias.stride_batch + h * f.bias.stride_head;
    const int of_keys[2] = {min(key, last_key), min(key + 8, last_key)};
    const int stride = static_cast<int>(f.bias.stride_q);  // a head has less than 2^31 elements
    const float* const lse = queries_row(0);
#pragma unroll
    for (int n = 0; n < kBlockM / 8; ++n) {
      const float2 shift = *reinterpret_cast<const float2*>(lse + 8 * n);
      const int query = first_query + 8 * n + 2 * (lane() % 4);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int at = min(query + e % 2, last_query) * stride + of_keys[e / 2];
        float& x = scores[4 * n + e];
        x = ptx::exp2_approx(fmaf(x, plan.scale_log2, fmaf(to_float(bias[at]), kLog2E, e % 2 ? shift.y : shift.x)));
      }
    }
  }

  /// The same under a softcap, c tanh(s / c); `scores` become P^T, and P^T (1 - tanh^2) goes to shared memory.
  /// `hide(n, x)` makes zeros of what is hidden of 16 queries.
  template <class Hide>
  __device__ void capped_exponentials(const Hide& hide) {
    const AttentionParams& f = p.forward;
    const float inner = f.scale / f.softcap, outer = f.softcap * kLog2E;
    const float* const lse = queries_row(0);
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
      float derivative[8];
      auto& x = reinterpret_cast<float(&)[8]>(scores[8 * n]);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float2 shift = *reinterpret_cast<const float2*>(lse + 16 * n + e / 4 * 8);
        const float t = tanh_exp2(x[e] * inner);
        x[e] = ptx::exp2_approx(fmaf(t, outer, e % 2 ? shift.y : shift.x));
        derivative[e] = 1.0f - t * t;
      }
      hide(n, x);
#pragma unroll
      for (int e = 0; e < 8; ++e) derivative[e] *= x[e];
      keep(n, derivative);
    }
  }

  __device__ void keep(int n, const float (&x)[8]) {
    *stash(n) =
        uint4{pack<__half>(x[0], x[1]), pack<__half>(x[2], x[3]), pack<__half>(x[4], x[5]), pack<__half>(x[6], x[7])};
  }

  /// dP^T -> dS^T in `scores`.
  __device__ void differentiate() {
    const float* const delta = queries_row(1);
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
      uint4 kept;
      if constexpr (kStash) kept = *stash(n);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float2 shift = *reinterpret_cast<const float2*>(delta + 16 * n + r / 2 * 8);
        float2 weight;
        if constexpr (kStash)
          weight = unpack_pair<__half>(r == 0 ? kept.x : r == 1 ? kept.y : r == 2 ? kept.z : kept.w);
        else
          weight = unpack_pair<T>(operand[n][r]);
        float* const x = &scores[8 * n + 2 * r];
        x[0] = weight.x * (x[0] + shift.x);
        x[1] = weight.y * (x[1] + shift.y);
      }
    }
  }

  /// dS^T to shared memory, for the dQ warpgroup.
  __device__ void hand_over() {
    if constexpr (kStash) __syncwarp();  // the warp has read what it left here
    const int row = warpgroup * 64 + warp() * 16 + lane() % 16;
    const std::uint32_t line = shared.grad_s(scored.slot()) + row * 128;
#pragma unroll
    for (int n = 0; n < kSteps; ++n)
      ptx::stmatrix_x4(line + n / 4 * Shape::kScoreBlockBytes + ((2 * (n % 4) + lane() / 16) ^ (row & 7)) * 16,
                       operand[n][0], operand[n][1], operand[n][2], operand[n][3]);
    ptx::fence_proxy_async_shared();
    __syncwarp();
    release(shared.grad_s_full(scored.slot()));
    ++scored.count;
  }

  /// Whether some pairs of a tile of queries are hidden. This is worked out before the wait for the scores: between the
  /// scores and the exponentials it took 2 to 7 % of a call.
  __device__ static std::uint32_t is_masked(const BackwardItem& item, int tile) {
    std::uint32_t masked = (tile < item.first_whole) | (tile >= item.last_whole);
    ptx::hold(masked);
    return masked;
  }

  /// P^T of the pairs that a block mask hides is zero. The step's record is read again here: kept from where the tile
  /// was read, it would be spilled.
  __device__ void hide_blocks(const BackwardItem& item, int first_key, int first_query) {
    const AttentionParams& f = p.forward;
    const SparseStep* const of = shared.step(at.slot());
    const unsigned states = of->states(warpgroup);
    if (states == kAllWhole) return;
    constexpr int kWords = kBlockM == 64 ? 2 : 1;  // at a time: more would be spilled with more queries
#pragma unroll
    for (int q = 0; q < kBlockM; q += 32 * kWords) {
      const unsigned state = states >> q / 64 * 2 & 3;
      if (state == kBlockWhole) continue;
      // A word has the bits of the warp's 16 keys for one query. A lane reads those of kWords queries, for all lanes.
      std::uint32_t words[kWords] = {};
      if (state == kBlockShown && first_key < item.range.k_len) {  // a head's words: less than 2^31
        std::uint32_t query = first_query + q + lane();
        ptx::hold(query);  // or all words are read before the first is used, and spilled
        const std::uint32_t* const from = f.mask.row(item.b, item.g * plan.group + of->head(), 0) + first_key / 32;
        const int stride = static_cast<int>(f.mask.stride_q), last = item.range.q_len - 1;
#pragma unroll
        for (int m = 0; m < kWords; ++m)
          words[m] = from[min(static_cast<int>(query) + 32 * m, last) * stride] >> first_key % 32;
      }
#pragma unroll
      for (int n = q / 16; n < q / 16 + 2 * kWords; ++n)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int from = n % 2 * 16 + 2 * (lane() % 4) + r / 2 * 8 + r % 2;
          const std::uint32_t shown = __shfl_sync(kFullMask, words[n / 2 % kWords], from) >> lane() / 4;
#pragma unroll
          for (int half = 0; half < 2; ++half)
            if ((shown >> 8 * half & 1u) == 0) scores[8 * n + r / 2 * 4 + 2 * half + r % 2] = 0.0f;
        }
    }
  }
  /// The states of a step that hides nothing.
  static constexpr unsigned kAllWhole = Shape::kBlockM == 128 ? 0xa : 0x2;

  /// S^T of a tile of queries -> P^T in `scores`. `heads` of its group, with its own one, are left of the tile.
  __device__ void weigh(const BackwardItem& item, int tile, int heads, bool masked) {
    if constexpr (kStash) ptx::mbarrier_wait(shared.grad_s_empty(scored.slot()), scored.parity() ^ 1);
    const int first_key = item.n_tile * Shape::kBlockN + warpgroup * 64 + warp() * 16, first_query = tile * kBlockM;
    if constexpr (kModified) {
      const AttentionParams& f = p.forward;
      const int h = (item.g + 1) * plan.group - heads;
      const auto hide = [&](int n, float(&x)[8]) {
        if (masked) {
          const Mask mask(item.range, first_key, first_query);
#pragma unroll
          for (int e = 0; e < 8; ++e)
            if (mask.hides(8 * n + e)) x[e] = 0.0f;
        }
        if (f.mask.data) hide_by_words(f, item, h, first_key, first_query + 16 * n, x);
      };
      if (f.softcap > 0.0f) return capped_exponentials(hide);
      if (f.bias.data)
        bias_exponentials(item, h, first_key, first_query);
      else if (f.alibi_slopes)
        alibi_exponentials({f, item, h, first_key, first_query});
      else
        exponentials();
#pragma unroll
      for (int n = 0; n < kSteps; ++n) {
        auto& x = reinterpret_cast<float(&)[8]>(scores[8 * n]);
        hide(n, x);
        keep(n, x);
      }
    } else {
      exponentials();
      if (masked) {
        const Mask mask(item.range, first_key, first_query);
#pragma unroll
        for (int i = 0; i < kBlockM / 2; ++i)
          if (mask.hides(i)) scores[i] = 0.0f;
      }
      if constexpr (Shape::kSparse) hide_blocks(item, first_key, first_query);
      if constexpr (kStash) {
#pragma unroll
        for (int n = 0; n < kSteps; ++n) keep(n, reinterpret_cast<const float(&)[8]>(scores[8 * n]));
      }
    }
  }

  /// With a block mask, the step whose Q is there says which tile it is.
  __device__ void find_tile(const BackwardItem& item, int& tile, std::uint32_t& masked) const {
    if constexpr (Shape::kSparse) {
      tile = shared.step(at.slot())->tile();
      masked = is_masked(item, tile);
    }
  }

  /// The scores of an item's first tile of queries.
  __device__ void open(const BackwardItem& item, int tile, int heads) {
    ptx::mbarrier_wait(shared.q_full(at.slot()), at.parity());
    std::uint32_t masked = is_masked(item, tile);
    find_tile(item, tile, masked);
    ptx::mbarrier_wait(shared.k_full(keys.slot()), keys.parity());
    ptx::hold(scores);
    ptx::wgmma_fence();
    issue_scores<kQkDim>(scores, shared.k(keys.slot()), shared.q(at.slot()));
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(scores);
    weigh(item, tile, heads, masked);
    ptx::mbarrier_wait(shared.v_full(), values.parity());
  }

  /// From P^T of one tile of queries to P^T of the next one. kLast: no tile follows. No product is under way at the
  /// start or at the end, since ptxas serialises products that cross the back edge of a loop.
  template <bool kLast>
  __device__ void step(const BackwardItem& item, int next_tile, int heads, int accumulate) {
    const std::uint32_t stage = at.slot();
    ptx::mbarrier_wait(shared.grad_out_full(stage), at.parity());
    round();
    ptx::hold(scores);
    hold_operand(operand);
    ptx::hold(grad_v);
    ptx::wgmma_fence();
    issue_scores<kVDim>(scores, shared.v(), shared.grad_out(stage));
    ptx::wgmma_commit();
    issue_gradient(grad_v, operand, shared.grad_out(stage), accumulate);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    ptx::hold(scores);
    if constexpr (kLast) {
      release(shared.k_empty(keys.slot()));
      release(shared.v_empty());
    }
    differentiate();
    ptx::wgmma_wait<0>();
    ptx::hold(grad_v);
    hold_operand(operand);
    release(shared.grad_out_empty(stage));
    // In shared memory the other use of its place has been waited for already (kStash).
    ptx::mbarrier_wait(shared.grad_s_empty(scored.slot()), scored.parity() ^ 1);
    round();
    hand_over();

    ++at.count;
    std::uint32_t masked = 0;
    if constexpr (!kLast) masked = is_masked(item, next_tile);
    if constexpr (!kLast) ptx::mbarrier_wait(shared.q_full(at.slot()), at.parity());
    if constexpr (!kLast) find_tile(item, next_tile, masked);
    ptx::hold(scores);
    hold_operand(operand);
    ptx::hold(grad_k);
    ptx::wgmma_fence();
    if constexpr (!kLast) {
      issue_scores<kQkDim>(scores, shared.k(keys.slot()), shared.q(at.slot()));
      ptx::wgmma_commit();
    }
    issue_gradient(grad_k, operand, shared.q(stage), accumulate);
    ptx::wgmma_commit();
    if constexpr (!kLast) {
      ptx::wgmma_wait<1>();
      ptx::hold(scores);
      weigh(item, next_tile, heads, masked);
    }
    ptx::wgmma_wait<0>();
    ptx::hold(grad_k);
    hold_operand(operand);
    release(shared.q_empty(stage));
  }

  /// Calls put(x, factor, to, token stride, columns) for dK and for dV, where they are wanted; `to` is of `first_key`.
  template <class Put>
  __device__ void for_both(const BackwardItem& item, int first_key, const Put& put) const {
    const AttentionParams& f = p.forward;
    const std::int64_t begin = f.is_varlen_k() ? f.k_begin(item.b) : 0;
    const auto row0 = [&](void* to, std::int64_t batch, std::int64_t head, std::int64_t token) {
      return static_cast<T*>(to) + row_offset(f.is_varlen_k(), begin, item.b, item.g, first_key, batch, head, token);
    };
    if (p.grad_v)
      put(grad_v, 1.0f, row0(p.grad_v, p.stride_grad_v_batch, p.stride_grad_v_head, p.stride_grad_v_token),
          p.stride_grad_v_token, static_cast<int>(f.head_dim_v));
    if (p.grad_k)
      put(grad_k, f.scale, row0(p.grad_k, p.stride_grad_k_batch, p.stride_grad_k_head, p.stride_grad_k_token),
          p.stride_grad_k_token, static_cast<int>(f.head_dim));
  }

  /// threadIdx.x, read again for what is done once an item. If it were kept over the loop of steps, it would be
  /// spilled, or a register of the loop would.
  __device__ static std::uint32_t thread_again() {
    std::uint32_t thread = threadIdx.x;
    ptx::hold(thread);
    return thread;
  }

  /// Stores dK and dV through the place of the next dS, of which each warp has 2 KB.
  __device__ void store(const BackwardItem& item, Ring<Shape::kScoreSlots> next, std::uint32_t thread) const {
    const int key_warp = static_cast<int>(thread) / 32 - (Shape::kThreads / 32 - Shape::kKeyWarps);
    const int first_key = item.n_tile * Shape::kBlockN + 16 * key_warp;
    ptx::mbarrier_wait(shared.grad_s_empty(next.slot()), next.parity() ^ 1);
    const std::uint32_t place = shared.grad_s(next.slot()) + key_warp * 16 * 128;
    FiniteCheck<> finite;
    for_both(item, first_key, [&](const auto& x, float factor, T* to, std::int64_t token, int dim) {
      constexpr int kDim = 2 * static_cast<int>(sizeof(x) / sizeof(x[0]));
      store_by_lines<kDim>(x, factor, place, to, token, item.range.k_len - first_key, dim, thread % 32, finite);
    });
    finite.report(plan.not_finite);
  }

  /// Stores zeros: no query sees these keys.
  __device__ void store_zeros(const BackwardItem& item) const {
    const int first_key = item.n_tile * Shape::kBlockN + warpgroup * 64;
    for_both(item, first_key, [&](const auto&, float, T* to, std::int64_t token, int dim) {
      store_zero_rows(to, token, min(64, item.range.k_len - first_key), dim, threadIdx.x % 128, 128);
    });
  }

  __device__ void run() {
    at = {};
    scored = {};
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
      store(item, scored, thread_again());
      ptx::mbarrier_arrive(shared.item_empty(items.slot()));
    }
  }
};

}  // namespace flashkernel::cuda::sm90a
