// What the kernels of sample get, and the arithmetic that decides which token a row draws: all of them call it, so that
// every device draws the same. Filled by ops/sample.cpp.
// Invariant: what follows float32 here is single operations, each rounded to nearest, and fused ones where it says so;
// what is summed is integers, so no order of additions matters.
#pragma once

#include <cmath>

#include "ops/params_common.hpp"

namespace flashkernel {

struct SampleParams {
  static constexpr const char* kOp = "sample";
  static constexpr std::int64_t kMostTokens = std::int64_t{1} << 23;  // so that 2^40 a token adds up to 64 bits

  DType dtype = DType::kFloat32;
  Device device{};
  std::int64_t rows = 0, vocab = 0;
  const void* logits = nullptr;  // [rows, vocab], neighbours in memory
  std::int64_t stride_logits = 0;
  // [rows]; null where absent
  const float* temperature = nullptr;
  IndexArray top_k;
  const float* top_p = nullptr;
  const float* min_p = nullptr;
  const float* repetition_penalty = nullptr;
  const float* frequency_penalty = nullptr;
  const float* presence_penalty = nullptr;
  const std::int64_t* seed = nullptr;
  const std::int64_t* offset = nullptr;
  // [rows, vocab]; null where absent
  const float* bias = nullptr;
  const std::int32_t* history = nullptr;  // 2 * (times generated) + (in the prompt)
  std::int64_t stride_bias = 0, stride_history = 0;
  void* out = nullptr;  // [rows]
  bool out_is_int64 = false;
  float* logprob = nullptr;  // [rows], or null

  FK_HOST_DEVICE bool adjusts() const { return bias || history; }
  FK_HOST_DEVICE void write(std::int64_t row, std::int64_t token) const {
    if (out_is_int64)
      static_cast<std::int64_t*>(out)[row] = token;
    else
      static_cast<std::int32_t*>(out)[row] = static_cast<std::int32_t>(token);
  }
};

/// What a call has to do (params_common.hpp).
inline double work_of(const SampleParams& p) { return work::product(p.rows, p.vocab); }
/// Some fifty passes with exponentials.
inline double steps_of(const SampleParams& p) { return 64 * work_of(p); }

namespace sampling {

inline constexpr float kLog2E = 1.44269504f;
inline constexpr int kFractionBits = 24;                // of a distance, in units of ln 2
inline constexpr int kWeightBits = 40;                  // the best token's weight is 2^40
inline constexpr std::uint32_t kFar = 41u << 24;        // the first distance whose weight is 0
inline constexpr std::uint32_t kAllDistances = ~0u;     // a limit that nothing exceeds
inline constexpr std::int32_t kAllTokens = 0x7fffffff;  // the same for ids

/// a * b, rounded: no addition that follows is fused with it.
FK_HOST_DEVICE inline float product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  volatile float rounded = a * b;
  return rounded;
#endif
}

/// One row's parameters.
struct Row {
  float scale = 0;  // ln 2 units of a logit: log2(e) / temperature
  bool greedy = true;
  std::int64_t top_k = 0;  // 0: no limit
  float top_p = 1, min_p = 0;
  float repetition = 1, frequency = 0, presence = 0;
};

FK_HOST_DEVICE inline Row row_of(const SampleParams& p, std::int64_t row) {
  Row r;
  const float temperature = p.temperature ? p.temperature[row] : 0.0f;
  if (p.top_k) {
    const std::int64_t k = p.top_k[row];
    r.top_k = k > 0 && k < p.vocab ? k : (k == 1 ? 1 : 0);
  }
  r.greedy = !(temperature > 0.0f) || r.top_k == 1;
  if (!r.greedy) {
    r.scale = kLog2E / temperature;
    if (!(r.scale < 3.4028234663852886e38f)) r.scale = 3.4028234663852886e38f;
  }
  if (p.top_p) r.top_p = p.top_p[row];
  if (p.min_p) r.min_p = p.min_p[row];
  if (r.min_p > 1.0f) r.min_p = 1.0f;  // the best token stays
  if (p.history) {
    if (p.repetition_penalty) r.repetition = p.repetition_penalty[row];
    if (p.frequency_penalty) r.frequency = p.frequency_penalty[row];
    if (p.presence_penalty) r.presence = p.presence_penalty[row];
  }
  return r;
}

/// A logit with bias and penalties.
FK_HOST_DEVICE inline float adjusted(const SampleParams& p, const Row& r, std::int64_t row, std::int64_t token,
                                     float logit) {
  if (p.bias) logit += p.bias[row * p.stride_bias + token];
  const std::int32_t seen = p.history ? p.history[row * p.stride_history + token] : 0;
  if (seen == 0) return logit;
  if (r.repetition != 1.0f) logit = logit < 0.0f ? product(logit, r.repetition) : logit / r.repetition;
  const std::int32_t count = seen >> 1;
  if (count > 0) {
    logit -= product(static_cast<float>(count), r.frequency);
    logit -= r.presence;
  }
  return logit;
}

/// How far a logit lies below the best one, in 2^-24 of ln 2; kFar or more where its weight is 0.
FK_HOST_DEVICE inline std::uint32_t distance(float best, float logit, float scale) {
  const float steps = (best - logit) * scale * 16777216.0f;
  return steps < static_cast<float>(kFar) ? static_cast<std::uint32_t>(steps) : kFar;  // a NaN is far
}

/// 2^40 * 2^(-distance / 2^24), by a polynomial (least squares in relative error, 2e-8) in fused steps.
FK_HOST_DEVICE inline std::uint64_t weight(std::uint32_t distance) {
  if (distance >= kFar) return 0;
  const float f = static_cast<float>(distance & 0xffffffu) * 5.9604644775390625e-8f;
  float y = 0.00010889923578361049f;
  y = fmaf(y, f, -0.001274361158721149f);
  y = fmaf(y, f, 0.009578722529113293f);
  y = fmaf(y, f, -0.055490508675575256f);
  y = fmaf(y, f, 0.24022430181503296f);
  y = fmaf(y, f, -0.6931470632553101f);
  y = fmaf(y, f, 1.0f);
  const auto fixed = static_cast<std::uint32_t>(y * 2147483648.0f);  // exact: y has 24 bits and is at most 1
  return (static_cast<std::uint64_t>(fixed) << (kWeightBits - 31)) >> (distance >> kFractionBits);
}

/// The high 64 bits of a * b.
FK_HOST_DEVICE inline std::uint64_t multiply_high(std::uint64_t a, std::uint64_t b) {
  const std::uint64_t a0 = a & 0xffffffffu, a1 = a >> 32, b0 = b & 0xffffffffu, b1 = b >> 32;
  const std::uint64_t middle = a1 * b0 + ((a0 * b0) >> 32), low = (middle & 0xffffffffu) + a0 * b1;
  return a1 * b1 + (middle >> 32) + (low >> 32);
}

/// The least mass of kept tokens: the smallest integer of at least top_p * mass, for top_p < 1.
FK_HOST_DEVICE inline std::uint64_t least_mass(std::uint64_t mass, float top_p) {
  const auto share = static_cast<std::uint64_t>((top_p > 0.0f ? top_p : 0.0f) * 4294967296.0f);
  const std::uint64_t low = (mass & 0xffffffffu) * share;
  const std::uint64_t target = (mass >> 32) * share + (low >> 32) + ((low & 0xffffffffu) != 0 ? 1 : 0);
  return target > 0 ? target : 1;
}

/// The least weight of kept tokens.
FK_HOST_DEVICE inline std::uint64_t least_weight(float min_p) {
  const float exact = min_p * 1099511627776.0f;
  if (!(exact > 0.0f)) return 0;
  const auto whole = static_cast<std::uint64_t>(exact);
  return static_cast<float>(whole) < exact ? whole + 1 : whole;
}

/// 64 random bits: two words of Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011).
FK_HOST_DEVICE inline std::uint64_t random_bits(std::uint64_t seed, std::uint64_t offset) {
  std::uint32_t c0 = static_cast<std::uint32_t>(offset), c1 = static_cast<std::uint32_t>(offset >> 32), c2 = 0, c3 = 0;
  std::uint32_t k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t first = std::uint64_t{0xD2511F53u} * c0, second = std::uint64_t{0xCD9E8D57u} * c2;
    const std::uint32_t high0 = static_cast<std::uint32_t>(first >> 32),
                        high1 = static_cast<std::uint32_t>(second >> 32);
    c0 = high1 ^ c1 ^ k0;
    c2 = high0 ^ c3 ^ k1;
    c1 = static_cast<std::uint32_t>(second);
    c3 = static_cast<std::uint32_t>(first);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return static_cast<std::uint64_t>(c1) << 32 | c0;
}
FK_HOST_DEVICE inline std::uint64_t random_bits(const SampleParams& p, std::int64_t row) {
  return random_bits(p.seed ? static_cast<std::uint64_t>(p.seed[row]) : 0,
                     p.offset ? static_cast<std::uint64_t>(p.offset[row]) : 0);
}

/// Which tokens may be drawn: those nearer than `distance`, those of just that distance up to an id, and of these what
/// has the least weight.
struct Limit {
  std::uint32_t distance = kAllDistances;
  std::int32_t token = kAllTokens;  // the last one kept of those at `distance`
  std::uint64_t weight = 0;

  /// The weight of a token, 0 for one that is not kept.
  FK_HOST_DEVICE std::uint64_t kept(std::uint32_t of, std::int32_t id) const {
    if (of > distance || (of == distance && id > token)) return 0;
    const std::uint64_t own = sampling::weight(of);
    return own >= weight ? own : 0;
  }
};

}  // namespace sampling
}  // namespace flashkernel
