// One row of sample by the blocks of a cluster, or by one block. Called by sample.cu (one block, which reads the row
// again for each step) and sm90a/sample.cu (a cluster, which holds it in shared memory).
// A limit (top-k, top-p) is found without a sort: tokens are counted and weighed in bins of their distance from the
// best one (an integer of 30 bits), then those of the bin that holds the limit in 512 finer ones, and so on, until so
// few are left that each of them is compared with each. Equal ones at a limit of top-p are told apart by their ids.
// Few tokens of a row have a weight that matters: while all are weighed, each warp lists its near ones, and the rounds
// read the lists; the far tokens together are one bin. If the limit lies in that bin, the rounds begin again with all
// tokens. A warp with more near tokens than its list holds reads all of its tokens in every round.
// Invariant: sums are of integers, and all blocks of a cluster see the same ones, so all take the same branches.
#pragma once

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/pipeline/turn.cuh"
#include "cuda/sampling/shared.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/held_row.cuh"

namespace flashkernel::cuda::sampler {

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
      weigh();
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
  __device__ std::uint64_t order(const Best& best) const {
    return best.at < 0 ? 0 : order_of(best.value, first_ + best.at);
  }
  /// The best of this thread's logits, with bias and penalties or as they came.
  __device__ std::uint64_t best_of(bool with_penalties) const {
    Best best;
    each([&](int i) { best.take(with_penalties ? logit(i) : to_float(logits_[first_ + i]), i); });
    return order(best);
  }
  __device__ std::uint64_t best_of_all(bool vectors) {
    if constexpr (kCluster)
      return hold(vectors);
    else
      return best_of(true);
  }
  /// `best_of(true)`; the logits are held from here on.
  __device__ std::uint64_t hold(bool vectors) {
    Best best;
    const auto take = [&](float own, int i) {
      held_[i] = __float_as_uint(own);
      best.take(own, i);
    };
    if (!vectors || p_.adjusts()) {
      each([&](int i) { take(logit(i), i); });
      return order(best);
    }
    constexpr int N = kVectorElements<T>, kBatch = 4;
    const auto* const row = reinterpret_cast<const Words<T>*>(logits_ + first_);
    const int whole = count_ / N;
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
        for (int i = 0; i < N; ++i) best.take(values[i], vector * N + i);
      }
    }
    if (const int i = whole * N + static_cast<int>(threadIdx.x); i < count_) take(to_float(logits_[first_ + i]), i);
    return order(best);
  }

  /// Weighs this warp's tokens and lists the near ones. The cluster holds distances from here on.
  __device__ void weigh() {
    const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
    const int begin = warp * of_warp(), end = min(count_, begin + of_warp());
    std::uint64_t near = 0;
    unsigned listed = 0, count = 0;
    mass_ = 0;
#pragma unroll 4
    for (int at = begin; at < end; at += kWarp) {
      const int i = at + lane;
      std::uint32_t d = sampling::kFar;
      if (i < end) {
        // Until the next exchange a thread reads what it writes here.
        if constexpr (kCluster)
          held_[i] = d = sampling::distance(best_, __uint_as_float(held_[i]), options_.scale);
        else
          d = distance(i);
      }
      const std::uint64_t weight = sampling::weight(d);
      mass_ += weight;
      count += d < sampling::kFar ? 1 : 0;
      const unsigned there = __ballot_sync(kFullMask, d < kNear);
      if (there == 0) continue;
      if (d < kNear) {
        near += weight;
        const unsigned place = listed + static_cast<unsigned>(__popc(there & ((1u << lane) - 1)));
        if (place < kListed) shared_.list[warp][place] = static_cast<std::uint32_t>(i);
      }
      listed += static_cast<unsigned>(__popc(there));
    }
    if (limited()) {
      const std::uint64_t far = warp_sum(mass_ - near);
      count = warp_sum(count);
      if (lane == 0)
        shared_.listed[warp] = listed, shared_.far_mass[warp] = far, shared_.far_count[warp] = count - listed;
    }
    __syncwarp();
  }
  __device__ bool limited() const { return options_.top_k > 0 || options_.top_p < 1.0f || options_.min_p > 0.0f; }
  /// f(place) of this warp's near tokens, and of others where they are not listed; of all once `near_` is false.
  template <class F>
  __device__ void each_near(F f) const {
    const unsigned warp = threadIdx.x / kWarp, listed = shared_.listed[warp];
    if (!near_ || listed > kListed) return each(f);
    for (unsigned at = threadIdx.x % kWarp; at < listed; at += kWarp) f(static_cast<int>(shared_.list[warp][at]));
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

  __device__ static void add(std::uint32_t* low, std::uint32_t* high, std::uint64_t weight) {
    const auto part = static_cast<std::uint32_t>(weight);
    const std::uint32_t before = atomicAdd(low, part);
    const auto rest = static_cast<std::uint32_t>(weight >> 32) + (before + part < before ? 1u : 0u);
    if (rest > 0) atomicAdd(high, rest);
  }
  /// Counts and weighs tokens in `used` bins; bin_of(distance, id) below 0 leaves one out. far: the others are the bin
  /// kFarBin. Gives the first bin with which there are `count` tokens, or with which they weigh `mass` (count 0);
  /// mass_of(all tokens' mass) may give that anew. A bin of kBins: all of them together are fewer.
  template <class BinOf, class MassOf>
  __device__ Found bins(int used, bool far, BinOf bin_of, unsigned count, MassOf mass_of, std::uint64_t& total_mass) {
    std::uint32_t* const counts = shared_.counts[bins_];
    std::uint32_t* const low = shared_.low[bins_];
    std::uint32_t* const high = shared_.high[bins_];
    bins_ ^= 1;
    for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kThreads) counts[bin] = low[bin] = high[bin] = 0;
    __syncthreads();
    if (far && threadIdx.x % kWarp == 0) {
      atomicAdd(counts + kFarBin, shared_.far_count[threadIdx.x / kWarp]);
      add(low + kFarBin, high + kFarBin, shared_.far_mass[threadIdx.x / kWarp]);
    }
    each_near([&](int i) {
      const std::uint32_t d = distance(i);
      const int bin = bin_of(d, first_ + i);
      if (bin < 0) return;
      atomicAdd(counts + bin, 1u);
      add(low + bin, high + bin, sampling::weight(d));
    });
    sync();
    const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
    unsigned counted[4] = {}, counted_all = 0;
    std::uint64_t weighed[4] = {}, weighed_all = 0;
    if (warp < kScanWarps) {
      const int blocks = 4 * thread < used ? blocks_ : 0;
#pragma unroll 1  // two at a time do not fit the registers
      for (int block = 0; block < blocks; ++block) {
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
      const int shift = max(kFirstShift - kBinBits * level, 0), bits = level < 3 ? kBinBits : 3;
      const bool far = level == 0 && near_;
      const std::uint32_t end = far ? kNear : sampling::kFar;
      const auto bin_of = [&](std::uint32_t d, int) {
        if (level == 0) return d < end ? static_cast<int>(d >> shift) : -1;
        return d >> (shift + bits) == prefix ? static_cast<int>(d >> shift & ((1u << bits) - 1)) : -1;
      };
      const auto mass_of = [&](std::uint64_t all) {
        if (level == 0) least = sampling::least_mass(mass > 0 ? mass : all, options_.top_p);
        return least - mass_before;
      };
      const int used = level > 0 ? 1 << bits : far ? kFarBin + 1 : kAllBins;
      const Found found = bins(used, far, bin_of, count > 0 ? count - count_before : 0, mass_of, total);
      if (found.bin == kBins) {  // top_k of more tokens than have a weight
        mass = total;
        return limit;
      }
      if (far && found.bin == kFarBin) {  // once more, with all tokens
        near_ = false;
        level = -1;
        continue;
      }
      prefix = prefix << bits | found.bin;
      if (level == 0) prefix = found.bin;
      const unsigned with = count_before + found.count_at + found.count_before;
      count_before += found.count_before;
      mass_before += found.mass_before;
      limit.distance = ((prefix + 1) << shift) - 1;
      mass = mass_before + found.mass_at;
      if (with == count) return limit;
      if (found.count_at <= kFinalists) {
        limit = compare(prefix, shift, count > 0 ? count - count_before : 0, least - mass_before);
        mass = mass_before + shared_.limit_mass;
        return limit;
      }
      if (level == 3 && count == 0) ties(limit, least - mass_before, found.count_at);
    }
    return limit;
  }
  /// The limit among the tokens, at most kFinalists, whose distance begins with `prefix`: that with which there are
  /// `count`, and all at its distance; or with which they weigh `mass` (count 0).
  __device__ Limit compare(std::uint32_t prefix, int shift, unsigned count, std::uint64_t mass) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
    unsigned& entered = shared_.mail[mail_].x;
    if (thread == 0) entered = 0;
    __syncthreads();
    each_near([&](int i) {
      const std::uint32_t d = distance(i);
      if (d >> shift != prefix) return;
      const std::uint64_t weight = sampling::weight(d);
      shared_.entries[atomicAdd(&entered, 1u)] =
          make_uint4(d, static_cast<std::uint32_t>(first_ + i), static_cast<std::uint32_t>(weight),
                     static_cast<std::uint32_t>(weight >> 32));
    });
    sync();
    mail_ ^= 1;
    const unsigned of_block = lane < blocks_ ? read(&shared_.mail[mail_ ^ 1], lane).x : 0;
    const unsigned with_block = warp_scan(of_block);
    const unsigned all = __shfl_sync(kFullMask, with_block, kWarp - 1);
    for (int at = thread; at < blocks_ * kFinalists; at += kThreads) {
      const int block = at / kFinalists;
      const auto place = static_cast<unsigned>(at % kFinalists);
      const unsigned there = __shfl_sync(kFullMask, of_block, block), with = __shfl_sync(kFullMask, with_block, block);
      if (place < there) shared_.finalists[with - there + place] = read(&shared_.entries[place], block);
    }
    __syncthreads();
    if (static_cast<unsigned>(thread) < all) {
      const uint4 own = shared_.finalists[thread];
      unsigned before = 0;
      std::uint64_t mass_before = 0, mass_with = 0;  // with: all of the same distance
#pragma unroll 4
      for (unsigned at = 0; at < all; ++at) {
        const uint4 other = shared_.finalists[at];
        const std::uint64_t weight = static_cast<std::uint64_t>(other.w) << 32 | other.z;
        if (other.x > own.x) continue;
        mass_with += weight;
        if (other.x == own.x && other.y >= own.y) continue;
        mass_before += weight;
        ++before;
      }
      const std::uint64_t weight = static_cast<std::uint64_t>(own.w) << 32 | own.z;
      const bool here = count > 0 ? before + 1 == count : mass_before < mass && mass <= mass_before + weight;
      if (here) {
        shared_.limit = Limit{};
        shared_.limit.distance = own.x;
        if (count == 0) shared_.limit.token = static_cast<std::int32_t>(own.y);
        shared_.limit_mass = mass_with;
      }
    }
    __syncthreads();
    return shared_.limit;
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
          1 << bits, false, bin_of, needed - before, [](std::uint64_t) { return std::uint64_t{0}; }, total);
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
    const int thread = static_cast<int>(threadIdx.x), my_warp = thread / kWarp, lane = thread % kWarp;
    const auto kept = [&](int i) { return limit.kept(distance(i), first_ + i); };
    std::uint64_t mine = mass_;
    if (limited()) {
      mine = 0;
      // A far token weighs at most 2^-12 of the best one.
      if (limit.distance >= kNear && limit.weight <= std::uint64_t{1} << (sampling::kWeightBits - 12)) near_ = false;
      each_near([&](int i) { mine += kept(i); });
    }
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
    // The first warp with which the sum exceeds it.
    const std::uint64_t with_warp = warp_scan(lane < kWarps ? shared_.warps[lane] : 0);
    const int warp = __popc(__ballot_sync(kFullMask, lane < kWarps && with_warp <= left));
    const std::uint64_t before_warp = __shfl_sync(kFullMask, with_warp, max(warp - 1, 0));
    if (warp > 0) left -= before_warp;
    // The tokens of that warp, by all threads: a few neighbours each.
    const int begin = warp * of_warp(), end = min(count_, begin + of_warp());
    const int each_has = (of_warp() + kThreads - 1) / kThreads;
    const int from = min(end, begin + thread * each_has), to = min(end, from + each_has);
    std::uint64_t sum = 0;
    for (int i = from; i < to; ++i) sum += kept(i);
    std::uint64_t with = warp_scan(sum);
    if (lane == kWarp - 1) shared_.scan[my_warp] = with;
    __syncthreads();
    const std::uint64_t with_scan = warp_scan(lane < kWarps ? shared_.scan[lane] : 0);
    const std::uint64_t before_mine = __shfl_sync(kFullMask, with_scan, max(my_warp - 1, 0));
    if (my_warp > 0) with += before_mine;
    if (left >= with || left < with - sum) return -1;
    left -= with - sum;
    int i = from;
    for (std::uint64_t weight = kept(i); left >= weight; weight = kept(i)) left -= weight, ++i;
    return first_ + i;
  }

  /// The log-probability of a token under the logits as they came, without bias and penalties. `best` is the largest
  /// logit with them.
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
  std::uint64_t mass_ = 0;  // of this thread's tokens
  bool near_ = true;        // what follows has to see near tokens only
  int mail_ = 0, bins_ = 0;
};

}  // namespace flashkernel::cuda::sampler
