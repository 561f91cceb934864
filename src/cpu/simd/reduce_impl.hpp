// sum, mean, max and argmax over one merged dim, either contiguous or strided under contiguous outputs; included by
// <isa>/reduce.cpp. Sums go through pieces of a fixed size (row_plan.hpp) and then over the pieces, so that errors stay
// small and the number of threads does not change the order.
#pragma once

#include "cpu/simd/row_plan.hpp"
#include "cpu/simd/rows.hpp"
#include "ops/reduce_params.hpp"

namespace flashkernel::cpu {
namespace {

inline float larger(float a, float b) {  // a NaN wins
  return a > b || a != a ? a : b;
}

template <class T>
inline float maximum_of(const T* x, std::int64_t n) {
  return has_nan(x, n) ? kInfinity - kInfinity : max_of(x, n);
}

/// values[0..n) folded pairwise in place.
template <class F>
inline float fold_pairs(float* values, std::int64_t n, F&& f) {
  for (; n > 1; n = (n + 1) / 2) {
    for (std::int64_t i = 0; i < n / 2; ++i) values[i] = f(values[2 * i], values[2 * i + 1]);
    if (n % 2) values[n / 2] = values[n - 1];
  }
  return values[0];
}

template <class T>
inline void store_result(const ReduceParams& p, std::int64_t offset, float value) {
  if (p.op == ReduceOp::kMean) value /= static_cast<float>(p.reduced_count);
  if (p.out_dtype == DType::kFloat32) {
    static_cast<float*>(p.out)[offset] = value;
  } else {
    Simd::store_first(static_cast<T*>(p.out) + offset, Simd::set1(value), 1);
  }
}

// The first maximum, or the first NaN: the maximum once, then a walk that stops at it.
template <class T>
inline std::int64_t first_maximum(const T* x, std::int64_t n) {
  const float top = maximum_of(x, n);
  const bool nan = top != top;
  std::int64_t c = 0;
  for (; c < n; c += Simd::kWidth) {
    const int lanes = static_cast<int>(imin<std::int64_t>(Simd::kWidth, n - c));
    const Reg v = load_lanes(x + c, lanes);
    unsigned hits = Simd::bits(nan ? Simd::is_nan(v) : Simd::equal(v, Simd::set1(top)));
    if (lanes < Simd::kWidth) hits &= (1u << lanes) - 1u;
    if (hits == 0) continue;
    while (!(hits & 1u)) {
      hits >>= 1;
      ++c;
    }
    break;
  }
  return c;
}

template <class T>
inline void reduce_contiguous(const ReduceParams& p, void* workspace) {
  const std::int64_t n = p.reduced_count, pieces = ceil_div(n, kReducePiece);
  const T* const x = static_cast<const T*>(p.x);
  const auto x_at = [&](std::int64_t i) { return x + offset_at(i, p.num_kept, p.kept_shape, p.stride_x_kept); };
  const auto out_at = [&](std::int64_t i) { return offset_at(i, p.num_kept, p.kept_shape, p.stride_out); };
  if (p.op == ReduceOp::kArgmax) {
    auto run = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t i = begin; i < end; ++i)
        static_cast<std::int64_t*>(p.out)[out_at(i)] = first_maximum(x_at(i), n);
    };
    return parallel_for(p.kept_count, rows_per_task(n * static_cast<std::int64_t>(sizeof(T))), run);
  }
  const bool is_max = p.op == ReduceOp::kMax;
  const auto piece = [&](const T* from, std::int64_t count) {
    return is_max ? maximum_of(from, count)
                  : sum_of(count, [&](std::int64_t c, int lanes) { return load_lanes(from + c, lanes); });
  };
  if (pieces == 1) {
    auto run = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t i = begin; i < end; ++i) store_result<T>(p, out_at(i), piece(x_at(i), n));
    };
    return parallel_for(p.kept_count, rows_per_task(n * static_cast<std::int64_t>(sizeof(T))), run);
  }
  float* const partial = static_cast<float*>(workspace);
  auto run = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t start = i % pieces * kReducePiece;
      partial[i] = piece(x_at(i / pieces) + start, imin(kReducePiece, n - start));
    }
  };
  parallel_for(p.kept_count * pieces, rows_per_task(kReducePiece * static_cast<std::int64_t>(sizeof(T))), run);
  auto finish = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) {
      float* const own = partial + i * pieces;
      store_result<T>(p, out_at(i),
                      is_max ? fold_pairs(own, pieces, [](float a, float b) { return larger(a, b); })
                             : fold_pairs(own, pieces, [](float a, float b) { return a + b; }));
    }
  };
  parallel_for(p.kept_count, rows_per_task(pieces * 4), finish);
}

constexpr std::int64_t kReduceStrip = 512;  // outputs of a task: 2 KiB of sums

/// Sum or maximum of `rows` rows, `stride` apart, into acc[0..columns).
template <class T>
inline void reduce_rows(const T* x, std::int64_t stride, std::int64_t rows, std::int64_t columns, bool is_max,
                        float* acc) {
  for_vectors(columns, [&](std::int64_t c, int lanes) { Simd::save(acc + c, load_lanes(x + c, lanes)); });
  std::int64_t r = 1;
  // A NaN in either operand stays: max(a, b) returns b for a NaN, so the running value is kept by hand when it is the
  // NaN.
  const auto top = [](Reg a, Reg b) { return Simd::select(Simd::is_nan(b), b, Simd::max(b, a)); };
  for (; r + 4 <= rows; r += 4) {
    const T* const row = x + r * stride;
    for_vectors(columns, [&](std::int64_t c, int lanes) {
      const Reg v0 = load_lanes(row + c, lanes), v1 = load_lanes(row + stride + c, lanes);
      const Reg v2 = load_lanes(row + 2 * stride + c, lanes), v3 = load_lanes(row + 3 * stride + c, lanes);
      const Reg was = Simd::load(acc + c);
      Simd::save(acc + c, is_max ? top(top(top(v0, v1), top(v2, v3)), was)
                                 : Simd::add(was, Simd::add(Simd::add(v0, v1), Simd::add(v2, v3))));
    });
  }
  for (; r < rows; ++r)
    for_vectors(columns, [&](std::int64_t c, int lanes) {
      const Reg v = load_lanes(x + r * stride + c, lanes), was = Simd::load(acc + c);
      Simd::save(acc + c, is_max ? top(v, was) : Simd::add(was, v));
    });
}

/// x[kept..., reduced, columns] with contiguous columns: pieces of rows x strips of columns, then the same over the
/// pieces.
template <class T>
inline void reduce_strided(const ReduceParams& p, void* workspace) {
  const std::int64_t n = p.reduced_count, pieces = ceil_div(n, kReduceRows);
  const std::int64_t columns = p.kept_shape[p.num_kept - 1], outer = p.kept_count / columns;
  const std::int64_t strips = ceil_div(columns, kReduceStrip), stride = p.stride_x_reduced[0];
  const bool is_max = p.op == ReduceOp::kMax;
  float* const partial = static_cast<float*>(workspace);  // [outer][pieces][columns], when there are several pieces
  auto run = [&](std::int64_t begin, std::int64_t end, int) {
    float acc[kReduceStrip + Simd::kWidth];
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t strip = i % strips, piece = i / strips % pieces, o = i / strips / pieces;
      const std::int64_t c0 = strip * kReduceStrip, count = imin(kReduceStrip, columns - c0);
      const T* const x = static_cast<const T*>(p.x) + offset_at(o, p.num_kept - 1, p.kept_shape, p.stride_x_kept) +
                         piece * kReduceRows * stride + c0;
      reduce_rows(x, stride, imin(kReduceRows, n - piece * kReduceRows), count, is_max, acc);
      if (pieces > 1) {
        float* const to = partial + (o * pieces + piece) * columns + c0;
        for_vectors(count, [&](std::int64_t c, int lanes) { save_lanes(to + c, Simd::load(acc + c), lanes); });
      } else {
        const std::int64_t at = offset_at(o, p.num_kept - 1, p.kept_shape, p.stride_out);
        for (std::int64_t c = 0; c < count; ++c) store_result<T>(p, at + c0 + c, acc[c]);
      }
    }
  };
  parallel_for(outer * pieces * strips,
               rows_per_task(imin(n, kReduceRows) * imin(columns, kReduceStrip) * static_cast<std::int64_t>(sizeof(T))),
               run);
  if (pieces == 1) return;
  auto finish = [&](std::int64_t begin, std::int64_t end, int) {
    float acc[kReduceStrip + Simd::kWidth];
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t c0 = i % strips * kReduceStrip, o = i / strips, count = imin(kReduceStrip, columns - c0);
      reduce_rows(partial + o * pieces * columns + c0, columns, pieces, count, is_max, acc);
      const std::int64_t at = offset_at(o, p.num_kept - 1, p.kept_shape, p.stride_out);
      for (std::int64_t c = 0; c < count; ++c) store_result<T>(p, at + c0 + c, acc[c]);
    }
  };
  parallel_for(outer * strips, rows_per_task(pieces * imin(columns, kReduceStrip) * 4), finish);
}

template <class T>
inline void reduce_typed(const ReduceParams& p, void* workspace) {
  if (p.kept_count == 0) return;
  if (p.stride_x_reduced[0] == 1) return reduce_contiguous<T>(p, workspace);
  reduce_strided<T>(p, workspace);
}

}  // namespace
}  // namespace flashkernel::cpu
