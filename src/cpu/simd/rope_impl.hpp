// RoPE (Su et al., 2021), in-kernel or by table, and kv_append with it; included by <isa>/rope.cpp.
// Cosines and sines of a token are computed once, in double, and shared by all heads of q and k: angles are position *
// frequency in double, reduced by multiples of pi / 2 in two parts, so they are good to fp32 at any position below
// 2^31.
#pragma once

#include "cpu/simd/rows.hpp"
#include "ops/kv_params.hpp"
#include "ops/rope_params.hpp"

namespace flashkernel::cpu {
namespace {

constexpr std::int64_t kMaxPairs = 512;  // rotary_dim up to 1024
constexpr std::int64_t kRopeTokens =
    8;  // tokens whose cosines are at hand while the heads are walked: 8 x 64 x 8 B = 4 KiB typical

struct RopeRow {
  // Interleaved pairs need each value twice and the sine's sign alternating; NeoX halves use the first half of the
  // arrays.
  float cos[2 * kMaxPairs], sin[2 * kMaxPairs];
};

/// cos and sin of position * frequency[i]. Plain loops: the compiler makes vectors of doubles of them.
inline void cos_sin(double position, const double* frequency, std::int64_t n, float* cosines, float* sines) {
  constexpr double kTwoOverPi = 0.63661977236758134308;
  constexpr double kHalfPiHigh = 1.57079632679489655800, kHalfPiLow = 6.12323399573676603587e-17;
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to a whole number, in the low bits
  for (std::int64_t i = 0; i < n; ++i) {
    const double angle = position * frequency[i];
    const double shifted = angle * kTwoOverPi + kRound;
    const double quarter = shifted - kRound;
    const double r = fma(-quarter, kHalfPiLow, fma(-quarter, kHalfPiHigh, angle));
    const double z = r * r;
    // Taylor series: on |r| <= pi / 4 the first dropped terms are 1.8e-9 (sine) and 1.2e-10 (cosine).
    const double s = r + r * z * (-1.0 / 6 + z * (1.0 / 120 + z * (-1.0 / 5040 + z * (1.0 / 362880))));
    const double c = 1.0 + z * (-0.5 + z * (1.0 / 24 + z * (-1.0 / 720 + z * (1.0 / 40320 - z * (1.0 / 3628800)))));
    std::int64_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    const bool odd = bits & 1, flip_sine = bits & 2, flip_cosine = (bits + 1) & 2;
    const double sine = odd ? c : s, cosine = odd ? s : c;
    sines[i] = static_cast<float>(flip_sine ? -sine : sine);
    cosines[i] = static_cast<float>(flip_cosine ? -cosine : cosine);
  }
}

inline void rope_frequencies(const RopeSpec& spec, double* frequency) {
  const std::int64_t pairs = spec.rotary_dim / 2;
  for (std::int64_t i = 0; i < pairs; ++i)
    frequency[i] = spec.inv_freq
                       ? static_cast<double>(spec.inv_freq[i])
                       : pow(spec.theta, -2.0 * static_cast<double>(i) / static_cast<double>(spec.rotary_dim));
}

/// Brings a row of `pairs` cosines and sines into the order that rotate_head reads, with the direction's sign.
inline void finish_row(const RopeSpec& spec, RopeRow* row) {
  const std::int64_t pairs = spec.rotary_dim / 2;
  if (spec.inverse)
    for (std::int64_t i = 0; i < pairs; ++i) row->sin[i] = -row->sin[i];
  if (!spec.interleaved) return;
  for (std::int64_t i = pairs - 1; i >= 0; --i) {
    const float c = row->cos[i], s = row->sin[i];
    row->cos[2 * i] = row->cos[2 * i + 1] = c;
    row->sin[2 * i] = -s;
    row->sin[2 * i + 1] = s;
  }
}

template <class T>
inline void rotate_head(const RopeSpec& spec, const RopeRow& row, std::int64_t head_dim, const T* in, T* out) {
  const std::int64_t pairs = spec.rotary_dim / 2;
  if (spec.interleaved) {
    for_vectors(2 * pairs, [&](std::int64_t i, int lanes) {
      const Reg x = load_lanes(in + i, lanes);
      const Reg y = Simd::mul(Simd::swap_pairs(x), load_lanes(row.sin + i, lanes));
      save_lanes(out + i, Simd::fma(x, load_lanes(row.cos + i, lanes), y), lanes);
    });
  } else {
    for_vectors(pairs, [&](std::int64_t i, int lanes) {
      const Reg a = load_lanes(in + i, lanes), b = load_lanes(in + pairs + i, lanes);
      const Reg c = load_lanes(row.cos + i, lanes), s = load_lanes(row.sin + i, lanes);
      save_lanes(out + i, Simd::fnma(b, s, Simd::mul(a, c)), lanes);
      save_lanes(out + pairs + i, Simd::fma(a, s, Simd::mul(b, c)), lanes);
    });
  }
  if (in != out && head_dim > 2 * pairs)
    memcpy(out + 2 * pairs, in + 2 * pairs, static_cast<std::size_t>(head_dim - 2 * pairs) * sizeof(T));
}

/// A row of a table, from `cos_at` and `sin_at` elements on.
inline void table_row(DType dtype, const void* cos, const void* sin, std::int64_t cos_at, std::int64_t sin_at,
                      std::int64_t pairs, RopeRow* row) {
  visit_type(dtype, [&](auto type) {
    using Table = decltype(type);
    const Table* const c = static_cast<const Table*>(cos) + cos_at;
    const Table* const s = static_cast<const Table*>(sin) + sin_at;
    for_vectors(pairs, [&](std::int64_t i, int lanes) {
      save_lanes(row->cos + i, load_lanes(c + i, lanes), lanes);
      save_lanes(row->sin + i, load_lanes(s + i, lanes), lanes);
    });
  });
}

inline void table_row(const RopeParams& p, std::int64_t batch, std::int64_t token, RopeRow* row) {
  const std::int64_t at =
      p.table_is_per_token
          ? token
          : (p.positions.data ? index_at(p.positions, batch * p.stride_positions_batch + token) : token);
  table_row(p.table_dtype, p.cos, p.sin, batch * p.stride_table_batch + at * p.stride_table_row,
            batch * p.stride_sin_batch + at * p.stride_sin_row, p.spec.rotary_dim / 2, row);
}

template <class T>
inline void rope_typed(const RopeParams& p) {
  double frequency[kMaxPairs];
  if (!p.cos) rope_frequencies(p.spec, frequency);
  const std::int64_t blocks = ceil_div(p.seq, kRopeTokens);
  auto run = [&](std::int64_t begin, std::int64_t end, int) {
    RopeRow rows[kRopeTokens];
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t b = i / blocks, t0 = i % blocks * kRopeTokens, count = imin(kRopeTokens, p.seq - t0);
      for (std::int64_t t = 0; t < count; ++t) {
        if (p.cos) {
          table_row(p, b, t0 + t, &rows[t]);
        } else {
          const std::int64_t position =
              p.positions.data ? index_at(p.positions, b * p.stride_positions_batch + t0 + t) : t0 + t;
          cos_sin(static_cast<double>(position), frequency, p.spec.rotary_dim / 2, rows[t].cos, rows[t].sin);
        }
        finish_row(p.spec, &rows[t]);
      }
      for (std::int64_t h = 0; h < p.heads_q; ++h)
        for (std::int64_t t = 0; t < count; ++t)
          rotate_head(
              p.spec, rows[t], p.head_dim,
              static_cast<const T*>(p.q) + b * p.stride_q_batch + h * p.stride_q_head + (t0 + t) * p.stride_q_token,
              static_cast<T*>(p.q_out) + b * p.stride_q_out_batch + h * p.stride_q_out_head +
                  (t0 + t) * p.stride_q_out_token);
      for (std::int64_t h = 0; h < p.heads_kv; ++h)
        for (std::int64_t t = 0; t < count; ++t)
          rotate_head(
              p.spec, rows[t], p.head_dim,
              static_cast<const T*>(p.k) + b * p.stride_k_batch + h * p.stride_k_head + (t0 + t) * p.stride_k_token,
              static_cast<T*>(p.k_out) + b * p.stride_k_out_batch + h * p.stride_k_out_head +
                  (t0 + t) * p.stride_k_out_token);
    }
  };
  const std::int64_t bytes =
      kRopeTokens * (p.heads_q + p.heads_kv) * p.head_dim * 2 * static_cast<std::int64_t>(sizeof(T));
  parallel_for(p.batch * blocks, rows_per_task(bytes), run);
}

/// RMSNorm of a head (Zhang and Sennrich, 2019), rounded to its dtype.
template <class T>
inline void norm_head(const KvAppendParams& p, TypedPointer weight, const T* in, T* out) {
  const std::int64_t n = p.pages.head_dim;
  const float squares = sum_of(n, [&](std::int64_t c, int lanes) {
    const Reg x = load_lanes(in + c, lanes);
    return Simd::mul(x, x);
  });
  const Reg rstd = Simd::set1(1.0f / sqrtf(squares / static_cast<float>(n) + p.norm_eps));
  visit_type(weight.dtype, [&](auto type) {
    using Weight = decltype(type);
    const Weight* const w = static_cast<const Weight*>(weight.data);
    for_vectors(n, [&](std::int64_t c, int lanes) {
      save_lanes(out + c, Simd::mul(Simd::mul(load_lanes(in + c, lanes), rstd), load_lanes(w + c, lanes)), lanes);
    });
  });
}

template <class T>
inline void kv_append_typed(const KvAppendParams& p) {
  const KvPages& pages = p.pages;
  double frequency[kMaxPairs];
  if (p.has_rope && !p.table) rope_frequencies(p.rope, frequency);
  auto run = [&](std::int64_t begin, std::int64_t end, int) {
    RopeRow row;
    T normed[2 * kMaxPairs];
    const auto turn = [&](TypedPointer norm, const T* in, T* out) {
      if (norm) norm_head(p, norm, in, normed);
      rotate_head(p.rope, row, pages.head_dim, norm ? normed : in, out);
    };
    for (std::int64_t t = begin; t < end; ++t) {
      if (p.has_rope) {
        const std::int64_t position = index_at(p.positions, t), pairs = p.rope.rotary_dim / 2;
        if (p.table)
          table_row(p.table.dtype, p.table.cos, p.table.sin, position * p.table.stride_cos,
                    position * p.table.stride_sin, pairs, &row);
        else
          cos_sin(static_cast<double>(position), frequency, pairs, row.cos, row.sin);
        finish_row(p.rope, &row);
      }
      const std::int64_t slot = index_at(p.slots, t);
      if (slot >= 0 && slot < pages.num_pages * pages.page_size) {
        const std::int64_t page = slot / pages.page_size, offset = slot % pages.page_size;
        for (std::int64_t h = 0; h < pages.heads_kv; ++h) {
          const T* const k = static_cast<const T*>(p.k) + t * p.stride_k_token + h * p.stride_k_head;
          const T* const v = static_cast<const T*>(p.v) + t * p.stride_v_token + h * p.stride_v_head;
          T* const k_slot = static_cast<T*>(pages.k) + page * pages.stride_k_page + offset * pages.stride_k_slot +
                            h * pages.stride_k_head;
          T* const v_slot = static_cast<T*>(pages.v) + page * pages.stride_v_page + offset * pages.stride_v_slot +
                            h * pages.stride_v_head;
          if (p.has_rope) {
            turn(p.k_norm, k, k_slot);
          } else {
            memcpy(k_slot, k, static_cast<std::size_t>(pages.head_dim) * sizeof(T));
          }
          memcpy(v_slot, v, static_cast<std::size_t>(pages.head_dim_v) * sizeof(T));
        }
      }
      for (std::int64_t h = 0; h < p.heads_q; ++h)
        turn(p.q_norm, static_cast<const T*>(p.q) + t * p.stride_q_token + h * p.stride_q_head,
             static_cast<T*>(p.q_out) + t * p.stride_q_out_token + h * p.stride_q_out_head);
    }
  };
  const std::int64_t elements = pages.heads_kv * (pages.head_dim + pages.head_dim_v) + p.heads_q * pages.head_dim;
  parallel_for(p.tokens, rows_per_task(elements * 2 * static_cast<std::int64_t>(sizeof(T))), run);
}

}  // namespace
}  // namespace flashkernel::cpu
