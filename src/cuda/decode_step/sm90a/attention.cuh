// Attention in the decode step: one query over a part of the keys of a sequence and kv head, for all heads that share
// it. A unit is a part; those that merge read how many parts a sequence has from its length (linear.cuh). Keys are
// shared by the warps, and within a warp by groups of lanes, each of which holds a whole row, 8 elements a lane.
#pragma once

#include "cuda/decode_step/sm90a/block.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/math.cuh"

namespace flashkernel::cuda::decode_step {

template <class T, int D>
class PartOfKeys {
 public:
  static constexpr int kLanes = D / 8, kPerWarp = kWarp / kLanes, kPerBlock = kPerWarp * kWarps, kAtOnce = 2;

  __device__ PartOfKeys(const Run& run, int layer, int unit, const Shared& shared)
      : run_(run), layer_(static_cast<std::uint32_t>(layer)) {
    const int heads = run.g.heads_kv;
    part_ = unit / (run.g.rows * heads);  // all first parts before the second ones
    row_ = unit / heads % run.g.rows;
    kv_head_ = unit % heads;
    length_ = shared.lengths[row_];
    parts_ = shared.parts[row_];
    const int keys = keys_of_part(length_, run.g.parts);
    first_ = part_ * keys;
    end_ = min(first_ + keys, length_);
    own_ = static_cast<int>(threadIdx.x) / kLanes;
    element_ = static_cast<int>(threadIdx.x) % kLanes * 8;
  }
  __device__ bool empty() const { return first_ >= end_; }
  /// Whether the row sees no key; this unit writes what attention gives then.
  __device__ bool nothing_to_see() const { return length_ <= 0 && part_ == 0; }

  /// Where a key or value lies.
  template <bool kKeys>
  __device__ const T* row(int key) const {
    const DecodeStepParams& p = run_.p;
    const auto block = run_.page_size.divide(static_cast<std::uint32_t>(key));
    const std::int64_t page = p.block_table[row_ * p.stride_block_table + block];
    const std::int64_t slot = key - static_cast<std::int64_t>(block) * p.page_size;
    return static_cast<const T*>(kKeys ? p.k_pages : p.v_pages) +
           layer_ * (kKeys ? p.stride_k_layer : p.stride_v_layer) + page * (kKeys ? p.stride_k_page : p.stride_v_page) +
           slot * (kKeys ? p.stride_k_slot : p.stride_v_slot) + kv_head_ * (kKeys ? p.stride_k_head : p.stride_v_head) +
           element_;
  }
  /// The keys or values from `base` on, kAtOnce a lane: those of earlier steps if `old`, that of this step if `made`.
  template <bool kKeys>
  __device__ void load(uint4 (&to)[kAtOnce], int base, bool old, bool made) const {
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int key = base + own_ + n * kPerBlock;
      if (old) to[n] = make_uint4(0, 0, 0, 0);
      if (key < end_ && (key == length_ - 1 ? made : old)) to[n] = load_eight(row<kKeys>(key));
    }
  }
  /// Before the wait: the first ones to registers, the others to L2.
  __device__ void load_old() {
    if (element_ % 64 == 0)
#pragma unroll 1
      for (int key = first_ + own_ + kAtOnce * kPerBlock; key < end_; key += kPerBlock) {
        ptx::prefetch_l2(row<true>(key));
        ptx::prefetch_l2(row<false>(key));
      }
    load<true>(k, first_, true, false);
    load<false>(v, first_, true, false);
    ptx::settle(layer_);  // addresses are worked out again behind the wait: registers
  }

  /// Heads `from` to from + kHeadsAtOnce of the group. `fresh`: load_old has been called, and nothing else since.
  __device__ void compute(int from, bool fresh, Shared& shared) {
    const int group = run_.g.heads_q / run_.g.heads_kv, heads = min(kHeadsAtOnce, group - from);
    float sum[kHeadsAtOnce][8] = {}, most[kHeadsAtOnce], total[kHeadsAtOnce] = {};
    const T* const queries = static_cast<const T*>(run_.q) +
                             (static_cast<std::int64_t>(row_) * run_.g.heads_q + kv_head_ * group + from) * D +
                             element_;
    const float scale = run_.p.scale * 1.4426950408889634f;  // log2 e
    uint4 q[kHeadsAtOnce];
    load<true>(k, first_, !fresh, true);
    load<false>(v, first_, !fresh, true);
#pragma unroll
    for (int h = 0; h < kHeadsAtOnce; ++h) {
      most[h] = -INFINITY;
      q[h] = h < heads ? load_eight(queries + h * D) : make_uint4(0, 0, 0, 0);
    }
    // All lanes of the block go round as often as the first.
#pragma unroll 1
    for (int base = first_; base < end_; base += kAtOnce * kPerBlock) {
      float score[kHeadsAtOnce][kAtOnce];
#pragma unroll
      for (int h = 0; h < kHeadsAtOnce; ++h) {
        float query[8];
        ptx::settle(q[h].x), ptx::settle(q[h].y), ptx::settle(q[h].z), ptx::settle(q[h].w);  // widened again each time
        widen<T>(query, q[h]);
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          float values[8], dot = 0;
          widen<T>(values, k[n]);
          const bool seen = base + own_ + n * kPerBlock < end_;
#pragma unroll
          for (int i = 0; i < 8; ++i) dot += query[i] * values[i];
#pragma unroll
          for (int lane = kLanes / 2; lane > 0; lane /= 2) dot += __shfl_xor_sync(kFullMask, dot, lane);
          score[h][n] = seen ? dot * scale : -INFINITY;
        }
      }
      const int next = base + kAtOnce * kPerBlock;
      ptx::settle(layer_);
      if (next < end_) load<true>(k, next, true, true);  // under way meanwhile
#pragma unroll
      for (int h = 0; h < kHeadsAtOnce; ++h) {
        float largest = most[h];
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) largest = larger(largest, score[h][n]);
        const float point = largest == -INFINITY ? 0.0f : largest, before = ptx::exp2_approx(most[h] - point);
        most[h] = largest;
        total[h] *= before;
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[h][i] *= before;
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          score[h][n] = ptx::exp2_approx(score[h][n] - point);  // its weight from here on
          total[h] += score[h][n];
        }
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        float values[8];
        widen<T>(values, v[n]);
#pragma unroll
        for (int h = 0; h < kHeadsAtOnce; ++h)
#pragma unroll
          for (int i = 0; i < 8; ++i) sum[h][i] += score[h][n] * values[i];
      }
      if (next < end_) load<false>(v, next, true, true);
    }
    join_lanes(sum, most, total);
    leave(sum, most, total, shared);
    meet();
    write(kv_head_ * group + from, heads, shared);
    meet();  // what comes next may write there
  }

  /// Zeros for all heads of the group; NaN where the row's length or pages can't be.
  __device__ void write_nothing() const {
    const int group = run_.g.heads_q / run_.g.heads_kv;
    T* const to =
        static_cast<T*>(run_.attended) + (static_cast<std::int64_t>(row_) * run_.g.heads_q + kv_head_ * group) * D;
#pragma unroll 1
    for (int at = static_cast<int>(threadIdx.x); at < group * D; at += kConsumers)
      to[at] = from_float<T>(length_ < 0 ? NAN : 0.0f);
  }

 private:
  /// NaN wins.
  static __device__ float larger(float a, float b) { return a != a ? a : b != b ? b : fmaxf(a, b); }

  /// The keys of a warp's groups of lanes.
  static __device__ void join_lanes(float (&sum)[kHeadsAtOnce][8], float (&most)[kHeadsAtOnce],
                                    float (&total)[kHeadsAtOnce]) {
#pragma unroll
    for (int lane = kLanes; lane < kWarp; lane *= 2)
#pragma unroll
      for (int h = 0; h < kHeadsAtOnce; ++h) {
        const float other = __shfl_xor_sync(kFullMask, most[h], lane), now = larger(most[h], other);
        const float base = now == -INFINITY ? 0.0f : now, mine = ptx::exp2_approx(most[h] - base),
                    its = ptx::exp2_approx(other - base);
        most[h] = now;
        total[h] = mine * total[h] + its * __shfl_xor_sync(kFullMask, total[h], lane);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[h][i] = mine * sum[h][i] + its * __shfl_xor_sync(kFullMask, sum[h][i], lane);
      }
  }
  __device__ void leave(const float (&sum)[kHeadsAtOnce][8], const float (&most)[kHeadsAtOnce],
                        const float (&total)[kHeadsAtOnce], Shared& shared) const {
    const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
    if (lane >= kLanes) return;
#pragma unroll
    for (int h = 0; h < kHeadsAtOnce; ++h) {
      float* const to = &shared.attention.values[warp][h * D + element_];
      *reinterpret_cast<float4*>(to) = make_float4(sum[h][0], sum[h][1], sum[h][2], sum[h][3]);
      *reinterpret_cast<float4*>(to + 4) = make_float4(sum[h][4], sum[h][5], sum[h][6], sum[h][7]);
      if (lane == 0) shared.attention.most_and_sum[warp][h] = make_float2(most[h], total[h]);
    }
  }
  /// The sums of the warps: the result where the row has one part; else in fp32, and the logarithm (to base 2) of their
  /// total.
  __device__ void write(int head, int heads, const Shared& shared) const {
#pragma unroll 1
    for (int at = static_cast<int>(threadIdx.x); at < heads * D; at += kConsumers) {
      const int h = at / D;
      float most = -INFINITY, total = 0, sum = 0;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) most = larger(most, shared.attention.most_and_sum[warp][h].x);
      const float base = most == -INFINITY ? 0.0f : most;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) {
        const float2 of = shared.attention.most_and_sum[warp][h];
        const float weight = ptx::exp2_approx(of.x - base);
        total += weight * of.y;
        sum += weight * shared.attention.values[warp][at];
      }
      sum *= ptx::reciprocal_approx(total);
      const std::int64_t which = static_cast<std::int64_t>(row_) * run_.g.heads_q + head + h;
      if (parts_ == 1) {
        static_cast<T*>(run_.attended)[which * D + at % D] = from_float<T>(sum);
        continue;
      }
      const std::int64_t to = which * run_.g.parts + part_;
      run_.partial[to * D + at % D] = sum;
      if (at % D == 0) run_.lse[to] = base + log2f(total);
    }
  }

  const Run& run_;
  std::uint32_t layer_;
  int part_, row_, kv_head_, length_, parts_, first_, end_, own_, element_;
  uint4 k[kAtOnce], v[kAtOnce];
};

template <class T, int D>
__device__ inline void attention(const Run& run, const Instruction& ins, int phase, Shared& shared) {
  const int group = run.g.heads_q / run.g.heads_kv;
  bool waited = false;
#pragma unroll 1
  for (int unit = ins.first; unit < ins.first + ins.count; ++unit) {
    PartOfKeys<T, D> keys(run, ins.layer, unit, shared);
    keys.load_old();
    if (!waited) wait_for(run, ins, phase);
    waited = true;
    if (keys.nothing_to_see()) keys.write_nothing();
    if (keys.empty()) continue;
#pragma unroll 1
    for (int from = 0; from < group; from += kHeadsAtOnce) keys.compute(from, from == 0, shared);
  }
}

}  // namespace flashkernel::cuda::decode_step
