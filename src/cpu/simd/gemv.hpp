// linear for few rows (decode): the weight is streamed once and everything else stays in cache. fp32 sums in one fixed
// order. Included by <isa>/linear.cpp. Weight [out, in] with in contiguous: dot products, several weight rows at a
// time. Weight with out contiguous (GPT-2's [in, out]): strips of outputs, eight weight rows at a time added onto sums
// in L1.
#pragma once

#include "cpu/simd/gemm.hpp"
#include "ops/linear_params.hpp"

namespace flashkernel::cpu {
namespace {

template <int kRows>
struct Rows {
  static constexpr int kCount = kRows;
};

/// Vectors in a line of memory of a weight.
template <class T>
constexpr int kLineVectors = 64 / (Simd::kWidth * static_cast<int>(sizeof(T)));
template <class T>
constexpr std::int64_t kLine = 64 / static_cast<std::int64_t>(sizeof(T));

/// A line as fp32, in the order that is the cheapest to widen into (`load_pair`).
template <class T>
inline void load_line(const T* p, Reg (&v)[kLineVectors<T>]) {
  if constexpr (kLineVectors<T> == 1) {
    v[0] = Simd::load(p);
  } else {
#pragma GCC unroll 2
    for (int i = 0; i < kLineVectors<T>; i += 2) Simd::load_pair(p + i * Simd::kWidth, &v[i], &v[i + 1]);
  }
}
/// The first `count` elements of a line and zeros.
template <class T>
inline void load_part_of_line(const T* p, std::int64_t count, Reg (&v)[kLineVectors<T>]) {
  alignas(64) T line[kLine<T>] = {};
  for (std::int64_t i = 0; i < count; ++i) line[i] = p[i];
  load_line(line, v);
}

/// Rows of x as fp32 in the order of load_line, `pitch` apart, with zeros to the end of the last line.
template <class T>
inline void widen_lines(const T* from, std::int64_t stride, std::int64_t rows, std::int64_t features, float* to,
                        std::int64_t pitch) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t i = 0; i < features; i += kLine<T>) {
      Reg v[kLineVectors<T>];
      if (features - i >= kLine<T>) {
        load_line(from + r * stride + i, v);
      } else {
        load_part_of_line(from + r * stride + i, features - i, v);
      }
      for (int j = 0; j < kLineVectors<T>; ++j) Simd::save(to + r * pitch + i + j * Simd::kWidth, v[j]);
    }
  }
}

/// Sums side by side: as many as a vector has lanes, so that one transposing addition ends them all.
template <int kRows>
constexpr int kDotOuts = Simd::kWidth / (kRows == 3 ? 4 : kRows);

/// Lane r * kOuts + o: the product of row r of x and row o of the weight. An order that depends on k alone: lines in
/// turn, in a line its vectors in turn. Lines of the next kOuts rows, or of these 16 KiB further on, are asked for on
/// the way.
template <int kRows, int kOuts, class T>
inline Reg dot_block(const float* x, std::int64_t pitch, const T* weight, std::int64_t stride, std::int64_t k) {
  constexpr std::int64_t kLines = 256;  // asked for before they are needed
  static_assert(kRows * kOuts <= Simd::kWidth);
  Reg acc[Simd::kWidth];
#pragma GCC unroll 16
  for (int i = 0; i < Simd::kWidth; ++i) acc[i] = Simd::zero();
  const auto add = [&](const Reg(&w)[kLineVectors<T>], std::int64_t i, int o) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int v = 0; v < kLineVectors<T>; ++v)
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r)
        acc[r * kOuts + o] = Simd::fma(w[v], Simd::load(x + r * pitch + i + v * Simd::kWidth), acc[r * kOuts + o]);
  };
  const std::int64_t whole = k / kLine<T> * kLine<T>, ahead = imin(kLines / kOuts * kLine<T>, round_up(k, kLine<T>));
  std::int64_t i = 0;
  for (; i < whole; i += kLine<T>) {
    const std::int64_t next = i + ahead;
    const char* const from = reinterpret_cast<const char*>(weight) +
                             (next < k ? next : kOuts * stride + (next - k)) * static_cast<std::int64_t>(sizeof(T));
#pragma GCC unroll 16
    for (int o = 0; o < kOuts; ++o) {
      __builtin_prefetch(from + o * stride * static_cast<std::int64_t>(sizeof(T)));
      Reg w[kLineVectors<T>];
      load_line(weight + o * stride + i, w);
      add(w, i, o);
    }
  }
  if (i < k) {
#pragma GCC unroll 16
    for (int o = 0; o < kOuts; ++o) {
      Reg w[kLineVectors<T>];
      load_part_of_line(weight + o * stride + i, k - i, w);
      add(w, i, o);
    }
  }
  return Simd::sum_rows(acc);
}

constexpr std::int64_t kDotUnit = 16, kDotStrip = 64;  // outputs: of a task, and whose sums meet the epilogue together

template <int kRows, class T>
inline void dot_strip(const float* x, std::int64_t pitch, const T* weight, std::int64_t stride, std::int64_t outs,
                      std::int64_t k, float* sums) {
  constexpr int kOuts = kDotOuts<kRows>;
  alignas(64) float block[Simd::kWidth];
  std::int64_t o = 0;
  for (; o + kOuts <= outs; o += kOuts) {
    Simd::save(block, dot_block<kRows, kOuts>(x, pitch, weight + o * stride, stride, k));
    for (int r = 0; r < kRows; ++r)
      for (int j = 0; j < kOuts; ++j) sums[r * kDotStrip + o + j] = block[r * kOuts + j];
  }
  for (; o < outs; ++o) {
    Simd::save(block, dot_block<kRows, 1>(x, pitch, weight + o * stride, stride, k));
    for (int r = 0; r < kRows; ++r) sums[r * kDotStrip + o] = block[r];
  }
}

template <class T>
inline void gemv_in_contiguous(const LinearParams& p, const float* x, std::int64_t pitch, const Epilogue<T>& epilogue) {
  const T* const weight = static_cast<const T*>(p.weight);
  const std::int64_t k = p.in_features, stride = p.stride_weight_out;
  auto run = [&](std::int64_t begin, std::int64_t end, int) {
    float sums[kGemvRows * kDotStrip];
    for (std::int64_t n0 = begin * kDotUnit, n1 = imin(end * kDotUnit, p.out_features); n0 < n1; n0 += kDotStrip) {
      const std::int64_t outs = imin(kDotStrip, n1 - n0);
      // All rows of x for one unit before the next: what of the weight is read again comes from L2 at worst.
      for (std::int64_t o = 0; o < outs; o += kDotUnit) {
        const auto dots = [&](auto rows, std::int64_t r) {
          dot_strip<decltype(rows)::kCount>(x + r * pitch, pitch, weight + (n0 + o) * stride, stride,
                                            imin(kDotUnit, outs - o), k, sums + r * kDotStrip + o);
        };
        std::int64_t r = 0;
        for (; r + 4 <= p.rows; r += 4) dots(Rows<4>{}, r);
        switch (p.rows - r) {
          case 1: dots(Rows<1>{}, r); break;
          case 2: dots(Rows<2>{}, r); break;
          case 3: dots(Rows<3>{}, r); break;
          default: break;
        }
      }
      epilogue.tile(sums, kDotStrip, 0, p.rows, n0, outs);
    }
  };
  const std::int64_t units = ceil_div(p.out_features, kDotUnit);
  const std::int64_t unit_bytes = kDotUnit * k * static_cast<std::int64_t>(sizeof(T));
  parallel_for(units, stream_grain(units, unit_bytes, num_workers()), run);
}

constexpr std::int64_t kAxpySums = 4096;  // rows x outputs of a strip: 16 KiB of L1

/// sums[r][n] += x[r][k..k+kDepth) * weight[k..k+kDepth)[n]; rows of sums lie `strip` apart. The lines of the next
/// kDepth rows of the weight are asked for on the way.
template <int kRows, int kDepth, class T>
inline void axpy_rows(const float* x, std::int64_t pitch, const T* weight, std::int64_t stride, std::int64_t outs,
                      float* sums, std::int64_t strip) {
  constexpr int kW = Simd::kWidth;
  for (std::int64_t c = 0; c < outs; c += kW) {
    Reg w[kDepth];
    if (c % kLine<T> == 0) {
#pragma GCC unroll 8
      for (int d = 0; d < kDepth; ++d) __builtin_prefetch(weight + (kDepth + d) * stride + c);
    }
#pragma GCC unroll 8
    for (int d = 0; d < kDepth; ++d) w[d] = load_columns(weight + d * stride, c, outs);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      Reg sum = Simd::load(sums + r * strip + c);
#pragma GCC unroll 8
      for (int d = 0; d < kDepth; ++d) sum = Simd::fma(Simd::set1(x[r * pitch + d]), w[d], sum);
      Simd::save(sums + r * strip + c, sum);
    }
  }
}

template <int kRows, class T>
inline void axpy_strip(const float* x, std::int64_t pitch, const T* weight, std::int64_t stride, std::int64_t outs,
                       std::int64_t k, float* sums, std::int64_t strip) {
  constexpr int kDepth = 8;
  std::int64_t i = 0;
  for (; i + kDepth <= k; i += kDepth)
    axpy_rows<kRows, kDepth>(x + i, pitch, weight + i * stride, stride, outs, sums, strip);
  for (; i < k; ++i) axpy_rows<kRows, 1>(x + i, pitch, weight + i * stride, stride, outs, sums, strip);
}

template <class T>
inline void gemv_out_contiguous(const LinearParams& p, const float* x, std::int64_t pitch,
                                const Epilogue<T>& epilogue) {
  const T* const weight = static_cast<const T*>(p.weight);
  const std::int64_t k = p.in_features, stride = p.stride_weight_in, rows = p.rows;
  // Wide strips, so that a row of the weight is a long run of memory, but at least two a thread. A strip's width does
  // not change the order of any sum.
  const std::int64_t widest = imax<std::int64_t>(64, kAxpySums / imax<std::int64_t>(1, rows) / 64 * 64);
  const std::int64_t strip =
      imin(widest, imax<std::int64_t>(64, round_up(ceil_div(p.out_features, 2 * num_workers()), 64)));
  auto run = [&](std::int64_t begin, std::int64_t end, int) {
    alignas(64) float sums[kAxpySums];
    for (std::int64_t s = begin; s < end; ++s) {
      const std::int64_t n0 = s * strip, outs = imin(strip, p.out_features - n0);
      const T* const from = weight + n0;
      for (std::int64_t i = 0; i < rows * strip; i += Simd::kWidth) Simd::save(sums + i, Simd::zero());
      if (rows == 8) {
        axpy_strip<8>(x, pitch, from, stride, outs, k, sums, strip);
      } else {
        std::int64_t r = 0;
        for (; r + 4 <= rows; r += 4)
          axpy_strip<4>(x + r * pitch, pitch, from, stride, outs, k, sums + r * strip, strip);
        switch (rows - r) {
          case 1: axpy_strip<1>(x + r * pitch, pitch, from, stride, outs, k, sums + r * strip, strip); break;
          case 2: axpy_strip<2>(x + r * pitch, pitch, from, stride, outs, k, sums + r * strip, strip); break;
          case 3: axpy_strip<3>(x + r * pitch, pitch, from, stride, outs, k, sums + r * strip, strip); break;
          default: break;
        }
      }
      epilogue.tile(sums, strip, 0, rows, n0, outs);
    }
  };
  parallel_for(ceil_div(p.out_features, strip),
               imax<std::int64_t>(1, rows_per_task(strip * k * static_cast<std::int64_t>(sizeof(T)))), run);
}

/// Rows of x as fp32, `pitch` apart; behind the last element zeros, to a whole vector.
template <class T>
inline void widen_rows(const T* from, std::int64_t stride, std::int64_t rows, std::int64_t features, float* to,
                       std::int64_t pitch) {
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t i = 0; i < features; i += Simd::kWidth)
      Simd::save(to + r * pitch + i, load_columns(from + r * stride, i, features));
}

/// x of `rows` <= kGemvRows rows as fp32 in `workspace`, then one of the two walks over the weight.
template <class T>
inline void gemv(const LinearParams& p, const Epilogue<T>& epilogue, void* workspace) {
  const std::int64_t pitch = gemv_pitch(p.in_features);
  float* const x = static_cast<float*>(workspace);
  if (p.stride_weight_in == 1) {
    widen_lines(static_cast<const T*>(p.x), p.stride_x_row, p.rows, p.in_features, x, pitch);
    gemv_in_contiguous<T>(p, x, pitch, epilogue);
  } else {
    widen_rows(static_cast<const T*>(p.x), p.stride_x_row, p.rows, p.in_features, x, pitch);
    gemv_out_contiguous<T>(p, x, pitch, epilogue);
  }
}

}  // namespace
}  // namespace flashkernel::cpu
