// Attention in the decode step: one query over a part of the keys of a sequence and kv head, for all heads that share
// it. A unit is a part; those that merge read how many parts a sequence has from its length (linear.cuh).
//
// Keys and values come to shared memory, kKeys at a time, by cp.async; those of earlier steps before the wait. Up to 8
// heads are the columns of m16n8k16; its rows are keys, and then elements of their values. A warp has 16 keys and 64
// elements; the warps' sums meet in shared memory.
#pragma once

#include "cuda/decode_step/sm90a/block.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/matrix.cuh"

namespace flashkernel::cuda::decode_step {

template <class T, int D>
class PartOfKeys {
 public:
  static constexpr int kWarpKeys = 16, kWarpElements = 64, kElementGroups = D / kWarpElements;
  static constexpr int kKeyGroups = kWarps / kElementGroups, kKeys = kKeyGroups * kWarpKeys;  // of warps; in memory
  static constexpr int kTiles = kWarpElements / 16;
  static constexpr int kPitch = D + 4;  // of sums in memory: a warp's stores meet no bank twice
  static constexpr int kChunks = D / 8, kKeysAPass = kConsumers / kChunks, kPasses = kKeys / kKeysAPass;
  static_assert(2 * kKeys * D * 2 <= sizeof(Shared::attention.rows));
  static_assert(kKeyGroups * kHeadsAtOnce * kPitch <= sizeof(Shared::attention.values) / sizeof(float));

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
  }
  __device__ bool empty() const { return first_ >= end_; }
  /// Whether the row sees no key; this unit writes what attention gives then.
  __device__ bool nothing_to_see() const { return length_ <= 0 && part_ == 0; }

  /// Before the wait: the first keys and values to shared memory, all but those of this step, the others to L2.
  __device__ void bring_old(Shared& shared) {
    bring(first_, false, shared);
    made_page_ = page_of(length_ - 1);
    if (chunk() % 8 == 0)
#pragma unroll 1
      for (int key = first_ + kKeys + own(); key < end_; key += kKeysAPass) {
        ptx::prefetch_l2(row<true>(key, page_of(key)));
        ptx::prefetch_l2(row<false>(key, page_of(key)));
      }
  }

  /// Heads `from` to from + kHeadsAtOnce of the group. `fresh`: bring_old has been called, and nothing else since.
  __device__ void compute(int from, bool fresh, Shared& shared) {
    const int group = run_.g.heads_q / run_.g.heads_kv, heads = min(kHeadsAtOnce, group - from);
    if (fresh)
      bring_made(shared);
    else
      bring(first_, true, shared);
    load_queries(kv_head_ * group + from, heads);
    float sums[kTiles][4] = {}, most[2] = {-INFINITY, -INFINITY}, total[2] = {};
#pragma unroll 1
    for (int base = first_;;) {
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      meet();
      attend(base, sums, most, total, shared);
      meet();  // all have taken what is there
      base += kKeys;
      if (base >= end_) break;
      bring(base, true, shared);
    }
    leave(sums, most, total, heads, shared);
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
  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  static __device__ int key_group() { return static_cast<int>(threadIdx.x) / kWarp % kKeyGroups; }
  static __device__ int first_element() { return static_cast<int>(threadIdx.x) / kWarp / kKeyGroups * kWarpElements; }
  /// What a thread copies of a pass: 8 elements of a key.
  static __device__ int own() { return static_cast<int>(threadIdx.x) / kChunks; }
  static __device__ int chunk() { return static_cast<int>(threadIdx.x) % kChunks; }

  __device__ std::int32_t page_of(int key) const {
    return run_.p
        .block_table[row_ * run_.p.stride_block_table + run_.page_size.divide(static_cast<std::uint32_t>(key))];
  }
  /// Where this thread's chunk of a key or value lies.
  template <bool kKey>
  __device__ const T* row(int key, std::int64_t page) const {
    const DecodeStepParams& p = run_.p;
    const std::int64_t slot = key - run_.page_size.divide(static_cast<std::uint32_t>(key)) * p.page_size;
    return static_cast<const T*>(kKey ? p.k_pages : p.v_pages) + layer_ * (kKey ? p.stride_k_layer : p.stride_v_layer) +
           page * (kKey ? p.stride_k_page : p.stride_v_page) + slot * (kKey ? p.stride_k_slot : p.stride_v_slot) +
           kv_head_ * (kKey ? p.stride_k_head : p.stride_v_head) + chunk() * 8;
  }
  /// Where chunk `chunk` of row `at` lies in shared memory: values behind keys, chunks at places that 8 rows share.
  static __device__ std::uint32_t place(const Shared& shared, int at, int chunk) {
    return ptx::shared_address(shared.attention.rows) + (at * kChunks + (chunk ^ at % 8)) * 16;
  }
  __device__ void copy(int base, int key, std::int64_t page, Shared& shared) const {
    const int from = key < end_ ? key : end_ - 1, bytes = key < end_ ? 16 : 0;  // zeros behind the last one
    ptx::cp_async_16(place(shared, key - base, chunk()), row<true>(from, page), bytes);
    ptx::cp_async_16(place(shared, kKeys + key - base, chunk()), row<false>(from, page), bytes);
  }
  /// Keys and values from `base` on; that of this step only if it is `made`.
  __device__ void bring(int base, bool made, Shared& shared) const {
    std::int32_t pages[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) pages[pass] = page_of(min(base + own() + pass * kKeysAPass, end_ - 1));
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int key = base + own() + pass * kKeysAPass;
      if (made || key != length_ - 1) copy(base, key, pages[pass], shared);
    }
  }
  __device__ void bring_made(Shared& shared) const {
    const int key = length_ - 1, at = key - first_;
    if (key < end_ && at < kKeys && at % kKeysAPass == own()) copy(first_, key, made_page_, shared);
  }
  /// The right operand; zeros where there are fewer heads.
  __device__ void load_queries(int head, int heads) {
    const T* const from = static_cast<const T*>(run_.q) +
                          (static_cast<std::int64_t>(row_) * run_.g.heads_q + head + lane() / 4) * D + lane() % 4 * 2;
#pragma unroll
    for (int i = 0; i < D / 8; ++i)
      q_[i] = lane() / 4 < heads ? *reinterpret_cast<const std::uint32_t*>(from + i * 8) : 0;
  }

  /// The keys of this warp, from `base` on: scores, and the values by their weights. A lane has two heads.
  __device__ void attend(int base, float (&sums)[kTiles][4], float (&most)[2], float (&total)[2],
                         const Shared& shared) const {
    const int first = key_group() * kWarpKeys, seen = end_ - base - first;
    if (seen <= 0) return;  // all lanes of the warp
    float scores[4] = {};
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      std::uint32_t keys[4];
      ptx::ldmatrix_x4(keys, place(shared, first + lane() % 16, step * 2 + lane() / 16));
      ptx::mma_m16n8k16<T>(scores, keys, q_[2 * step], q_[2 * step + 1]);
    }
    const float scale = run_.p.scale * 1.4426950408889634f;  // log2 e
    float before[2];
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      float largest = most[head];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& score = scores[half * 2 + head];
        score = half * 8 + lane() / 4 < seen ? score * scale : -INFINITY;
        largest = fmaxf(largest, score);
      }
#pragma unroll
      for (int other = 4; other < kWarp; other *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, other));
      const float point = largest == -INFINITY ? 0.0f : largest;
      before[head] = ptx::exp2_approx(most[head] - point);
      most[head] = largest;
      total[head] *= before[head];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& weight = scores[half * 2 + head];
        weight = ptx::exp2_approx(weight - point);
        total[head] += weight;
      }
    }
    const std::uint32_t low = ptx::movmatrix_trans(narrow_two<T>(scores[0], scores[1])),
                        high = ptx::movmatrix_trans(narrow_two<T>(scores[2], scores[3]));
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      std::uint32_t values[4];
      ptx::ldmatrix_x4_trans(values, place(shared, kKeys + first + lane() / 16 * 8 + lane() % 8,
                                           first_element() / 8 + tile * 2 + lane() / 8 % 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[tile][i] *= before[i % 2];
      ptx::mma_m16n8k16<T>(sums[tile], values, low, high);
    }
  }

  __device__ void leave(const float (&sums)[kTiles][4], const float (&most)[2], const float (&total)[2], int heads,
                        Shared& shared) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = total[i];
#pragma unroll
      for (int other = 4; other < kWarp; other *= 2) sum += __shfl_xor_sync(kFullMask, sum, other);
      const int head = lane() % 4 * 2 + i;
      if (head >= heads) continue;
      float* const to =
          shared.attention.values + (key_group() * kHeadsAtOnce + head) * kPitch + first_element() + lane() / 4;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) to[tile * 16] = sums[tile][i], to[tile * 16 + 8] = sums[tile][2 + i];
      if (lane() / 4 == 0 && first_element() == 0) shared.most_and_sum[key_group()][head] = make_float2(most[i], sum);
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
      for (int keys = 0; keys < kKeyGroups; ++keys) most = fmaxf(most, shared.most_and_sum[keys][h].x);
      const float base = most == -INFINITY ? 0.0f : most;
#pragma unroll
      for (int keys = 0; keys < kKeyGroups; ++keys) {
        const float2 of = shared.most_and_sum[keys][h];
        const float weight = ptx::exp2_approx(of.x - base);
        total += weight * of.y;
        sum += weight * shared.attention.values[(keys * kHeadsAtOnce + h) * kPitch + at % D];
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
  int part_, row_, kv_head_, length_, parts_, first_, end_;
  std::int32_t made_page_ = 0;
  std::uint32_t q_[D / 8];
};

template <class T, int D>
__device__ inline void attention(const Run& run, const Instruction& ins, int phase, Shared& shared) {
  const int group = run.g.heads_q / run.g.heads_kv;
  bool waited = false;
  meet();  // all have taken the x that keys now replace
#pragma unroll 1
  for (int unit = ins.first; unit < ins.first + ins.count; ++unit) {
    PartOfKeys<T, D> keys(run, ins.layer, unit, shared);
    if (!keys.empty()) keys.bring_old(shared);
    if (!waited) wait_for(run, ins, phase);
    waited = true;
    if (keys.nothing_to_see()) keys.write_nothing();
    if (keys.empty()) continue;
#pragma unroll 1
    for (int from = 0; from < group; from += kHeadsAtOnce) keys.compute(from, from == 0, shared);
  }
}

}  // namespace flashkernel::cuda::decode_step
