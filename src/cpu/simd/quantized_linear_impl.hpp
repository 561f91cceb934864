// quantized_linear on top of simd/gemm.hpp and simd/gemv.hpp; included by <isa>/quantized_linear.cpp. Few rows: the
// weight is streamed once, its blocks become fp32 numbers in registers. More rows: they become fp32 as the product's
// operand is packed. Invariant: the numbers are those of the dequantised weight, and each sum adds in the order of
// `linear` on an fp32 weight [out, in]: for the same instruction set both give the same bits.
#pragma once

#include <cstring>

#include "cpu/simd/gemm_vec.hpp"
#include "cpu/simd/gemv.hpp"
#include "ops/quantized_linear_params.hpp"

namespace flashkernel::cpu {
namespace {

constexpr int kBlockVectors = static_cast<int>(quantized::kBlock) / Simd::kWidth;

/// A format's blocks as fp32: q * scale + offset, one fused step. Rounds once: scale and offset have 11 bits or fewer
/// beside 8 of q in every format of GGUF, so the product is exact there.
template <WeightFormat kFormat>
struct Blocks {
  static constexpr std::int64_t kBytes = quantized::block_bytes(kFormat);
  const QuantizedLinearParams& p;

  __attribute__((always_inline)) static inline Reg number(TypedPointer from, std::int64_t i) {
    switch (from.dtype) {
      case DType::kFloat16: return Simd::broadcast(static_cast<const Half*>(from.data) + i);
      case DType::kBFloat16: return Simd::broadcast(static_cast<const BFloat*>(from.data) + i);
      default: return Simd::set1(static_cast<const float*>(from.data)[i]);
    }
  }

  /// A number within a block, which may begin at any byte of a file.
  __attribute__((always_inline)) static inline Reg half_at(const std::uint8_t* from) {
    Half half;
    std::memcpy(&half, from, sizeof half);
    return Simd::broadcast(&half);
  }

  /// The scale and the offset of a block at `from`, of group `group` of row `out`.
  __attribute__((always_inline)) inline void scale(const std::uint8_t* from, std::int64_t out, std::int64_t group,
                                                   Reg* scale, Reg* offset) const {
    if constexpr (quantized::is_gguf(kFormat)) {
      *scale = half_at(from);
      if constexpr (kFormat == WeightFormat::kQ4_1) {
        *offset = half_at(from + 2);
      } else {
        *offset = Simd::mul(*scale, Simd::set1(-quantized::plain_zero(kFormat)));
      }
    } else {
      *scale = number(p.scales, out * p.stride_scales_row + group);
      const Reg zero =
          p.zeros ? number(p.zeros, out * p.stride_zeros_row + group) : Simd::set1(quantized::plain_zero(kFormat));
      *offset = Simd::mul(*scale, Simd::sub(Simd::zero(), zero));
    }
  }

  /// The `count` elements of a block, at most 32; others are not numbers of the weight.
  __attribute__((always_inline)) inline void take(const std::uint8_t* from, std::int64_t count, Reg scale, Reg offset,
                                                  Reg (&numbers)[kBlockVectors]) const {
    const std::uint8_t* const elements = from + quantized::head_bytes(kFormat);
    Reg q[kBlockVectors];
    if constexpr (quantized::is_int8(kFormat)) {
      const Int8* const bytes = reinterpret_cast<const Int8*>(elements);
      for (int v = 0; v < kBlockVectors; ++v) {
        if (kFormat == WeightFormat::kInt8 && count < quantized::kBlock) {
          const std::int64_t left = imin<std::int64_t>(Simd::kWidth, imax<std::int64_t>(0, count - v * Simd::kWidth));
          q[v] = Simd::load_first(bytes + v * Simd::kWidth, static_cast<int>(left));
        } else {
          q[v] = Simd::load(bytes + v * Simd::kWidth);
        }
      }
    } else {
      Simd::load_halves_of_bytes(elements, q);
    }
    for (int v = 0; v < kBlockVectors; ++v)
      numbers[v] = kFormat == WeightFormat::kQ8_0 ? Simd::mul(q[v], scale) : Simd::fma(q[v], scale, offset);
  }
};

/// Sums of kRows rows of x with the weight's rows [out, out + kOuts); those of a row lie kDotStrip apart.
template <WeightFormat kFormat, int kRows, int kOuts>
inline void quantized_dots(const Blocks<kFormat>& blocks, const float* x, std::int64_t pitch, std::int64_t out,
                           float* sums) {
  const QuantizedLinearParams& p = blocks.p;
  const std::int64_t group_blocks = imax<std::int64_t>(1, p.group / quantized::kBlock);
  const bool one_group = p.group == p.in_features;
  const std::uint8_t* from = p.weight + out * p.stride_weight_row;
  Reg acc[kRows][kOuts];
  for (int r = 0; r < kRows; ++r)
    for (int o = 0; o < kOuts; ++o) acc[r][o] = Simd::zero();
  // Unrolled, so that the sums stay in registers: in memory each addition would wait for a store.
  const auto block = [&](std::int64_t i, std::int64_t group, std::int64_t count) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int o = 0; o < kOuts; ++o) {
      const std::uint8_t* const own = from + o * p.stride_weight_row;
      Reg scale, offset, numbers[kBlockVectors];
      blocks.scale(own, out + o, group, &scale, &offset);
      blocks.take(own, count, scale, offset, numbers);
#pragma GCC unroll 4
      for (int v = 0; v < kBlockVectors; ++v) {
        if (count < quantized::kBlock && v * Simd::kWidth >= count) break;
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
          acc[r][o] = Simd::fma(numbers[v], Simd::load(x + r * pitch + i + v * Simd::kWidth), acc[r][o]);
      }
    }
    from += Blocks<kFormat>::kBytes;
  };
  const std::int64_t whole = p.in_features / quantized::kBlock * quantized::kBlock;
  std::int64_t group = 0, in_group = 0;
  for (std::int64_t i = 0; i < whole; i += quantized::kBlock) {
    block(i, group, quantized::kBlock);
    if (!one_group && ++in_group == group_blocks) {
      in_group = 0;
      ++group;
    }
  }
  if constexpr (kFormat == WeightFormat::kInt8) {
    if (whole < p.in_features) block(whole, group, p.in_features - whole);
  }
  // As simd/gemv.hpp ends its sums, so that in fp32 both give the same bits.
  static_assert(kRows * kOuts <= Simd::kWidth);
  Reg all[Simd::kWidth];
#pragma GCC unroll 16
  for (int i = 0; i < Simd::kWidth; ++i) all[i] = i < kRows * kOuts ? acc[i / kOuts][i % kOuts] : Simd::zero();
  alignas(64) float ends[Simd::kWidth];
  Simd::save(ends, Simd::sum_rows(all));
  for (int r = 0; r < kRows; ++r)
    for (int o = 0; o < kOuts; ++o) sums[r * kDotStrip + o] = ends[r * kOuts + o];
}

template <WeightFormat kFormat, int kRows>
inline void quantized_strip(const Blocks<kFormat>& blocks, const float* x, std::int64_t pitch, std::int64_t out,
                            std::int64_t outs, float* sums) {
  // Sums, a block's numbers, its scale and its offset fit AVX2's 16 registers.
  constexpr int kOuts = Simd::kWidth == 16 ? (kRows == 8 ? 2 : 4) : (kRows <= 2 ? 4 : (kRows <= 4 ? 2 : 1));
  std::int64_t o = 0;
  for (; o + kOuts <= outs; o += kOuts) quantized_dots<kFormat, kRows, kOuts>(blocks, x, pitch, out + o, sums + o);
  for (; o < outs; ++o) quantized_dots<kFormat, kRows, 1>(blocks, x, pitch, out + o, sums + o);
}

/// x of `rows` <= kGemvRows rows as fp32 against every row of the weight; `epilogue` takes sums of kDotStrip outputs.
template <WeightFormat kFormat, class TileEpilogue>
inline void quantized_gemv(const QuantizedLinearParams& p, const float* x, std::int64_t pitch,
                           const TileEpilogue& epilogue) {
  auto run = [&](std::int64_t begin, std::int64_t end, int) {
    const Blocks<kFormat> blocks{p};
    float sums[kGemvRows * kDotStrip];
    for (std::int64_t strip = begin; strip < end; ++strip) {
      const std::int64_t n0 = strip * kDotStrip, outs = imin(kDotStrip, p.out_features - n0);
      std::int64_t r = 0;
      if (p.rows == 8) {
        quantized_strip<kFormat, 8>(blocks, x, pitch, n0, outs, sums);
        r = 8;
      } else if (p.rows >= 4) {
        quantized_strip<kFormat, 4>(blocks, x, pitch, n0, outs, sums);
        r = 4;
      }
      const float* const rest = x + r * pitch;
      switch (p.rows - r) {
        case 1: quantized_strip<kFormat, 1>(blocks, rest, pitch, n0, outs, sums + r * kDotStrip); break;
        case 2: quantized_strip<kFormat, 2>(blocks, rest, pitch, n0, outs, sums + r * kDotStrip); break;
        case 3: quantized_strip<kFormat, 3>(blocks, rest, pitch, n0, outs, sums + r * kDotStrip); break;
        default: break;
      }
      epilogue(sums, n0, outs);
    }
  };
  // A block's numbers cost some four times what its bytes do.
  const std::int64_t work = kDotStrip * p.in_features * 2;
  parallel_for(ceil_div(p.out_features, kDotStrip), imax<std::int64_t>(1, rows_per_task(work)), run);
}

/// f(std::integral_constant<WeightFormat, ...>)
template <class F>
inline void visit_format(WeightFormat format, F&& f) {
  switch (format) {
    case WeightFormat::kInt4: return f(std::integral_constant<WeightFormat, WeightFormat::kInt4>{});
    case WeightFormat::kInt8: return f(std::integral_constant<WeightFormat, WeightFormat::kInt8>{});
    case WeightFormat::kQ4_0: return f(std::integral_constant<WeightFormat, WeightFormat::kQ4_0>{});
    case WeightFormat::kQ4_1: return f(std::integral_constant<WeightFormat, WeightFormat::kQ4_1>{});
    case WeightFormat::kQ8_0: return f(std::integral_constant<WeightFormat, WeightFormat::kQ8_0>{});
  }
}

/// The weight as the operand of gemm.
struct QuantizedOperand {
  const QuantizedLinearParams& p;
};

/// Columns [n0, n0 + columns) of k [k0, k0 + length) as VecMicro packs them; k0 is a multiple of 32.
template <WeightFormat kFormat>
inline void pack_quantized(const QuantizedLinearParams& p, std::int64_t n0, std::int64_t columns, std::int64_t k0,
                           std::int64_t length, float* to) {
  constexpr int kW = Simd::kWidth;
  const Blocks<kFormat> blocks{p};
  for (std::int64_t c = 0; c < round_up(columns, 2 * kW); c += kW) {
    float* const sliver = to + c / (2 * kW) * (2 * kW) * length + c % (2 * kW);
    const std::int64_t lanes = imax<std::int64_t>(0, imin<std::int64_t>(kW, columns - c));
    for (std::int64_t i = 0; i < length; i += quantized::kBlock) {
      const std::int64_t count = imin(quantized::kBlock, length - i), group = (k0 + i) / p.group;
      Reg numbers[kW][kBlockVectors];
      for (int j = 0; j < kW; ++j) {
        if (j < lanes) {
          const std::int64_t out = n0 + c + j;
          const std::uint8_t* const from =
              p.weight + out * p.stride_weight_row + (k0 + i) / quantized::kBlock * Blocks<kFormat>::kBytes;
          Reg scale, offset;
          blocks.scale(from, out, group, &scale, &offset);
          blocks.take(from, count, scale, offset, numbers[j]);
        } else {
          for (Reg& number : numbers[j]) number = Simd::zero();
        }
      }
      for (int v = 0; v < kBlockVectors; ++v) {
        Reg square[kW];
        for (int j = 0; j < kW; ++j) square[j] = numbers[j][v];
        Simd::transpose(square);
        const std::int64_t left = imin<std::int64_t>(kW, count - v * kW);
        for (std::int64_t j = 0; j < left; ++j) Simd::save(sliver + (i + v * kW + j) * 2 * kW, square[j]);
      }
    }
  }
}

struct QuantizedMicro : VecMicro {
  static inline void pack_b(const QuantizedOperand& b, std::int64_t n0, std::int64_t columns, std::int64_t k0,
                            std::int64_t length, void* packed) {
    visit_format(b.p.format, [&](auto format) {
      pack_quantized<decltype(format)::value>(b.p, n0, columns, k0, length, static_cast<float*>(packed));
    });
  }
};

/// The weight is streamed for up to kFewRows rows.
template <class T, std::int64_t kFewRows = kGemvRows>
inline void quantized_linear_typed(const QuantizedLinearParams& p, void* workspace) {
  const Epilogue<T> epilogue{static_cast<T*>(p.out), nullptr,     p.stride_out_row, 0, p.bias.data,
                             p.bias.dtype,           p.activation};
  if (p.rows > kFewRows) {
    const Operand<T> x{static_cast<const T*>(p.x), p.stride_x_row, 1};
    return gemm<QuantizedMicro>(p.rows, p.out_features, p.in_features, x, QuantizedOperand{p}, epilogue, workspace);
  }
  if constexpr (kFewRows > 0) {
    const std::int64_t pitch = gemv_pitch(p.in_features);
    float* const x = static_cast<float*>(workspace);
    widen_rows(static_cast<const T*>(p.x), p.stride_x_row, p.rows, p.in_features, x, pitch);
    const auto finish = [&](const float* sums, std::int64_t n0, std::int64_t outs) {
      epilogue.tile(sums, kDotStrip, 0, p.rows, n0, outs);
    };
    visit_format(p.format, [&](auto format) { quantized_gemv<decltype(format)::value>(p, x, pitch, finish); });
  }
}

}  // namespace
}  // namespace flashkernel::cpu
