// One row of sample by the blocks of a cluster, or by one block. Called by sample.cu (one block, which reads the row
// again for each step) and sm90a/sample.cu (a cluster, which holds it in shared memory).
// A limit (top-k, top-p) is found without a sort: all tokens are counted and weighed in 512 bins of their distance from
// the best one, then those of the bin that holds the limit in 512 finer ones, and so on; distances are integers of 30
// bits. Equal ones at a limit of top-p are told apart by their ids in the same way. Most rows need two or three rounds.
// Invariant: sums are of integers, and all blocks of a cluster see the same ones, so all take the same branches.
#pragma once

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/pipeline/turn.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/held_row.cuh"
#include "cuda/tile/reduce.cuh"
#include "ops/sample_params.hpp"

namespace flashkernel::cuda::sampler {

constexpr int kThreads = 384, kWarps = kThreads / kWarp;
constexpr int kBinBits = 9, kBins = 1 << kBinBits;
constexpr int kScanThreads = kBins / 4, kScanWarps = kScanThreads / kWarp;  // four bins each

/// The tokens of one bin, and of those before it.
struct Found {
  unsigned bin;
  unsigned count_before, count_at;
  std::uint64_t mass_before, mass_at;
};

struct Shared {
  alignas(16) std::uint32_t counts[2][kBins];
  alignas(16) std::uint32_t low[2][kBins];  // of the masses
  alignas(16) std::uint32_t high[2][kBins];
  alignas(16) uint4 mail[2];
  std::uint64_t warps[kWarps];
  std::uint64_t scan[kWarps];
  std::uint64_t scan_mass[kScanWarps];
  unsigned scan_count[kScanWarps];
  Found found;
};

/// Larger for a better logit, of equal ones for a smaller id; the largest for one that is refused. Never 0.
__device__ inline std::uint64_t order_of(float logit, std::int64_t token) {
  std::uint32_t bits = __float_as_uint(logit);
  if (bits == 0x80000000u) bits = 0;
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  if (!(logit < INFINITY)) bits = ~0u;
  return static_cast<std::uint64_t>(bits) << 32 | ~static_cast<std::uint32_t>(token);
}
__device__ inline float logit_of_order(std::uint64_t order) {
  const auto bits = static_cast<std::uint32_t>(order >> 32);
  return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}

__device__ inline std::uint64_t warp_largest(std::uint64_t value) {
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) {
    const std::uint64_t other = __shfl_xor_sync(kFullMask, value, lane);
    value = other > value ? other : value;
  }
  return value;
}
__device__ inline std::uint64_t warp_sum(std::uint64_t value) {
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) value += __shfl_xor_sync(kFullMask, value, lane);
  return value;
}
/// The sum of this lane's and all lower lanes' values.
template <class Number>
__device__ inline Number warp_scan(Number value) {
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const Number other = __shfl_up_sync(kFullMask, value, static_cast<unsigned>(step));
    if (static_cast<int>(threadIdx.x % kWarp) >= step) value += other;
  }
  return value;
}

/// T: of the logits. kCluster: `blocks` blocks share the row, and hold it: `held` has `share` words; else one block
/// reads it again.
template <class T, bool kCluster>
class RowSampler {
 public:
  __device__ RowSampler(const SampleParams& p, Shared& shared, std::uint32_t* held, int blocks, int share)
      : p_(p),
        shared_(shared),
        held_(held),
        blocks_(kCluster ? blocks : 1),
        row_(blockIdx.x / static_cast<unsigned>(kCluster ? blocks : 1)),
        first_(rank() * share),
        count_(max(0, min(share, static_cast<int>(p.vocab) - first_))),
        logits_(static_cast<const T*>(p.logits) + row_ * p.stride_logits),
        options_(sampling::row_of(p, row_)) {}

  __device__ void run(bool vectors) {
    const std::uint64_t best = largest(best_of_all(vectors));
    const auto order = static_cast<std::uint32_t>(best >> 32);
    std::int64_t token = ~static_cast<std::uint32_t>(best);
    const bool number = order != ~0u && order > 0x007fffffu;  // neither NaN nor infinite
    bool mine = blockIdx.x % static_cast<unsigned>(blocks_) == 0 && threadIdx.x == 0;
    if (number && !options_.greedy) {
      best_ = logit_of_order(best);
      if constexpr (kCluster) {
        const std::uint32_t* const logits = held_;
        // Until the next exchange a thread reads what it writes here.
        each([&](int i) { held_[i] = sampling::distance(best_, __uint_as_float(logits[i]), options_.scale); });
      }
      const int drawn = draw(limit());
      mine = drawn >= 0;
      token = drawn;
    }
    float logprob = NAN;
    if (p_.logprob && number) logprob = log_probability(best, mine ? token : 0);
    if (mine) {
      p_.write(row_, number ? token : -1 - token);
      if (p_.logprob) p_.logprob[row_] = logprob;
    }
    if (kCluster) sync();  // no block leaves while another one reads its shared memory
  }

 private:
  using Limit = sampling::Limit;

  __device__ static int rank() {
    if constexpr (kCluster)
      return static_cast<int>(ptx::cluster_rank());
    else
      return 0;
  }
  __device__ void sync() const {
    if constexpr (kCluster) {
      ptx::cluster_arrive();
      ptx::cluster_wait();
    } else {
      __syncthreads();
    }
  }
  /// 16 bytes of another block's shared memory, at the place of this block's own.
  __device__ uint4 read(const void* place, int block) const {
    if constexpr (kCluster) {
      const float4 v = ptx::load_cluster_4(ptx::map_shared(ptx::shared_address(place), static_cast<unsigned>(block)));
      return make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w));
    } else {
      return *static_cast<const uint4*>(place);
    }
  }
  /// f(place in this block's part), a warp after the other in the order of ids.
  template <class F>
  __device__ void each(F f) const {
    const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
    const int end = min(count_, (warp + 1) * of_warp());
#pragma unroll 2
    for (int i = warp * of_warp() + lane; i < end; i += kWarp) f(i);
  }
  /// Tokens of a warp: a multiple of 32.
  __device__ int of_warp() const { return (count_ + kThreads - 1) / kThreads * kWarp; }

  __device__ float logit(int i) const {
    return sampling::adjusted(p_, options_, row_, first_ + i, to_float(logits_[first_ + i]));
  }
  __device__ std::uint32_t distance(int i) const {
    if constexpr (kCluster)
      return held_[i];
    else
      return sampling::distance(best_, logit(i), options_.scale);
  }
  /// The best of this thread's logits, with bias and penalties or as they came.
  __device__ std::uint64_t best_of(bool with_penalties) const {
    std::uint64_t best = 0;
    each([&](int i) {
      const std::uint64_t own = order_of(with_penalties ? logit(i) : to_float(logits_[first_ + i]), first_ + i);
      best = own > best ? own : best;
    });
    return best;
  }
  __device__ std::uint64_t best_of_all(bool vectors) {
    if constexpr (kCluster)
      return hold(vectors);
    else
      return best_of(true);
  }
  /// `best_of(true)`; the logits are held from here on.
  __device__ std::uint64_t hold(bool vectors) {
    if (!vectors || p_.adjusts()) {
      std::uint64_t best = 0;
      each([&](int i) {
        const float own = logit(i);
        held_[i] = __float_as_uint(own);
        const std::uint64_t order = order_of(own, first_ + i);
        best = order > best ? order : best;
      });
      return best;
    }
    constexpr int N = kVectorElements<T>, kBatch = 4;
    const auto* const row = reinterpret_cast<const Words<T>*>(logits_ + first_);
    const int whole = count_ / N;
    std::uint64_t best = 0;
    const auto take = [&](float own, int i) {
      held_[i] = __float_as_uint(own);
      const std::uint64_t order = order_of(own, first_ + i);
      best = order > best ? order : best;
    };
    for (int at = static_cast<int>(threadIdx.x); at < whole; at += kBatch * kThreads) {
      Words<T> batch[kBatch];  // past the end the last one is loaded again
#pragma unroll
      for (int j = 0; j < kBatch; ++j) batch[j] = row[min(at + j * kThreads, whole - 1)];
      settle(batch);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int vector = at + j * kThreads;
        if (vector >= whole) continue;
        float values[N];
        batch[j].floats(values);
#pragma unroll
        for (int i = 0; i < N; i += 4)
          *reinterpret_cast<uint4*>(held_ + vector * N + i) =
              make_uint4(__float_as_uint(values[i]), __float_as_uint(values[i + 1]), __float_as_uint(values[i + 2]),
                         __float_as_uint(values[i + 3]));
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const std::uint64_t order = order_of(values[i], first_ + vector * N + i);
          best = order > best ? order : best;
        }
      }
    }
    if (const int i = whole * N + static_cast<int>(threadIdx.x); i < count_) take(to_float(logits_[first_ + i]), i);
    return best;
  }

  /// Every thread's value of `mine` to all of the cluster: what each block has made of its threads' values.
  template <class Combine>
  __device__ void exchange(std::uint64_t mine, Combine combine) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
    mine = combine(mine);
    if (lane == 0) shared_.warps[warp] = mine;
    __syncthreads();
    if (warp == 0) {
      const std::uint64_t all = combine(lane < kWarps ? shared_.warps[lane] : 0);
      if (lane == 0)
        shared_.mail[mail_] = make_uint4(static_cast<std::uint32_t>(all), static_cast<std::uint32_t>(all >> 32), 0, 0);
    }
    sync();
    mail_ ^= 1;
  }
  /// What block `block` made known by the last exchange.
  __device__ std::uint64_t message(int block) const {
    const uint4 words = read(&shared_.mail[mail_ ^ 1], block);
    return static_cast<std::uint64_t>(words.y) << 32 | words.x;
  }
  /// One of the messages of each block in a lane; 0 in the others.
  __device__ std::uint64_t messages() const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    return lane < blocks_ ? message(lane) : 0;
  }
  __device__ std::uint64_t largest(std::uint64_t mine) {
    exchange(mine, [](std::uint64_t value) { return warp_largest(value); });
    return warp_largest(messages());
  }

  /// Counts and weighs tokens in bins; bin_of(distance, id) below 0 leaves one out. Gives the first bin with which
  /// there are `count` tokens, or with which they weigh `mass` (count 0); mass_of(all tokens' mass) may give that anew.
  /// A bin of kBins: all of them together are fewer.
  template <class BinOf, class MassOf>
  __device__ Found bins(BinOf bin_of, unsigned count, MassOf mass_of, std::uint64_t& total_mass) {
    std::uint32_t* const counts = shared_.counts[bins_];
    std::uint32_t* const low = shared_.low[bins_];
    std::uint32_t* const high = shared_.high[bins_];
    bins_ ^= 1;
    for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kThreads) counts[bin] = low[bin] = high[bin] = 0;
    __syncthreads();
    each([&](int i) {
      const std::uint32_t d = distance(i);
      const int bin = bin_of(d, first_ + i);
      if (bin < 0) return;
      const std::uint64_t weight = sampling::weight(d);
      const auto part = static_cast<std::uint32_t>(weight);
      atomicAdd(counts + bin, 1u);
      const std::uint32_t before = atomicAdd(low + bin, part);
      const auto rest = static_cast<std::uint32_t>(weight >> 32) + (before + part < before ? 1u : 0u);
      if (rest > 0) atomicAdd(high + bin, rest);
    });
    sync();
    const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
    unsigned counted[4] = {}, counted_all = 0;
    std::uint64_t weighed[4] = {}, weighed_all = 0;
    if (warp < kScanWarps) {
      for (int block = 0; block < blocks_; ++block) {
        const uint4 c = read(counts + 4 * thread, block), l = read(low + 4 * thread, block),
                    h = read(high + 4 * thread, block);
        counted[0] += c.x, counted[1] += c.y, counted[2] += c.z, counted[3] += c.w;
        weighed[0] += static_cast<std::uint64_t>(h.x) << 32 | l.x;
        weighed[1] += static_cast<std::uint64_t>(h.y) << 32 | l.y;
        weighed[2] += static_cast<std::uint64_t>(h.z) << 32 | l.z;
        weighed[3] += static_cast<std::uint64_t>(h.w) << 32 | l.w;
      }
      counted_all = warp_scan(counted[0] + counted[1] + counted[2] + counted[3]);
      weighed_all = warp_scan(weighed[0] + weighed[1] + weighed[2] + weighed[3]);
      if (lane == kWarp - 1) shared_.scan_count[warp] = counted_all, shared_.scan_mass[warp] = weighed_all;
    }
    if (thread == 0) shared_.found = {kBins, 0, 0, 0, 0};
    __syncthreads();
    unsigned all_count = 0;
    std::uint64_t all_mass = 0;
#pragma unroll
    for (int w = 0; w < kScanWarps; ++w) {
      all_count += shared_.scan_count[w], all_mass += shared_.scan_mass[w];
      if (w < warp) counted_all += shared_.scan_count[w], weighed_all += shared_.scan_mass[w];
    }
    const std::uint64_t mass = count > 0 ? 0 : mass_of(all_mass);
    total_mass = all_mass;
    if (warp < kScanWarps) {
      unsigned count_before = counted_all - (counted[0] + counted[1] + counted[2] + counted[3]);
      std::uint64_t mass_before = weighed_all - (weighed[0] + weighed[1] + weighed[2] + weighed[3]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool here = count > 0 ? count_before < count && count <= count_before + counted[i]
                                    : mass_before < mass && mass <= mass_before + weighed[i];
        if (here)
          shared_.found = {static_cast<unsigned>(4 * thread + i), count_before, counted[i], mass_before, weighed[i]};
        count_before += counted[i], mass_before += weighed[i];
      }
    }
    __syncthreads();
    return shared_.found;
  }

  /// The distance that top_k (count > 0) or top_p ends at. mass: of the tokens that may be drawn; 0: all of them.
  /// Afterwards, of those that are left.
  __device__ Limit find(unsigned count, std::uint64_t& mass) {
    Limit limit;
    std::uint32_t prefix = 0;
    unsigned count_before = 0;
    std::uint64_t mass_before = 0, least = 0, total = 0;
#pragma unroll 1
    for (int level = 0; level < 4; ++level) {
      const int shift = max(21 - kBinBits * level, 0), bits = level < 3 ? kBinBits : 3;
      const auto bin_of = [&](std::uint32_t d, int) {
        if (level == 0) return d < sampling::kFar ? static_cast<int>(d >> shift) : -1;
        return d >> (shift + bits) == prefix ? static_cast<int>(d >> shift & ((1u << bits) - 1)) : -1;
      };
      const auto mass_of = [&](std::uint64_t all) {
        if (level == 0) least = sampling::least_mass(mass > 0 ? mass : all, options_.top_p);
        return least - mass_before;
      };
      const Found found = bins(bin_of, count > 0 ? count - count_before : 0, mass_of, total);
      if (found.bin == kBins) {  // top_k of more tokens than have a weight
        mass = total;
        return limit;
      }
      prefix = prefix << bits | found.bin;
      if (level == 0) prefix = found.bin;
      const unsigned with = count_before + found.count_at + found.count_before;
      count_before += found.count_before;
      mass_before += found.mass_before;
      limit.distance = ((prefix + 1) << shift) - 1;
      mass = mass_before + found.mass_at;
      if (found.count_at == 1 || with == count) return limit;
      if (level == 3 && count == 0) ties(limit, least - mass_before, found.count_at);
    }
    return limit;
  }
  /// Keeps as many of the tokens at the limit's distance as weigh `mass`.
  __device__ void ties(Limit& limit, std::uint64_t mass, unsigned there) {
    const std::uint64_t each = sampling::weight(limit.distance);
    const auto needed = static_cast<unsigned>((mass + each - 1) / each);
    if (needed >= there) return;
    std::uint32_t prefix = 0;
    unsigned before = 0;
    std::uint64_t total = 0;
#pragma unroll 1
    for (int level = 0; level < 3; ++level) {
      const int shift = max(14 - kBinBits * level, 0), bits = level < 2 ? kBinBits : 5;
      const auto bin_of = [&](std::uint32_t d, int id) {
        const auto token = static_cast<std::uint32_t>(id);
        if (d != limit.distance || (level > 0 && token >> (shift + bits) != prefix)) return -1;
        return static_cast<int>(token >> shift & ((1u << bits) - 1));
      };
      const Found found = bins(
          bin_of, needed - before, [](std::uint64_t) { return std::uint64_t{0}; }, total);
      prefix = prefix << bits | found.bin;
      before += found.count_before;
      limit.token = static_cast<std::int32_t>(((prefix + 1) << shift) - 1);
      if (before + found.count_at == needed) return;
    }
  }
  __device__ Limit limit() {
    Limit limit;
    std::uint64_t mass = 0;
#pragma unroll 1
    for (int step = options_.top_k > 0 ? 0 : 1; step < (options_.top_p < 1.0f ? 2 : 1); ++step)
      limit = find(step == 0 ? static_cast<unsigned>(options_.top_k) : 0, mass);
    if (options_.min_p > 0.0f) limit.weight = sampling::least_weight(options_.min_p);
    return limit;
  }

  /// The token that is drawn, in the thread that finds it; -1 in all others.
  __device__ int draw(const Limit& limit) {
    const auto kept = [&](int i) { return limit.kept(distance(i), first_ + i); };
    std::uint64_t mine = 0;
    each([&](int i) { mine += kept(i); });
    exchange(mine, [](std::uint64_t value) { return warp_sum(value); });
    const std::uint64_t of_blocks = messages();
    std::uint64_t before = 0, all = 0, own = 0;
    const int block = rank();
    for (int b = 0; b < blocks_; ++b) {
      const std::uint64_t mass = __shfl_sync(kFullMask, of_blocks, b);
      if (b < block) before += mass;
      if (b == block) own = mass;
      all += mass;
    }
    std::uint64_t left = sampling::multiply_high(sampling::random_bits(p_, row_), all);
    if (left < before || left - before >= own) return -1;
    left -= before;
    int warp = 0;
    while (left >= shared_.warps[warp]) left -= shared_.warps[warp++];
    // The tokens of that warp, by all threads: a few neighbours each.
    const int begin = warp * of_warp(), end = min(count_, begin + of_warp());
    const int each_has = (of_warp() + kThreads - 1) / kThreads;
    const int from = min(end, begin + static_cast<int>(threadIdx.x) * each_has), to = min(end, from + each_has);
    std::uint64_t sum = 0;
    for (int i = from; i < to; ++i) sum += kept(i);
    std::uint64_t with = warp_scan(sum);
    const int my_warp = static_cast<int>(threadIdx.x) / kWarp;
    if (threadIdx.x % kWarp == kWarp - 1) shared_.scan[my_warp] = with;
    __syncthreads();
    for (int w = 0; w < my_warp; ++w) with += shared_.scan[w];
    if (left >= with || left < with - sum) return -1;
    left -= with - sum;
    int i = from;
    for (std::uint64_t weight = kept(i); left >= weight; weight = kept(i)) left -= weight, ++i;
    return first_ + i;
  }

  /// Of a token under the logits as they came. best: that of the logits with bias and penalties.
  __device__ float log_probability(std::uint64_t best, std::int64_t token) {
    const float most = logit_of_order(p_.adjusts() ? largest(best_of(false)) : best);
    std::uint64_t mine = 0;
    each([&](int i) {
      mine += sampling::weight(sampling::distance(most, to_float(logits_[first_ + i]), sampling::kLog2E));
    });
    exchange(mine, [](std::uint64_t value) { return warp_sum(value); });
    const std::uint64_t all = warp_sum(messages());
    return to_float(logits_[token]) - most - logf(static_cast<float>(all) * 9.094947017729282e-13f);
  }

  const SampleParams& p_;
  Shared& shared_;
  std::uint32_t* const held_;
  const int blocks_;
  const std::int64_t row_;
  const int first_, count_;
  const T* const logits_;
  const sampling::Row options_;
  float best_ = 0;
  int mail_ = 0, bins_ = 0;
};

}  // namespace flashkernel::cuda::sampler
