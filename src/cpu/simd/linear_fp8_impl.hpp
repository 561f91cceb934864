// linear_fp8 on top of simd/gemm.hpp; included by <isa>/linear_fp8.cpp. Elements become fp32 numbers times their
// scales: x in workspace, once, the weight as the product's operand is packed. Invariant: a row's sums do not depend on
// the number of rows.
#pragma once

#include "cpu/simd/gemm_vec.hpp"
#include "cpu/simd/gemv.hpp"
#include "ops/linear_fp8_params.hpp"

namespace flashkernel::cpu {
namespace {

/// The weight as the operand of gemm.
struct Fp8Operand {
  const LinearFp8Params& p;
};

/// A vector of elements from k on, of which `left` are there, times the scale of their block.
__attribute__((always_inline)) inline Reg fp8_numbers(const std::uint8_t* row, std::int64_t k, std::int64_t left,
                                                      const float* scales, std::int64_t stride) {
  const auto* const from = reinterpret_cast<const Float8*>(row) + k;
  const Reg elements = left >= Simd::kWidth ? Simd::load(from) : Simd::load_first(from, static_cast<int>(left));
  return Simd::mul(elements, Simd::set1(scales[k / fp8::kBlock * stride]));
}

struct Fp8Micro : VecMicro {
  /// Columns [n0, n0 + columns) of k [k0, k0 + length) as VecMicro packs them; k0 is a multiple of a vector.
  static inline void pack_b(const Fp8Operand& b, std::int64_t n0, std::int64_t columns, std::int64_t k0,
                            std::int64_t length, void* packed) {
    constexpr int kW = Simd::kWidth;
    const LinearFp8Params& p = b.p;
    auto* const to = static_cast<float*>(packed);
    for (std::int64_t c = 0; c < round_up(columns, 2 * kW); c += kW) {
      float* const sliver = to + c / (2 * kW) * (2 * kW) * length + c % (2 * kW);
      const std::int64_t lanes = imax<std::int64_t>(0, imin<std::int64_t>(kW, columns - c));
      for (std::int64_t i = 0; i < length; i += kW) {
        const std::int64_t left = imin<std::int64_t>(kW, length - i);
        Reg square[kW];
        for (int j = 0; j < kW; ++j) {
          square[j] = Simd::zero();
          if (j >= lanes) continue;
          const std::int64_t out = n0 + c + j;
          square[j] = fp8_numbers(p.weight + out * p.stride_weight_row, k0 + i, left, p.weight_scale_of(out),
                                  p.stride_weight_scale_block);
        }
        Simd::transpose(square);
        for (std::int64_t j = 0; j < left; ++j) Simd::save(sliver + (i + j) * 2 * kW, square[j]);
      }
    }
  }
};

/// workspace: x in fp32, rows of gemv_pitch, then that of gemm.
template <class T>
inline void linear_fp8_typed(const LinearFp8Params& p, void* workspace) {
  const std::int64_t pitch = gemv_pitch(p.in_features);
  auto* const x = static_cast<float*>(workspace);
  auto widen = [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row)
      for (std::int64_t k = 0; k < p.in_features; k += Simd::kWidth)  // a row's pitch is whole vectors
        Simd::store(x + row * pitch + k, fp8_numbers(p.x + row * p.stride_x_row, k, p.in_features - k,
                                                     p.x_scale + row * p.stride_x_scale_row, p.stride_x_scale_block));
  };
  parallel_for(p.rows, imax<std::int64_t>(1, rows_per_task(p.in_features)), widen);
  const Epilogue<T> epilogue{static_cast<T*>(p.out), nullptr,     p.stride_out_row, 0, p.bias.data,
                             p.bias.dtype,           p.activation};
  gemm<Fp8Micro>(p.rows, p.out_features, p.in_features, Operand<float>{x, pitch, 1}, Fp8Operand{p}, epilogue,
                 x + p.rows * pitch);
}

}  // namespace
}  // namespace flashkernel::cpu
