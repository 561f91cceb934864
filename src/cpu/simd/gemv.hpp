// linear for few rows (decode): the weight is streamed once and everything else stays in cache. fp32 sums in one fixed
// order. Included by <isa>/linear.cpp. Weight [out, in] with in contiguous: dot products, four weight rows at a time.
// Weight with out contiguous (GPT-2's [in, out]): strips of outputs, eight weight rows at a time added onto sums in L1.
#pragma once

#include "cpu/simd/gemm.hpp"
#include "ops/linear_params.hpp"

namespace flashkernel::cpu {
namespace {

/// sums[r][o] for kRows rows of x and kOuts rows of the weight.
template <int kRows, int kOuts, class T>
inline void dot_block(const float* x, std::int64_t pitch, const T* weight, std::int64_t stride, std::int64_t k,
                      float (&sums)[kRows][kOuts]) {
  constexpr int kW = Simd::kWidth;
  Reg acc[kRows][kOuts];
  for (int r = 0; r < kRows; ++r)
    for (int o = 0; o < kOuts; ++o) acc[r][o] = Simd::zero();
  std::int64_t i = 0;
  for (; i + kW <= k; i += kW) {
    for (int o = 0; o < kOuts; ++o) {
      const Reg w = Simd::load(weight + o * stride + i);
      for (int r = 0; r < kRows; ++r) acc[r][o] = Simd::fma(w, Simd::load(x + r * pitch + i), acc[r][o]);
    }
  }
  if (i < k) {
    for (int o = 0; o < kOuts; ++o) {
      const Reg w = Simd::load_first(weight + o * stride + i, static_cast<int>(k - i));
      for (int r = 0; r < kRows; ++r)
        acc[r][o] = Simd::fma(w, Simd::load_first(x + r * pitch + i, static_cast<int>(k - i)), acc[r][o]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int o = 0; o < kOuts; ++o) sums[r][o] = Simd::sum(acc[r][o]);
}

constexpr std::int64_t kDotStrip = 64;  // outputs whose sums meet the epilogue together

template <int kRows, class T>
inline void dot_strip(const float* x, std::int64_t pitch, const T* weight, std::int64_t stride, std::int64_t outs,
                      std::int64_t k, float* sums) {
  // 4 x 4 sums and 4 + 1 operands fit AVX2's 16 registers only with fewer outputs at a time.
  constexpr int kOuts = Simd::kWidth == 16 ? 4 : (kRows >= 4 ? 2 : 4);
  std::int64_t o = 0;
  for (; o + kOuts <= outs; o += kOuts) {
    float block[kRows][kOuts];
    dot_block<kRows, kOuts>(x, pitch, weight + o * stride, stride, k, block);
    for (int r = 0; r < kRows; ++r)
      for (int j = 0; j < kOuts; ++j) sums[r * kDotStrip + o + j] = block[r][j];
  }
  for (; o < outs; ++o) {
    float block[kRows][1];
    dot_block<kRows, 1>(x, pitch, weight + o * stride, stride, k, block);
    for (int r = 0; r < kRows; ++r) sums[r * kDotStrip + o] = block[r][0];
  }
}

template <class T>
inline void gemv_in_contiguous(const LinearParams& p, const float* x, std::int64_t pitch, const Epilogue<T>& epilogue) {
  const T* const weight = static_cast<const T*>(p.weight);
  const std::int64_t k = p.in_features, stride = p.stride_weight_out;
  auto run = [&](std::int64_t begin, std::int64_t end, int) {
    float sums[kGemvRows * kDotStrip];
    for (std::int64_t strip = begin; strip < end; ++strip) {
      const std::int64_t n0 = strip * kDotStrip, outs = imin(kDotStrip, p.out_features - n0);
      const T* const from = weight + n0 * stride;
      std::int64_t r = 0;
      for (; r + 4 <= p.rows; r += 4) dot_strip<4>(x + r * pitch, pitch, from, stride, outs, k, sums + r * kDotStrip);
      switch (p.rows - r) {
        case 1: dot_strip<1>(x + r * pitch, pitch, from, stride, outs, k, sums + r * kDotStrip); break;
        case 2: dot_strip<2>(x + r * pitch, pitch, from, stride, outs, k, sums + r * kDotStrip); break;
        case 3: dot_strip<3>(x + r * pitch, pitch, from, stride, outs, k, sums + r * kDotStrip); break;
        default: break;
      }
      epilogue.tile(sums, kDotStrip, 0, p.rows, n0, outs);
    }
  };
  const std::int64_t strips = ceil_div(p.out_features, kDotStrip);
  parallel_for(strips, imax<std::int64_t>(1, rows_per_task(kDotStrip * k * static_cast<std::int64_t>(sizeof(T)))), run);
}

constexpr std::int64_t kAxpySums = 4096;  // rows x outputs of a strip: 16 KiB of L1

/// sums[r][n] += x[r][k..k+kDepth) * weight[k..k+kDepth)[n]; rows of sums lie `strip` apart.
template <int kRows, int kDepth, class T>
inline void axpy_rows(const float* x, std::int64_t pitch, const T* weight, std::int64_t stride, std::int64_t outs,
                      float* sums, std::int64_t strip) {
  constexpr int kW = Simd::kWidth;
  for (std::int64_t c = 0; c < outs; c += kW) {
    Reg w[kDepth];
    for (int d = 0; d < kDepth; ++d) w[d] = load_columns(weight + d * stride, c, outs);
    for (int r = 0; r < kRows; ++r) {
      Reg sum = Simd::load(sums + r * strip + c);
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
  widen_rows(static_cast<const T*>(p.x), p.stride_x_row, p.rows, p.in_features, x, pitch);
  if (p.stride_weight_in == 1) {
    gemv_in_contiguous<T>(p, x, pitch, epilogue);
  } else {
    gemv_out_contiguous<T>(p, x, pitch, epilogue);
  }
}

}  // namespace
}  // namespace flashkernel::cpu
