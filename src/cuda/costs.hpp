// How long the CUDA rows take, by a model: a launch, and the work of a call (`work_of`) over the rate of a family.
// Rates are an H200's, in round numbers. That one family is faster than another decides, not by how much; each rate
// stands for the calls that its rows accept. Host code; tests_cpp/cuda_costs_test.cpp holds the order.
#pragma once

#include "cuda/attention/limits.hpp"
#include "ops/attention_params.hpp"
#include "ops/kernel_entry.hpp"
#include "ops/linear_params.hpp"

namespace flashkernel::cuda {

inline constexpr double kLaunchUs = 2.5;

/// A variant outside of the range that it was measured to be the best in: later than any family that serves there.
inline constexpr double kOutsideItsRange = 2;

inline double launch_and(double work, double rate) { return kLaunchUs + work / rate; }

namespace rates {
/// Ops bound by memory: elements in a microsecond.
inline constexpr int kRowsGeneric = 900000, kRowsInClusters = 1100000;
/// Rows that are read twice, and that are read element by element.
inline constexpr int kRowsTwice = 600000, kRowsByElement = 100000;
/// Linear's gradient: terms in a microsecond.
inline constexpr int kGradientGeneric = 20000000, kGradientSm75 = 100000000, kGradientSm80 = 200000000,
                     kGradientSm90a = 350000000;
/// Attention's gradient: terms in a microsecond.
inline constexpr int kBackwardGeneric = 5000000, kBackwardSm75 = 50000000, kBackwardSm80 = 130000000,
                     kBackwardSm90a = 270000000;
/// MLA decoding: terms in a microsecond.
inline constexpr int kMlaGeneric = 5000000, kMlaSm80 = 150000000, kMlaSm90a = 300000000;
/// A whole decode step: terms in a microsecond.
inline constexpr int kDecodeStep = 2000000, kDecodePhases = 1000000;
}  // namespace rates

template <class Params, int kRate>
float cost_us(const Params& params, const DeviceFacts&) {
  return static_cast<float>(launch_and(work_of(params), kRate));
}

/// A family that serves calls of two kinds: `few` queries or rows, bound by what they read, and many, bound by
/// products. Elements of K and V, or of weights, in a microsecond; terms in a microsecond.
struct Rates {
  int few, many;
};

namespace rates {
inline constexpr Rates kNaive{10000, 100000}, kTiled{50000, 1000000}, kForwardSm75{100000, 30000000},
    kForwardSm80{200000, 150000000}, kForwardSm90a{300000, 350000000}, kForwardScoredSm90a{250000, 250000000};
/// Operands of 8 bits: as fast as 16 bits, but behind every kernel that widens them, since sums of many values that are
/// alike lose a part on these tensor cores (docs/low_precision.md).
inline constexpr Rates kForwardFloat8Sm90a{4000, 500000};
/// Short sequences in small tiles: before every other forward kernel in its range (lab/cliffs.md).
inline constexpr Rates kForwardShort{310000, 360000000};
// A split over keys reads them with the whole device, whatever the number of heads: for a few queries it is ahead of
// any kernel that walks the keys in one block.
inline constexpr Rates kDecode{400000, 1}, kDecodeSm80{1600000, 1}, kDecodeSm90a{1800000, 1};
/// Many rows of few queries, over keys in parts: ahead of the forward kernel where it is best, and so with few rows.
inline constexpr Rates kFewQueriesSm90a{1700000, 360000000};

inline constexpr Rates kLinearTiles{50000, 10000000}, kLinearSm75{100000, 100000000}, kLinearSm80{200000, 200000000},
    kLinearFewRows{400000, 1}, kLinearSm90a{800000, 350000000}, kLinearFewRowsSm80{1600000, 1},
    kLinearFewRowsSm90a{2000000, 1}, kQuantizedFewRowsSm80{4000000, 60000000}, kFusedFewRowsSm80{2000000, 1},
    kFusedComposed{1000000, 300000000};
}  // namespace rates

/// Query rows of a kv head up to which a call of attention is bound by reading keys and values.
inline constexpr std::int64_t kFewQueries = 32;
inline bool has_few_queries(const AttentionParams& p) {
  return p.heads_kv > 0 && p.heads_q / p.heads_kv * p.seq_q <= kFewQueries;
}
/// Rows of x up to which a call of linear is bound by reading weights.
inline constexpr std::int64_t kFewRowsOfLinear = 64;

inline double attention_us(const AttentionParams& p, const Rates& rates) {
  if (!has_few_queries(p)) return launch_and(work_of(p), rates.many);
  return launch_and(work::product(p.batch * p.heads_kv, p.seq_k) * static_cast<double>(p.head_dim + p.head_dim_v),
                    rates.few);
}
template <class Params>
double linear_us(const Params& p, const Rates& rates) {
  if (p.rows > kFewRowsOfLinear) return launch_and(work_of(p), rates.many);
  return launch_and(work::product(p.in_features, p.out_features), rates.few);
}

template <const Rates& kRates>
float attention_cost_us(const AttentionParams& p, const DeviceFacts&) {
  return static_cast<float>(attention_us(p, kRates));
}
template <const Rates& kRates, class Params = LinearParams>
float linear_cost_us(const Params& p, const DeviceFacts&) {
  return static_cast<float>(linear_us(p, kRates));
}

/// Queries and keys of the longest sequence up to which small tiles are taken. On an H200 they are ahead at 64 queries
/// and behind the tiles of sm90a at 128.
inline constexpr std::int64_t kMostShortQueries = 64, kMostShortKeys = 128;
inline float attention_short_cost_us(const AttentionParams& p, const DeviceFacts&) {
  const double us = attention_us(p, rates::kForwardShort);
  return static_cast<float>(p.seq_q <= kMostShortQueries && p.seq_k <= kMostShortKeys ? us : kOutsideItsRange * us);
}

inline const AttentionParams& forward_of(const AttentionParams& p) { return p; }
inline const AttentionParams& forward_of(const AttentionBackwardParams& p) { return p.forward; }

/// Whether a smaller one of `kBuilt` holds the call than {kQkDim, kVDim}, whose range are the others.
template <class Params, const auto& kBuilt, int kQkDim, int kVDim>
bool is_for_smaller_head_dims(const Params& params) {
  const AttentionParams& p = forward_of(params);
  return !is_smallest(kBuilt, {kQkDim, kVDim}, p.head_dim, p.head_dim_v);
}

/// What `kCost` says of the instance for {kQkDim, kVDim}, in its range and outside.
template <class Params, typename RowFunctions<Params>::Cost kCost, const auto& kBuilt, int kQkDim, int kVDim>
float cost_us_of_head_dims(const Params& params, const DeviceFacts& facts) {
  const float us = kCost(params, facts);
  const bool outside = is_for_smaller_head_dims<Params, kBuilt, kQkDim, kVDim>(params);
  return outside ? static_cast<float>(kOutsideItsRange * us) : us;
}

}  // namespace flashkernel::cuda
