// Prototype: attention backward on Hopper, head_dim 128, fp16, with two key warpgroups of 240 registers that make dQ
// themselves, and a producer. 128 keys a block, kBlockM (64 or 80) queries a step.
//
//   S^T = K Q^T, dP^T = V dO^T (rows of keys) -> P^T, dS^T as register operands of dV += P^T dO, dK += dS^T Q
//   dS to shared memory as rows of queries, 64 keys a line; dQ^T = K^T dS^T, 64 of the 128 columns a warpgroup
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>

#include "cuda/host/clusters.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/host/tensor_map.hpp"
#include "cuda/ptx/atomic.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90a/attention_bwd_epilogue.cuh"
#include "cuda/tile/vector.cuh"

namespace flashkernel::cuda::sm90a {
namespace proto {

/// Walks of the tiles of queries.
enum Walk : int { kDown = 0, kUp = 1, kSpread = 2 };

struct Plan {
  const __half *out, *grad_out;
  const float* lse;
  __half *dq, *dk, *dv;
  float *rows, *sums;
  int* ticket;
  long long* clocks;  // or null: per item and warpgroup, before and after its steps
  int batch, heads, seq, q_tiles, k_tiles, items, at_once, causal, walk, stagger;
  float scale, scale_log2;
};

/// kDelay: dQ of a step is made a step later, when the other warpgroup's dS has long been there. kLate: dK before dQ,
/// which is added under the next step's scores. kPrefetch: the next step's S is under way before dQ is added (in which
/// case P^T is made at the step's end). kBulk: dQ leaves by bulk reductions from shared memory. kInit: dP^T starts from -D.
/// kKeep: dS^T from P^T in fp32, not from P^T rounded. kLaterV: dV is issued after dS^T is there, not before dP^T is.
/// kCluster 2: two blocks with neighbouring tiles of keys each bring half of Q and dO for both; items by turns.
template <int kBlockM_, int kStages_, bool kDelay_, bool kLate_, bool kPrefetch_ = false, bool kBulk_ = false,
          bool kInit_ = false, bool kKeep_ = false, int kScoreSlots_ = 2, bool kLaterV_ = false,
          int kCluster_ = 1>
struct Shape {
  static constexpr int kBlockM = kBlockM_, kStages = kStages_, kBlockN = 128, kDim = 128;
  static constexpr bool kDelay = kDelay_, kLate = kLate_, kPrefetch = kPrefetch_, kBulk = kBulk_, kInit = kInit_;
  static constexpr bool kKeep = kKeep_, kLaterV = kLaterV_;
  static constexpr int kCluster = kCluster_;
  static constexpr int kScoreSlots = kScoreSlots_;
  static constexpr int kQBlockBytes = kBlockM * 128, kQBytes = 2 * kQBlockBytes;
  static constexpr int kKvBlockBytes = kBlockN * 128, kKvBytes = 2 * kKvBlockBytes;
  static constexpr int kHalfBytes = kBlockM * 128, kScoreBytes = 2 * kHalfBytes;
  static constexpr int kRowsBytes = 2 * kBlockM * 4;
  static constexpr int kWarpSum = kBlockM / 8 * 128;  // floats of dQ of a warp: kBlockM / 8 x 32 lanes x 4
  static constexpr int kTileSum = 8 * kWarpSum;
  static constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;
  static constexpr int kThreads = 384;
};

template <class S>
struct Layout {
  static constexpr int kItems = 2;
  static constexpr int kK = 0, kV = kK + S::kKvBytes, kQ = kV + S::kKvBytes, kGradOut = kQ + S::kStages * S::kQBytes;
  static constexpr int kGradS = kGradOut + S::kStages * S::kQBytes, kSum = kGradS + S::kScoreSlots * S::kScoreBytes;
  static constexpr int kRows = kSum + (S::kBulk ? S::kTileSum * 4 : 0);
  static constexpr int kBarrier = kRows + S::kStages * S::kRowsBytes;
  static constexpr int kBarriers = 5 + 4 * S::kStages + 2 * S::kScoreSlots + 2 * kItems;
  static constexpr int kItem = kBarrier + 8 * kBarriers, kBytes = kItem + 4 * kItems;
  static_assert(kBytes <= 227 * 1024, "a block of sm_90 has 227 KB");

  std::uint32_t base;
  __device__ std::uint32_t k() const { return base + kK; }
  __device__ std::uint32_t v() const { return base + kV; }
  __device__ std::uint32_t q(int stage) const { return base + kQ + stage * S::kQBytes; }
  __device__ std::uint32_t grad_out(int stage) const { return base + kGradOut + stage * S::kQBytes; }
  __device__ std::uint32_t grad_s(int slot) const { return base + kGradS + slot * S::kScoreBytes; }
  __device__ std::uint32_t rows(int stage) const { return base + kRows + stage * S::kRowsBytes; }
  __device__ std::uint32_t sum() const { return base + kSum; }
  __device__ std::uint32_t barrier(int i) const { return base + kBarrier + 8 * i; }
  __device__ std::uint32_t k_full() const { return barrier(0); }
  __device__ std::uint32_t k_empty() const { return barrier(1); }
  __device__ std::uint32_t v_full() const { return barrier(2); }
  __device__ std::uint32_t v_empty() const { return barrier(3); }
  __device__ std::uint32_t q_full(int stage) const { return barrier(4 + stage); }
  __device__ std::uint32_t q_empty(int stage) const { return q_full(S::kStages + stage); }
  __device__ std::uint32_t grad_out_full(int stage) const { return q_full(2 * S::kStages + stage); }
  __device__ std::uint32_t grad_out_empty(int stage) const { return q_full(3 * S::kStages + stage); }
  __device__ std::uint32_t grad_s_full(int slot) const { return q_full(4 * S::kStages + slot); }
  __device__ std::uint32_t grad_s_empty(int slot) const { return grad_s_full(S::kScoreSlots + slot); }
  __device__ std::uint32_t item_full(int slot) const { return grad_s_full(2 * S::kScoreSlots + slot); }
  __device__ std::uint32_t item_empty(int slot) const { return item_full(kItems + slot); }
  __device__ std::uint32_t done() const { return item_full(2 * kItems); }
  __device__ int* item(int slot) const {
    return static_cast<int*>(__cvta_shared_to_generic(base + kItem + 4 * slot));
  }
};

__device__ inline void wait(std::uint32_t barrier, std::uint32_t parity) { ptx::mbarrier_wait(barrier, parity); }

/// One thread runs this: ends the launch, after seconds, rather than let it hang. (In each wait it would cost registers.)
__device__ inline void watch(std::uint32_t done) {
#ifdef FK_EMULATED
  ptx::mbarrier_wait(done, 0);
#else
#pragma unroll 1
  for (int polls = 0; !ptx::mbarrier_try_wait(done, 0); ++polls) {
    __nanosleep(20000);
    if (polls > 60000) __trap();
  }
#endif
}

/// 128 keys of a head, and the tiles of queries that see them, in the order of the walk.
template <class S>
struct Decoded {
  int head, n_tile, first, tile, steps;
  __device__ Decoded(const Plan& p, int ticket) {
    const int k_tiles = (p.k_tiles + S::kCluster - 1) / S::kCluster;  // or pairs
    const int per_group = p.at_once * k_tiles, group = ticket / per_group, in_group = ticket % per_group;
    const int heads = min(p.at_once, p.batch * p.heads - group * p.at_once);
    head = group * p.at_once + in_group % heads;
    n_tile = in_group / heads * S::kCluster;
    first = p.causal ? n_tile * S::kBlockN / S::kBlockM : 0;
    steps = p.q_tiles - first;
    tile = p.walk == kDown ? p.q_tiles - 1 : first;
    if (p.walk == kSpread) tile += n_tile * steps / p.k_tiles;
    if (S::kCluster == 2) n_tile += blockIdx.x % 2;
  }
  __device__ int next(const Plan& p, int at) const {
    if (p.walk == kDown) return at - 1;
    return at == p.q_tiles - 1 ? first : at + 1;
  }
};

/// This block's half of a tile for both blocks of the cluster.
template <class S>
__device__ inline void load_half(std::uint32_t to, const CUtensorMap* map, std::uint32_t barrier, std::uint64_t policy,
                                 int row, int h, int b) {
  const int half = blockIdx.x % 2;
  ptx::tma_load_multicast(to + half * S::kQBlockBytes, map, barrier, 3, policy, half * 64, row, h, b);
}

template <class S>
__device__ inline void load_tile(std::uint32_t to, int block_bytes, const CUtensorMap* map, std::uint32_t barrier,
                                 std::uint64_t policy, int row, int h, int b) {
  ptx::tma_load(to, map, barrier, policy, 0, row, h, b);
  ptx::tma_load(to + block_bytes, map, barrier, policy, 64, row, h, b);
}

/// One thread runs this.
template <class S>
__device__ inline void produce(const Plan& p, const Layout<S>& shared, const CUtensorMap* map_q,
                               const CUtensorMap* map_k, const CUtensorMap* map_v, const CUtensorMap* map_grad_out) {
  const std::uint64_t keep = 0x14f0000000000000, pass = 0x12f0000000000000;  // evict last, evict first
  Ring<S::kStages> at;
  Ring<Layout<S>::kItems> items;
  for (;; ++items.count) {
    wait(shared.item_empty(items.slot()), items.parity() ^ 1);
    const int ticket = S::kCluster == 1 ? atomicAdd(p.ticket, 1)
                                        : static_cast<int>(blockIdx.x / 2 + items.count * (gridDim.x / 2));
    *shared.item(items.slot()) = ticket < p.items ? ticket : -1;
    ptx::mbarrier_arrive(shared.item_full(items.slot()));
    if (ticket >= p.items) return;
    const Decoded<S> item(p, ticket);
    const int b = item.head / p.heads, h = item.head % p.heads;
    int tile = item.tile;
#pragma unroll 1
    for (int left = item.steps; left > 0; --left, ++at.count, tile = item.next(p, tile)) {
      const int stage = static_cast<int>(at.slot());
      wait(shared.q_empty(stage), at.parity() ^ 1);
      ptx::mbarrier_arrive_expect(shared.q_full(stage), S::kQBytes + S::kRowsBytes);
      if constexpr (S::kCluster == 2)
        load_half<S>(shared.q(stage), map_q, shared.q_full(stage), keep, tile * S::kBlockM, h, b);
      else
        load_tile<S>(shared.q(stage), S::kQBlockBytes, map_q, shared.q_full(stage), keep, tile * S::kBlockM, h, b);
      ptx::bulk_load(shared.rows(stage),
                     p.rows + (static_cast<std::int64_t>(item.head) * p.q_tiles + tile) * (2 * S::kBlockM),
                     S::kRowsBytes, shared.q_full(stage));
      if (left == item.steps) {
        wait(shared.k_empty(), (items.count & 1) ^ 1);
        ptx::mbarrier_arrive_expect(shared.k_full(), S::kKvBytes);
        load_tile<S>(shared.k(), S::kKvBlockBytes, map_k, shared.k_full(), pass, item.n_tile * S::kBlockN, h, b);
        wait(shared.v_empty(), (items.count & 1) ^ 1);
        ptx::mbarrier_arrive_expect(shared.v_full(), S::kKvBytes);
        load_tile<S>(shared.v(), S::kKvBlockBytes, map_v, shared.v_full(), pass, item.n_tile * S::kBlockN, h, b);
      }
      wait(shared.grad_out_empty(stage), at.parity() ^ 1);
      ptx::mbarrier_arrive_expect(shared.grad_out_full(stage), S::kQBytes);
      if constexpr (S::kCluster == 2)
        load_half<S>(shared.grad_out(stage), map_grad_out, shared.grad_out_full(stage), keep, tile * S::kBlockM, h, b);
      else
        load_tile<S>(shared.grad_out(stage), S::kQBlockBytes, map_grad_out, shared.grad_out_full(stage), keep,
                     tile * S::kBlockM, h, b);
    }
  }
}

__device__ inline float2 halves(std::uint32_t word) { return __half22float2(*reinterpret_cast<const __half2*>(&word)); }

/// kMasked: some tiles have pairs to hide.
template <class S, bool kMasked>
struct Consumer {
  static constexpr int kBlockM = S::kBlockM, kSteps = kBlockM / 16, kDim = S::kDim;
  static constexpr bool kDelay = S::kDelay, kLate = S::kLate;

  const Plan& p;
  const Layout<S>& shared;
  const int warpgroup;

  Ring<S::kStages> at;
  Ring<S::kScoreSlots> scored;
  float grad_k[kDim / 2], grad_v[kDim / 2];
  float s[kBlockM / 2];  // S^T, P^T
  float t[kBlockM / 2];  // dP^T; dQ^T
  std::uint32_t weights[kSteps][4], operand[kSteps][4];  // P^T and dS^T, rounded
  int first_key, head;

  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ static int warp() { return threadIdx.x % 128 / 32; }
  __device__ static void release(std::uint32_t barrier) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
  }

  /// Of Q or dO: both blocks of the cluster are told.
  __device__ static void release_slot(std::uint32_t barrier) {
    if constexpr (S::kCluster == 2) {
      if (lane() < 2) ptx::mbarrier_arrive_cluster(ptx::map_shared(barrier, lane()));
    } else {
      release(barrier);
    }
  }

  // All of these only issue.
  __device__ void issue_scores(float (&x)[kBlockM / 2], std::uint32_t keys, std::uint32_t queries, bool accumulate) {
    const std::uint64_t a = ptx::matrix_descriptor(keys + warpgroup * 64 * 128, 16, 1024);
    const std::uint64_t b = ptx::matrix_descriptor(queries, 16, 1024);
    ptx::hold(x);
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d)
      ptx::wgmma_ss<__half>(x, a + (d / 4 * S::kKvBlockBytes + d % 4 * 32) / 16,
                            b + (d / 4 * S::kQBlockBytes + d % 4 * 32) / 16, accumulate || d > 0);
    ptx::wgmma_commit();
  }
  __device__ void issue_gradient(float (&grad)[kDim / 2], std::uint32_t (&from)[kSteps][4], std::uint32_t queries,
                                 bool accumulate) {
    const std::uint64_t b = ptx::matrix_descriptor(queries, S::kQBlockBytes, 1024);
#pragma unroll
    for (int n = 0; n < kSteps; ++n) ptx::hold(from[n]);
    ptx::hold(grad);
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kSteps; ++n) ptx::wgmma_rs<__half, true>(grad, from[n], b + n * 2048 / 16, n > 0 || accumulate);
    ptx::wgmma_commit();
  }
  __device__ void issue_grad_q(float (&x)[kBlockM / 2], std::uint32_t slot) {
    const std::uint64_t a = ptx::matrix_descriptor(shared.k() + warpgroup * S::kKvBlockBytes, 1024, 1024);
    const std::uint64_t b = ptx::matrix_descriptor(shared.grad_s(static_cast<int>(slot)), 16, 1024);
    ptx::hold(x);
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < S::kBlockN / 16; ++n)
      ptx::wgmma_ss<__half, true, false>(x, a + n * 2048 / 16, b + (n / 4 * S::kHalfBytes + n % 4 * 32) / 16, n > 0);
    ptx::wgmma_commit();
  }

  /// This lane's pairs: queries 8 n + 2 (lane % 4) and the next one.
  __device__ const float* queries_row(int of_delta) const {
    return static_cast<const float*>(__cvta_shared_to_generic(shared.rows(static_cast<int>(at.slot())))) +
           of_delta * kBlockM + 2 * (lane() % 4);
  }

  /// S^T of a tile -> P^T, and rounded.
  __device__ void weigh(int tile) {
    const float* const lse = queries_row(0);
#pragma unroll
    for (int n = 0; n < kBlockM / 8; ++n) {
      const float2 shift = *reinterpret_cast<const float2*>(lse + 8 * n);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = s[4 * n + e];
        x = ptx::exp2_approx(fmaf(x, p.scale_log2, e % 2 ? shift.y : shift.x));
      }
    }
    if constexpr (kMasked) {
      if ((p.causal && tile * kBlockM < first_key + S::kBlockN) || first_key + S::kBlockN > p.seq) {
        int ahead[2];  // key - query of element 0
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key = first_key + warpgroup * 64 + warp() * 16 + lane() / 4 + 8 * half;
          const int query = p.causal ? tile * kBlockM + 2 * (lane() % 4) : 0x20000000;
          ahead[half] = key < p.seq ? key - query : 0x20000000;
        }
#pragma unroll
        for (int i = 0; i < kBlockM / 2; ++i)
          if (ahead[i / 2 % 2] > i / 4 * 8 + i % 2) s[i] = 0.0f;
      }
    }
#pragma unroll
    for (int n = 0; n < kSteps; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) weights[n][r] = pack<__half>(s[8 * n + 2 * r], s[8 * n + 2 * r + 1]);
  }

  __device__ void start_from_delta() {
    const float* const delta = queries_row(1);
#pragma unroll
    for (int n = 0; n < kBlockM / 8; ++n) {
      const float2 shift = *reinterpret_cast<const float2*>(delta + 8 * n);
      t[4 * n] = t[4 * n + 2] = shift.x;
      t[4 * n + 1] = t[4 * n + 3] = shift.y;
    }
  }

  /// dP^T -> dS^T rounded.
  __device__ void differentiate() {
    const float* const delta = queries_row(1);
#pragma unroll
    for (int n = 0; n < kSteps; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int i = 8 * n + 2 * r;
        float x = t[i], y = t[i + 1];
        if constexpr (!S::kInit) {
          const float2 shift = *reinterpret_cast<const float2*>(delta + 16 * n + r / 2 * 8);
          x += shift.x, y += shift.y;
        }
        float2 weight;
        if constexpr (S::kKeep)
          weight = float2{s[i], s[i + 1]};
        else
          weight = halves(weights[n][r]);
        operand[n][r] = pack<__half>(weight.x * x, weight.y * y);
      }
  }

  /// dS^T to shared memory, transposed: a line a query.
  __device__ void hand_over() {
    const int slot = static_cast<int>(scored.slot());
    wait(shared.grad_s_empty(slot), scored.parity() ^ 1);
    const int row = lane() % 8 + lane() / 16 * 8, chunk = 2 * warp() + lane() / 8 % 2;
    const std::uint32_t to =
        shared.grad_s(slot) + warpgroup * S::kHalfBytes + row * 128 + (chunk ^ (lane() % 8)) * 16;
#pragma unroll
    for (int n = 0; n < kSteps; ++n)
      ptx::stmatrix_x4_trans(to + n * 2048, operand[n][0], operand[n][1], operand[n][2], operand[n][3]);
    ptx::fence_proxy_async_shared();
    __syncwarp();
    release(shared.grad_s_full(slot));
  }

  /// dQ^T in `t` to the tile's sums.
  __device__ void add(int tile) {
    float* const to = p.sums + (static_cast<std::int64_t>(head) * p.q_tiles + tile) * S::kTileSum +
                      (warpgroup * 4 + warp()) * S::kWarpSum;
    if constexpr (S::kBulk) {
      const std::uint32_t place = shared.sum() + (warpgroup * 4 + warp()) * S::kWarpSum * 4;
      float4* const mine = static_cast<float4*>(__cvta_shared_to_generic(place + lane() * 16));
      if (lane() == 0) ptx::bulk_wait_read<0>();
      __syncwarp();
#pragma unroll
      for (int c = 0; c < kBlockM / 8; ++c) mine[c * 32] = float4{t[4 * c], t[4 * c + 1], t[4 * c + 2], t[4 * c + 3]};
      ptx::fence_proxy_async_shared();
      __syncwarp();
      if (lane() == 0) {
        ptx::bulk_reduce_add(to, place, S::kWarpSum * 4);
        ptx::bulk_commit();
      }
    } else {
#pragma unroll
      for (int c = 0; c < kBlockM / 8; ++c)
        ptx::reduce_add_4(to + lane() * 4 + c * 128, t[4 * c], t[4 * c + 1], t[4 * c + 2], t[4 * c + 3]);
    }
  }

  /// One step. Nothing is under way at either end: ptxas serialises what crosses the loop's back edge. kFirst: no dQ of
  /// a step before. `due`: the tile whose dQ waits in `t`, or -1.
  template <bool kFirst>
  __device__ void step(int tile, int before, int due, int accumulate) {
    const int stage = static_cast<int>(at.slot());
    wait(shared.q_full(stage), at.parity());
    issue_scores(s, shared.k(), shared.q(stage), false);
    if constexpr (kLate && !kFirst) {
      if constexpr (!kDelay)
        add(before);
      else if (due >= 0)
        add(due);
    }
    wait(shared.grad_out_full(stage), at.parity());
    if constexpr (S::kInit) start_from_delta();
    issue_scores(t, shared.v(), shared.grad_out(stage), S::kInit);
    ptx::wgmma_wait<1>();
    ptx::hold(s);
    weigh(tile);
    if constexpr (!S::kLaterV) issue_gradient(grad_v, weights, shared.grad_out(stage), accumulate);
    ptx::wgmma_wait<!S::kLaterV>();
    ptx::hold(t);
    differentiate();
    hand_over();
    if constexpr (S::kLaterV) issue_gradient(grad_v, weights, shared.grad_out(stage), accumulate);
    const auto reading = kDelay ? scored.before() : scored;
    const int slot = static_cast<int>(reading.slot());
    if constexpr (kLate || (kDelay && kFirst)) {
      issue_gradient(grad_k, operand, shared.q(stage), accumulate);
      if constexpr (!(kDelay && kFirst)) {
        wait(shared.grad_s_full(slot), reading.parity());
        issue_grad_q(t, slot);
        ptx::wgmma_wait<1>();
        hold_gradients();
        release_slot(shared.grad_out_empty(stage));
        release_slot(shared.q_empty(stage));
        ptx::wgmma_wait<0>();
        ptx::hold(t);
        release(shared.grad_s_empty(slot));
      } else {
        ptx::wgmma_wait<0>();
        hold_gradients();
        release_slot(shared.grad_out_empty(stage));
        release_slot(shared.q_empty(stage));
      }
    } else {
      wait(shared.grad_s_full(slot), reading.parity());
      issue_grad_q(t, slot);
      issue_gradient(grad_k, operand, shared.q(stage), accumulate);
      ptx::wgmma_wait<1>();
      ptx::hold(t);
      ptx::hold(grad_v);
      release_slot(shared.grad_out_empty(stage));
      release(shared.grad_s_empty(slot));
      add(kDelay ? before : tile);
      ptx::wgmma_wait<0>();
      hold_gradients();
      release_slot(shared.q_empty(stage));
    }
    ++at.count, ++scored.count;
  }

  __device__ void hold_gradients() {
    ptx::hold(grad_v);
    ptx::hold(grad_k);
#pragma unroll
    for (int n = 0; n < kSteps; ++n) ptx::hold(weights[n]), ptx::hold(operand[n]);
  }

  /// The same with the next step's S issued before dK, so that something of this warpgroup is always under way: P^T is
  /// made at the end, under dK.
  template <bool kFirst, bool kLast>
  __device__ void step_ahead(int tile, int before, int next, int accumulate) {
    const int stage = static_cast<int>(at.slot());
    const std::uint32_t parity = at.parity();
    wait(shared.grad_out_full(stage), parity);
    issue_scores(t, shared.v(), shared.grad_out(stage), false);
    issue_gradient(grad_v, weights, shared.grad_out(stage), accumulate);
    ptx::wgmma_wait<1>();
    ptx::hold(t);
    differentiate();
    hand_over();
    constexpr bool kGradQ = !(kDelay && kFirst);
    const auto reading = kDelay ? scored.before() : scored;
    const int slot = static_cast<int>(reading.slot());
    if constexpr (kGradQ) {
      wait(shared.grad_s_full(slot), reading.parity());
      issue_grad_q(t, slot);
    }
    ptx::wgmma_wait<kGradQ>();
    ptx::hold(grad_v);
#pragma unroll
    for (int n = 0; n < kSteps; ++n) ptx::hold(weights[n]);
    release_slot(shared.grad_out_empty(stage));
    ++at.count;
    if constexpr (!kLast) {
      wait(shared.q_full(static_cast<int>(at.slot())), at.parity());
      issue_scores(s, shared.k(), shared.q(static_cast<int>(at.slot())), false);
    }
    issue_gradient(grad_k, operand, shared.q(stage), accumulate);
    if constexpr (kGradQ) {
      ptx::wgmma_wait<1 + !kLast>();
      ptx::hold(t);
      release(shared.grad_s_empty(slot));
      add(kDelay ? before : tile);
    }
    if constexpr (!kLast) {
      ptx::wgmma_wait<1>();
      ptx::hold(s);
      weigh(next);
    }
    ptx::wgmma_wait<0>();
    hold_gradients();
    release_slot(shared.q_empty(stage));
    ++scored.count;
  }

  __device__ void stamp(int end) {
#ifndef FK_EMULATED
    if (p.clocks && threadIdx.x % 128 == 0)
      p.clocks[((head * p.k_tiles + first_key / S::kBlockN) * 2 + warpgroup) * 2 + end] = clock64();
#endif
  }

  __device__ void last_grad_q(int tile) {
    const auto last = scored.before();
    wait(shared.grad_s_full(static_cast<int>(last.slot())), last.parity());
    issue_grad_q(t, last.slot());
    ptx::wgmma_wait<0>();
    ptx::hold(t);
    release(shared.grad_s_empty(static_cast<int>(last.slot())));
    add(tile);
  }

  __device__ void run() {
#ifndef FK_EMULATED
    if (warpgroup == 1 && p.stagger > 0) __nanosleep(p.stagger);
#endif
    at = {};
    scored = {};
    for (Ring<Layout<S>::kItems> items;; ++items.count) {
      const int item_slot = static_cast<int>(items.slot());
      wait(shared.item_full(item_slot), items.parity());
      const int ticket = *shared.item(item_slot);
      __syncwarp();
      release(shared.item_empty(item_slot));
      if (ticket < 0) break;
      const Decoded<S> item(p, ticket);
      first_key = item.n_tile * S::kBlockN;
      head = item.head;
      int tile = item.tile;
      wait(shared.k_full(), items.count & 1);
      stamp(0);
      if constexpr (S::kPrefetch) {
        const int stage = static_cast<int>(at.slot());
        wait(shared.q_full(stage), at.parity());
        issue_scores(s, shared.k(), shared.q(stage), false);
        ptx::wgmma_wait<0>();
        ptx::hold(s);
        weigh(tile);
        wait(shared.v_full(), items.count & 1);
        int before = -1;
        if constexpr (kDelay) {
          const int next = item.next(p, tile);
          if (item.steps == 1)
            step_ahead<true, true>(tile, -1, 0, 0);
          else
            step_ahead<true, false>(tile, -1, next, 0);
          before = tile, tile = next;
        }
#pragma unroll 1
        for (int i = kDelay; i < item.steps - 1; ++i) {
          const int next = item.next(p, tile);
          step_ahead<false, false>(tile, before, next, i);
          before = tile, tile = next;
        }
        if (!kDelay || item.steps > 1) {
          step_ahead<false, true>(tile, before, 0, item.steps - 1);
          before = tile;
        }
        if constexpr (kDelay) last_grad_q(before);
      } else {
        wait(shared.v_full(), items.count & 1);
        int before = -1, due = -1;
        if constexpr (kDelay || kLate) {
          step<true>(tile, -1, -1, 0);
          before = tile, tile = item.next(p, tile);
        }
#pragma unroll 1
        for (int i = kDelay || kLate; i < item.steps; ++i) {
          step<false>(tile, before, due, i);
          due = before;
          before = tile, tile = item.next(p, tile);
        }
        if constexpr (kLate && !kDelay) add(before);
        if constexpr (kLate && kDelay)
          if (due >= 0) add(due);
        if constexpr (kDelay) {
          last_grad_q(before);
        }
      }
      stamp(1);
      release(shared.k_empty());
      release(shared.v_empty());
      const int key = first_key + warpgroup * 64;
      const std::int64_t stride = static_cast<std::int64_t>(p.heads) * kDim;
      const std::int64_t row0 =
          (static_cast<std::int64_t>(head / p.heads) * p.seq + key) * stride + head % p.heads * kDim;
      FiniteCheck finite;
      store_fragment<kDim>(grad_v, 1.0f, p.dv + row0, stride, p.seq - key, kDim, finite);
      store_fragment<kDim>(grad_k, p.scale, p.dk + row0, stride, p.seq - key, kDim, finite);
    }
    if constexpr (S::kBulk)
      if (lane() == 0) ptx::bulk_wait<0>();
    release(shared.done());
  }
};

template <class S, bool kMasked>
__global__ void __launch_bounds__(S::kThreads, 1)
    bwd_kernel(const __grid_constant__ Plan p, const __grid_constant__ CUtensorMap map_q,
               const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_v,
               const __grid_constant__ CUtensorMap map_grad_out) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  const Layout<S> shared{ptx::shared_address(dynamic_shared)};
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(shared.k_full(), 1);
    ptx::mbarrier_init(shared.k_empty(), 8);
    ptx::mbarrier_init(shared.v_full(), 1);
    ptx::mbarrier_init(shared.v_empty(), 8);
    for (int i = 0; i < S::kStages; ++i) {
      ptx::mbarrier_init(shared.q_full(i), 1);
      ptx::mbarrier_init(shared.q_empty(i), 8 * S::kCluster);
      ptx::mbarrier_init(shared.grad_out_full(i), 1);
      ptx::mbarrier_init(shared.grad_out_empty(i), 8 * S::kCluster);
    }
    for (int i = 0; i < S::kScoreSlots; ++i) {
      ptx::mbarrier_init(shared.grad_s_full(i), 8);
      ptx::mbarrier_init(shared.grad_s_empty(i), 8);
    }
    for (int i = 0; i < Layout<S>::kItems; ++i) {
      ptx::mbarrier_init(shared.item_full(i), 1);
      ptx::mbarrier_init(shared.item_empty(i), 8);
    }
    ptx::mbarrier_init(shared.done(), 8);
    ptx::fence_mbarrier_init();
  }
  if constexpr (S::kCluster == 2) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }
  const int warpgroup = static_cast<int>(__shfl_sync(kFullMask, threadIdx.x / 128, 0));
  if (warpgroup == 0) {
    ptx::decrease_registers<S::kProducerRegisters>();
    if (threadIdx.x == 0) produce<S>(p, shared, &map_q, &map_k, &map_v, &map_grad_out);
    if (threadIdx.x == 32) watch(shared.done());
  } else {
    ptx::increase_registers<S::kConsumerRegisters>();
    Consumer<S, kMasked> consumer{p, shared, warpgroup - 1};
    consumer.run();
  }
  if constexpr (S::kCluster == 2) {  // nobody leaves while the other may still reach into its shared memory
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
}

/// -LSE in base 2 and -D of a tile of queries; its sums of dQ zeroed.
template <int kBlockM>
__global__ void __launch_bounds__(256) prepare(const __grid_constant__ Plan p) {
  const int head = blockIdx.x / p.q_tiles, tile = blockIdx.x % p.q_tiles;
  const int b = head / p.heads, h = head % p.heads;
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.ticket = 0;
  float4* const sums = reinterpret_cast<float4*>(p.sums + static_cast<std::int64_t>(blockIdx.x) * (kBlockM * 128));
  for (int i = threadIdx.x; i < kBlockM * 32; i += 256) sums[i] = float4{0.0f, 0.0f, 0.0f, 0.0f};
  float* const rows = p.rows + static_cast<std::int64_t>(blockIdx.x) * (2 * kBlockM);
  const int lane = threadIdx.x % 16;
#pragma unroll
  for (int row = threadIdx.x / 16; row < kBlockM; row += 16) {
    const int i = tile * kBlockM + row, from = min(i, p.seq - 1);
    const std::int64_t offset = ((static_cast<std::int64_t>(b) * p.seq + from) * p.heads + h) * 128 + lane * 8;
    float x[8], y[8], sum = 0.0f;
    load_floats(x, p.out + offset);
    load_floats(y, p.grad_out + offset);
#pragma unroll
    for (int e = 0; e < 8; ++e) sum = fmaf(x[e], y[e], sum);
#pragma unroll
    for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
    if (lane > 0) continue;
    const float lse = p.lse[static_cast<std::int64_t>(head) * p.seq + from];
    rows[row] = i < p.seq && lse != -INFINITY ? -1.4426950408889634f * lse : -INFINITY;
    rows[kBlockM + row] = i < p.seq ? -sum : 0.0f;
  }
}

/// dQ = scale * sums, from the order of the fragments to rows.
template <int kBlockM>
__global__ void __launch_bounds__(256) convert(const __grid_constant__ Plan p) {
  constexpr int kLine = 136;
  __shared__ __half tile[kBlockM * kLine];
  const int head = blockIdx.x / p.q_tiles, first = blockIdx.x % p.q_tiles * kBlockM;
  const int b = head / p.heads, h = head % p.heads;
  const float4* const sums =
      reinterpret_cast<const float4*>(p.sums + static_cast<std::int64_t>(blockIdx.x) * (kBlockM * 128));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int c = 0; c < kBlockM / 8; ++c) {
    const float4 x = sums[(warp * (kBlockM / 8) + c) * 32 + lane];
    __half* const to = tile + (8 * c + 2 * (lane % 4)) * kLine + 16 * warp + lane / 4;
    to[0] = __float2half(x.x * p.scale);
    to[kLine] = __float2half(x.y * p.scale);
    to[8] = __float2half(x.z * p.scale);
    to[kLine + 8] = __float2half(x.w * p.scale);
  }
  __syncthreads();
#pragma unroll
  for (int row = threadIdx.x / 16; row < kBlockM; row += 16) {
    if (first + row >= p.seq) break;
    *reinterpret_cast<uint4*>(p.dq + ((static_cast<std::int64_t>(b) * p.seq + first + row) * p.heads + h) * 128 +
                              lane % 16 * 8) = *reinterpret_cast<const uint4*>(tile + row * kLine + lane % 16 * 8);
  }
}

inline CUtensorMap rows_of(const void* data, const Plan& p, std::uint32_t box) {
  TensorMapSpec map;
  map.data = data;
  map.dtype = DType::kFloat16;
  map.rank = 4;
  const std::int64_t token = static_cast<std::int64_t>(p.heads) * 128;
  map.dims[0] = {128, 1, 64};
  map.dims[1] = {p.seq, token, box};
  map.dims[2] = {p.heads, 128, 1};
  map.dims[3] = {p.batch, token * p.seq, 1};
  return make_tensor_map("bwd", map);
}

struct Call {
  const void *q, *k, *v, *out, *grad_out, *lse;
  void *dq, *dk, *dv, *workspace, *clocks;
  int batch, seq, heads, causal, at_once, walk, stagger, sms;
  float scale;
  cudaStream_t stream;
};

inline std::int64_t tiles_of(std::int64_t seq, int block_m) { return (seq + block_m - 1) / block_m; }
inline std::int64_t workspace_bytes(std::int64_t heads, std::int64_t seq, int block_m) {
  return heads * tiles_of(seq, block_m) * block_m * (128 + 2) * 4 + 16;
}

template <class S>
void run_variant(const Call& c) {
  Plan p{};
  p.out = static_cast<const __half*>(c.out);
  p.grad_out = static_cast<const __half*>(c.grad_out);
  p.lse = static_cast<const float*>(c.lse);
  p.dq = static_cast<__half*>(c.dq), p.dk = static_cast<__half*>(c.dk), p.dv = static_cast<__half*>(c.dv);
  p.batch = c.batch, p.heads = c.heads, p.seq = c.seq, p.causal = c.causal, p.clocks = static_cast<long long*>(c.clocks), p.walk = c.walk, p.stagger = c.stagger;
  p.q_tiles = static_cast<int>(tiles_of(c.seq, S::kBlockM));
  p.k_tiles = static_cast<int>(tiles_of(c.seq, S::kBlockN));
  const std::int64_t heads = c.batch * c.heads, tiles = heads * p.q_tiles;
  p.items = static_cast<int>(heads * p.k_tiles);
  p.sums = static_cast<float*>(c.workspace);
  p.rows = p.sums + tiles * S::kTileSum;
  p.ticket = reinterpret_cast<int*>(p.rows + tiles * 2 * S::kBlockM);
  p.scale = c.scale, p.scale_log2 = c.scale * 1.4426950408889634f;
  std::int64_t steps = p.q_tiles, distance = 2;
  if (c.causal) {
    steps = (steps + 1) / 2;
    distance = std::clamp(p.k_tiles / 8, 2, 8);
  }
  const std::int64_t wanted =
      c.at_once > 0 ? std::min<std::int64_t>(c.at_once, heads)
                    : std::clamp<std::int64_t>(ceil_div(distance * c.sms, steps), 1, heads);
  p.at_once = static_cast<int>(ceil_div(heads, ceil_div(heads, wanted)));
  launch("bwd prepare", prepare<S::kBlockM>, {static_cast<unsigned>(tiles), 256, 0, c.stream}, p);
  const CUtensorMap q = rows_of(c.q, p, S::kBlockM), g = rows_of(c.grad_out, p, S::kBlockM);
  const CUtensorMap k = rows_of(c.k, p, S::kBlockN), v = rows_of(c.v, p, S::kBlockN);
  if (S::kCluster == 2) p.items = static_cast<int>(heads * ceil_div(p.k_tiles, 2));
  LaunchShape shape{static_cast<unsigned>(std::min(p.items, c.sms)), S::kThreads, Layout<S>::kBytes, c.stream};
  const auto kernel = c.causal || p.seq % (S::kBlockN * S::kCluster) != 0 ? bwd_kernel<S, true> : bwd_kernel<S, false>;
  if (S::kCluster == 2) {
    int device = 0;
    cudaGetDevice(&device);
    const int most = clusters_at_once("bwd", reinterpret_cast<const void*>(kernel), 2, S::kThreads, Layout<S>::kBytes, device);
    shape.grid = static_cast<unsigned>(2 * std::max(1, std::min({p.items, c.sms / 2, most}))), shape.cluster = 2;
  }
  launch("bwd", kernel, shape, p, q, k, v, g);
  launch("bwd convert", convert<S::kBlockM>, {static_cast<unsigned>(tiles), 256, 0, c.stream}, p);
}

struct Variant {
  const char* name;
  int block_m;
  void (*run)(const Call&);
};

#ifndef BWD_LIST
#define BWD_LIST "variants.inc"
#endif
const Variant kVariants[] = {
#define BWD_VARIANT(name, ...) {name, __VA_ARGS__::kBlockM, run_variant<__VA_ARGS__>},
#include BWD_LIST
#undef BWD_VARIANT
};
constexpr int kCount = static_cast<int>(sizeof(kVariants) / sizeof(kVariants[0]));

}  // namespace proto
}  // namespace flashkernel::cuda::sm90a

namespace proto = flashkernel::cuda::sm90a::proto;
#define BWD_EXPORT extern "C" __attribute__((visibility("default")))

BWD_EXPORT int bwd_count() { return proto::kCount; }
BWD_EXPORT const char* bwd_name(int variant) { return proto::kVariants[variant].name; }
BWD_EXPORT long long bwd_workspace(int variant, int batch, int seq, int heads) {
  return proto::workspace_bytes(static_cast<long long>(batch) * heads, seq, proto::kVariants[variant].block_m);
}
/// clocks: null, or [B * H * key tiles, 2 warpgroups, 2] int64, clocks before and after the steps. Returns
/// 0, or 1 with the reason on stderr. lse [B, H, S]; the rest [B, S, H, 128]. at_once 0: chosen; walk: 0 down, 1 up, 2
/// spread; stagger: nanoseconds that the second warpgroup sleeps at the start.
BWD_EXPORT int bwd(int variant, const void* q, const void* k, const void* v, const void* out, const void* grad_out,
                   const void* lse, void* dq, void* dk, void* dv, void* workspace, void* clocks, int batch, int seq, int heads,
                   int causal, float scale, int at_once, int walk, int stagger, int sms, void* stream) {
  try {
    proto::kVariants[variant].run({q, k, v, out, grad_out, lse, dq, dk, dv, workspace, clocks, batch, seq, heads, causal,
                                   at_once, walk, stagger, sms, scale, static_cast<cudaStream_t>(stream)});
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bwd: %s\n", e.what());
    return 1;
  }
}
