// linear_cross_entropy and its gradient: what is done with a chunk of logits, in vectors; included by
// <isa>/linear_loss.cpp. A row's segment is summed in the order of rows.hpp, which depends on its length alone.
#pragma once

#include "cpu/simd/rows.hpp"
#include "ops/linear_loss_params.hpp"

namespace flashkernel::cpu {
namespace {

/// tanh as attention's softcap has it: a polynomial near 0, where the quotient would cancel.
inline Reg vec_tanh(Reg x) {
  const Reg a = Simd::abs(x), z = Simd::mul(x, x);
  Reg small = Simd::set1(kTanhCoefficients[4]);
  for (int i = 3; i >= 0; --i) small = Simd::fma(small, z, Simd::set1(kTanhCoefficients[i]));
  small = Simd::fma(Simd::mul(a, z), small, a);
  const Reg one = Simd::set1(1.0f);
  const Reg large = Simd::sub(one, Simd::div(Simd::set1(2.0f), Simd::add(vec_exp(Simd::add(a, a)), one)));
  return Simd::copy_sign(Simd::select_less(a, Simd::set1(kTanhSmall), small, large), x);
}

/// A logit as the softmax sees it.
struct Capping {
  bool caps;
  Reg inverse, factor, scale;

  template <class Params>
  explicit Capping(const Params& p)
      : caps(p.softcap > 0.0f),
        inverse(Simd::set1(caps ? 1.0f / p.softcap : 0.0f)),
        factor(Simd::set1(p.scale * p.softcap)),
        scale(Simd::set1(p.scale)) {}

  Reg operator()(Reg logit) const {
    return caps ? Simd::mul(vec_tanh(Simd::mul(logit, inverse)), factor) : Simd::mul(logit, scale);
  }
  float operator()(float logit) const {
    float lanes[Simd::kWidth];
    Simd::store(lanes, (*this)(Simd::set1(logit)));
    return lanes[0];
  }
};

template <class T>
inline LossState segment_state(const LinearCrossEntropyParams& p, const Capping& capped, const T* logits,
                               const float* weights, std::int64_t n) {
  LossState state{};
  state.maximum = capped(max_of(logits, n));
  const Reg origin = Simd::set1(loss_origin(state.maximum));
  const auto shifted = [&](std::int64_t c, int lanes) {
    return Simd::sub(capped(load_lanes(logits + c, lanes)), origin);
  };
  state.sum = sum_of(n, [&](std::int64_t c, int lanes) { return vec_exp(shifted(c, lanes)); });
  if (p.label_smoothing > 0.0f) {
    state.weight = static_cast<float>(n);
    if (weights) {
      state.weight = sum_of(n, [&](std::int64_t c, int lanes) { return load_lanes(weights + c, lanes); });
      state.total = sum_of(
          n, [&](std::int64_t c, int lanes) { return Simd::mul(load_lanes(weights + c, lanes), shifted(c, lanes)); });
    } else {
      state.total = sum_of(n, shifted);
    }
  }
  return state;
}

template <class T>
inline void update_losses(const LinearCrossEntropyParams& p) {
  auto run = [&](std::int64_t begin, std::int64_t end, int) {
    const Capping capped(p);
    for (std::int64_t row = begin; row < end; ++row) {
      const T* const logits = static_cast<const T*>(p.logits) + row * p.stride_logits_row;
      LossState state{kNegInf, 0.0f, 0.0f, 0.0f, 0.0f};
      if (p.first_column > 0) state = p.state[row];
      for (std::int64_t c = 0; c < p.columns; c += p.segment)
        join_columns(state, segment_state(p, capped, logits + c,
                                          p.class_weights ? p.class_weights + p.first_column + c : nullptr,
                                          imin(p.segment, p.columns - c)));
      const std::int64_t target = index_at(p.targets, row) - p.first_column;
      if (target >= 0 && target < p.columns) state.hit = capped(scalar_value(logits[target]));
      p.state[row] = state;
    }
  };
  parallel_for(p.rows, rows_per_task(p.columns * static_cast<std::int64_t>(sizeof(T))), run);
}

template <class T>
inline void logits_to_gradient(const LinearCrossEntropyBackwardParams& p) {
  auto run = [&](std::int64_t begin, std::int64_t end, int) {
    const bool caps = p.softcap > 0.0f;
    const Reg inverse = Simd::set1(caps ? 1.0f / p.softcap : 0.0f), factor = Simd::set1(p.scale * p.softcap);
    const Reg scale = Simd::set1(p.scale), one = Simd::set1(1.0f);
    for (std::int64_t row = begin; row < end; ++row) {
      T* const logits = static_cast<T*>(p.logits) + row * p.stride_logits_row;
      const LossCoefficients k = p.coefficients[row];
      if (k.probability == 0.0f && k.target == 0.0f && k.uniform == 0.0f) {
        for_vectors(p.columns, [&](std::int64_t c, int lanes) { save_lanes(logits + c, Simd::zero(), lanes); });
        continue;
      }
      const Reg shift = Simd::set1(k.shift), rest = Simd::set1(k.rest), probability = Simd::set1(k.probability);
      const float* const weights = p.class_weights ? p.class_weights + p.first_column : nullptr;
      const auto gradient = [&](Reg logit, Reg less) {
        Reg value = Simd::mul(logit, scale), slope = scale;
        if (caps) {
          const Reg t = vec_tanh(Simd::mul(logit, inverse));
          value = Simd::mul(t, factor);
          slope = Simd::mul(scale, Simd::fnma(t, t, one));
        }
        const Reg log_p = Simd::sub(Simd::sub(value, shift), rest);
        return Simd::mul(Simd::sub(Simd::mul(probability, vec_exp(log_p)), less), slope);
      };
      const auto uniform = [&](std::int64_t c, int lanes) {
        const Reg all = Simd::set1(k.uniform);
        return weights && k.uniform != 0.0f ? Simd::mul(all, load_lanes(weights + c, lanes)) : all;
      };
      const std::int64_t target = index_at(p.targets, row) - p.first_column;
      const bool is_here = target >= 0 && target < p.columns;
      const float at_target = is_here ? scalar_value(logits[target]) : 0.0f;  // before it is written over
      for_vectors(p.columns, [&](std::int64_t c, int lanes) {
        save_lanes(logits + c, gradient(load_lanes(logits + c, lanes), uniform(c, lanes)), lanes);
      });
      if (is_here) {
        const Reg less = Simd::add(uniform(target, 1), Simd::set1(k.target));
        Simd::store_first(logits + target, gradient(Simd::set1(at_target), less), 1);
      }
    }
  };
  parallel_for(p.rows, rows_per_task(p.columns * 2 * static_cast<std::int64_t>(sizeof(T))), run);
}

template <class Part>
inline void accumulate(const LinearCrossEntropyBackwardParams& p) {
  auto run = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row) {
      const Part* const part = static_cast<const Part*>(p.part.data) + row * p.columns;
      float* const sum = p.sum + row * p.stride_sum_row;
      for_vectors(p.columns, [&](std::int64_t c, int lanes) {
        Reg value = load_lanes(part + c, lanes);
        if (!p.is_first) value = Simd::add(load_lanes(sum + c, lanes), value);
        save_lanes(sum + c, value, lanes);
      });
      if (!p.out) continue;
      visit_type(p.out_dtype, [&](auto type) {
        auto* const out = static_cast<decltype(type)*>(p.out) + row * p.stride_out_row;
        for_vectors(p.columns,
                    [&](std::int64_t c, int lanes) { save_lanes(out + c, load_lanes(sum + c, lanes), lanes); });
      });
    }
  };
  parallel_for(p.rows, rows_per_task(p.columns * 8), run);
}

inline void linear_cross_entropy_step(const LinearCrossEntropyParams& p) {
  if (p.step == LinearCrossEntropyParams::Step::kFinish) return finish_losses(p);
  visit_type(p.dtype, [&](auto type) { update_losses<decltype(type)>(p); });
}

inline void linear_cross_entropy_backward_step(const LinearCrossEntropyBackwardParams& p) {
  using Step = LinearCrossEntropyBackwardParams::Step;
  if (p.step == Step::kCoefficients) return loss_coefficients(p);
  if (p.step == Step::kAccumulate) return visit_type(p.part.dtype, [&](auto type) { accumulate<decltype(type)>(p); });
  visit_type(p.dtype, [&](auto type) { logits_to_gradient<decltype(type)>(p); });
}

}  // namespace
}  // namespace flashkernel::cpu
