// sample, row by row: a limit is found by counting in ever finer bins of distance, and the draw walks the row.
#include <algorithm>
#include <limits>

#include "core/thread_pool.hpp"
#include "cpu/scalar/element.hpp"
#include "cpu/scalar/kernels.hpp"

namespace flashkernel::cpu_scalar {
namespace {

using sampling::Limit;

constexpr int kBinBits = 10, kBins = 1 << kBinBits;

struct Best {
  float value = -std::numeric_limits<float>::infinity();
  std::int64_t token = 0;
  bool refused = false;  // NaN or +inf
  void take(float logit, std::int64_t id) {
    if (refused) return;
    if (!(logit < std::numeric_limits<float>::infinity()))
      *this = {logit, id, true};
    else if (logit > value)
      value = logit, token = id;
  }
  bool number() const { return !refused && value > -std::numeric_limits<float>::infinity(); }
};

/// The distance at which the tokens from the best one on are `count`, or weigh `mass` (0: count).
struct Found {
  std::uint32_t distance;
  std::uint64_t mass_before, count_at;
};

Found find(const std::uint32_t* distances, std::int64_t vocab, std::uint64_t count, std::uint64_t mass) {
  std::uint32_t prefix = 0;
  std::uint64_t counted = 0, weighed = 0, last_count = 0;
  for (int shift = 20; shift >= 0; shift -= kBinBits) {
    std::uint64_t counts[kBins] = {}, masses[kBins] = {};
    for (std::int64_t t = 0; t < vocab; ++t) {
      const std::uint32_t d = distances[t];
      if (d >= sampling::kFar || (shift < 20 && d >> (shift + kBinBits) != prefix)) continue;
      ++counts[d >> shift & (kBins - 1)];
      masses[d >> shift & (kBins - 1)] += sampling::weight(d);
    }
    int bin = 0;
    while (bin < kBins - 1 && (mass > 0 ? weighed + masses[bin] < mass : counted + counts[bin] < count)) {
      counted += counts[bin];
      weighed += masses[bin++];
    }
    prefix = prefix << kBinBits | static_cast<std::uint32_t>(bin);
    last_count = counts[bin];
  }
  return {prefix, weighed, last_count};
}

Limit limit_of(const sampling::Row& row, const std::uint32_t* distances, std::int64_t vocab) {
  Limit limit;
  if (row.min_p > 0) limit.weight = sampling::least_weight(row.min_p);
  const auto reaches = [&](std::uint32_t d) { return d < sampling::kFar && d <= limit.distance; };
  if (row.top_k > 0) {
    std::int64_t near = 0;
    for (std::int64_t t = 0; t < vocab; ++t) near += reaches(distances[t]) ? 1 : 0;
    if (row.top_k < near) limit.distance = find(distances, vocab, static_cast<std::uint64_t>(row.top_k), 0).distance;
  }
  if (row.top_p < 1) {
    std::uint64_t mass = 0;
    for (std::int64_t t = 0; t < vocab; ++t)
      if (reaches(distances[t])) mass += sampling::weight(distances[t]);
    if (mass == 0) return limit;  // nothing is near the best one: another thread has written logits meanwhile
    const std::uint64_t least = sampling::least_mass(mass, row.top_p);
    const Found found = find(distances, vocab, 0, least);
    // As many of the equal tokens as are needed, in the order of their ids.
    const std::uint64_t each = sampling::weight(found.distance);
    std::uint64_t needed = (least - found.mass_before + each - 1) / each;
    limit.distance = found.distance;
    if (needed < found.count_at) {
      std::int64_t t = 0;
      while (needed -= distances[t] == found.distance ? 1 : 0) ++t;
      limit.token = static_cast<std::int32_t>(t);
    }
  }
  return limit;
}

template <class T>
void sample_row(const SampleParams& p, std::int64_t r, std::uint32_t* distances) {
  const T* const logits = static_cast<const T*>(p.logits) + r * p.stride_logits;
  const sampling::Row row = sampling::row_of(p, r);
  const auto logit_of = [&](std::int64_t t) { return sampling::adjusted(p, row, r, t, to_float(logits[t])); };
  Best best;
  for (std::int64_t t = 0; t < p.vocab; ++t) best.take(logit_of(t), t);
  std::int64_t token = best.token;
  if (best.number() && !row.greedy) {
    for (std::int64_t t = 0; t < p.vocab; ++t) distances[t] = sampling::distance(best.value, logit_of(t), row.scale);
    const Limit limit = limit_of(row, distances, p.vocab);
    std::uint64_t mass = 0;
    for (std::int64_t t = 0; t < p.vocab; ++t) mass += limit.kept(distances[t], static_cast<std::int32_t>(t));
    std::uint64_t left = sampling::multiply_high(sampling::random_bits(p, r), mass);
    for (token = 0; token < p.vocab - 1; ++token) {  // ends there even if another thread writes logits meanwhile
      const std::uint64_t own = limit.kept(distances[token], static_cast<std::int32_t>(token));
      if (left < own) break;
      left -= own;
    }
  }
  p.write(r, best.number() ? token : -1 - token);
  if (!p.logprob) return;
  double sum = 0, most = -std::numeric_limits<double>::infinity();
  for (std::int64_t t = 0; t < p.vocab; ++t) most = std::max(most, load<T>(logits, t));
  for (std::int64_t t = 0; t < p.vocab; ++t) sum += std::exp(load<T>(logits, t) - most);
  p.logprob[r] = best.number() ? static_cast<float>(load<T>(logits, token) - most - std::log(sum))
                               : std::numeric_limits<float>::quiet_NaN();
}

}  // namespace

std::size_t sample_workspace(const SampleParams& p) {
  return static_cast<std::size_t>(p.rows * p.vocab) * sizeof(std::uint32_t);
}

void sample(const SampleParams& p, void* workspace, Stream) {
  auto task = [&](std::int64_t begin, std::int64_t end, int) {
    visit_floating(p.dtype, [&](auto zero) {
      for (std::int64_t row = begin; row < end; ++row)
        sample_row<decltype(zero)>(p, row, static_cast<std::uint32_t*>(workspace) + row * p.vocab);
    });
  };
  parallel_for(p.rows, 1, task);
}

}  // namespace flashkernel::cpu_scalar
